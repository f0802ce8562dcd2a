"""Trains a pocket model on generated conversations. CPU, torch, minutes to an hour.

Owns the schedule, the batches, the optimiser and resumable checkpoints. The schedule counts steps,
never seconds, and the data of a step depend on (seed, step) alone, so a resumed run sees what an
unbroken run would have seen.

    python -m pocket.train OUT.pt [--plan full|tiny] [--vocab FILE] [--threads 2] [--seed 1]

OUT.pt is also where a run resumes. `python -m pocket.export OUT.pt pocket.gguf` makes the model.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pocket import generate
from pocket.bpe import TURN_END, TURN_START, Vocabulary
from pocket.net import Net
from pocket.shape import Shape, tensor_shapes

USER_SHARE, USER_WEIGHT = 0.4, 0.2  # of the user's tokens this share is learnt, this much
NO_DILUTION = ("facts", "recall", "system")  # kinds whose keys are what recall must find
CHECKPOINT_STEPS = 100


@dataclass(frozen=True)
class Batch:
    """Rows and length of a step's batch; `dilution` > 1 = filler keys count up to so often."""

    rows: int
    length: int
    dilution: float = 0.0


@dataclass(frozen=True)
class Phase:
    """Steps that draw from the same batches; a batch listed twice is drawn twice as often."""

    steps: int
    batches: tuple[Batch, ...]
    gap_share: float  # sequences whose positions get gaps (PoSE)


@dataclass(frozen=True)
class Plan:
    """A training run. `factors` are (step, learning-rate factor) corners of a polyline."""

    shape: Shape
    phases: tuple[Phase, ...]
    factors: tuple[tuple[int, float], ...]
    quantise_from: int

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return sum(phase.steps for phase in self.phases)

    def phase(self, step: int) -> Phase:
        """The phase a step belongs to."""
        for phase in self.phases:
            if step < phase.steps:
                return phase
            step -= phase.steps
        return self.phases[-1]

    def factor(self, step: int) -> float:
        """Learning-rate factor; where two corners share a step, the later one counts."""
        before = [corner for corner in self.factors if corner[0] <= step][-1]
        after = [corner for corner in self.factors if corner[0] > step][:1] or [before]
        width = max(1, after[0][0] - before[0])
        return before[1] + (after[0][1] - before[1]) * (step - before[0]) / width


_MIXED = (Batch(16, 512), Batch(8, 1024), Batch(8, 1024), Batch(4, 2048), Batch(4, 2048))
_LONG = (
    *(Batch(12, 512),) * 3,
    *(Batch(12, 512, 12),) * 2,
    *(Batch(6, 1024, 16),) * 3,
    Batch(3, 2048, 8),
    Batch(1, 8192),
)
PLANS = {
    # About 15 million tokens. Recall and copying appear between 1.7 and 2.5 million; gaps start
    # once short positions are learnt; the last phase teaches recall against much filler.
    "full": Plan(
        Shape(),
        (
            Phase(300, (Batch(16, 256),), 0.0),
            Phase(1000, (Batch(16, 256),), 0.5),
            Phase(450, (Batch(12, 512),), 0.5),
            Phase(400, _MIXED, 0.5),
            Phase(675, _LONG, 0.6),
        ),
        ((0, 0.0), (40, 1.0), (1750, 1.0), (2150, 0.27), (2150, 0.1), (2160, 0.4), (2825, 0.01)),
        quantise_from=1931,
    ),
    # Proves that the parts fit together; the result knows headers and little else.
    "tiny": Plan(
        Shape(layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32, ffn=128, context_tokens=2048),
        (Phase(30, (Batch(8, 128),), 0.0), Phase(20, (Batch(4, 128, 4), Batch(4, 128)), 0.5)),
        ((0, 0.0), (5, 1.0), (50, 0.1)),
        quantise_from=40,
    ),
}


@dataclass
class Arrays:
    """One batch: inputs, targets, weights of targets, positions, and the attention bias."""

    tokens: Tensor
    targets: Tensor
    weights: Tensor
    positions: Tensor
    bias: Tensor | None


