"""The outline of a chat prompt, from its control tokens: where the first user's message is.

Knows the marks that chat templates put before a message; a prompt of another template has no
outline. Reads tokens, renders nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from batchengine.text.vocab import Tokenizer

# ChatML, Llama 3, Harmony, Gemma 3 and 4, Mistral
ROLE_MARK = re.compile(rb"<\|(im_start|start_header_id|start)\|>|<start_of_turn>|<\|turn>|\[INST\]")
ROLE = re.compile(r"\s*(system|developer|user|assistant|model|tool|ipython|functions(?=\.))\b")
OF_TOOL = "functions"  # in front of a tool's name, which Harmony has for a role
MARK_OF_USER = b"[INST]"  # no role follows it
ROLE_TOKENS = 4  # that a role's name has at most
MARKS_MAX = 64  # before the first user's message: what is looked at does not grow with the prompt


class Outline(NamedTuple):
    """`head`: tokens before the first user's message, `first_end`: up to the mark after it; both
    0 = unknown. `is_single`: no message follows it, but for the beginning of the answer."""

    head: int = 0
    first_end: int = 0
    is_single: bool = False


class Outlines:
    """Finds outlines of prompts of one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        pieces = {token: tokenizer.piece(token) for token in tokenizer.control}
        self.marks = frozenset(t for t, piece in pieces.items() if ROLE_MARK.fullmatch(piece))
        self._of_user = frozenset(t for t in self.marks if pieces[t] == MARK_OF_USER)

    def role(self, tokens: Sequence[int], mark: int) -> str:
        """Return the role of the message whose mark is token number `mark`; "" = unknown."""
        if tokens[mark] in self._of_user:
            return "user"
        name = b"".join(map(self._tokenizer.piece, tokens[mark + 1 : mark + 1 + ROLE_TOKENS]))
        found = ROLE.match(name.decode(errors="replace"))
        if found is None:
            return ""
        return "tool" if found[1] == OF_TOOL else found[1]

    def of(self, prompt: Sequence[int]) -> Outline:
        """Return the outline of a prompt."""
        head = self._next(prompt, 0)
        for _ in range(MARKS_MAX):
            if head == len(prompt) or self.role(prompt, head) == "user":
                break
            head = self._next(prompt, head + 1)
        else:
            return Outline()
        if head == len(prompt):
            return Outline()
        end = self._next(prompt, head + 1)
        after = self._next(prompt, end + 1)
        return Outline(head, end, after == len(prompt) and self.role_at(prompt, end) != "user")

    def role_at(self, prompt: Sequence[int], mark: int) -> str:
        """Return the role at `mark`, "" at the prompt's end."""
        return self.role(prompt, mark) if mark < len(prompt) else ""

    def _next(self, prompt: Sequence[int], start: int) -> int:
        """Return the position of the next mark; the prompt's length if there is none."""
        found = len(prompt)
        for mark in self.marks:
            try:
                found = min(found, prompt.index(mark, start, found))
            except ValueError:
                continue
        return found
