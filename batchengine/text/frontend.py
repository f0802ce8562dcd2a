"""The text side of the engine: every call that costs time in proportion to its input.

Owns one worker thread, on which encoding and rendering run, so that a long prompt never holds
the event loop. Token pieces and streaming decoders are cheap and stay on the caller's thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, cast

from batchengine.text.chat_template import ChatTemplate
from batchengine.text.control_tokens import ControlGuard
from batchengine.text.detokeniser import Detokeniser
from batchengine.text.messages import prepare_messages
from batchengine.text.vocab import Tokenizer

T = TypeVar("T")
logger = logging.getLogger(__name__)


class TextFrontend:
    """encode, render, decode for one model. Made with `await TextFrontend.open(...)`."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, executor: ThreadPoolExecutor
    ) -> None:
        self.tokenizer = tokenizer
        self._template = template
        self._executor = executor
        self._closed = False
        self._guard = ControlGuard(tokenizer)
        self._specials = {
            "bos_token": _text(tokenizer, tokenizer.bos),
            "eos_token": _text(tokenizer, tokenizer.eos),
        }

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str],
        template: Callable[[str | None], ChatTemplate],
    ) -> TextFrontend:
        """Load the vocabulary of the GGUF at `path`, on the worker thread.

        `template` is called there with the source of the file's chat template, None when it has
        none: `TextFrontend.open(path, ChatTemplate)`.
        """
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="text")

        def load() -> TextFrontend:
            tokenizer = Tokenizer(path)
            made = template(tokenizer.chat_template)
            if made.warning is not None:
                logger.warning("%s: %s", os.fspath(path), made.warning)
            return cls(tokenizer, made, executor)

        try:
            frontend = await asyncio.get_running_loop().run_in_executor(executor, load)
        except BaseException:
            executor.shutdown(wait=False)
            raise
        # Ahead of the first chat; a template that fails raises again in that chat.
        executor.submit(frontend._template.start)
        return frontend

    async def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of plain text, begin-of-sequence as the metadata asks.

        `special` = control tokens written in the text count (trusted text only).
        """
        return await self._off_loop(lambda: self.tokenizer.encode(text, special=special))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        """The prompt as token ids; text of the request never becomes a control token."""

        def work() -> list[int]:
            variables = {**self._specials, **(kwargs or {})}

            def render(chat: object) -> str:
                return self._template.render(cast(dict[str, object], chat), variables)

            listed = [dict(tool) for tool in tools or ()] or None
            chat = {"messages": prepare_messages(messages), "tools": listed}
            return self._guard.encode_chat(chat, render)

        return await self._off_loop(work)

    def piece(self, token: int) -> bytes:
        """Bytes of one token."""
        return self.tokenizer.piece(token)

    def detokeniser(self) -> Detokeniser:
        """A fresh streaming decoder; control tokens are invisible."""
        return Detokeniser(self.tokenizer.piece, self.tokenizer.is_control)

    async def close(self) -> None:
        """Wait for running work, free the vocabulary, end the template process; idempotent."""
        if not self._closed:
            self._closed = True
            await self._off_loop(self._close)
            self._executor.shutdown(wait=False)

    def _close(self) -> None:
        self._template.close()
        self.tokenizer.close()

    async def _off_loop(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def _text(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.piece(token).decode("utf-8", "replace")
