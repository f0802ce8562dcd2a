"""What canonical arithmetic costs in quality: its divergence from floats, against that of Q4_0.

The reference is a forward pass in binary64 over the same Q4_0 weights (`bench.models.float_model`).
`kl` is the mean over positions of D(reference || engine), in nats: what rounding activations,
queries, K and V adds. `kl_q4_0` is D(unquantised weights || Q4_0 weights), both in binary64: what
the format costs anyway. The gate is `ratio` = kl / kl_q4_0 < 5 %. `top1` is the share of positions
at which the engine's best token is the reference's, in percent. `llama_ratio` is that of llama.cpp,
which rounds activations too, with KV in f32.

Models:

* pocket: the shipped model on the texts of `pocket.evaluate`, contexts to 2,000 tokens. Its weights
  before quantisation were not kept, so they are drawn: uniform in the cell of values that quantise
  to each stored level. The drawn weights quantise to the bytes of the file.
* synthetic models, random weights and random tokens: plain, and with planted outliers, a few
  channels of the inputs of q, k, v, gate, up and down that are larger by a factor. In `outliers_*`
  the columns that read them are like all others, so these channels carry most of the signal. In
  `balanced_*` the columns are smaller by the same factor, so that the function is that of `plain`:
  Q4_0 rounds such columns to zero and loses those channels, which is the harder case for the ratio.
  `keys_*` have a balanced pair of large channels in K instead.

`shares` predicts the ratio from numpy, one rounding at a time: inputs of matrices with scales
max / 127, with scales of seven significant bits (those of the engine), of three and of one (powers
of two); queries, K and V as the engine holds them, and without the transform of heads.

`answers`: the evaluation items that the engine answers as the reference does (kept) and correctly
(right), and those that only the reference answers correctly (lost; the gate is none). `llama`:
positions of texts that llama.cpp chose greedily at which the engine chooses the same token.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np
import numpy.typing as npt

import kernels
from bench import report
from bench.models.float_model import (
    F64,
    FloatModel,
    Rounding,
    half_scales,
    ratio_scales,
    short_scales,
    transformed,
)
from bench.models.llama import LlamaContext, LlamaModel
from bench.models.local_runner import LocalRunner
from bench.models.synthetic import F32, Shape, Tensor, random_tensors, write_tensors
from pocket import generate
from pocket.evaluate import SHIPPED, build_set
from pocket.generate import Exchange, Item, Turn, render

GATE = 0.05
END = "<|im_end|>"
ANSWER_TOKENS_MAX = 160
# A small gain of the head: Q4_0 then costs as many nats as it does on trained models, about 0.1.
SHAPE = Shape(
    n_layer=4, n_embd=1024, n_ff=3072, n_head=8, n_kv_head=4, head_dim=128, n_vocab=2048,
    rope_base=1e6, head_gain=1.5, kinds={"token_embd": "q8_0"},
)  # fmt: skip
CHANNELS = 4  # planted outliers of one matrix input


@dataclass(frozen=True)
class Outliers:
    """Factors of a few channels: in matrix inputs, of what reads them, and in K (its reader: Q)."""

    inputs: float = 1.0
    readers: float = 1.0
    keys: float = 1.0


SYNTHETIC = {
    "plain": Outliers(),
    "outliers_20": Outliers(20.0),
    "outliers_50": Outliers(50.0),
    "outliers_100": Outliers(100.0),
    "balanced_20": Outliers(20.0, 1 / 20.0),
    "balanced_50": Outliers(50.0, 1 / 50.0),
    "keys_20": Outliers(keys=20.0),
}


class Divergence:
    """Mean divergence and agreement of two series of logits, added up text by text."""

    def __init__(self) -> None:
        self.positions = 0
        self._nats = 0.0
        self._agreed = 0

    def add(self, reference: npt.NDArray[Any], candidate: npt.NDArray[Any]) -> None:
        """Rows of logits, a position each."""
        p, q = log_softmax(reference), log_softmax(candidate)
        self._nats += float((np.exp(p) * (p - q)).sum())
        self._agreed += int((reference.argmax(1) == candidate.argmax(1)).sum())
        self.positions += len(p)

    @property
    def mean(self) -> float:
        """D(reference || candidate) per position, in nats."""
        return self._nats / self.positions

    @property
    def percent(self) -> float:
        """Positions with the same best token."""
        return 100.0 * self._agreed / self.positions


def log_softmax(logits: npt.NDArray[Any]) -> F64:
    shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def shares_of(head_dim: int) -> dict[str, Rounding]:
    """The roundings that `shares` tries one at a time."""

    def keys(x: F64) -> F64:
        return half_scales(x, 32)

    def values(x: F64) -> F64:
        return half_scales(x, head_dim)

    def queries(x: F64) -> F64:
        return short_scales(x, 7)

    return {
        "inputs_ratio": Rounding(inputs=ratio_scales),
        "inputs_7_bits": Rounding(inputs=lambda x: short_scales(x, 7)),
        "inputs_3_bits": Rounding(inputs=lambda x: short_scales(x, 3)),
        "inputs_1_bit": Rounding(inputs=lambda x: short_scales(x, 1)),
        "qkv_plain": Rounding(queries=queries, keys=keys, values=values),
        "qkv": Rounding(
            queries=lambda x: transformed(queries(transformed(x))),
            keys=lambda x: transformed(keys(transformed(x))),
            values=values,
        ),
    }


@dataclass(frozen=True)
class Subject:
    """One model to measure: the file, its unquantised twin, and texts as token ids."""

    path: Path
    unquantised: FloatModel
    texts: Sequence[list[int]]


def llama_logits(subject: Subject) -> Iterator[F32]:
    """llama.cpp's logits of every text."""
    n_ctx = max(len(text) for text in subject.texts) + 64
    with LlamaModel(subject.path) as model:
        for text in subject.texts:
            with LlamaContext(model, n_ctx=n_ctx, kv_type="f32", threads=1) as context:
                yield context.all_logits(text)


