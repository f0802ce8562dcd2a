"""The text side of the engine: every call that costs time in proportion to its input.

Owns one worker thread, on which encoding and rendering run, so that a long prompt never holds
the event loop. Token pieces and streaming decoders are cheap and stay on the caller's thread.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar, cast

from batchengine.text.control_tokens import ControlGuard
from batchengine.text.detokeniser import Detokeniser
from batchengine.text.vocab import Tokenizer

T = TypeVar("T")


class ChatRenderer(Protocol):
    """What the frontend needs of a chat template; `batchengine.text.ChatTemplate` is one."""

    def prepare(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        kwargs: Mapping[str, object] | None,
    ) -> dict[str, object]:
        """Check a request; returns {"messages": …, "tools": …, "kwargs": …} as plain data."""
        ...

    def render(self, variables: Mapping[str, object], specials: Mapping[str, str]) -> str: ...

    def start(self) -> None: ...

    def close(self) -> None: ...


class TextFrontend:
    """encode, render, decode for one model. Made with `await TextFrontend.open(...)`."""

    def __init__(
        self, tokenizer: Tokenizer, renderer: ChatRenderer, executor: ThreadPoolExecutor
    ) -> None:
        self.tokenizer = tokenizer
        self.renderer = renderer
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
        renderer: Callable[[str | None], ChatRenderer],
    ) -> TextFrontend:
        """Load the vocabulary of the GGUF at `path`, on the worker thread.

        `renderer` is called there with the file's own chat template (None when it has none):
        `TextFrontend.open(path, ChatTemplate)`.
        """
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="text")

        def load() -> TextFrontend:
            tokenizer = Tokenizer(path)
            return cls(tokenizer, renderer(tokenizer.chat_template), executor)

        try:
            frontend = await asyncio.get_running_loop().run_in_executor(executor, load)
        except BaseException:
            executor.shutdown(wait=False)
            raise
        # Ahead of the first chat; a template that fails raises again in that chat.
        executor.submit(frontend.renderer.start)
        return frontend

    async def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of plain text, begin-of-sequence as the metadata asks.

        `special` = control tokens written in the text count (trusted text only).
        """
        return await self._off_loop(lambda: self.tokenizer.encode(text, special=special))

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt as text. It is for display: its control tokens look like those of users."""

        def work() -> str:
            return self.renderer.render(
                self.renderer.prepare(messages, tools, kwargs), self._specials
            )

        return await self._off_loop(work)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        """The prompt as token ids; text of the request never becomes a control token."""

        def work() -> list[int]:
            variables = self.renderer.prepare(messages, tools, kwargs)
            chat = {name: variables[name] for name in ("messages", "tools")}

            def render(chat: object) -> str:
                parts = cast(dict[str, object], chat)
                return self.renderer.render({**variables, **parts}, self._specials)

            return self._guard.encode_chat(chat, render)

        return await self._off_loop(work)

    def piece(self, token: int) -> bytes:
        """Bytes of one token."""
        return self.tokenizer.piece(token)

    def is_eog(self, token: int) -> bool:
        """True when the token ends a generation."""
        return self.tokenizer.is_eog(token)

    def detokeniser(self, *, show_control: bool = False) -> Detokeniser:
        """A fresh streaming decoder; control tokens are invisible by default."""
        is_hidden = _never if show_control else self.tokenizer.is_control
        return Detokeniser(self.tokenizer.piece, is_hidden)

    async def close(self) -> None:
        """Wait for running work, free the vocabulary, end the template process; idempotent."""
        if not self._closed:
            self._closed = True
            await self._off_loop(self._close)
            self._executor.shutdown(wait=False)

    def _close(self) -> None:
        self.renderer.close()
        self.tokenizer.close()

    async def _off_loop(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def _never(_token: int) -> bool:
    return False


def _text(tokenizer: Tokenizer, token: int | None) -> str:
    return "" if token is None else tokenizer.piece(token).decode("utf-8", "replace")
