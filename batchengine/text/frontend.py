"""The text side of the engine: its vocabulary here, all work on texts in processes of its own.

Owns the vocabulary of the model and the pool of text processes. Token pieces and streaming
decoders are cheap and stay on the caller's thread.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import msgspec

from batchengine import errors
from batchengine.core import PLAIN_OUTPUT, BatchEngineError, Constraint, OutputForm
from batchengine.markup import MARKUPS, Markup
from batchengine.text.detokeniser import Detokeniser
from batchengine.text.messages import PROBE_TEXT
from batchengine.text.pool import TextLimits, TextPool
from batchengine.text.vocab import TEXT_BYTES_MAX, Tokenizer, utf8
from batchengine.wire.text import Check, Encode, EncodeChat, Open, Read, token_ids

GOOD_MAX = 1024  # constraints that are remembered
logger = logging.getLogger(__name__)


class TextFrontend:
    """encode, read, decode for one model. Made with `await TextFrontend.open(...)`."""

    def __init__(self, tokenizer: Tokenizer, pool: TextPool) -> None:
        self.tokenizer = tokenizer
        self._pool = pool
        self._good = OrderedDict[bytes, list[str]]()  # by digests of constraints
        # by markup: control tokens that are no markers, and tokens of marks if it has breaks
        self._known_marks = dict[str, tuple[frozenset[int], frozenset[int] | None]]()

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str],
        *,
        reader: str = "",
        template: str | None = None,
        limits: TextLimits | None = None,
        today: datetime.date | None = None,
    ) -> TextFrontend:
        """Loads the vocabulary of the GGUF at `path`, and starts a text process.

        `reader` names the function that answers `read` (see `batchengine.text.process`).
        `template` None = the file's own chat template, or ChatML. `today` is what templates see
        as the date; it stays, since a prompt that changes at midnight would lose every shared
        prefix.
        """
        limits = limits or TextLimits()
        tokenizer = await asyncio.to_thread(Tokenizer, path)
        if template is None and tokenizer.chat_template is None:
            logger.warning(
                "%s: the model file has no chat template; using ChatML, which it may not"
                " understand", os.fspath(path),
            )  # fmt: skip
        opening = Open(
            vocabulary=str(tokenizer.path.absolute()),
            template=template,
            today=(today or datetime.date.today()).isoformat(),
            cpu_s=limits.cpu_s,
            memory_bytes=limits.memory_bytes,
            output_chars_max=limits.output_chars_max,
        )
        frontend = cls(tokenizer, TextPool(opening, reader, limits))
        if reader:
            frontend._pool.warm_up()
        return frontend

    @property
    def trouble(self) -> str:
        """Why requests are refused, since no text process starts; or ""."""
        return self._pool.trouble

    async def encode(self, text: str, *, special: bool = False, tenant: str = "") -> list[int]:
        """Token ids of plain text, begin-of-sequence as the metadata asks.

        `special` = control tokens written in the text count (trusted text only).
        """
        return token_ids(await self._pool.call(Encode(special), utf8(text), tenant))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        kwargs: Mapping[str, object] | None = None,
        *,
        tenant: str = "",
    ) -> list[int]:
        """The prompt as token ids; text of the request never becomes a control token."""
        try:
            chat = msgspec.msgpack.encode([messages, tools, kwargs])
        except (UnicodeEncodeError, RecursionError, TypeError) as error:
            what = "the messages are not valid JSON text"
            raise errors.INVALID_MESSAGES(what=what, why=error) from error
        if len(chat) > TEXT_BYTES_MAX:
            raise errors.TEXT_TOO_LARGE(mib=TEXT_BYTES_MAX >> 20)
        return token_ids(await self._pool.call(EncodeChat(), chat, tenant))

    async def template_fault(self) -> str:
        """Why no chat can be made a prompt, found by the shortest one; "" = the template works."""
        try:
            tokens = await self.encode_chat([{"role": "user", "content": PROBE_TEXT}])
        except BatchEngineError as error:
            if error.code == errors.TEXT_UNAVAILABLE.code:  # says nothing about the template
                return ""
            return f"{error.what}: {error.why}"
        if not tokens:
            return "the model's chat template makes an empty prompt"
        shown = PROBE_TEXT.encode() in b"".join(map(self.piece, tokens))
        return "" if shown else "the model's chat template does not show what a user writes"

    async def read(self, question: bytes, body: bytes | memoryview, *, tenant: str = "") -> bytes:
        """What the reader answers to a request's body; neither is looked at in this process."""
        if len(body) > TEXT_BYTES_MAX:
            raise errors.TEXT_TOO_LARGE(mib=TEXT_BYTES_MAX >> 20)
        return await self._pool.call(Read(question), body, tenant)

    async def check(self, constraint: Constraint, digest: bytes, *, tenant: str = "") -> list[str]:
        """The names of keywords that the constraint does not enforce. Raise GRAMMAR_REFUSED unless
        an answer can be constrained to this, whose `digest` it is: agents send the same tools with
        every turn, so what was found good is remembered."""
        if digest not in self._good:
            found = await self._pool.call(Check(), msgspec.msgpack.encode(constraint), tenant)
            if len(self._good) >= GOOD_MAX:
                self._good.popitem(last=False)
            self._good[digest] = msgspec.msgpack.decode(found, type=list[str])
        self._good.move_to_end(digest)
        return self._good[digest]

    def piece(self, token: int) -> bytes:
        """Bytes of one token."""
        return self.tokenizer.piece(token)

    def detokeniser(self, output: OutputForm = PLAIN_OUTPUT) -> Detokeniser:
        """A fresh streaming decoder; control tokens are invisible, but for markers, which some
        markups keep apart from text that spells them."""
        markup, control = MARKUPS.get(output.markup), self.tokenizer.control
        known = self._known_marks.get(output.markup)
        if known is None:
            markers = frozenset[str]() if markup is None else markup.markers
            special = self.tokenizer.special_ids
            shown = {special[one] for one in markers if one in special}
            has_marks = markup is not None and markup.has_breaks and _has_calls(markup, special)
            known = (control.difference(shown), control.union(shown) if has_marks else None)
            self._known_marks[output.markup] = known
        hidden, marks = known
        is_mark = None if marks is None else marks.__contains__
        return Detokeniser(self.tokenizer.piece, hidden.__contains__, is_mark)

    async def close(self) -> None:
        """Ends the text processes and frees the vocabulary; idempotent."""
        await self._pool.close()
        self.tokenizer.close()


def _has_calls(markup: Markup, special: Mapping[str, int]) -> bool:
    """Whether a vocabulary has a token for a mark that begins calls, and that breaks would part."""
    return any(one.startswith("<|") and one in special for one in markup.forms)
