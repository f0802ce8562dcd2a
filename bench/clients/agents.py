"""The agents: how each is started, and asked twice.

Their configuration is what `batchengine connect` writes, or variables, for one without a file. The
other variables and options here only let them run without a person and without hosts beyond the
endpoint.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MODEL = "bench"
CONTEXT_TOKENS = 65536
PRINT = "printf MARKER_%d.txt 7391"  # its output is in no request before it has run


@dataclass(frozen=True)
class Agent:
    """One agent. Commands begin with the program's name and `{prompt}` stands for the prompt.
    `tool` runs a shell command with `arguments`.
    `connects`: `batchengine connect` writes its configuration; else variables are it, where `{url}`
    and `{key}` stand for the daemon's."""

    name: str
    package: str
    first: tuple[str, ...]
    second: tuple[str, ...]
    tool: str
    arguments: dict[str, Any]
    env: dict[str, str] = field(default_factory=dict[str, str])
    connects: bool = True


CLAUDE_FLAGS = ("--output-format", "json", "--dangerously-skip-permissions")
CODEX = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
OPENCLAW = ("agent", "--local", "--session-id", "bench", "--json", "--message")

AGENTS = (
    Agent(
        "claude",
        "@anthropic-ai/claude-code",
        (*CLAUDE_FLAGS, "-p", "{prompt}"),
        (*CLAUDE_FLAGS, "-c", "-p", "{prompt}"),
        "Bash",
        {"command": PRINT},
        {"IS_SANDBOX": "1"},  # it refuses to run as root without
    ),
    Agent(
        "codex",
        "@openai/codex",
        (*CODEX, "{prompt}"),
        (*CODEX, "resume", "--last", "{prompt}"),
        "exec_command",
        {"cmd": PRINT},
    ),
    Agent(
        "opencode",
        "opencode-ai",
        ("run", "{prompt}"),
        ("run", "-c", "{prompt}"),
        "bash",
        {"command": PRINT, "description": "list files"},
        {
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        },
    ),
    Agent(
        "openclaw",
        "openclaw",
        (*OPENCLAW, "{prompt}"),
        (*OPENCLAW, "{prompt}"),
        "exec",
        {"command": PRINT},
    ),
    Agent(
        "pi",
        "@mariozechner/pi-coding-agent",
        ("-p", "{prompt}"),
        ("-p", "-c", "{prompt}"),
        "bash",
        {"command": PRINT},
        {"PI_OFFLINE": "1"},
    ),
    Agent(
        "qwen",
        "@qwen-code/qwen-code",
        ("-y", "-p", "{prompt}"),
        ("-y", "-c", "-p", "{prompt}"),
        "run_shell_command",
        {"command": PRINT, "is_background": False},
        {"QWEN_TELEMETRY_ENABLED": "false"},
    ),
    Agent(
        "copilot",
        "@github/copilot",
        ("--allow-all-tools", "-p", "{prompt}"),
        ("--allow-all-tools", "--continue", "-p", "{prompt}"),
        "bash",
        {"command": PRINT, "description": "list files"},
        {
            "COPILOT_PROVIDER_BASE_URL": "{url}/v1",
            "COPILOT_PROVIDER_API_KEY": "{key}",
            "COPILOT_PROVIDER_WIRE_API": "responses",
            "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(CONTEXT_TOKENS * 3 // 4),
            "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": "8192",
            "COPILOT_MODEL": MODEL,
            "COPILOT_OFFLINE": "true",
            "COPILOT_AUTO_UPDATE": "false",
        },
        connects=False,
    ),
)
