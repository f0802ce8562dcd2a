"""The recurrent states of a pipeline's pages, which come to the daemon that owns them.

A pipeline for a model with recurrent state is worth what its states are: a session goes on behind
its pages only where a file has the state. The stages send those behind every so many tokens, as a
lane would save them, and the one behind the last token.
"""

from __future__ import annotations

from batchengine.core import PAGE_TOKENS
from batchengine.kv.states import LaneStates
from batchengine.session import Session
from batchengine.wire import lane as wire
from kv_store.states import state_name, state_seed

AHEAD = 2  # states for which the worker has memory


class GatheredStates:
    """The states of one pipeline, in the order of their positions."""

    def __init__(self, states: LaneStates, session: Session) -> None:
        """Of all tokens of `session`, whole pages, for a model with recurrent state."""
        self.interval = states.interval
        self._states, self._session = states, session
        n_tokens = len(session.tokens)
        self._positions = [*range(self.interval, n_tokens, self.interval), n_tokens]
        self._keys: list[bytes | None] = []  # of those that were named; None: it is left out
        self._complete = 0

    @property
    def is_complete(self) -> bool:
        """Whether every state is saved, or was left out."""
        return self._complete == len(self._positions)

    @property
    def limit(self) -> int:
        """The position up to which the stages may compute: no state that is not named is sent."""
        named = len(self._keys)
        if named == len(self._positions):
            return self._positions[-1]
        return self._positions[named] - PAGE_TOKENS

    def name(self, run: int) -> list[wire.GatherState]:
        """Name the next states to the worker, as many as it has memory for."""
        notes: list[wire.GatherState] = []
        while len(self._keys) < min(self._complete + AHEAD, len(self._positions)):
            position = self._positions[len(self._keys)]
            found = self._states.gather(self._session, position)
            self._keys.append(None if found is None else found[0])
            file = ("", 0) if found is None else (state_name(*found), state_seed(found[0]))
            notes.append(wire.GatherState(run, position, *file))
        return notes

    def completed(self, count: int) -> None:
        """Note that the first `count` states are done."""
        for key in self._keys[self._complete : count]:
            if key is not None:
                self._states.gathered(key)
        self._complete = max(self._complete, min(count, len(self._keys)))

    def give_up(self) -> list[bytes]:
        """Expect no more states. Returns the keys of those that the worker may still be writing:
        they are abandoned once it says that the pipeline is closed."""
        left = [key for key in self._keys[self._complete :] if key is not None]
        self._states.give_up(left)
        return left
