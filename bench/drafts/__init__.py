"""Decode with drafts against decode without, on texts that agents say: changes of source files.

A model of random weights says nothing sensible, so each answer is given: the next token of a step
is that of the text, whatever the logits are. Forward passes are real, so are the logits of every
row that is wanted, and the rules of `batchengine/policy/drafts.py` with what they learn; there is
no sampler and no engine around them. Texts are changes in the git history of a folder:

    rewrite  prompt: a file; answer: the whole file after the change
    edit     prompt: a file; answer: old and new lines of each place, as calls of an editing tool
    new      prompt: another file of the folder; answer: a file that the change has added

Figures are tokens per second of one session, medians over texts; both ways of a text take turns.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from batchengine.lanes.host_device import n_accepted
from batchengine.policy.cost import CostModel, StepCost, entry_ms, work_of
from batchengine.policy.drafts import DraftOdds, DraftOffer, PromptLookup, StepRate, grant
from batchengine.text.vocab import Tokenizer
from bench import report
from bench.engine import DISK, synthetic_model
from bench.models.local_runner import LocalRunner, LocalSequence
from bench.models.synthetic import PRESETS

POCKET = Path(__file__).parents[2] / "pocket" / "pocket-q4_0.gguf"
DRAFT_MAX = 15  # of a CPU lane
COMMITS = 800
ANSWER_CHARS_MIN = 600


class Text(NamedTuple):
    """What is in the prompt, and what is answered."""

    prompt: str
    answer: str


class Run(NamedTuple):
    """One decode of an answer."""

    seconds: float
    steps: int
    drafted: int
    accepted: int


class History:
    """The git history of a folder; without one, nothing has changed."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def git(self, *arguments: str) -> str:
        """What git prints; empty if it fails."""
        command = ["git", "-C", self.folder, *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False
        )
        return done.stdout

    def changed(self, commit: str, kind: str) -> list[str]:
        """Python files that a commit has modified (M) or added (A)."""
        how = "--name-only", f"--diff-filter={kind}"
        names = self.git("diff", *how, f"{commit}~1", commit).split()
        return [name for name in names if name.endswith(".py")]

    def file(self, commit: str, name: str) -> str:
        """A file as a commit has it."""
        return self.git("show", f"{commit}:{name}")


def rewrite(history: History, commit: str) -> Iterator[Text]:
    """Whole files after a change."""
    for name in history.changed(commit, "M"):
        yield Text(history.file(f"{commit}~1", name), history.file(commit, name))


def edit(history: History, commit: str) -> Iterator[Text]:
    """The places of files that a change has touched."""
    for name in history.changed(commit, "M"):
        calls: list[str] = []
        old = new = ""
        diff = history.git("diff", "-U1", f"{commit}~1", commit, "--", name).splitlines()[4:]
        for line in [*diff, "@@"]:
            if line.startswith("@@"):
                if old != new:
                    calls.append(json.dumps({"old_string": old, "new_string": new}))
                old = new = ""
            else:
                old += line[1:] + "\n" if line[:1] in " -" else ""
                new += line[1:] + "\n" if line[:1] in " +" else ""
        yield Text(history.file(f"{commit}~1", name), "\n".join(calls))


def new(history: History, commit: str) -> Iterator[Text]:
    """Files that a change has added."""
    for name in history.changed(commit, "A"):
        beside = history.git("ls-tree", "--name-only", commit, f"{Path(name).parent}/").split()
        others = [other for other in beside if other.endswith(".py") and other != name]
        if others:
            yield Text(history.file(commit, others[-1]), history.file(commit, name))


KINDS: dict[str, Callable[[History, str], Iterator[Text]]] = {
    "rewrite": rewrite,
    "edit": edit,
    "new": new,
}


def texts_of(history: History, kind: str, n: int, rng: random.Random) -> list[Text]:
    """So many texts of a kind, of different changes."""
    found: list[Text] = []
    commits = history.git("log", f"-{COMMITS}", "--format=%H").split()[:-1]
    rng.shuffle(commits)
    for commit in commits:
        if len(found) == n:
            break
        fitting = [
            text
            for text in KINDS[kind](history, commit)
            if len(text.answer) >= ANSWER_CHARS_MIN and text.prompt
        ]
        found += rng.sample(fitting, min(1, len(fitting)))
    return found


