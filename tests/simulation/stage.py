"""Scripted scenes in the simulated world: events are written down, not drawn from a seed.

`play(script)` boots an engine of two lanes without faults, runs the script, waits until all work
has ended and checks the same invariants as a seed does. Every scene may be played with the
mechanism of an incident put in: then it must fail.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from batchengine.config import Config, LaneConfig, load
from batchengine.core import (
    DoneEvent,
    ErrorEvent,
    GenerationRequest,
    Sampling,
    Sla,
    SlaClass,
    TokenEvent,
)
from batchengine.engine import Generation
from batchengine.engine.lane.loop import LaneLoop
from batchengine.wire import lane as wire
from bench.models.hashlm import hashlm_tokens
from tests.simulation.lanes import Plan, SimLane
from tests.simulation.world import MODEL, PAGE_BYTES, EngineRun, Outcome, World, simulate
from tests.support.engines import words

Script = Callable[["Stage"], Awaitable[None]]


@dataclasses.dataclass(slots=True)
class Reading:
    """What one reader was sent."""

    tokens: list[int]
    done: DoneEvent | None = None
    error: str = ""


class Stage(World):
    """A world without random choices, for a script."""

    script: Script
    settings: dict[str, Any]
    slots = 16
    recurrent = 0  # bytes of the model's recurrent state
    repeats = 0  # different tokens that the model samples; 0 = all

    def __init__(self, seed: int, folder: str) -> None:
        self.plans: list[Callable[[SimLane, wire.Step], Plan | None]] = []
        self.asked = 0
        super().__init__(seed, folder)

    def _choose_faults(self) -> dict[str, float]:
        return {}

    def _choose_state_bytes(self) -> int:
        return self.recurrent

    def _choose_n_tokens(self) -> int:
        return self.repeats

    def _choose_config(self) -> Config:
        lanes = tuple(
            LaneConfig(
                name=name, threads=1, tier="any", entries_max=8, open_pages=self.slots,
                tokens_per_step=320,
            )
            for name in ("left", "right")
        )  # fmt: skip
        config = load(
            None,
            {
                "model.path": str(MODEL),
                "store.dir": f"{self.folder}/kv",
                "store.allow_volatile": True,
                "store.budget_bytes": 300 * PAGE_BYTES,
                "router.promote_auto": False,
                "server.admin_socket": f"{self.folder}/admin.sock",
                **self.settings,
            },
        )
        return dataclasses.replace(config, cache_dir=self.folder, lanes=lanes)

    def plan_step(self, lane: SimLane, frame: wire.LaneFrame) -> Plan:
        assert isinstance(frame.message, wire.Step)
        for plan in self.plans:
            found = plan(lane, frame.message)
            if found is not None:
                return found
        return Plan(0.004)

    async def run(self) -> None:
        await self.boot()
        async with asyncio.timeout(600):
            await type(self).script(self)
        await self.end()

    # ----------------------------------------------------------------- operations of a script

    @property
    def now(self) -> EngineRun:
        assert self.engine_run is not None
        return self.engine_run

    def lane(self, name: str) -> LaneLoop:
        return next(loop for loop in self.now.loops if loop.lane.name == name)

    def process(self, name: str) -> Any:
        lane = self.lane(name).lane
        assert isinstance(lane, SimLane)
        return lane.process

    def ask(
        self, prompt: Sequence[int], n: int, session: str | None = None, seed: int = 0, **how: Any
    ) -> Generation:
        self.asked += 1
        return self.now.submit(
            GenerationRequest(
                request_id=f"ask-{self.asked}",
                prompt=tuple(prompt),
                tokens_max=n,
                sampling=Sampling(temperature=1.0, seed=seed),
                ignore_eos=True,
                sla=Sla(SlaClass.STANDARD),
                session_id=session,
                **how,
            )
        )

    def start(self, generation: Generation) -> asyncio.Task[Reading]:
        """Read the answer to its end in a task."""
        task = self.loop.create_task(self.read(generation))
        self.tasks.add(task)  # type: ignore[arg-type]
        return task

    async def read(self, generation: Generation) -> Reading:
        """Read every event; each token must be the expected one."""
        request, reading = generation.request, Reading([])
        answer = hashlm_tokens(
            request.prompt,
            request.tokens_max,
            seed=request.sampling.seed,
            model=self.model,
            n_tokens=self.n_tokens,
        )
        skip = generation.resumes or 0
        async for event in generation:
            match event:
                case TokenEvent():
                    at = skip + len(reading.tokens)
                    if event.token != answer[at]:
                        raise AssertionError(
                            f"{request.request_id}: wrong token {at}: {event.token},"
                            f" not {answer[at]}"
                        )
                    reading.tokens.append(event.token)
                case DoneEvent():
                    reading.done = event
                case ErrorEvent():
                    reading.error = event.error.name
                case _:
                    pass
        return reading

    async def answer(
        self, prompt: Sequence[int], n: int, session: str | None = None, **how: Any
    ) -> Reading:
        """Ask, and read the whole answer."""
        reading = await self.read(self.ask(prompt, n, session, **how))
        if reading.error or len(reading.tokens) != n:
            raise AssertionError(
                f"{len(reading.tokens)} tokens of {n}, then {reading.error or 'an end'}"
            )
        return reading

    async def until(self, fact: Callable[[], bool], seconds: float = 120.0) -> None:
        try:
            async with asyncio.timeout(seconds):
                while not fact():  # noqa: ASYNC110  there is no event for every fact
                    await asyncio.sleep(0.001)
        except TimeoutError:
            raise AssertionError("what the script waits for does not happen") from None

    def home(self, session: str) -> str:
        """The lane of a named session."""
        found = self.up.state.sessions["", session]
        return self.up.state.home[found.key].lane.name

    def other(self, session: str) -> str:
        return "right" if self.home(session) == "left" else "left"

    async def computed(self, generation: Generation, tokens: int) -> None:
        await self.until(lambda: generation.completion_tokens >= tokens)


def play(
    script: Script,
    seed: int = 0,
    slots: int = 16,
    recurrent: int = 0,
    repeats: int = 0,
    **settings: Any,
) -> Outcome:
    """Play a scene; AssertionError if anything failed in it. Settings: a__b for "a.b"."""
    dotted = {name.replace("__", "."): value for name, value in settings.items()}
    own = {"settings": dotted, "slots": slots, "recurrent": recurrent, "repeats": repeats}
    scene = type("Scene", (Stage,), {"script": staticmethod(script), **own})
    outcome = simulate(seed, world=scene)
    if outcome.error:
        raise AssertionError(outcome.error)
    return outcome


__all__ = ["Plan", "Reading", "Stage", "play", "words"]
