"""What each agent's configuration must say to use a daemon: one row per agent.

Owns names and values; `connect` shows and writes them. A recipe is a file that is merged (JSON,
TOML, YAML, lines of a shell), so that what else stands in it is kept.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

ANSWER_SHARE = 4  # of the context, an answer may have one part in so many
ANSWER_MAX = 32_768
PATIENCE_S = 1800  # a long prompt on a processor takes minutes before its first token
CONTEXT_MIN = 32_768  # of agents whose prompts are long
KEY_DEFAULT = "local"  # agents refuse an empty key


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A daemon as an agent has to know it. `base` has no /v1."""

    base: str
    model: str
    context: int
    key: str = KEY_DEFAULT

    @property
    def v1(self) -> str:
        return f"{self.base}/v1"

    @property
    def answer(self) -> int:
        """Tokens of an answer at most."""
        return max(256, min(ANSWER_MAX, self.context // ANSWER_SHARE))


class Recipe(NamedTuple):
    """The configuration of one agent: `path` of its file, what is `wanted` in it, and how to start
    the agent then, where `{model}`, `{context}` and `{key}` stand for the daemon's. Without
    `context_min` tokens it cannot work: its prompt alone has 8,000 to 23,000."""

    path: str
    wanted: Callable[[Endpoint], dict[str, Any] | str]  # fields of JSON, or lines
    start: str
    note: str = ""
    context_min: int = CONTEXT_MIN

    def merge(self, text: str, endpoint: Endpoint) -> str:
        """The text of the file with what is wanted; raises ValueError for one that is no JSON."""
        wanted = self.wanted(endpoint)
        return with_block(text, wanted) if isinstance(wanted, str) else merged_json(text, wanted)


def merged_json(text: str, wanted: dict[str, Any]) -> str:
    """JSON with `wanted` in it; other keys stay. Raises ValueError for text that is no object."""
    found: Any = json.loads(text) if text.strip() else {}
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return json.dumps(_merged(found, wanted), indent=2, ensure_ascii=False) + "\n"


def _merged(found: Any, wanted: Any) -> Any:
    if not (isinstance(found, dict) and isinstance(wanted, dict)):
        return wanted
    pairs: dict[str, Any] = dict(cast("dict[str, Any]", found))
    for name, value in cast("dict[str, Any]", wanted).items():
        pairs[name] = _merged(pairs.get(name), value)
    return pairs


def with_block(text: str, block: str) -> str:
    """Text with a block of ours, between two marks; an earlier one is replaced."""
    begin, end = "# batchengine: begin", "# batchengine: end"
    whole = f"{begin}\n{block.rstrip()}\n{end}\n"
    old = re.compile(re.escape(begin) + r".*?" + re.escape(end) + r"\n?", re.DOTALL)
    if old.search(text):
        return old.sub(lambda _: whole, text, count=1)
    return (text.rstrip("\n") + "\n\n" if text.strip() else "") + whole


def _claude(to: Endpoint) -> dict[str, Any]:
    return {
        "env": {
            "ANTHROPIC_BASE_URL": to.base,
            "ANTHROPIC_AUTH_TOKEN": to.key,
            "ANTHROPIC_MODEL": to.model,
            "ANTHROPIC_SMALL_FAST_MODEL": to.model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": to.model,
            "ANTHROPIC_DEFAULT_SONNET_MODEL": to.model,
            "ANTHROPIC_DEFAULT_OPUS_MODEL": to.model,
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(to.context),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(to.answer),
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "MAX_THINKING_TOKENS": "0",
            "API_TIMEOUT_MS": str(PATIENCE_S * 1000),
        }
    }


def _codex(to: Endpoint) -> str:
    """The provider alone: keys outside of tables would have to stand before every table of the
    file, and versions disagree on where a profile is written. `start` names the rest."""
    return (
        f"[model_providers.batchengine]\n"
        f'name = "batchengine"\nbase_url = "{to.v1}"\nwire_api = "responses"\n'
        f'env_key = "BATCHENGINE_API_KEY"\n'
        f"stream_idle_timeout_ms = {PATIENCE_S * 1000}\n"
        f"request_max_retries = 2\nstream_max_retries = 2\n"
    )


def _opencode(to: Endpoint, schema: str = "https://opencode.ai/config.json") -> dict[str, Any]:
    limit = {"context": to.context, "output": to.answer}
    options = {"baseURL": to.v1, "apiKey": to.key, "timeout": PATIENCE_S * 1000}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "batchengine",
        "options": options,
        "models": {to.model: {"name": to.model, "limit": limit}},
    }
    return {
        "$schema": schema,
        "provider": {"batchengine": provider},
        "model": f"batchengine/{to.model}",
        "small_model": f"batchengine/{to.model}",
    }


def _kilo(to: Endpoint) -> dict[str, Any]:
    """It was made of OpenCode, and reads the same form."""
    return _opencode(to, "https://app.kilo.ai/config.json")


def _qwen(to: Endpoint) -> dict[str, Any]:
    generation = {
        "contextWindowSize": to.context,
        "samplingParams": {"max_tokens": to.answer},
        "timeout": PATIENCE_S * 1000,
    }
    auth = {"selectedType": "openai", "baseUrl": to.v1, "apiKey": to.key}
    model = {"name": to.model, "generationConfig": generation}
    return {"security": {"auth": auth}, "model": model}


def _openclaw(to: Endpoint) -> dict[str, Any]:
    compat = {
        "supportsPromptCacheKey": True,  # names the session
        "supportsUsageInStreaming": True,
        "supportsTools": True,
        "toolSchemaProfile": "llamacpp",
    }
    row = {
        "contextWindow": to.context,
        "maxTokens": to.answer,
        "input": ["text"],
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
        "compat": compat,
    }
    names = (to.model, f"{to.model}:background")
    provider = {
        "baseUrl": to.v1,
        "apiKey": to.key,
        "api": "openai-completions",
        "timeoutSeconds": PATIENCE_S,
        "models": [{"id": name, "name": name, **row} for name in names],
    }
    heartbeat = {"model": f"batchengine/{to.model}:background", "isolatedSession": True}
    return {
        "models": {"providers": {"batchengine": provider}},
        "agents": {
            "defaults": {
                "model": {"primary": f"batchengine/{to.model}"},
                "heartbeat": heartbeat,
            }
        },
    }


def _pi(to: Endpoint) -> dict[str, Any]:
    row = {"id": to.model, "contextWindow": to.context, "maxTokens": to.answer}
    provider = {
        "baseUrl": to.v1,
        "api": "openai-responses",  # it names the session there, and not in the others
        "apiKey": to.key,
        "models": [row],
    }
    return {"providers": {"batchengine": provider}}


def _litellm(to: Endpoint) -> str:
    """Lines of YAML: a model of a list that is ours alone, so a file of its own."""
    return (
        "model_list:\n"
        f"  - model_name: {to.model}\n"
        "    litellm_params:\n"
        f"      model: openai/{to.model}\n"
        f"      api_base: {to.v1}\n"
        f"      api_key: {to.key}\n"
        f"      timeout: {PATIENCE_S}\n"
        "    model_info:\n"
        f"      max_input_tokens: {to.context}\n"
        f"      max_output_tokens: {to.answer}\n"
    )


def _llm(to: Endpoint) -> str:
    return (
        f"- model_id: {to.model}\n"
        f"  model_name: {to.model}\n"
        f"  api_base: {to.v1}\n"
        f"  api_key_name: batchengine\n"
    )


def _aider(to: Endpoint) -> str:
    return (
        f"openai-api-base: {to.v1}\n"
        f"openai-api-key: {to.key}\n"
        f"model: openai/{to.model}\n"
        f"timeout: {PATIENCE_S}\n"
    )


def _home(variable: str, default: str, file: str) -> str:
    return os.path.join(os.path.expanduser(os.environ.get(variable) or default), file)


def recipes() -> dict[str, Recipe]:
    """Every agent by name; paths are those of this user."""
    return {
        "claude": Recipe(
            _home("CLAUDE_CONFIG_DIR", "~/.claude", "settings.json"), _claude, "claude"
        ),
        "codex": Recipe(
            _home("CODEX_HOME", "~/.codex", "config.toml"),
            _codex,
            "BATCHENGINE_API_KEY={key} codex -c model_provider=batchengine -c model={model}"
            " -c model_context_window={context}",
        ),
        "opencode": Recipe(
            _home("XDG_CONFIG_HOME", "~/.config", "opencode/opencode.json"), _opencode, "opencode"
        ),
        "openclaw": Recipe(
            _home("OPENCLAW_STATE_DIR", "~/.openclaw", "openclaw.json"), _openclaw, "openclaw"
        ),
        "pi": Recipe(
            _home("PI_CODING_AGENT_DIR", "~/.pi/agent", "models.json"),
            _pi,
            "pi --provider batchengine",
        ),
        "kilo": Recipe(_home("XDG_CONFIG_HOME", "~/.config", "kilo/kilo.json"), _kilo, "kilo"),
        "qwen": Recipe(os.path.expanduser("~/.qwen/settings.json"), _qwen, "qwen"),
        "litellm": Recipe(
            "litellm-batchengine.yaml",
            _litellm,
            "LITELLM_MASTER_KEY=sk-local litellm --config litellm-batchengine.yaml",
            "clients of LiteLLM send its master key, which newer versions do not start without",
            context_min=0,
        ),
        "llm": Recipe(
            _home("LLM_USER_PATH", "~/.config/io.datasette.llm", "extra-openai-models.yaml"),
            _llm,
            "llm keys set batchengine --value {key}; llm -m {model} 'Hello'",
            context_min=0,
        ),
        "aider": Recipe(
            os.path.expanduser("~/.aider.conf.yml"),
            _aider,
            "aider",
            "keys of this block that the file has elsewhere, too, must be removed there",
            context_min=0,
        ),
    }
