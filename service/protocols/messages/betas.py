"""The header anthropic-beta: names of features that a client may use, with a date.

Owns the features that change nothing unless a body asks for them, and those that are always there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

HEADER = "anthropic-beta"
NAMES_MAX = 32
KNOWN = {
    "advanced-tool-use", "claude-code", "context-management", "effort", "extended-cache-ttl",
    "fast-mode", "fine-grained-tool-streaming", "inline-tools", "interleaved-thinking",
    "mid-conversation-tool-changes", "prompt-caching", "prompt-caching-scope",
    "structured-outputs", "thinking-token-count", "token-counting", "token-efficient-tools",
}  # fmt: skip
_DATE = re.compile(r"-\d{4}-\d\d-\d\d$|-\d{8}$")


def unknown(headers: Mapping[str, str]) -> list[str]:
    """Names of features that the daemon does not have, as fields that it ignores."""
    sent = [name.strip() for name in headers.get(HEADER, "").split(",")[:NAMES_MAX]]
    return [f"{HEADER}.{name}" for name in sent if name and _DATE.sub("", name) not in KNOWN]