def measure(subject: Subject, runner: LocalRunner) -> dict[str, Any]:
    """The figures of one model."""
    model = FloatModel.from_file(subject.path)
    engine, q4_0, llama = Divergence(), Divergence(), Divergence()
    roundings = shares_of(model.head_dim)
    shares = {name: Divergence() for name in roundings}
    for text, theirs in zip(subject.texts, llama_logits(subject), strict=True):
        exact = model.logits(text)
        llama.add(exact, theirs)
        engine.add(exact, runner.all_logits(text))
        q4_0.add(subject.unquantised.logits(text), exact)
        for name, rounding in roundings.items():
            shares[name].add(exact, model.logits(text, rounding))
    return {
        "kl": float(f"{engine.mean:.4g}"),
        "kl_q4_0": float(f"{q4_0.mean:.4g}"),
        "ratio": round(engine.mean / q4_0.mean, 4),
        "llama_ratio": round(llama.mean / q4_0.mean, 4),
        "top1": round(engine.percent, 3),
        "positions": engine.positions,
        "shares": {name: round(share.mean / q4_0.mean, 4) for name, share in shares.items()},
    }


# -- synthetic models


def plant(tensors: Mapping[str, Tensor], shape: Shape, outliers: Outliers) -> None:
    """Scales CHANNELS channels of inputs of q, k, v, gate, up, down, and a pair of each K head."""
    rng = np.random.default_rng(2)
    wide = rng.choice(shape.n_embd, CHANNELS, replace=False)
    pair = np.array([3, 3 + shape.head_dim // 2])  # both turn together, so the factor passes RoPE
    for layer in range(shape.n_layer):
        weight = {
            role: tensors[f"blk.{layer}.{role}.weight"][0]
            for role in (
                *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_q_norm", "attn_k_norm"),
                *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
            )
        }
        weight["attn_norm"][wide] *= outliers.inputs
        weight["ffn_norm"][wide] *= outliers.inputs
        for role in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"):
            weight[role][:, wide] *= outliers.readers
        inner = rng.choice(shape.n_ff, CHANNELS, replace=False)
        weight["ffn_up"][inner] *= outliers.inputs
        weight["ffn_down"][:, inner] *= outliers.readers
        weight["attn_k_norm"][pair] *= outliers.keys
        weight["attn_q_norm"][pair] /= outliers.keys


def synthetic_subject(folder: Path, name: str, shape: Shape, n_tokens: int) -> Subject:
    """Writes a model of SYNTHETIC in Q4_0; its twin has the weights before quantisation."""
    tensors = random_tensors(replace(shape, base="f32", kinds={}))
    plant(tensors, shape, SYNTHETIC[name])
    types = {"q4_0": gguf.GGMLQuantizationType.Q4_0, "q8_0": gguf.GGMLQuantizationType.Q8_0}
    quantised: dict[str, Tensor] = {}
    for key, (data, kind) in tensors.items():
        if data.ndim == 2:
            role = key.removesuffix(".weight").rsplit(".", 1)[-1]
            kind = shape.kinds.get(role, shape.base)
            data = gguf.quants.quantize(data, types[kind])
        quantised[key] = data, kind
    path = folder / f"{name}.gguf"
    write_tensors(path, shape, quantised)
    weights = {key: data.astype(np.float64) for key, (data, _) in tensors.items()}
    text = np.random.default_rng(5).integers(3, shape.n_vocab, n_tokens).tolist()
    return Subject(path, FloatModel.from_file(path).with_weights(weights), [text])


# -- the pocket model


def drawn_weights(path: Path) -> dict[str, F64]:
    """Weights before quantisation, drawn: uniform in the cell of each stored Q4_0 level.

    The value of largest magnitude of a block is the first of level 0, and exact; cells are a margin
    narrower than the quantiser's, so that the rounding of a scale to binary16 moves no value out.
    """
    rng = np.random.default_rng(3)
    drawn: dict[str, F64] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.tensor_type != gguf.GGMLQuantizationType.Q4_0:
            continue
        blocks = tensor.data.reshape(-1, 18)
        scale = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float64)
        levels = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], 1).astype(np.int64)
        moved = levels - 8 + rng.uniform(-0.499, 0.499, levels.shape)
        largest = levels.argmin(1)[:, None]
        np.put_along_axis(moved, largest, np.take_along_axis(levels - 8, largest, 1), 1)
        # Level 0 is the cell from -8 to -7.5: nothing is larger than the value of level 0 itself.
        values = np.maximum(moved, -8.0) * scale
        drawn[str(tensor.name)] = values.reshape(len(tensor.data), -1)
    return drawn


