"""A session whose client has just cut its history can migrate."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from batchengine.config import LaneConfig
from batchengine.core import BatchEngineError
from batchengine.engine import Engine
from batchengine.engine.lane.loop import LaneLoop
from batchengine.engine.placement import migration
from batchengine.session import Session, State
from tests.support.engines import (
    Answer,
    Reference,
    Site,
    read,
    request,
    running_engine,
    suspend,
    until,
    words,
)

LANES = tuple(LaneConfig(name=n, threads=1, entries_max=1) for n in ("left", "right"))
PROMPT = words(1, 700)
EDITED = [*PROMPT[:640], *words(2, 40)]  # cut inside the open page: 128 of its rows stay good


class Cut:
    """A session waits for a seat right after a cut that its lane has not carried out.

    The worker of the lane is stopped before the frame that brings the session's rows under their
    new epoch is sent, or with that frame on the way.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def begin(self, when: str) -> asyncio.Future[Answer]:
        engine = self.engine
        await read(engine.submit(request(PROMPT, 20, session="s")))
        self.session: Session = engine.state.sessions["", "s"]
        others = [engine.submit(request(words(3 + i, 30), 3000)) for i in range(2)]
        self.busy = [asyncio.ensure_future(read(other)) for other in others]
        await until(lambda: all(len(loop.running) == 1 for loop in engine.state.lanes))
        self.source: LaneLoop = engine.state.home[self.session.key]
        self.target = next(loop for loop in engine.state.lanes if loop is not self.source)
        self.pid = self.source.lane.pid
        pages = self.source.kv
        if when == "yet to be sent":
            suspend(self.pid)
            await asyncio.sleep(0.05)  # its answers are committed, the next step is sent
        else:
            self._stop_at_the_frame()
        answer = asyncio.ensure_future(read(engine.submit(request(EDITED, 30, session="s"))))
        await until(lambda: self.session.state is State.WAITING)
        if when == "on the way":
            await until(lambda: any(labels.relabel for labels in pages.slots._sent))
        assert bool(pages.slots._relabels) == (when == "yet to be sent")
        assert pages.slots.is_relabeling(self.session)
        assert engine.state.home[self.session.key] is self.source
        assert len(self.session.tokens) - self.session.frontier == 40
        for other in others:
            if other.lane == self.target.lane.name:
                other.cancel()
        await until(lambda: not self.target.running)
        self.others = others
        return answer

    def _stop_at_the_frame(self) -> None:
        lane, real = self.source.lane, self.source.lane.post

        def post(step: Any, payload: bytes, **limits: Any) -> Any:
            if step.relabel:
                suspend(self.pid)
            return real(step, payload, **limits)

        lane.post = post  # type: ignore[method-assign]

    def resume_worker(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    async def end(self) -> None:
        for other in self.others:
            other.cancel()
        await asyncio.gather(*self.busy)


@pytest.mark.parametrize("when", ["yet to be sent", "on the way"])
async def test_a_migration_waits_until_the_cut_is_carried_out(
    site: Site, reference: Reference, when: str
) -> None:
    """It does not fail for rows that are still under their old epoch."""
    async with running_engine(site, lanes=LANES, router__promote_auto=False) as engine:
        cut = Cut(engine)
        answer = await cut.begin(when)
        before = engine.stats()["tokens_recomputed"]
        moving = asyncio.ensure_future(engine.promote("", "s", to=cut.target.lane.name))
        await until(lambda: bool(cut.source.kv.touches) or moving.done())
        assert not moving.done()
        cut.resume_worker()
        report = await moving
        assert (report["result"], report["rows_recomputed"]) == ("moved", 0)
        assert report["rows_copied"] == 640 % 256
        assert (await answer).tokens == reference.tokens(EDITED, 30)
        assert engine.stats()["tokens_recomputed"] == before
        await cut.end()


async def test_a_cut_that_is_never_carried_out_ends_the_migration_with_a_reason(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends at the lane's deadline, and the session stays."""
    monkeypatch.setattr(migration, "ANSWER_S", 0.3)
    async with running_engine(site, lanes=LANES, router__promote_auto=False) as engine:
        cut = Cut(engine)
        answer = await cut.begin("yet to be sent")
        with pytest.raises(BatchEngineError, match="does not answer") as caught:
            await engine.promote("", "s", to=cut.target.lane.name)
        assert caught.value.code == "BE3005"
        assert engine.state.home[cut.session.key] is cut.source
        cut.resume_worker()
        await cut.end()
        assert (await answer).tokens == reference.tokens(EDITED, 30)
