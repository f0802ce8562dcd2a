"""Stages of one lane: one after another, and together at most as much time as the lane's steps."""

from __future__ import annotations

from array import array

from batchengine.config import LaneConfig
from batchengine.engine.lane.seats import Seats
from batchengine.engine.lane.stage_queue import StageOwner, StageQueue, StageWork
from batchengine.lanes.worker_process import Lane
from batchengine.policy.cost import StepCost
from batchengine.wire import lane as wire

COST = StepCost(1.0, 1.0, 1.0, 1e-4, 1e-6)  # one ms per token


class FakeLane(Lane):
    """A worker that takes a ms per token; it answers with `why`."""

    def __init__(self) -> None:
        super().__init__("fake")
        self.asked: list[tuple[int, int, int, bytes]] = []
        self.why = ""

    async def run_stage(
        self, step: wire.StageStep, payload: bytes, *, deadline_s: float
    ) -> wire.StageDone:
        self.asked.append((step.run, step.start, step.n_tokens, payload))
        return wire.StageDone(step.run, 1000 * step.n_tokens, self.why)


class Others(Seats):
    """What the lane computes beside stages, alone."""

    def __init__(self, *, urgent: bool = False, owed: float = 1.0) -> None:
        self.urgent, self.owed = urgent, owed

    def have_urgent(self) -> bool:
        return self.urgent

    def owed_to_steps(self, tenant: str) -> float:
        return self.owed if tenant == "many" else 1.0


NONE, TOLERANT, URGENT = Others(), Others(), Others(urgent=True)


def work(
    run: int, arrived: int, n_tokens: int = 512, peer: str = "", tenant: str = ""
) -> StageWork:
    owner = StageOwner(peer, tenant)
    return StageWork(
        run, 1.0, n_tokens, 256, array("i"), owner=owner, arrived=arrived, allowed=n_tokens
    )


async def test_pieces_fit_what_has_come_and_the_time_that_others_wait() -> None:
    queue, lane = StageQueue(LaneConfig("x", tokens_per_step=640)), FakeLane()
    queue.add(work(1, 0))
    assert not await queue.run(lane, COST, NONE, idle=True)
    one = queue.get(1)
    assert one is not None
    one.arrived = 300
    assert await queue.run(lane, COST, NONE, idle=True)
    assert await queue.run(lane, COST, NONE, idle=True)
    assert not await queue.run(lane, COST, NONE, idle=True)
    one.arrived, one.allowed = 512, 400
    assert await queue.run(lane, COST, URGENT, idle=False)  # at most 100 ms: 64 tokens
    assert [asked[1:3] for asked in lane.asked] == [(0, 256), (256, 44), (300, 64)]
    queue.stepped(100.0)
    assert await queue.run(
        lane, COST, TOLERANT, idle=False
    )  # throughput-tolerant requests wait longer
    assert lane.asked[-1][1:3] == (364, 36)
    assert queue.pieces == len(lane.asked)


async def test_stages_take_at_most_as_long_as_the_steps_of_the_lane() -> None:
    queue, lane = StageQueue(LaneConfig("x", tokens_per_step=640)), FakeLane()
    queue.add(work(1, 512))
    queue.add(work(2, 512))
    stage_ms, steps_ms = 0, 0
    for _ in range(40):
        if await queue.run(lane, COST, URGENT, idle=False):
            stage_ms += lane.asked[-1][2]
        else:
            queue.stepped(10.0)
            steps_ms += 10
    assert stage_ms <= steps_ms + 64 + 10
    assert {asked[0] for asked in lane.asked} == {1}
    assert await queue.run(lane, COST, NONE, idle=True)  # nothing waits any more


async def test_prompts_of_one_owner_come_one_after_another_and_owners_have_turns() -> None:
    queue, lane = StageQueue(LaneConfig("x", tokens_per_step=640)), FakeLane()
    first, late = work(1, 512), work(3, 0, peer="b")
    for each in (first, work(2, 512), late, work(4, 512, peer="b")):
        queue.add(each)
    assert queue.left_ms(COST) == 1024 + 2 * 512 * 256 * 1e-6  # those of b
    assert queue.left_ms(COST, "b") == queue.left_ms(COST)
    assert queue.left_ms(COST, "c") == 0.0
    first.arrived = 256  # another piece comes later
    runs = list[int]()
    for _ in range(3):
        await queue.run(lane, COST, NONE, idle=True)
        runs.append(lane.asked[-1][0])
    assert runs == [1, 4, 2]  # the one of b that came first has no rows yet
    first.arrived = late.arrived = 512
    while await queue.run(lane, COST, NONE, idle=True):
        runs.append(lane.asked[-1][0])
    assert runs[3:] == [3, 1, 3, 2, 4]
    assert queue.left_ms(COST) == 0.0
    for run in (1, 2, 3, 4):
        queue.remove(run)
    assert not queue


async def test_tenants_have_turns_and_each_no_more_than_its_share() -> None:
    queue, lane = StageQueue(LaneConfig("x", tokens_per_step=640)), FakeLane()
    for run, tenant in enumerate(["many", "many", "few"], 1):
        queue.add(work(run, 512, tenant=tenant))
    others, runs = Others(owed=3.0), list[int]()
    assert queue.left_ms(COST) == 0.0  # none is for a peer
    for _ in range(4):
        assert await queue.run(lane, COST, others, idle=False)
        run, _, n_tokens, _ = lane.asked[-1]
        runs.append(run)
        queue.stepped((1.0 if run == 3 else 3.0) * n_tokens - 1.0)
        assert not await queue.run(lane, COST, others, idle=False)
        queue.stepped(1.0)
    assert runs == [1, 3, 1, 3]


async def test_a_stage_that_ends_leaves_the_others() -> None:
    queue, lane = StageQueue(LaneConfig("x", tokens_per_step=640)), FakeLane()
    ended: list[tuple[int, str]] = []
    queue.on_ended = lambda run, why: ended.append((run, why))
    first = StageWork(1, 0.5, 256, 256, array("i", range(256)), arrived=256, allowed=256)
    for each in (first, work(2, 512), work(3, 512)):
        queue.add(each)
    lane.why = "its numbers are not finite"
    await queue.run(lane, COST, NONE, idle=True)
    assert lane.asked[0][3] == array("i", range(256)).tobytes()
    lane.why = ""
    queue.remove(2)
    await queue.run(lane, COST, NONE, idle=True)
    assert [asked[0] for asked in lane.asked] == [1, 3]
    queue.died()
    assert ended == [(1, "its numbers are not finite"), (3, "its worker died")]
    assert not queue
