"""Arenas of dead workers: each file is deleted once nothing reads it any more."""

from __future__ import annotations

from collections.abc import Callable

from kv_store.arenas.arena import Arena


class DeadArenas:
    """Arenas of dead workers of one lane, and the number of holders of each of its arenas."""

    def __init__(self) -> None:
        self.dead: list[Arena] = []
        self._holders: dict[Arena, int] = {}

    def __repr__(self) -> str:
        return f"<DeadArenas {self.dead!r} holders={self._holders!r}>"

    def __bool__(self) -> bool:
        """Whether any arena is dead, or held."""
        return bool(self.dead or self._holders)

    def hold(self, arena: Arena) -> Callable[[], None]:
        """Keep the arena's file until the returned function is called; later calls do nothing."""
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
        """Delete the arena of a dead worker now, or when its last holder releases it."""
        self.dead.append(arena)
        self._delete(arena)

    def _delete(self, arena: Arena) -> None:
        if arena in self.dead and arena not in self._holders:
            self.dead.remove(arena)
            arena.close(delete=True)

    def close(self) -> None:
        """Delete all dead arenas, held or not."""
        while self.dead:
            self.dead.pop().close(delete=True)