class Decoder:
    """Decodes given answers with one model, and keeps what is learnt from step to step."""

    def __init__(self, runner: LocalRunner) -> None:
        self.runner = runner
        self.cost = CostModel(StepCost())

    def decode(
        self, sequence: LocalSequence, prompt: Sequence[int], answer: Sequence[int], drafts: int
    ) -> Run:
        """Decode an answer behind a prompt, all of which but its last token has KV."""
        lookup, odds = PromptLookup(prompt), DraftOdds()
        n = drafted = accepted = steps = 0
        last = prompt[-1]
        began = time.perf_counter()
        while n < len(answer):
            frontier, step_began = sequence.frontier, time.perf_counter()
            draft = lookup.find(min(drafts, len(answer) - n - 1))
            chance = odds.chance(draft.matched)
            offer = DraftOffer(0, len(draft.tokens), chance, self.cost.draft_ms(frontier))
            rate = StepRate(1, self.cost.cost.fixed_ms + entry_ms(self.cost.cost, frontier, 1))
            length = grant([offer], rate, drafts).get(0, 0) if draft.tokens else 0
            tokens = draft.tokens[:length]
            self._step(sequence, [last, *tokens])
            kept = n_accepted(tokens, answer[n : n + length + 1])
            self._keep(sequence, [last, *tokens], length - kept)
            came = answer[n : n + kept + 1]
            lookup.extend(came)
            ms = (time.perf_counter() - step_began) * 1000
            work = work_of([(frontier, 1)])
            if length:
                odds.learn(draft.matched, length, kept)
                self.cost.observe_drafted(work, [(frontier, length)], ms)
            else:
                self.cost.observe(work, ms)
            last, n, steps = came[-1], n + kept + 1, steps + 1
            drafted, accepted = drafted + length, accepted + kept
        return Run(time.perf_counter() - began, steps, drafted, accepted)

    def _step(self, sequence: LocalSequence, tokens: Sequence[int]) -> None:
        """Compute rows of tokens, and the logits behind each."""
        stepper, vocab = self.runner.stepper, self.runner.spec.n_vocab
        self.runner.set_step([(sequence, [token % vocab for token in tokens])], [len(tokens) - 1])
        stepper.run(np.arange(len(tokens), dtype=np.int32))
        stepper.logits(len(tokens))

    def _keep(self, sequence: LocalSequence, tokens: Sequence[int], rejected: int) -> None:
        """Count the tokens of the step that was set, but for the last ones, to a timeline."""
        if rejected:
            self.runner.stepper.rewind([(0, rejected)])
        self.runner.commit([(sequence, tokens[: len(tokens) - rejected])])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench drafts", description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--model", default="", help=f"a GGUF, or one of {', '.join(PRESETS)}")
    parser.add_argument("--vocab", type=Path, default=POCKET, help="GGUF with the vocabulary")
    parser.add_argument("--texts", type=int, default=0, help="texts of each kind")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of a prompt at most")
    parser.add_argument("--answer", type=int, default=400, help="tokens of an answer at most")
    parser.add_argument("--history", default=".", help="folder with a git history")
    parser.add_argument("--json")
    given = parser.parse_args(argv)
    preset = given.model or ("0.1b" if given.quick else "0.6b")
    path = synthetic_model(preset) if preset in PRESETS else Path(preset)
    n_texts = given.texts or (2 if given.quick else 8)
    tokenizer, rng = Tokenizer(given.vocab), random.Random(1)
    longest = given.prompt + given.answer
    runner = LocalRunner(
        path,
        threads=given.threads,
        n_pages=3 * (longest // 256 + 2),
        logits_max=DRAFT_MAX + 1,
        cache_dir=DISK if DISK.is_dir() else Path(tempfile.gettempdir()),
    )
    decoder = Decoder(runner)
    result: dict[str, dict[str, float]] = {}
    samples: dict[str, list[dict[str, float]]] = {}
    print(f"{path.name}, {given.threads} threads, vocabulary of {given.vocab.name}", flush=True)
    for kind in KINDS:
        rows: list[tuple[int, Run, Run]] = []
        for text in texts_of(History(given.history), kind, n_texts, rng):
            prompt = tokenizer.encode(text.prompt)[: given.prompt]
            answer = tokenizer.encode(text.answer)[: given.answer]
            sequence = LocalSequence()
            vocab = runner.spec.n_vocab
            runner.prefill(sequence, [token % vocab for token in prompt[:-1]])
            runs: dict[int, Run] = {}
            for drafts in rng.sample([0, DRAFT_MAX], 2):
                copy = runner.fork(sequence)
                runs[drafts] = decoder.decode(copy, prompt, answer, drafts)
                runner.release(copy)
            runner.release(sequence)
            rows.append((len(answer), runs[0], runs[DRAFT_MAX]))
        if not rows:
            print(f"  {kind:<8} no change of this kind in the git history of this folder")
            continue
        samples[kind] = [
            {"tokens": n, "plain_s": plain.seconds, **drafted._asdict()}
            for n, plain, drafted in rows
        ]
        ratios = [plain.seconds / drafted.seconds for _, plain, drafted in rows]
        result[kind] = {
            "ratio": round(statistics.median(ratios), 2),
            "ratio_min": round(min(ratios), 2),
            "ratio_max": round(max(ratios), 2),
            "tokens_per_s": round(statistics.median(n / run.seconds for n, _, run in rows), 1),
            "plain_tokens_per_s": round(
                statistics.median(n / run.seconds for n, run, _ in rows), 1
            ),
            "tokens_per_step": round(sum(n for n, *_ in rows) / sum(d.steps for *_, d in rows), 2),
            "accepted": round(
                sum(d.accepted for *_, d in rows) / max(1, sum(d.drafted for *_, d in rows)), 2
            ),
        }
        print(f"  {kind:<8} {result[kind]}", flush=True)
    runner.close()
    details = {"gguf": path.name, "threads": given.threads, "samples": samples}
    report.finish(result, details=details, json_path=given.json)
    return 0
