"""Where the pages of sessions are: open places of one lane's arena, sealed pages of the store.

Owns page tables, the lane's arena, the seal pipeline, and how open rows come into an arena from
elsewhere. Refuses I/O and waiting: the store's threads do the work, results are taken in `poll`.
All changes happen between two steps of the lane, so a place that is freed here can be poisoned,
zeroed and used again by the next frame.

    OPEN place --256 tokens--> digest by the lane --> reserve ticket --> seal (store thread)
      --> publish (next commit) --> lane verifies the extent copy --> table entry swaps
      --> place freed

Three floors: `places` (tables), `seals` (arena to store), `adoption` (into the arena);
`LanePages` adds the frame and the life of the worker.
"""

from batchengine.pages.adoption import Adoption
from batchengine.pages.lane import LanePages
from batchengine.pages.places import Seal

__all__ = ["Adoption", "LanePages", "Seal"]