class PocketTexts:
    """The evaluation set of the pocket model, as token ids."""

    def __init__(self, llama: LlamaModel) -> None:
        self.llama = llama
        self.end = llama.tokenize(END)[0]

    def encode(self, turns: Sequence[Turn]) -> list[int]:
        return self.llama.tokenize(render(turns))

    def _measure(self, exchange: Exchange) -> int:
        return len(self.encode([Turn(*turn) for turn in exchange])) - 3

    def items(self, per_task: int, per_distance: int, distances: Sequence[int]) -> list[Item]:
        return build_set(1, per_task, per_distance, self._measure, distances)

    def is_right(self, answer: Sequence[int], item: Item) -> bool:
        return self.llama.text([t for t in answer if t != self.end]) == item.answer

    def stories(self, count: int) -> list[list[int]]:
        """Prompts whose answers are long and have close calls."""
        rng = random.Random("pocket stories 1")
        asked = [generate.TASKS["told_story"][1](rng)[0] for _ in range(count)]
        return [self.encode([Turn(*turn)]) for turn in asked]

    def greedy(self, context: LlamaContext, prompt: list[int], most: int) -> list[int]:
        """The prompt and what llama.cpp chooses after it."""
        context.clear()
        text = list(prompt)
        logits = context.prefill(text)
        while len(text) < len(prompt) + most:
            text.append(int(logits.argmax()))
            if text[-1] == self.end:
                break
            logits = context.prefill(text[-1:], start=len(text) - 1)
        return text


def reference_answer(model: FloatModel, prompt: list[int], end: int) -> list[int]:
    """The greedy answer of the reference, which computes the whole text for every token."""
    text = list(prompt)
    while len(text) < len(prompt) + ANSWER_TOKENS_MAX and text[-1:] != [end]:
        text.append(int(model.logits(text)[-1].argmax()))
    return text[len(prompt) :]


def answers_of(
    texts: PocketTexts, items: Sequence[Item], model: FloatModel, runner: LocalRunner
) -> tuple[dict[str, int], list[list[int]]]:
    """The items answered by the engine as by the reference, and correctly; prompts with answers.

    The reference gives the same greedy answer exactly if each token of it is its best one.
    """
    prompts = [texts.encode(item.turns) for item in items]
    answers: list[list[int]] = []
    for prompt in prompts:
        answers += runner.generate([prompt], ANSWER_TOKENS_MAX, eos=[texts.end])
    kept = right = lost = 0
    for prompt, answer, item in zip(prompts, answers, items, strict=True):
        best = model.logits(prompt + answer[:-1])[len(prompt) - 1 :].argmax(1)
        is_kept, is_right = best.tolist() == answer, texts.is_right(answer, item)
        kept += is_kept
        right += is_right
        if not is_kept and not is_right:
            lost += texts.is_right(reference_answer(model, prompt, texts.end), item)
    full = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    return {"items": len(items), "kept": kept, "right": right, "lost": lost}, full


def agreement_with_llama(
    texts: PocketTexts, prompts: Sequence[list[int]], model: FloatModel, runner: LocalRunner
) -> dict[str, float]:
    """Percent of llama.cpp's greedy tokens that engine and reference choose in their places.

    `both` is the agreement of engine and reference there. llama.cpp rounds activations with scales
    max / 127, so an engine that rounds in the same way agrees with it more than exact floats do.
    """
    engine = reference = both = total = 0
    with LlamaContext(texts.llama, kv_type="f32", threads=1, n_ctx=4096) as context:
        for prompt in prompts:
            text = texts.greedy(context, prompt, 96)
            chosen, first = np.array(text[len(prompt) :]), len(prompt) - 1
            ours = runner.all_logits(text[:-1])[first:].argmax(1)
            exact = model.logits(text[:-1])[first:].argmax(1)
            engine += int((ours == chosen).sum())
            reference += int((exact == chosen).sum())
            both += int((ours == exact).sum())
            total += len(chosen)
    return {
        "positions": total,
        "engine": round(100 * engine / total, 3),
        "reference": round(100 * reference / total, 3),
        "both": round(100 * both / total, 3),
    }


