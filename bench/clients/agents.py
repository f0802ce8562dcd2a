"""The agents: how each is configured for a local endpoint, and asked twice.

Each row is what a user of that agent would write, taken from its documentation and from what it
was seen to send. No agent needs another address than the endpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODEL = "bench"
CONTEXT_TOKENS = 65536
OUTPUT_TOKENS = 1024


@dataclass(frozen=True)
class Agent:
    """One agent. `configure(home, url)` writes its files; commands begin with the program's name
    and `{prompt}` stands for the prompt. `tool` runs a shell command with `arguments`."""

    name: str
    configure: Callable[[Path, str], dict[str, str]]  # returns environment variables
    first: tuple[str, ...]
    second: tuple[str, ...]
    tool: str
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def claude(home: Path, url: str) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "local",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(CONTEXT_TOKENS),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(OUTPUT_TOKENS),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "IS_SANDBOX": "1",
    }


def codex(home: Path, url: str) -> dict[str, str]:
    text = f"""model = "{MODEL}"
model_provider = "local"
model_context_window = {CONTEXT_TOKENS}
web_search = "disabled"
approval_policy = "never"
sandbox_mode = "danger-full-access"

[features]
plugins = false
apps = false
multi_agent = false

[model_providers.local]
name = "local"
base_url = "{url}/v1"
env_key = "LOCAL_KEY"
wire_api = "responses"
stream_idle_timeout_ms = 300000
"""
    write(home / ".codex" / "config.toml", text)
    return {"LOCAL_KEY": "local", "CODEX_HOME": str(home / ".codex")}


def opencode(home: Path, url: str) -> dict[str, str]:
    limit = {"context": CONTEXT_TOKENS, "output": OUTPUT_TOKENS}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "local",
        "options": {"baseURL": f"{url}/v1", "apiKey": "local"},
        "models": {MODEL: {"name": MODEL, "limit": limit}},
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"local/{MODEL}",
        "small_model": f"local/{MODEL}",
        "provider": {"local": provider},
        "enabled_providers": ["local"],
        "permission": {"bash": "allow", "edit": "allow"},
        "autoupdate": False,
        "share": "disabled",
    }
    write(home / ".config" / "opencode" / "opencode.json", json.dumps(config))
    return {
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_DATA_HOME": str(home / ".local" / "share"),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "XDG_STATE_HOME": str(home / ".local" / "state"),
    }


def openclaw(home: Path, url: str) -> dict[str, str]:
    work = home / "work"
    compat = {
        "supportsPromptCacheKey": True,
        "supportsUsageInStreaming": True,
        "supportsTools": True,
        "sendSessionAffinityHeaders": True,
    }
    model = {
        "id": MODEL,
        "name": MODEL,
        "contextWindow": CONTEXT_TOKENS,
        "maxTokens": OUTPUT_TOKENS,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "compat": compat,
    }
    provider = {
        "baseUrl": f"{url}/v1",
        "apiKey": "local",
        "api": "openai-completions",
        "timeoutSeconds": 300,
        "models": [model],
    }
    config = {
        "models": {"providers": {"local": provider}},
        "agents": {"defaults": {"model": {"primary": f"local/{MODEL}"}, "workspace": str(work)}},
    }
    write(home / "openclaw.json", json.dumps(config))
    return {"OPENCLAW_CONFIG_PATH": str(home / "openclaw.json")}


def pi(home: Path, url: str) -> dict[str, str]:
    model = {
        "id": MODEL,
        "name": MODEL,
        "reasoning": False,
        "input": ["text"],
        "contextWindow": CONTEXT_TOKENS,
        "maxTokens": OUTPUT_TOKENS,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    provider = {
        "baseUrl": f"{url}/v1",
        "apiKey": "local",
        "api": "openai-completions",
        "models": [model],
    }
    config = {"providers": {"local": provider}}
    write(home / ".pi" / "agent" / "models.json", json.dumps(config))
    return {"PI_OFFLINE": "1"}


CLAUDE_FLAGS = ("--output-format", "json", "--dangerously-skip-permissions")
OPENCLAW = ("openclaw", "agent", "--local", "--session-id", "bench", "--json", "--message")
PI_FLAGS = ("--provider", "local", "--model", MODEL, "-p")
COMMAND = {"command": "ls"}

AGENTS = (
    Agent(
        "claude",
        claude,
        ("claude", *CLAUDE_FLAGS, "-p", "{prompt}"),
        ("claude", *CLAUDE_FLAGS, "-c", "-p", "{prompt}"),
        "Bash",
        COMMAND,
    ),
    Agent(
        "codex",
        codex,
        ("codex", "exec", "--skip-git-repo-check", "{prompt}"),
        ("codex", "exec", "--skip-git-repo-check", "resume", "--last", "{prompt}"),
        "exec_command",
        {"cmd": "ls"},
    ),
    Agent(
        "opencode",
        opencode,
        ("opencode", "run", "{prompt}"),
        ("opencode", "run", "-c", "{prompt}"),
        "bash",
        {"command": "ls", "description": "list files"},
    ),
    Agent(
        "openclaw",
        openclaw,
        (*OPENCLAW, "{prompt}"),
        (*OPENCLAW, "{prompt}"),
        "exec",
        COMMAND,
    ),
    Agent(
        "pi",
        pi,
        ("pi", *PI_FLAGS, "{prompt}"),
        ("pi", *PI_FLAGS, "-c", "{prompt}"),
        "bash",
        COMMAND,
    ),
)
