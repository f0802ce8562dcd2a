"""Kills at every file call, SQL statement, frame, hand-over phase and output line of a script.

One script is played against a real engine with HashLM workers: prompts, a shared prefix, a
hand-over amid a stream and back, a killed worker and the import after it, a parked session, an
edited history, a fork, a drop, evictions, a clean stop; and a reopening amid a turn. It is played
once for every point n: at the n-th point the engine is killed (or its workers are), the next run
continues after the tokens that the client has, and every token, ledger and owner is checked.

    python -m bench.kill_points [--every N] [--first N] [--target engine|worker] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import report
from bench.crash import (
    LANES,
    ROOM_BYTES,
    Turn,
    engine_settings,
    is_shutdown,
    ledger_after,
    words,
)
from bench.models.hashlm import LAYOUT, hashlm_tokens
from bench.processes.engine_child import EngineProcess, engine_zygote
from bench.processes.postmortem import double_slots
from bench.processes.zygote import Zygote

STUCK_S = 60.0
RUNS_MAX = 12  # engine runs of one play, which needs two or three
SHARED = words(90, 256)


class Gone(Exception):
    """The engine has ended; the script continues with the next run."""


class Failure(AssertionError):
    """A failed check, with the point of the kill before it."""


@dataclass
class Session:
    """The state of one session as its client sees it."""

    name: str
    history: list[int] = field(default_factory=list[int])
    turn: Turn | None = None  # that has not ended

    @property
    def sent(self) -> int:
        """Tokens of the turn that were sent."""
        return self.turn.sent if self.turn is not None else 0


class Play:
    """The script, step by step; a step that was cut off is repeated."""

    def __init__(self, folder: Path, level: str) -> None:
        self.folder, self.level = folder, level
        self.sessions = {name: Session(name) for name in ("s", "t", "u", "v", "w")}
        self.engine: EngineProcess | None = None
        self.step = 0
        self.acts: set[str] = set()  # things done once, amid a stream
        self.points = 0
        self.fired = False
        self.killed_it = False  # the script itself has just killed the engine

    # --------------------------------------------------------------------------- the script

    def steps(self) -> list[Callable[[], Awaitable[None]]]:
        """The steps in order; each may be repeated after a kill."""
        s, t, u, v, w = self.sessions.values()
        return [
            lambda: self.turn(s, [*SHARED, *words(1, 30)], 12),
            lambda: self.turn(t, [*SHARED, *words(2, 90)], 6),
            lambda: self.turn(s, None, 70, self.move_about),
            lambda: self.verb("promote", t, to="b"),
            lambda: self.turn(t, None, 5),
            lambda: self.verb("park", s, call="call-s"),
            lambda: self.turn(s, None, 8),
            lambda: self.turn(s, s.history[:200] + words(3, 20), 6),
            lambda: self.fork(s, u),
            lambda: self.turn(u, None, 6),
            lambda: self.verb("drop", t),
            lambda: self.turn(v, words(4, 1500), 5),
            lambda: self.turn(w, words(5, 1500), 5),
            lambda: self.turn(s, None, 5),
            self.stop,
            lambda: self.turn(s, None, 6),
            lambda: self.turn(v, None, 30, self.kill_engine),
            lambda: self.turn(u, None, 6),
            self.finish,
        ]  # fmt: skip

    async def play(self, zygote: Zygote, settings: dict[str, Any], number: int) -> None:
        """Plays all steps, in as many runs as needed. `number`: the point of the kill, over
        all runs; 0 = none."""
        steps = self.steps()
        for _ in range(RUNS_MAX):
            left = number - self.points if number > self.points and not self.fired else 0
            before = self.points
            engine = self.engine = EngineProcess(zygote, settings | {"die_at": left})
            try:
                await self.is_up(engine)
                while self.step < len(steps):
                    await steps[self.step]()
                    self.step += 1
                    if left and self.engine is not None:
                        await self.count(before)
                    if self.engine is None:
                        break
                else:
                    return
            except Gone:
                await engine.over()
                if left and engine.status == -9 and not self.killed_it:
                    self.points, self.fired = number, True
                self.killed_it = False
            finally:
                engine.kill()
                await engine.over()
            doubles = double_slots(self.folder / "kv" / "arena", LANES)
            if doubles:
                raise Failure(f"two owners: {doubles}")
        raise Failure("the script does not end")

    async def is_up(self, engine: EngineProcess) -> None:
        if not await engine.is_ready():
            raise Gone
        for session in self.sessions.values():
            await self.check(session)

    async def count(self, before: int) -> None:
        found = await self.ask("points")
        self.points = before + found["points"]
        self.fired = self.fired or found["fired"]

    # ------------------------------------------------------------------------------- a turn

    async def turn(
        self,
        session: Session,
        prompt: list[int] | None,
        n: int,
        amid: Callable[[Session], Awaitable[None]] | None = None,
    ) -> None:
        """Reads one request to its end. `prompt` None: the history and some more."""
        turn = session.turn
        if turn is None:
            prompt = prompt or [*session.history, *words(len(session.history), 9)]
            turn = session.turn = Turn(prompt, hashlm_tokens(prompt, n))
        if turn.sent:
            stream = self.engine_now.ask("resume", session=session.name, from_token=turn.sent)
        else:
            stream = self.engine_now.ask("submit", session=session.name, prompt=turn.prompt, n=n)
        while True:
            message = await self.hear(stream)
            if "token" not in message:
                break
            if message["token"] != turn.expected[turn.sent]:
                at = f"{turn.sent} of {len(turn.prompt)}+{n}"
                raise Failure(f"{session.name}: token {at} is wrong")
            turn.sent += 1
            if amid is not None:
                await amid(session)
        if message.get("done") != "length" or turn.sent != n:
            raise Failure(f"{session.name}: ended after {turn.sent} of {n}: {message}")
        session.history, session.turn = turn.prompt + turn.expected, None

    async def move_about(self, session: Session) -> None:
        """Moves the session to the other lane, kills the workers, and moves it back."""
        if session.sent >= 10 and self.once("there"):
            self.engine_now.ask("promote", session=session.name, to="b")
        if session.sent >= 30 and self.once("death"):
            self.engine_now.kill_worker(0)
            self.engine_now.kill_worker(1)
        if session.sent >= 45 and self.once("back"):
            self.engine_now.ask("promote", session=session.name, to="a")

    async def kill_engine(self, session: Session) -> None:
        """Kills the engine amid a turn, which the next run reopens."""
        if session.sent >= 10 and self.once("everything"):
            self.killed_it = True
            self.engine_now.kill()

    def once(self, act: str) -> bool:
        is_first = act not in self.acts
        self.acts.add(act)
        return is_first

    # ---------------------------------------------------------------------------- other steps

    async def verb(self, op: str, session: Session, **fields: Any) -> None:
        """Requests an operation; it may fail, as a session may not be in memory after a kill."""
        answer = await self.ask(op, session=session.name, **fields)
        if answer.get("error") == "exception":
            raise Failure(f"{op} {session.name}: {answer['why']}")
        if op == "drop":
            session.history = []

    async def fork(self, session: Session, new: Session) -> None:
        answer = await self.ask("fork", session=session.name, to=new.name)
        if "error" in answer and answer["error"] not in ("session_exists",):
            raise Failure(f"fork: {answer}")
        new.history = list(session.history)

    async def stop(self) -> None:
        """Stops the engine cleanly; the next run plays the next step."""
        engine, self.engine = self.engine_now, None
        engine.ask("stop")
        await asyncio.wait_for(engine.over(), STUCK_S)
        if engine.status:
            self.engine = engine
            raise Gone

    async def finish(self) -> None:
        """Checks that no session is owned twice, and that the store is consistent."""
        answer = await self.ask("owners")
        if answer["double"]:
            raise Failure("two lanes hold pages of one session")
        answer = await self.ask("check")
        if "error" in answer:
            raise Failure(f"the store is damaged: {answer}")

    async def check(self, session: Session) -> None:
        """Checks in a new run that the ledger has the tokens that were sent, and no others."""
        found = await self.ask("record", session=session.name)
        tokens: list[int] = found.get("tokens") or []
        if session.turn is None and not session.history:
            return  # a fork or a drop that was not acknowledged
        if self.is_dropped(session):
            return
        lines, least = ledger_after(session.history, session.turn, self.level)
        if not any(tokens == line[: len(tokens)] for line in lines):
            raise Failure(f"{session.name}: the ledger has another timeline")
        if len(tokens) < least:
            raise Failure(f"{session.name}: the ledger lacks {least - len(tokens)} tokens")

    def is_dropped(self, session: Session) -> bool:
        """Whether the session's drop was sent and may have been done."""
        return session.name == "t" and self.step >= 10

    @property
    def engine_now(self) -> EngineProcess:
        if self.engine is None:
            raise Gone
        return self.engine

    async def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        return await self.hear(self.engine_now.ask(op, **fields))

    async def hear(self, stream: asyncio.Queue[dict[str, Any]]) -> dict[str, Any]:
        message = await asyncio.wait_for(stream.get(), STUCK_S)
        if "gone" in message or is_shutdown(message):
            raise Gone
        return message


