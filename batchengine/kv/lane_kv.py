"""The KV of one lane as its step loop sees it: what a frame carries, and a worker's death.

Owns the order in which the parts act. A session whose worker died keeps its sealed pages; its open
rows stay in the dead arena until the next worker has imported them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from batchengine import wire
from batchengine.kv.arenas import DeadArenas
from batchengine.kv.digests import DueDigest
from batchengine.kv.disputes import Disputes
from batchengine.kv.importing import RowImport, RowImporter
from batchengine.kv.invalidation import Invalidation
from batchengine.kv.prefix import PrefixMatcher
from batchengine.kv.sealing import SealPipeline
from batchengine.kv.slots import Labels, Seal, Slots
from batchengine.kv.touching import PageTouches, Touch
from kv_store.store import Store


class Chores(NamedTuple):
    """What a frame carries besides entries, and what its answers belong to."""

    labels: Labels
    import_rows: tuple[wire.ImportRows, ...]
    import_tokens: bytes
    touch: tuple[int, ...]
    digest: tuple[wire.Digest, ...]
    row_imports: list[RowImport]  # of each `import_rows`
    touches: list[Touch]  # of each `touch`
    digests: list[DueDigest]  # of each `digest`


class LaneKv:
    """The parts of one lane's KV. Each knows those before it only.

    `wake` is called from any thread when the lane's loop has something to do; `commit` when a
    manifest row waits for a commit.
    """

    def __init__(
        self,
        store: Store,
        disputes: Disputes,
        wake: Callable[[], None],
        commit: Callable[[], None],
    ) -> None:
        self.disputes = disputes
        self.arenas = DeadArenas()
        self.slots = Slots(store)
        self.prefix = PrefixMatcher(store, self.slots)
        self.sealing = SealPipeline(store, self.slots, self.arenas, disputes, wake, commit)
        self.invalidation = Invalidation(store, self.slots, self.sealing, disputes)
        self.importing = RowImporter(store, self.slots, self.sealing.digests, self.arenas, wake)
        self.touches = PageTouches(store.pages.layout.page_bytes, wake)

    def __repr__(self) -> str:
        return f"<LaneKv {self.slots!r} {self.sealing!r} {self.importing!r}>"

    # ------------------------------------------------------------------------------ the frame

    def poll(self) -> None:
        """Take the results of the store's threads. Called between steps."""
        self.sealing.poll()
        self.importing.poll()

    def chores(self) -> tuple[Chores, list[Seal]]:
        """What the next frame carries besides entries, and the seals it verifies. Taken once.

        Call it after the entries were chosen: a tail is never digested while its session computes.
        """
        import_rows, tokens, row_imports = self.importing.take_imports()
        touch, touches = self.touches.take()
        digests = self.sealing.digests.take()
        chores = Chores(
            self.slots.take_labels(),
            tuple(import_rows),
            tokens,
            tuple(touch),
            tuple([wire.Digest(slot.slot, rows) for _, _, rows, slot in digests]),
            row_imports,
            touches,
            digests,
        )
        return chores, self.sealing.read_back.take()

    def answered(
        self, chores: Chores, digests: tuple[bytes, ...], imported: tuple[int, ...]
    ) -> None:
        """The frame with these chores was executed."""
        self.slots.labeled()
        for (session, index, rows, slot), digest in zip(chores.digests, digests, strict=True):
            self.sealing.digested(session, index, rows, slot, digest)
        self.importing.arrived(chores.row_imports, imported)
        self.touches.touched(chores.touches)

    @property
    def has_chores(self) -> bool:
        """A frame must go out, even without entries."""
        return self._has_other_chores or bool(self.sealing.read_back.due())

    @property
    def _has_other_chores(self) -> bool:
        """A frame must go out, for more than to read what was published."""
        return bool(
            self.slots.has_labels
            or self.sealing.digests
            or self.touches
            or self.importing.has_chores
        )

    @property
    def is_busy(self) -> bool:
        """Something waits for the next frame, or for room in the store."""
        return bool(self.sealing.has_results or self.sealing.queued or self.has_chores)

    @property
    def is_sealing(self) -> bool:
        """Slots come back by themselves: seals or chores are in flight, or room is made."""
        return self.sealing.is_moving or self._has_other_chores

    # ------------------------------------------------------------------------------ the worker

    def close(self) -> None:
        """The worker is gone for good: its arena goes too."""
        self.arenas.close()
        lost = self.slots.lose_arena()
        if lost is not None:
            lost.arena.close(delete=True)

    def lane_died(self, chores: Chores | None) -> None:
        """The worker is reaped: open rows are pending rows, and seals in flight go on from the old
        file.

        `chores` were in its last frame, if any: they are not answered.
        """
        lost = self.slots.lose_arena()
        if lost is not None:
            self.importing.arena_died(lost)
            self.touches.arena_died()
        if chores is not None:
            self.touches.touched(chores.touches)
        self.sealing.arena_died()
        if lost is not None:
            self.arenas.retire(lost.arena)  # with its holders: rows that are wanted, seals

    def drop_dead_arenas(self) -> None:
        """There is no room for a new arena beside them: their rows are computed again."""
        for session in self.slots.members_pending():
            if any(isinstance(pending.source, wire.FromArena) for pending in session.kv.pending):
                self.slots.drop_pending(session)
                self.slots.changed(session)
