"""POST /v1/messages: a conversation of content blocks in, Anthropic's messages and events out."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

import msgspec

from batchengine import errors
from batchengine.core import FORM_MESSAGES
from service.protocols import conversation
from service.protocols.messages import diagnosis, edits
from service.protocols.messages.blocks import conversation_of, is_thinking
from service.protocols.messages.body import EFFORTS, THINKING, MessagesRequest, common
from service.protocols.messages.events import Facts, MessagesFormatter, error_object
from service.protocols.protocol import PromptEncoder, PromptLimits, Protocol
from service.protocols.requests import Prompt
from service.protocols.schema import TOKENS_MAX

VERSION = "anthropic-version"  # a header of every client of this protocol
BETA = "anthropic-beta"  # a header with names of features that a client may use, each with a date
BETAS_MAX = 32
# features that change nothing unless a body asks for them, and those that are always there
KNOWN_BETAS = {
    "advanced-tool-use", "claude-code", "context-management", "effort", "extended-cache-ttl",
    "fast-mode", "fine-grained-tool-streaming", "inline-tools", "interleaved-thinking",
    "mid-conversation-tool-changes", "prompt-caching", "prompt-caching-scope",
    "structured-outputs", "thinking-token-count", "token-counting", "token-efficient-tools",
}  # fmt: skip
_DATE = re.compile(r"-\d{4}-\d\d-\d\d$|-\d{8}$")


def check(body: MessagesRequest) -> None:
    """Raises 400 for fields that would change the answer and are not implemented."""
    if body.mcp_servers:
        what, fix = "MCP servers are not called from here", "call them from the client, as tools"
        raise errors.UNSUPPORTED_FIELD(param="mcp_servers", what=what, fix=fix)
    if body.thread is not None:
        raise errors.THREADS_UNSUPPORTED()
    if body.compaction is not None:
        what = "conversations are not summarised from here"
        fix = "ask for a summary by a message, or let the client do it"
        raise errors.UNSUPPORTED_FIELD(param="compaction", what=what, fix=fix)
    if body.n not in (None, 1):
        what, fix = "a message has one answer", "send several requests"
        raise errors.UNSUPPORTED_FIELD(param="n", what=what, fix=fix)
    if body.thinking is not None and body.thinking.type not in THINKING:
        raise errors.INVALID_FIELD(
            param="thinking.type",
            what=f"thinking: Input tag '{body.thinking.type[:40]}' found using 'type' does not"
            f" match any of the expected tags: {_listed(THINKING)}",
        )
    effort = None if body.output_config is None else body.output_config.effort
    if effort is not None and effort not in EFFORTS:
        what = f"output_config.effort: Input should be {_listed(EFFORTS)}"
        raise errors.INVALID_FIELD(param="output_config.effort", what=what)


def read_prompt(body: MessagesRequest, text: PromptEncoder, limits: PromptLimits) -> Prompt:
    """The tokens of the conversation; raises 400.

    Clients send the largest max_tokens of the model that they think of. So it is no promise that
    the context has room for as many; the answer says when that is what ended it.
    """
    shorter, applied = edits.edited(body, lambda one: _tokens(one, text, limits))
    meant = conversation_of(shorter)
    meant.unread = (*meant.unread, *edits.unread(body))
    prompt = conversation.read(meant, text, limits)
    room = limits.context_tokens - len(prompt.tokens[0])
    asked = prompt.tokens_max if body.max_tokens is None else body.max_tokens
    asks, previous = body.diagnostics is not None, None
    if body.diagnostics is not None:
        previous = body.diagnostics.previous_message_id
    facts = Facts(
        fills_context=asked > room,
        hides_reasoning=body.thinking is not None
        and is_thinking(body)
        and body.thinking.display == "omitted",
        warms=asked == 0,
        edits=None if body.context_management is None else applied,
        marks=diagnosis.marks(body, len(prompt.tokens[0])) if asks else "",
        miss=None if previous is None else diagnosis.miss(body, previous),
    )
    return dataclasses.replace(
        prompt,
        tokens_max=min(asked, room),
        echo=msgspec.json.encode(facts),
    )


def _tokens(body: MessagesRequest, text: PromptEncoder, limits: PromptLimits) -> int:
    """The tokens of a request's prompt as it stands, however long."""
    limits = msgspec.structs.replace(limits, context_tokens=TOKENS_MAX)
    return len(conversation.read(conversation_of(body), text, limits).tokens[0])


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def counted(tokens: int) -> dict[str, object]:
    """The answer of count_tokens."""
    return {"input_tokens": tokens}


def unknown_betas(headers: Mapping[str, str]) -> list[str]:
    """Names of features that the daemon does not have, as fields that it ignores."""
    sent = [name.strip() for name in headers.get(BETA, "").split(",")[:BETAS_MAX]]
    return [f"{BETA}.{name}" for name in sent if name and _DATE.sub("", name) not in KNOWN_BETAS]


MESSAGES = Protocol(
    name=FORM_MESSAGES,
    routes=("/v1/messages",),
    body=MessagesRequest,
    check=check,
    read_prompt=read_prompt,
    formatter=MessagesFormatter,
    error=error_object,
    common=common,
    count_route="/v1/messages/count_tokens",
    counted=counted,
)