def sweep(
    zygote: Zygote, first: int, every: int, target: str, seconds: float = 1e9
) -> Iterator[tuple[int, bool]]:
    """Plays with a kill at points first, first + every, ... until the script ends without one.

    Yields (point, whether a process was killed there). Raises Failure, naming the point.
    """
    number, until = first, time.monotonic() + seconds
    while time.monotonic() < until:
        with report.memory_folder("crash-", ROOM_BYTES) as folder:
            level = ("turn", "power")[number // every % 2]
            play = Play(folder, level)
            lane = {"tokens_per_step": 260, "chunk_tokens_max": 256, "open_pages": 8}
            budget_bytes = 10 * LAYOUT.page_bytes
            settings = engine_settings(folder, folder, lane, budget_bytes, level)
            try:
                asyncio.run(play.play(zygote, settings | {"target": target}, number))
            except (Failure, TimeoutError) as error:
                raise Failure(
                    f"{target} at point {number}, level {level}, step {play.step}: {error!r}"
                ) from error
        yield number, play.fired
        if not play.fired:
            return
        number += every


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.kill_points", description=__doc__)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--target", choices=("engine", "worker"), default="engine")
    parser.add_argument("--json", help="write figures to this file")
    args = parser.parse_args(argv)
    zygote, killed, last, began = engine_zygote(), 0, 0, time.perf_counter()
    try:
        for last, died in sweep(zygote, args.first, args.every, args.target):
            killed += died
            if killed % 50 == 0:
                print(f"  {last} points, {time.perf_counter() - began:.0f} s", flush=True)
    finally:
        zygote.close()
    result = {f"{args.target}_points": last, f"{args.target}_kills": killed, "failures": 0}
    report.finish(result, details=vars(args), json_path=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