class Source:
    """Batches of generated conversations."""

    def __init__(self, vocabulary: Vocabulary, plan: Plan, seed: int) -> None:
        self._encoder = vocabulary.encoder()
        self._start, self._end = vocabulary.id(TURN_START), vocabulary.id(TURN_END)
        self._newline = self._encode("\n")
        self._plan, self._seed = plan, seed

    def batch(self, step: int) -> Arrays:
        """The batch of a step, a function of (seed, step)."""
        rng = random.Random(f"pocket {self._seed} {step}")
        phase = self._plan.phase(step)
        form = rng.choice(phase.batches)
        tokens = torch.zeros(form.rows, form.length + 1, dtype=torch.long)
        weights = torch.zeros(form.rows, form.length + 1)
        positions = torch.arange(form.length).repeat(form.rows, 1)
        bias = torch.zeros(form.rows, 1, form.length, form.length) if form.dilution else None
        for row in range(form.rows):
            turns = generate.conversation(rng, int(form.length * 1.1) + 20)
            ids, learnt, starts, units, thin = self._sequence(rng, turns)
            count = min(len(ids), form.length + 1)
            tokens[row, :count] = torch.tensor(ids[:count])
            weights[row, :count] = torch.tensor(learnt[:count])
            if rng.random() < phase.gap_share:
                self._spread(rng, positions[row], starts)
            if bias is not None:
                bias[row, 0] = self._dilute(rng, form, units, thin)
        return Arrays(tokens[:, :-1], tokens[:, 1:], weights[:, 1:], positions, bias)

    def _encode(self, text: str) -> list[int]:
        return self._encoder.encode(text).ids

    def _sequence(
        self, rng: random.Random, turns: list[generate.Turn]
    ) -> tuple[list[int], list[float], list[int], list[int], list[bool]]:
        """(tokens, their loss weights, starts of turns, unit and dilutable per token)."""
        ids: list[int] = []
        learnt: list[float] = []
        starts: list[int] = []
        units: list[int] = []
        thin: list[bool] = []
        for turn in turns:
            starts.append(len(ids))
            body = self._encode(f"{turn.role}\n{turn.text}")
            head = len(self._encode(f"{turn.role}\n"))
            answer = turn.role == "assistant"
            said = [
                1.0 if answer else USER_WEIGHT * (rng.random() < USER_SHARE) for _ in body[head:]
            ]
            ids += [self._start, *body, self._end, *self._newline]
            learnt += [0.0] * (1 + head) + said + [float(answer)] + [0.0] * len(self._newline)
            units += [turn.unit] * (len(ids) - len(units))
            thin += [turn.kind not in NO_DILUTION] * (len(ids) - len(thin))
        return ids, learnt, starts, units, thin

    def _spread(self, rng: random.Random, positions: Tensor, starts: list[int]) -> None:
        """PoSE: one to three gaps, mostly between turns, so that far positions are learnt."""
        length = len(positions)
        gaps = rng.choice((1, 1, 2, 3))
        room = self._plan.shape.context_tokens - length
        for _ in range(gaps):
            cut = rng.choice(starts) if rng.random() < 0.8 else rng.randrange(length)
            low, high = math.log(8), math.log(max(9, room / gaps))
            positions[min(cut, length) :] += int(math.exp(rng.uniform(low, high)))

    def _dilute(
        self, rng: random.Random, form: Batch, units: list[int], thin: list[bool]
    ) -> Tensor:
        """Attention bias: a key in earlier filler counts as m keys, log(m) on its logit.

        So a short sequence has the softmax competition of one with its filler repeated m times.
        """
        length = form.length
        unit = torch.full((length,), units[-1])
        count = min(length, len(units))
        unit[:count] = torch.tensor(units[:count])
        filler = torch.zeros(length)
        filler[:count] = torch.tensor(thin[:count], dtype=torch.float32)
        strength = math.log(form.dilution) * rng.random() ** 0.6
        bias = filler[None, :] * strength * (unit[:, None] > unit[None, :])
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        return bias.masked_fill(future, float("-inf"))


class Muon:
    """Muon for hidden matrices, AdamW for embedding and norms."""

    def __init__(self, net: Net, matrix_rate: float = 0.02, other_rate: float = 0.004) -> None:
        self.matrices = net.matrices()
        known = {id(parameter) for parameter in self.matrices}
        self.others = [p for p in net.parameters() if id(p) not in known]
        self.adam = torch.optim.AdamW(
            self.others, lr=other_rate, betas=(0.9, 0.97), weight_decay=0.0
        )
        self.momenta = [torch.zeros_like(matrix) for matrix in self.matrices]
        self._matrix_rate, self._other_rate = matrix_rate, other_rate

    @torch.no_grad()
    def step(self, factor: float, momentum: float = 0.95, decay: float = 0.01) -> None:
        """Apply and clear the gradients at `factor` of the full rates."""
        for group in self.adam.param_groups:
            group["lr"] = self._other_rate * factor
        torch.nn.utils.clip_grad_norm_(self.others, 1.0)
        self.adam.step()
        rate = self._matrix_rate * factor
        for matrix, moment in zip(self.matrices, self.momenta, strict=True):
            if matrix.grad is None:
                continue
            moment.lerp_(matrix.grad, 1 - momentum)
            ahead = matrix.grad.lerp(moment, momentum)
            tall = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
            matrix.mul_(1 - rate * decay).add_(orthogonalise(ahead), alpha=-rate * tall)
        for parameter in (*self.matrices, *self.others):
            parameter.grad = None


