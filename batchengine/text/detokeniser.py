"""Streaming text: bytes of tokens to whole characters, and stop strings across token borders.

Owns two small state machines of one generation. The joined output of both does not depend on how
the stream was cut into tokens.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterable

from batchengine.markup import BREAK


class Detokeniser:
    """Tokens in, complete UTF-8 characters out.

    The joined output equals decoding the joined pieces at once, with U+FFFD for invalid bytes; a
    character cut off by the end of the stream becomes one U+FFFD in `flush`. Control tokens are
    invisible unless `is_hidden` is False for it. With `is_mark`, which tells tokens of marks, BREAK
    stands in each "<|" and "|>" that other tokens write.
    """

    def __init__(
        self,
        piece: Callable[[int], bytes],
        is_hidden: Callable[[int], bool],
        is_mark: Callable[[int], bool] | None = None,
    ) -> None:
        self._piece = piece
        self._is_hidden = is_hidden
        self._is_mark = is_mark
        self._last = ""  # "<" or "|" if the text ends with it
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Text that became complete with this token; may be empty."""
        if self._is_hidden(token):
            return ""
        text = self._decoder.decode(self._piece(token))
        if self._is_mark is None:
            return text
        if self._is_mark(token):
            self._last = ""
            return text
        return self._with_breaks(text)

    def _with_breaks(self, text: str) -> str:
        before = self._last
        if text:
            self._last = text[-1] if text[-1] in "<|" else ""
        return _with_breaks(before + text.replace(BREAK, "\ufffd"))[len(before) :]

    def flush(self) -> str:
        """End of stream: "" or one U+FFFD for a character that never became complete."""
        rest = self._decoder.decode(b"", True)
        self._decoder.reset()
        return rest


class StopMatcher:
    """Cuts a text stream before the first completed stop string.

    First = the one whose last character comes first; of several ending there, the longest. That
    choice needs no look ahead, so the result does not depend on how the stream was cut. An
    Aho-Corasick automaton over the stops: the depth of its state is exactly the number of
    characters that may still become part of a stop, hence the number held back.

        text     . . . . . . a b c a b        stops {"abd"}
                 [  emitted      )[held]      state depth 2
    """

    def __init__(self, stops: Iterable[str], unchecked: int = 0) -> None:
        """A stop string that is complete after the first `unchecked` texts is text."""
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._longest = [0]  # length of the longest stop that ends in this state, 0 = none
        for stop in stops:
            if not stop:
                raise ValueError("an empty stop string would stop at once")
            self._insert(stop)
            self._insert(_with_breaks(stop))
        self._fail = self._links()
        self._state = 0
        self._held = ""
        self._unchecked = unchecked
        self.stopped = False
        self.found = ""  # the stop string that was completed

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown, whether a stop string was completed)."""
        if self.stopped:
            return "", True
        is_checked, self._unchecked = self._unchecked <= 0, self._unchecked - 1
        if len(self._next) == 1:
            return text, False
        pending = self._held + text
        start = len(self._held)
        state = self._state
        for index in range(start, len(pending)):
            state = self._step(state, pending[index])
            cut = self._longest[state]
            if cut and is_checked:
                self.stopped, self._held = True, ""
                self.found = pending[index + 1 - cut : index + 1].replace(BREAK, "")
                return pending[: index + 1 - cut], True
        self._state = state
        show = len(pending) - self._depth[state]
        self._held = pending[show:]
        return pending[:show], False

    def flush(self) -> str:
        """End of stream: the text that was held back, which completed no stop string."""
        rest, self._held, self._state = self._held, "", 0
        return rest

    def _insert(self, stop: str) -> None:
        state = 0
        for character in stop:
            after = self._next[state].get(character)
            if after is None:
                after = len(self._next)
                self._next[state][character] = after
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._longest.append(0)
            state = after
        self._longest[state] = len(stop)

    def _links(self) -> list[int]:
        """Fail links, breadth first: the longest proper suffix that is also a state."""
        fail = [0] * len(self._next)
        self._fail = fail
        order = deque(self._next[0].values())
        while order:
            state = order.popleft()
            self._longest[state] = self._longest[state] or self._longest[fail[state]]
            for character, after in self._next[state].items():
                fail[after] = self._step(fail[state], character)
                order.append(after)
        return fail

    def _step(self, state: int, character: str) -> int:
        while True:
            after = self._next[state].get(character)
            if after is not None:
                return after
            if state == 0:
                return 0
            state = self._fail[state]


def _with_breaks(text: str) -> str:
    return text.replace("<|", f"<{BREAK}|").replace("|>", f"|{BREAK}>")
