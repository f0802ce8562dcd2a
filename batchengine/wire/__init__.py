"""The wire: framing (`frames`) and the messages of the link between engine and worker (`lane`).

The messages of the lane link are exported here; another kind of link has a module of its own.
"""

from batchengine.wire.lane import (
    LANE_LINK as LANE_LINK,
)
from batchengine.wire.lane import (
    Attach as Attach,
)
from batchengine.wire.lane import (
    Attached as Attached,
)
from batchengine.wire.lane import (
    CpuResources as CpuResources,
)
from batchengine.wire.lane import (
    Digest as Digest,
)
from batchengine.wire.lane import (
    Entry as Entry,
)
from batchengine.wire.lane import (
    Failed as Failed,
)
from batchengine.wire.lane import (
    FromArena as FromArena,
)
from batchengine.wire.lane import (
    FromPage as FromPage,
)
from batchengine.wire.lane import (
    ImportRows as ImportRows,
)
from batchengine.wire.lane import (
    LaneFrame as LaneFrame,
)
from batchengine.wire.lane import (
    LaneMessage as LaneMessage,
)
from batchengine.wire.lane import (
    Load as Load,
)
from batchengine.wire.lane import (
    Loading as Loading,
)
from batchengine.wire.lane import (
    ModelFacts as ModelFacts,
)
from batchengine.wire.lane import (
    Ping as Ping,
)
from batchengine.wire.lane import (
    Pong as Pong,
)
from batchengine.wire.lane import (
    Ready as Ready,
)
from batchengine.wire.lane import (
    Relabel as Relabel,
)
from batchengine.wire.lane import (
    ReserveSlot as ReserveSlot,
)
from batchengine.wire.lane import (
    SampledRow as SampledRow,
)
from batchengine.wire.lane import (
    Shutdown as Shutdown,
)
from batchengine.wire.lane import (
    Step as Step,
)
from batchengine.wire.lane import (
    StepDone as StepDone,
)
from batchengine.wire.lane import (
    Verify as Verify,
)
