"""Arenas of dead workers: each file stays until nothing reads it, then it is deleted."""

from __future__ import annotations

from collections.abc import Callable

from kv_store.arenas.arena import Arena


class DeadArenas:
    """Arenas of dead workers of one lane, and how many holders each arena of it has."""

    def __init__(self) -> None:
        self.dead: list[Arena] = []
        self._holders: dict[Arena, int] = {}

    def __repr__(self) -> str:
        return f"<DeadArenas {self.dead!r} holders={self._holders!r}>"

    def __bool__(self) -> bool:
        """Whether any arena is dead, or held."""
        return bool(self.dead or self._holders)

    def hold(self, arena: Arena) -> Callable[[], None]:
        """Keep an arena, should its worker die. Returns how to let it go; a second call is void."""
        self._holders[arena] = self._holders.get(arena, 0) + 1
        held = [arena]

        def release() -> None:
            if held:
                self._release(held.pop())

        return release

    def _release(self, arena: Arena) -> None:
        self._holders[arena] -= 1
        if not self._holders[arena]:
            del self._holders[arena]
            self._delete(arena)

    def retire(self, arena: Arena) -> None:
        """The arena's worker died: its file goes with the last holder."""
        self.dead.append(arena)
        self._delete(arena)

    def _delete(self, arena: Arena) -> None:
        if arena in self.dead and arena not in self._holders:
            self.dead.remove(arena)
            arena.close(delete=True)

    def close(self) -> None:
        """Delete all of them, held or not."""
        while self.dead:
            self.dead.pop().close(delete=True)
