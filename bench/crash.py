"""Random SIGKILLs against real engines and workers; every token that was sent is checked.

Several rigs, each a store with engine runs in sequence: clients with named sessions read streams,
check every token against those of an undisturbed model, and continue in the next run (resume, or
the same request again) after the tokens they were sent. Meanwhile sessions move between lanes, are
parked, edited and dropped, and pages are evicted for want of room. Killed are workers, the engine,
both, the engine while it starts and while it stops; half of the kills follow a hand-over, a park
or a drop within milliseconds. After each end of an engine the ledger must have the tokens sent,
and the arenas of its newest workers must not hold one (session, epoch, page) twice.

HashLM's tokens depend on every KV byte, so a wrong byte is a wrong token; the pocket model runs
the real arithmetic. Processes are forks (`bench.processes.zygote`), started in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchengine.session import common_prefix
from bench import report
from bench.models.hashlm import LAYOUT, hashlm_tokens
from bench.models.local_runner import LocalRunner
from bench.processes.engine_child import EngineProcess, engine_zygote
from bench.processes.postmortem import double_slots
from bench.processes.zygote import ROOT

POCKET = ROOT / "pocket" / "pocket-q4_0.gguf"
LANES = ("a", "b")
STUCK_S = 60.0  # a client that receives nothing for so long from a running engine is a finding
TOKENS_BETWEEN = 40  # sent by one engine between two kills, on average,
TOKENS_S_MAX = 1.0  # if it sends them within so long
EXAMPLES_MAX = 20  # findings described in full
HISTORY_MAX = 1300  # tokens; then a client starts a new session
ROOM_BYTES = 1 << 30  # in memory, for the stores of a run: every commit is synced


def words(seed: int, n: int, vocab: int = 1800) -> list[int]:
    """A prompt of ordinary tokens; a pure function of its arguments."""
    rng = random.Random(seed)
    return [rng.randrange(20, vocab) for _ in range(n)]


def is_shutdown(message: dict[str, Any]) -> bool:
    """Whether a clean stop explains this end of a stream."""
    return message.get("done") == "shutdown" or message.get("error") == "draining"


class HashOracle:
    """The tokens of HashLM after a prompt."""

    async def tokens(self, prompt: Sequence[int], n: int, seed: int) -> list[int]:
        return hashlm_tokens(prompt, n, seed=seed)

    def close(self) -> None:
        """It holds no model."""


class PocketOracle:
    """The tokens of the pocket model, one timeline at a time, without an engine."""

    def __init__(self, cache_dir: Path) -> None:
        self._runner = LocalRunner(POCKET, threads=1, cache_dir=cache_dir, n_pages=16)
        self._lock = asyncio.Lock()

    async def tokens(self, prompt: Sequence[int], n: int, seed: int) -> list[int]:
        async with self._lock:
            return (await asyncio.to_thread(self._runner.generate, [list(prompt)], n))[0]

    def close(self) -> None:
        self._runner.close()


@dataclass
class Findings:
    """The counts of a whole run."""

    kills: Counter[str] = field(default_factory=Counter[str])
    counts: Counter[str] = field(default_factory=Counter[str])
    lost: int = 0
    wrong: int = 0
    double: int = 0
    other: int = 0  # errors a client should never see
    examples: list[str] = field(default_factory=list[str])

    def report(self, kind: str, text: str, count: int = 1) -> None:
        """One finding: lost, wrong, double or other."""
        setattr(self, kind, getattr(self, kind) + count)
        if len(self.examples) < EXAMPLES_MAX:
            self.examples.append(f"{kind}: {text}")
            print(f"  FINDING {kind}: {text}", flush=True)

    @property
    def killed(self) -> int:
        return sum(self.kills.values())

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.wrong or self.double or self.other)


@dataclass
class Turn:
    """One request: its prompt, the tokens expected, and how many were sent so far."""

    prompt: list[int]
    expected: list[int]
    seed: int = 0
    sent: int = 0


def ledger_after(history: list[int], turn: Turn | None, level: str) -> tuple[list[list[int]], int]:
    """The timelines that a ledger may hold after a kill, and the least number of their tokens."""
    if turn is None:
        return [history], len(history)
    whole = turn.prompt + turn.expected
    if turn.sent:
        return [whole], len(turn.prompt) + (turn.sent if level == "power" else 0)
    # the turn may not be durable, and if it is it may have cut the history
    return [whole, history], common_prefix(turn.prompt, history)


def engine_settings(
    folder: Path, cache_dir: Path, lane: dict[str, int], budget_bytes: int, level: str
) -> dict[str, Any]:
    """The settings of `engine_child` for two lanes with HashLM that may be killed at any time."""
    return {
        "model": str(POCKET),
        "folder": str(folder),
        "cache_dir": str(cache_dir),
        "compute": "hash",
        "lanes": [lane | {"threads": 1, "entries_max": 4, "name": name} for name in LANES],
        "no_quarantine": True,
        "overrides": {
            "store.budget_bytes": budget_bytes,
            "store.durability": level,
            "router.promote_auto": False,
            "router.dwell_s": 0.0,
        },
    }


class Client:
    """One user with one session at a time, and the tokens that were acknowledged."""

    def __init__(self, rig: Rig, number: int) -> None:
        self.rig, self.number = rig, number
        self.rng = random.Random(f"{rig.name}/{number}")
        self.findings = rig.findings
        self.sessions = 0
        self.turn: Turn | None = None
        self.new_session()

    def new_session(self) -> None:
        """Forget everything and use another name."""
        self.sessions += 1
        self.name = f"{self.rig.name}-{self.number}-{self.sessions}"
        self.history: list[int] = []  # the timeline as acknowledged at the end of a turn
        self.turn = None
        self.epoch = 0

    async def live(self) -> None:
        """Runs turns until the rig ends."""
        checked: EngineProcess | None = None
        while not self.rig.over:
            engine = await self.rig.engine_up()
            if engine is None:
                return
            if engine is not checked:
                checked = engine
                if not await self.check_ledger(engine):
                    continue
            turn = self.turn = self.turn or await self.next_turn()
            if await self.read(engine, turn):
                self.history = turn.prompt + turn.expected
                self.turn = None
                self.findings.counts["turns"] += 1
                await self.between_turns(engine)

    async def next_turn(self) -> Turn:
        """A continuation, an edit, or the first prompt of a session; some share a prefix."""
        rng, rig = self.rng, self.rig
        if len(self.history) > rig.history_max:
            self.new_session()
        n = rng.choice((3, 20, 60, 150))
        if self.history:
            keep = len(self.history)
            if rng.random() < 0.15:
                keep = rng.randrange(1, keep)
            prompt = self.history[:keep] + words(
                rng.randrange(1 << 30), rng.choice((1, 9, 40, 130))
            )
        else:
            prompt = words(rng.randrange(3), rng.choice((0, 255, 256, 300)))
            prompt += words(rng.randrange(1 << 30), rng.choice((1, 5, 200, 257)))
        seed = rng.randrange(3) if rig.seeds else 0
        return Turn(prompt, await rig.oracle.tokens(prompt, n, seed), seed)

    async def read(self, engine: EngineProcess, turn: Turn) -> bool:
        """Submits or resumes the turn and checks its tokens; True when it is complete."""
        resumes = turn.sent > 0 and self.rng.random() < 0.8
        if resumes:
            stream = engine.ask("resume", session=self.name, from_token=turn.sent)
            at = turn.sent
        else:
            stream = engine.ask(
                "submit", session=self.name, prompt=turn.prompt, n=len(turn.expected),
                seed=turn.seed, park=self.rng.random() < 0.1,
            )  # fmt: skip
            at = 0
        while True:
            message = await self.rig.hear(stream, self)
            if "token" not in message:
                break
            if at >= len(turn.expected) or message["token"] != turn.expected[at]:
                self.findings.report("wrong", f"{self} token {at} resumed={resumes}: {message}")
                await self.explain(engine, turn, at, message["token"])
                self.new_session()
                return False
            at += 1
            turn.sent = max(turn.sent, at)
            self.findings.counts["tokens"] += 1
            self.rig.sent += 1
        return self.ended(message, turn, at, resumes)

    async def explain(self, engine: EngineProcess, turn: Turn, at: int, token: int) -> None:
        """Reports facts that may show the cause of a wrong token."""
        line = turn.prompt + turn.expected[:at]
        others = [(await self.rig.oracle.tokens(line, 1, seed))[0] for seed in range(3)]
        where = await self.rig.hear(engine.ask("detail", session=self.name), self)
        self.findings.report(
            "wrong",
            f"expected {turn.expected[at] if at < len(turn.expected) else None}, got {token},"
            f" seed {turn.seed}, of other seeds {others}; pid {engine.pid}; {where}",
            0,
        )

    def ended(self, message: dict[str, Any], turn: Turn, at: int, resumes: bool) -> bool:
        """Records the last event of a stream; True = the turn is complete."""
        if message.get("done") == "length":
            if at == len(turn.expected):
                return True
            self.findings.report("lost", f"{self} ended after {at} of {len(turn.expected)}")
            self.new_session()
        elif "gone" not in message and not is_shutdown(message):
            kind = message.get("error", "")
            missing = kind in ("session_not_found", "nothing_to_resume")
            # The turn row is durable before the first token is sent, so resuming must work.
            self.findings.report("lost" if missing and turn.sent else "other", f"{self} {message}")
            self.new_session()
        else:
            self.findings.counts["streams cut off"] += 1
        return False

    async def check_ledger(self, engine: EngineProcess) -> bool:
        """Checks in a new run that the ledger has the acknowledged tokens; False = it ended."""
        record = await self.rig.hear(engine.ask("record", session=self.name), self)
        if "gone" in record:
            return False
        tokens: list[int] = record.get("tokens") or []
        possible, least = ledger_after(self.history, self.turn, self.rig.level)
        if not any(tokens == line[: len(tokens)] for line in possible):
            self.findings.report("wrong", f"{self} the ledger has another timeline")
        elif len(tokens) < least:
            missing = least - len(tokens)
            self.findings.report("lost", f"{self} the ledger lacks {missing} tokens", missing)
        if record["epoch"] < self.epoch:
            self.findings.report("double", f"{self} epoch {self.epoch} became {record['epoch']}")
        self.epoch = max(self.epoch, record["epoch"])
        self.findings.counts["ledgers checked"] += 1
        return True

    async def between_turns(self, engine: EngineProcess) -> None:
        """Parks or drops the session at random."""
        dice = self.rng.random()
        if dice < 0.2:
            await self.rig.verb(engine, "park", session=self.name, call=f"call-{self.name}")
        elif dice < 0.25:
            name = self.name
            self.new_session()
            await self.rig.verb(engine, "drop", session=name)
        elif dice < 0.4:
            await asyncio.sleep(self.rng.random() * 0.02)

    def __str__(self) -> str:
        turn = self.turn
        where = "idle" if turn is None else f"{len(turn.prompt)}+{turn.sent}/{len(turn.expected)}"
        return f"{self.name} life {self.rig.runs} ({where})"


class Rig:
    """One store, its engine runs, its clients and its kills."""

    def __init__(self, bench: Bench, number: int) -> None:
        self.bench, self.name = bench, f"r{number}"
        self.rng = random.Random(f"{bench.seed}/{number}")
        self.findings, self.oracle, self.seeds = bench.findings, bench.oracle, bench.model == "hash"
        self.history_max = HISTORY_MAX if bench.model == "hash" else HISTORY_MAX // 2
        self.level = ("turn", "power")[number % 2]
        self.folder = bench.folder / self.name
        self.folder.mkdir()
        self.runs = self.sent = 0
        self.over = False
        self._engine: EngineProcess | None = None
        self._up = asyncio.Event()
        self._trigger = asyncio.Event()  # an operation was sent: the moment to kill
        lane = {"tokens_per_step": 132, "chunk_tokens_max": 128, "open_pages": 10}
        budget_bytes = bench.page_bytes * (24, 60, 400)[number % 3]
        settings = engine_settings(self.folder, bench.folder, lane, budget_bytes, self.level)
        compute = "hash" if bench.model == "hash" else "cpu"
        self.settings = settings | {"compute": compute, "quiet": not bench.verbose}

    async def run(self) -> None:
        """Runs engines and clients until the bench has enough kills."""
        clients = [Client(self, number) for number in range(self.bench.clients)]
        tasks = [asyncio.ensure_future(client.live()) for client in clients]
        tasks.append(asyncio.ensure_future(self.move_sessions(clients)))
        deaths = asyncio.ensure_future(self.deaths())
        try:
            await asyncio.wait([*tasks, deaths], return_when=asyncio.FIRST_COMPLETED)
            await deaths
            self.over = True
            self._up.set()
            await asyncio.wait_for(asyncio.gather(*tasks), STUCK_S)
        finally:
            self.over = True
            self._up.set()
            for task in (*tasks, deaths):
                task.cancel()
            await asyncio.gather(*tasks, deaths, return_exceptions=True)
            if self._engine is not None:
                self._engine.kill()
                await self._engine.over()

    # ----------------------------------------------------------------------- asked by clients

    async def engine_up(self) -> EngineProcess | None:
        """The running engine, as soon as there is one; None when the rig ends."""
        await self._up.wait()
        return None if self.over else self._engine

    async def hear(self, stream: asyncio.Queue[dict[str, Any]], who: object) -> dict[str, Any]:
        """The next message; TimeoutError, which ends the bench, after STUCK_S without one."""
        try:
            return await asyncio.wait_for(stream.get(), STUCK_S)
        except TimeoutError:
            self.findings.report("other", f"{who} hears nothing for {STUCK_S:.0f} s")
            raise

    async def verb(self, engine: EngineProcess, op: str, **fields: Any) -> None:
        """Requests an operation on a session, which may set off a kill."""
        self._trigger.set()
        answer = await self.hear(engine.ask(op, **fields), op)
        if "done" in answer:
            self.findings.counts[op] += 1
        elif "gone" not in answer:
            self.findings.counts[f"{op} refused: {answer['error']}"] += 1
            if answer["error"] == "exception":
                self.findings.report("other", f"{op} {fields}: {answer['why']}")

    async def move_sessions(self, clients: Sequence[Client]) -> None:
        """Moves random sessions at random moments."""
        while not self.over:
            await asyncio.sleep(self.rng.expovariate(1 / self.bench.move_every_s))
            engine = await self.engine_up()
            if engine is None:
                return
            client = self.rng.choice(clients)
            await self.verb(engine, "promote", session=client.name, to=self.rng.choice(LANES))
            owners = await self.hear(engine.ask("owners"), "owners")
            if owners.get("double"):
                self.findings.report("double", f"{client}: two lanes hold pages of one session")

    # ----------------------------------------------------------------------------- the killer

    async def deaths(self) -> None:
        """Runs engines one after the other, each until it is killed or stopped."""
        while self.bench.wants_kills:
            self.runs += 1
            engine = self._engine = EngineProcess(self.bench.zygote, self.settings)
            await self.one_life(engine)
            self._up.clear()
            await engine.over()
            if engine.status not in (0, -9):
                self.findings.report("other", f"{self.name} engine ended with {engine.status}")
            doubles = double_slots(self.folder / "kv" / "arena", LANES)
            if doubles:
                self.findings.report("double", f"{self.name} life {self.runs}: {doubles[:3]}")
        self._engine = None

    async def one_life(self, engine: EngineProcess) -> None:
        """One run of the engine, from its start to one of several kinds of end."""
        rng = self.rng
        if rng.random() < 0.12:
            await asyncio.sleep(rng.random() * self.bench.start_s)
            self.count("engine while starting", engine.kill())
            return
        started = time.perf_counter()
        if not await engine.is_ready():
            self.findings.report("other", f"{self.name} life {self.runs} did not start")
            return
        self.bench.note_start(time.perf_counter() - started)
        self._up.set()
        for _ in range(rng.randrange(1, 10)):
            when = await self.moment()
            if engine.is_over:
                self.findings.report("other", f"{self.name}: the engine ended by itself")
                return
            lanes = (0, 1) if rng.random() < 0.15 else (rng.randrange(2),)
            for lane in lanes:
                self.count(f"worker {when}", engine.kill_worker(lane))
        when, dice = await self.moment(), rng.random()
        if dice < 0.15:
            self._up.clear()
            engine.ask("stop")
            await asyncio.sleep(rng.random() * 0.06)
            self.count("engine while stopping", engine.kill())
        elif dice < 0.35:
            self.count(f"worker {when}", engine.kill_worker(rng.randrange(2)))
            await asyncio.sleep(rng.random() * 0.01)
            self.count("engine after a worker", engine.kill())
        elif dice < 0.38:
            self._up.clear()
            await engine.stop()
        else:
            self.count(f"engine {when}", engine.kill())

    async def moment(self) -> str:
        """Wait for the moment of a kill: during an operation, after some tokens, or any."""
        rng, dice = self.rng, self.rng.random()
        if dice < 0.4:
            self._trigger.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._trigger.wait(), 2 * self.bench.pause_s)
                await asyncio.sleep(rng.random() * rng.choice((0.001, 0.006, 0.02)))
                return "during a verb"
        if dice < 0.8:
            enough = self.sent + rng.expovariate(1 / TOKENS_BETWEEN)
            until = time.monotonic() + TOKENS_S_MAX
            while self.sent < enough and time.monotonic() < until:  # noqa: ASYNC110  clients count
                await asyncio.sleep(0.002)
            await asyncio.sleep(rng.random() * 0.004)
            return "after some tokens"
        await asyncio.sleep(rng.expovariate(1 / self.bench.pause_s))
        return "at any time"

    def count(self, kind: str, was_alive: bool) -> None:
        if was_alive:
            self.findings.kills[kind] += 1


class Bench:
    """The state that all rigs share."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.model: str = args.model
        self.wanted: int = args.kills
        self.seed: int = args.seed
        self.clients: int = args.clients
        self.verbose: bool = args.verbose
        self.folder = folder
        self.findings = Findings()
        self.zygote = engine_zygote()
        is_hash = self.model == "hash"
        self.page_bytes = LAYOUT.page_bytes if is_hash else 327_680
        self.pause_s = 0.05 if is_hash else 0.2
        self.move_every_s = 0.02 if is_hash else 0.05
        self.start_s = 0.2  # running mean of start times
        self.oracle = HashOracle() if is_hash else PocketOracle(folder)
        self.deadline = time.monotonic() + args.seconds if args.seconds else None

    @property
    def wants_kills(self) -> bool:
        late = self.deadline is not None and time.monotonic() > self.deadline
        return self.findings.killed < self.wanted and not late

    def note_start(self, seconds: float) -> None:
        self.start_s += 0.1 * (seconds - self.start_s)

    async def run(self, jobs: int) -> None:
        """Runs all rigs to their end, with a line of progress every 30 s."""
        rigs = [asyncio.ensure_future(Rig(self, number).run()) for number in range(jobs)]
        progress = asyncio.ensure_future(self.progress())
        try:
            await asyncio.gather(*rigs)
        finally:
            progress.cancel()
            for rig in rigs:
                rig.cancel()
            await asyncio.gather(*rigs, return_exceptions=True)

    async def progress(self) -> None:
        while True:
            await asyncio.sleep(30)
            found = self.findings
            print(
                f"  {found.killed} kills, {found.counts['tokens']} tokens checked,"
                f" {found.lost} lost, {found.wrong} wrong, {found.double} double",
                flush=True,
            )

    def close(self) -> None:
        self.zygote.close()
        self.oracle.close()


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench crash", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="20 kills, under half a minute")
    parser.add_argument("--kills", type=int, default=0, help="default 300, quick 20")
    parser.add_argument("--model", choices=("hash", "pocket"), default="hash")
    parser.add_argument("--jobs", type=int, default=0, help="engines at once (default 3, quick 2)")
    parser.add_argument("--clients", type=int, default=6, help="sessions at once in each engine")
    parser.add_argument("--seconds", type=float, default=0, help="stop early after so long")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="the engines' logs on stderr")
    parser.add_argument("--json", help="write figures to this file")
    args = parser.parse_args(argv)
    args.kills = args.kills or (20 if args.quick else 300)
    args.jobs = args.jobs or (2 if args.quick else 3)
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    began = time.perf_counter()
    with report.memory_folder("crash-", ROOM_BYTES) as folder:
        bench = Bench(args, folder)
        try:
            asyncio.run(bench.run(args.jobs))
        finally:
            bench.close()
    found, seconds = bench.findings, time.perf_counter() - began
    for name, count in sorted(found.kills.items()):
        print(f"  killed {name:<26}{count:>7}")
    for name, count in sorted(found.counts.items()):
        print(f"  {name:<33}{count:>7}")
    print(f"  {found.killed} kills in {seconds:.0f} s; 0 failures bound the rate (95 %)"
          f" at {300 / max(1, found.killed):.3g} % per kill")  # fmt: skip
    result = {
        "kills": found.killed,
        "lost_tokens": found.lost,
        "wrong_tokens": found.wrong,
        "double_owners": found.double,
    }
    details = {
        "model": args.model,
        "seed": args.seed,
        "seconds": round(seconds, 1),
        "bound_percent_95": 300 / max(1, found.killed),
        "kills": dict(found.kills),
        "counts": dict(found.counts),
        "other_findings": found.other,
        "findings": found.examples,
    }
    report.finish(result, details=details, json_path=args.json)
    return 0 if found.is_clean else 1
