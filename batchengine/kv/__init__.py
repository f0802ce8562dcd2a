"""KV pages of the sessions of one lane: open slots of its arena, and sealed pages of the store.

Owns page tables, the lane's arena, the seal pipeline, and the import of open rows into the arena.
Refuses I/O and waiting: the store's threads do the work, and `poll` takes their results. All
changes happen between two steps of the lane, so a slot that is freed here can be poisoned, zeroed
and used again by the next frame.

    OPEN slot --256 tokens--> digest by the lane --> reserve ticket --> seal (store thread)
      --> publish (next commit) --> lane verifies the extent copy --> table entry swaps
      --> slot freed

`LaneKv` puts the parts together: `Slots` (tables, arena slots), `PrefixMatcher` (store to table),
`SealPipeline` (arena to store), `Invalidation`, `RowImporter` (into the arena), `PageTouches`.
Each part depends only on parts before it in this list.
"""

from batchengine.kv.disputes import Disputes
from batchengine.kv.importing import RowImport
from batchengine.kv.lane_kv import LaneKv
from batchengine.kv.slots import Seal

__all__ = ["Disputes", "LaneKv", "RowImport", "Seal"]