class Run:
    """One run of the bench: its folder, its sizes and what it found."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.folder = folder
        self.result: dict[str, Any] = {}

    def runner(self, path: Path) -> LocalRunner:
        return LocalRunner(
            path, cache_dir=self.folder, threads=self.args.threads, n_pages=64, logits_max=512
        )

    def record(self, name: str, figures: dict[str, Any]) -> None:
        self.result[name] = figures
        shares = ", ".join(f"{k} {100 * v:.2f}" for k, v in figures["shares"].items())
        print(
            f"  {name:<14}kl {figures['kl']:.3e}   of Q4_0 {figures['kl_q4_0']:.3e}   ratio"
            f" {100 * figures['ratio']:6.2f} %   llama.cpp {100 * figures['llama_ratio']:6.2f} %"
            f"   top-1 {figures['top1']:.2f} %   {figures['positions']} positions"
            f"\n  {'':<14}shares in %: {shares}",
            flush=True,
        )

    def pocket(self) -> None:
        args = self.args
        model = FloatModel.from_file(SHIPPED)
        with LlamaModel(SHIPPED) as llama, self.runner(SHIPPED) as runner:
            texts = PocketTexts(llama)
            distances = [d for d in (64, 256, 1024, 2048) if d <= args.distance_max]
            items = texts.items(args.per_task, args.per_distance, distances)
            answers, full = answers_of(texts, items, model, runner)
            unquantised = model.with_weights(drawn_weights(SHIPPED))
            self.record("pocket", measure(Subject(SHIPPED, unquantised, full), runner))
            prompts = texts.stories(args.stories) + [texts.encode(i.turns) for i in items]
            agreement = agreement_with_llama(texts, prompts, model, runner)
        self.result |= {"answers": answers, "llama": agreement}
        print(
            f"  answers: {answers['kept']} of {answers['items']} kept, {answers['right']} right,"
            f" {answers['lost']} lost"
        )
        print(
            f"  llama.cpp's greedy tokens: engine {agreement['engine']} %, reference"
            f" {agreement['reference']} % of {agreement['positions']}; the two agree at"
            f" {agreement['both']} %"
        )

    def synthetic(self, name: str) -> None:
        shape = SHAPE
        if self.args.quick:
            shape = replace(shape, n_layer=1, n_embd=256, n_ff=512, n_vocab=512)
        subject = synthetic_subject(self.folder, name, shape, self.args.tokens)
        with self.runner(subject.path) as runner:
            self.record(name, measure(subject, runner))
        subject.path.unlink()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench quality", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few items, small models, seconds")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--models", default="", help="only these, separated by commas")
    parser.add_argument("--per-task", type=int, default=0, help="default 10, quick 1")
    parser.add_argument("--per-distance", type=int, default=0, help="default 6, quick 1")
    parser.add_argument("--distance-max", type=int, default=0, help="default 2048, quick 64")
    parser.add_argument("--stories", type=int, default=0, help="default 40, quick 1")
    parser.add_argument(
        "--tokens", type=int, default=0, help="synthetic text; default 512, quick 64"
    )
    parser.add_argument("--json", help="write figures to this file")
    args = parser.parse_args(argv)
    defaults = {"per_task": (10, 1), "per_distance": (6, 1), "distance_max": (2048, 64)}
    for name, pair in (defaults | {"stories": (40, 1), "tokens": (512, 64)}).items():
        setattr(args, name, getattr(args, name) or pair[args.quick])
    with tempfile.TemporaryDirectory(prefix="bench-quality-") as folder:
        run = Run(args, Path(folder))
        with run.runner(SHIPPED) as runner:
            identity = kernels.arith_id(runner.pool)
        print(f"arith_id {identity}, {kernels.isa()}")
        names = ["pocket", *(("plain", "outliers_20") if args.quick else SYNTHETIC)]
        for name in args.models.split(",") if args.models else names:
            run.pocket() if name == "pocket" else run.synthetic(name)
    rows = {name: row["ratio"] for name, row in run.result.items() if "ratio" in row}
    failed = [name for name, ratio in rows.items() if not ratio < GATE]
    failed += ["answers"] if run.result.get("answers", {"lost": 0})["lost"] else []
    print(f"  gate (ratios below {100 * GATE:.0f} %, no answer lost): {failed or 'passed'}")
    details = {"arith_id": identity, "isa": kernels.isa(), "sizes": {**vars(args)}}
    report.finish(run.result | {"failed": failed}, details=details, json_path=args.json)
    return 0