def orthogonalise(gradient: Tensor, rounds: int = 5) -> Tensor:
    """Nearly the closest matrix with equal singular values (Newton-Schulz, quintic)."""
    x = gradient.bfloat16()
    x = x / (x.norm() + 1e-7)
    flip = x.shape[0] > x.shape[1]
    x = x.T if flip else x
    for _ in range(rounds):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x.T if flip else x).float()


def loss_of(net: Net, batch: Arrays, dtype: torch.dtype) -> tuple[Tensor, float]:
    """(weighted loss, plain loss of the assistant's tokens)."""
    bias = None if batch.bias is None else batch.bias.to(dtype)
    hidden = net(batch.tokens, batch.positions, bias, dtype).flatten(0, 1)
    weights = batch.weights.flatten()
    chosen = weights.nonzero()[:, 0]
    logits = net.logits(hidden[chosen])
    each = functional.cross_entropy(logits, batch.targets.flatten()[chosen], reduction="none")
    weight = weights[chosen]
    answers = each.detach()[weight == 1.0]
    shown = answers.mean().item() if len(answers) else float("nan")
    return (each * weight).sum() / weight.sum(), shown


def train(
    out: Path,
    plan: Plan,
    vocabulary: Vocabulary,
    seed: int = 1,
    stop_after: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> list[float]:
    """Run, or go on from `out`; returns the assistant loss of each step done now."""
    torch.manual_seed(seed)
    net = Net(plan.shape)
    optimiser = Muon(net)
    step = _resume(out, net, optimiser) if out.exists() else 0
    source = Source(vocabulary, plan, seed)
    losses: list[float] = []
    end = plan.steps if stop_after is None else min(plan.steps, stop_after)
    shown_at, tokens = time.monotonic(), 0
    while step < end:
        if step >= plan.quantise_from:
            net.quantise()
        batch = source.batch(step)
        loss, answers = loss_of(net, batch, dtype)
        loss.backward()
        optimiser.step(plan.factor(step))
        losses.append(answers)
        tokens += batch.tokens.numel()
        step += 1
        if step % 20 == 0 or step == end:
            rate = tokens / (time.monotonic() - shown_at)
            print(f"step {step}/{plan.steps} loss {answers:.3f} {rate:.0f} tokens/s", flush=True)
            shown_at, tokens = time.monotonic(), 0
        if step % CHECKPOINT_STEPS == 0 or step == end:
            _save(out, net, optimiser, step, vocabulary)
    return losses


def _save(out: Path, net: Net, optimiser: Muon, step: int, vocabulary: Vocabulary) -> None:
    state = {
        "step": step,
        "shape": asdict(net.shape),
        "vocabulary": asdict(vocabulary),
        "net": net.state_dict(),
        "adam": optimiser.adam.state_dict(),
        "momenta": optimiser.momenta,
    }
    fresh = out.with_suffix(".new")
    torch.save(state, fresh)
    fresh.replace(out)  # a run stopped here keeps the older checkpoint


def _resume(out: Path, net: Net, optimiser: Muon) -> int:
    state = torch.load(out, weights_only=True)
    net.load_state_dict(state["net"])
    optimiser.adam.load_state_dict(state["adam"])
    for moment, saved in zip(optimiser.momenta, state["momenta"], strict=True):
        moment.copy_(saved)
    return int(state["step"])


def load_weights(path: Path) -> tuple[Shape, dict[str, np.ndarray], Vocabulary]:
    """What the exporter needs of a checkpoint: shape, fp32 arrays by GGUF name, vocabulary."""
    state = torch.load(path, weights_only=True)
    shape = Shape(**state["shape"])
    saved = {
        name.rsplit(".", 1)[0] + ".weight": value.float().numpy()
        for name, value in state["net"].items()
    }
    return (
        shape,
        {name: saved[name] for name in tensor_shapes(shape)},
        Vocabulary(**state["vocabulary"]),
    )


def main() -> None:
    """Train from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--plan", choices=sorted(PLANS), default="full")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--vocab",
        type=Path,
        default=Path(__file__).parent / "pocket-q4_0.gguf",
        help="JSON of pocket.bpe, or a GGUF file whose vocabulary is kept",
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    train(options.out, PLANS[options.plan], Vocabulary.load(options.vocab), options.seed)


if __name__ == "__main__":
    main()
