"""Tokens of one timeline that two daemons compute, as they cross the control link.

Owns how far each side knows the timeline, and what may be sent: tokens that the other has not sent
itself, without gaps, up to a limit. Anything else is a misfit, which ends the link.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from batchengine.engine.linked.holds import Misfit
from batchengine.peers.link import PeerLink
from batchengine.wire.lane import SampledRow
from batchengine.wire.peer import TURN_TOKENS_MAX, PeerFrame, TokenChoice, TurnTokens

NO_CHOICE = TokenChoice(0.0)


class Exchange:
    """How far a timeline came from the other side, and went to it, in tokens."""

    def __init__(self, run: int, n_tokens: int, n_vocab: int, *, is_owner: bool) -> None:
        """Both sides have the first `n_tokens` tokens, or will have. `is_owner`: it is a turn of
        this daemon."""
        self._run, self._is_owner = run, is_owner
        self.came = self.went = n_tokens
        self._n_vocab = n_vocab

    @property
    def known(self) -> int:
        """Leading tokens that the other side has, or that are on their way to it."""
        return max(self.came, self.went)

    def take(
        self, message: TurnTokens, payload: bytes, until: int, *, with_choices: bool
    ) -> list[SampledRow]:
        """Return the tokens of a message, which end before position `until`. Raises Misfit."""
        tokens, first = tokens_of(payload, self._n_vocab), message.first
        if not self.came <= first <= self.known:
            raise Misfit(f"tokens from position {first} on, between {self.came} and {self.known}")
        if first + len(tokens) > until:
            raise Misfit(f"tokens after position {until}")
        if len(message.choices) != (len(tokens) if with_choices else 0):
            raise Misfit(f"{len(message.choices)} logprobs of {len(tokens)} tokens")
        for choice in message.choices:
            self._check(choice)
        self.came = first + len(tokens)
        choices = message.choices or [NO_CHOICE] * len(tokens)
        return [
            SampledRow(0, token, choice.logprob, choice.top)
            for token, choice in zip(tokens, choices, strict=True)
        ]

    def _check(self, choice: TokenChoice) -> None:
        if not all(math.isfinite(one) for one in (choice.logprob, *[p for _, p in choice.top])):
            raise Misfit("a logprob that is not finite")
        if any(token >= self._n_vocab for token, _ in choice.top):
            raise Misfit("logprobs outside the vocabulary")

    def send(
        self,
        link: PeerLink,
        tokens: Sequence[int],
        first: int,
        choices: Sequence[TokenChoice] = (),
    ) -> None:
        """Send tokens from position `first` on, TURN_TOKENS_MAX at most. Raises PEER_DOWN."""
        message = TurnTokens(self._run, self._is_owner, first, tuple(choices))
        link.send(message, array("i", tokens).tobytes())
        self.went = first + len(tokens)


def tokens_of(payload: bytes, n_vocab: int) -> array[int]:
    """The tokens of a TurnTokens. Raises Misfit unless they are some, and in the vocabulary."""
    tokens = array("i")
    if not payload or len(payload) % tokens.itemsize:
        raise Misfit(f"{len(payload)} bytes of tokens")
    tokens.frombytes(payload)
    if len(tokens) > TURN_TOKENS_MAX or min(tokens) < 0 or max(tokens) >= n_vocab:
        raise Misfit("tokens outside the vocabulary, or too many")
    return tokens


def misplaced(frame: PeerFrame, role: int) -> None:
    """Raise Misfit unless a frame has the role, such as REQUEST, that its message has."""
    if frame.attempt != role:
        raise Misfit(f"{type(frame.message).__name__} is not sent in this way")
