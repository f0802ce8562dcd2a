"""Prefill and decode of one GGUF against llama.cpp: same file, same threads, same run.

Both are measured alike: a batch of token ids goes in, logits come out, no tokenizer,
no HTTP. llama.cpp runs at its best setting, chosen per row, at the row's own batch and length, by
trying flash attention on and off, KV types f16 and q8_0 and both KV layouts before the counted
repeats; the choice is printed.

Decode rows use sequences with KV of their own: no sequence shares memory with another one, on
either side. Only the making of that KV is shared, and it is not timed: each side prefills at most
1024 tokens once (llama.cpp once per flash and KV type), and longer or further sequences are byte
copies of it; llama.cpp prefills each sequence of a model with recurrent layers. Which values KV
and states hold changes no loop of either engine.

Long prompts have fewer repeats, and llama.cpp's setting for them is chosen on their first 2048
tokens. `prefill_8k` and `prefill_32k` take many minutes: `--long` or `--rows` asks for them.

Figures are tokens per second: median of interleaved repeats, with the range.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import kernels
from batchengine.gguf import GgufFile
from bench import report
from bench.models.llama import LlamaContext, LlamaModel, has_amx
from bench.models.llama_state import SequenceState
from bench.models.local_runner import LocalRunner, LocalSequence
from bench.models.synthetic import PRESETS, Shape, write_synthetic

SETTINGS: tuple[dict[str, Any], ...] = (
    {"flash": False, "kv_type": "f16"},
    {"flash": True, "kv_type": "f16"},
    {"flash": True, "kv_type": "q8_0"},
)
PROMPT = 16  # tokens already there before a decode row starts
PREFIX_MAX = 1024  # tokens prefilled for longer KV, which repeats them
CHOICE_MAX = 2048  # tokens of a prompt on which llama.cpp's settings are compared
PREFILLS = {"prefill_512": 512, "prefill_4k": 4096, "prefill_8k": 8192, "prefill_32k": 32768}
PREFILL_REPEATS = {4096: 3, 8192: 2, 32768: 1}  # at most so many
LONG = ("prefill_8k", "prefill_32k")
DISK = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "batchengine" / "bench"


def synthetic_model(name: str, shape: Shape | None = None) -> Path:
    """The synthetic GGUF of a preset, or of another shape by a name of its own; written once,
    seconds."""
    try:
        DISK.mkdir(parents=True, exist_ok=True)
        folder = DISK
    except OSError:
        folder = Path(tempfile.gettempdir())
    path = folder / f"synthetic-{name}.gguf"
    if not path.exists():
        print(f"writing {path.name}", flush=True)
        partial = path.with_suffix(f".{os.getpid()}.part")
        write_synthetic(partial, shape or PRESETS[name])
        partial.rename(path)
    return path


class Duel:
    """One GGUF in both engines, and the measurements of it."""

    def __init__(self, path: str | None, *, threads: int, quick: bool) -> None:
        self.quick = quick
        self.threads = threads
        preset = path or ("0.1b" if quick else "0.6b")
        self.path = synthetic_model(preset) if preset in PRESETS else Path(preset)
        self.llama_settings: dict[str, str] = {}
        with GgufFile(self.path) as gguf:
            tensors = {name: info.shape for name, info in gguf.tensors.items()}
        matrices = {n: s for n, s in tensors.items() if len(s) == 2}
        head = "output.weight" if "output.weight" in matrices else "token_embd.weight"
        layers = [s for n, s in matrices.items() if n not in (head, "token_embd.weight")]
        self.linear_parameters = sum(int(np.prod(s)) for s in layers)
        self.streamed_bytes = self.path.stat().st_size
        self.description = f"{self.path.name}, {self.streamed_bytes / 2**20:.0f} MiB"
        self.runner = LocalRunner(
            self.path,
            threads=threads,
            tokens_max=512,
            entries_max=32,
            n_pages=48 if quick else 240,
            logits_max=32,
            cache_dir=DISK if DISK.is_dir() else Path(tempfile.gettempdir()),
        )
        self.vocab = self.runner.spec.n_vocab
        self.is_recurrent = self.runner.model.states is not None
        self.llama = LlamaModel(self.path)
        if has_amx():
            print("llama.cpp keeps the layout of the file, which is slower: it fails with AMX")
        self.rng = np.random.default_rng(11)
        self._contexts: list[LlamaContext] = []
        self._sequences: list[LocalSequence] = []
        self._prefix: dict[int, LocalSequence] = {}  # by length
        self._prefix_llama: dict[tuple[int, bool, str], SequenceState] = {}

    def end_row(self) -> None:
        """Gives back the KV of the row just measured, on both sides."""
        for context in self._contexts:
            context.close()
        for sequence in self._sequences:
            self.runner.release(sequence)
        self._contexts, self._sequences = [], []

    def close(self) -> None:
        self.end_row()
        self.llama.close()
        self.runner.close()

    def tokens(self, count: int) -> list[int]:
        return self.rng.integers(3, self.vocab, count).tolist()

    def context(self, n_ctx: int, n_seq: int, setting: dict[str, Any]) -> LlamaContext:
        return LlamaContext(
            self.llama, n_ctx=n_ctx, threads=self.threads, n_seq_max=n_seq, **setting
        )

    def choose(self, row: str, recompute: Callable[[dict[str, Any]], float]) -> dict[str, Any]:
        """llama.cpp's fastest setting for this row: each tried once, the two best once more."""
        # With a handful of tokens of KV its type cannot matter: only the layout is tried.
        settings = SETTINGS if "4k" in row or row.startswith("prefill") else SETTINGS[:2]
        options = [s | {"kv_unified": u} for s in settings for u in (False, True)]
        if row.startswith("prefill") or row.endswith("_b1"):
            options = [o for o in options if o["kv_unified"]]  # one sequence: the same layout
        if self.quick:
            options = [options[0], options[-1]]
        speeds = np.array([recompute(option) for option in options])
        for index in () if self.quick else np.argsort(speeds)[-2:]:
            speeds[index] = max(speeds[index], recompute(options[index]))
        best = options[int(np.argmax(speeds))]
        self.llama_settings[row] = (
            f"flash {'on' if best['flash'] else 'off'}, kv {best['kv_type']}"
            f"{'' if best['kv_unified'] else ', KV per sequence'}"
        )
        return best

    def prefill_contenders(self, row: str, count: int) -> dict[str, Callable[[], float]]:
        """Whole prompts of `count` tokens, logits of the last one."""
        whole = self.tokens(count)

        def ours(prompt: list[int]) -> float:
            sequence = LocalSequence()
            start = time.perf_counter()
            self.runner.prefill(sequence, prompt)
            elapsed = time.perf_counter() - start
            self.runner.release(sequence)
            return len(prompt) / elapsed

        def timed(context: LlamaContext, prompt: list[int]) -> float:
            context.clear()
            start = time.perf_counter()
            context.prefill(prompt)
            return len(prompt) / (time.perf_counter() - start)

        def recompute(setting: dict[str, Any]) -> float:
            with self.context(count + 64, 1, setting) as context:
                context.prefill(whole[:64])
                return timed(context, whole[:CHOICE_MAX])

        context = self.context(count + 64, 1, self.choose(row, recompute))
        self._contexts.append(context)
        ours(whole[:512])
        return {"ours": lambda: ours(whole), "llama.cpp": lambda: timed(context, whole)}

    def own_sequence(self, length: int) -> LocalSequence:
        """A sequence of `length` tokens with pages of its own."""
        base = min(length, PREFIX_MAX)
        if base not in self._prefix:
            self._prefix[base] = LocalSequence()
            self.runner.prefill(self._prefix[base], self.tokens(base))
        sequence = self.runner.fork(self._prefix[base])  # a recurrent state is that of the prefix
        while sequence.frontier < length:
            more = self.runner.fork(self._prefix[base])
            sequence.pages += more.pages
            sequence.tokens += more.tokens
        self._sequences.append(sequence)
        return sequence

    def own_decode(self, batch: int, length: int, steps: int) -> Callable[[], float]:
        """Decode `steps` tokens of each of `batch` sequences with `length` tokens of KV."""
        sequences = [self.own_sequence(length) for _ in range(batch)]
        feed = self.tokens(steps * batch)

        def run() -> float:
            start = time.perf_counter()
            for step in range(steps):
                mine = feed[step * batch : (step + 1) * batch]
                self.runner.step([(s, [t]) for s, t in zip(sequences, mine, strict=True)])
            elapsed = time.perf_counter() - start
            for sequence in sequences:
                del sequence.tokens[length:]
            return batch * steps / elapsed

        run()
        return run

    def llama_decode(
        self, batch: int, length: int, steps: int, setting: dict[str, Any]
    ) -> LlamaContext:
        """`batch` sequences of `length` tokens of KV, and room for `steps` more of each."""
        base = min(length, PREFIX_MAX)
        if self.is_recurrent:  # its sequences cannot be copied as bytes, or cut
            context = self.context((length + 9 * steps + 256) * batch, batch, setting)
            for sequence in range(batch):
                context.prefill(self.tokens(length), sequence=sequence)
            return context
        kind = (base, setting["flash"], setting["kv_type"])
        if kind not in self._prefix_llama:
            with self.context(base + 64, 1, setting) as context:
                context.prefill(self.tokens(base))
                self._prefix_llama[kind] = context.save_sequence(0)
        state = self._prefix_llama[kind].repeated(length // base)
        context = self.context((length + steps + 256) * batch, batch, setting)
        for sequence in range(batch):
            context.load_sequence(sequence, state)
        return context

    def decode_contenders(
        self, batch: int, length: int, steps: int
    ) -> dict[str, Callable[[], float]]:
        ours = self.own_decode(batch, length, steps)
        feed = self.tokens(steps * batch)

        ends: dict[int, int] = {}  # of a context's sequences, where they cannot be cut

        def timed(context: LlamaContext, count: int = steps) -> float:
            first = ends.get(id(context), length)
            start = time.perf_counter()
            for step in range(count):
                mine = feed[step * batch : (step + 1) * batch]
                context.step(mine, [first + step] * batch)
            elapsed = time.perf_counter() - start
            if self.is_recurrent:
                ends[id(context)] = first + count
            else:
                for sequence in range(batch):
                    context.cut(sequence, length)
            return batch * count / elapsed

        def recompute(setting: dict[str, Any]) -> float:
            with self.llama_decode(batch, length, steps, setting) as context:
                ends.clear()
                timed(context, 1)
                return timed(context, 4)

        name = f"decode_{length // 1024}k_b{batch}" if length >= 1024 else f"decode_b{batch}"
        context = self.llama_decode(batch, length, steps, self.choose(name, recompute))
        self._contexts.append(context)
        ends.clear()
        timed(context)
        return {"ours": ours, "llama.cpp": lambda: timed(context)}

    def greedy_hash(self) -> str:
        """The bits of a short greedy run: the same on every machine and thread count."""
        prompt = np.random.default_rng(5).integers(3, self.vocab, 64).tolist()
        out = self.runner.generate([prompt], 16)[0]
        return hashlib.sha256(np.array(out, np.int32).tobytes()).hexdigest()[:16]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench engine", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model, under a minute")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=0, help="default 5, quick 2")
    parser.add_argument("--rows", default="", help="only these rows, separated by commas")
    parser.add_argument("--long", action="store_true", help=f"also {' and '.join(LONG)}")
    parser.add_argument(
        "--model", help="GGUF to measure, or a preset of bench.models.synthetic (default: 0.6b)"
    )
    parser.add_argument("--json", help="write figures to this file")
    args = parser.parse_args(argv)
    began = time.perf_counter()
    duel = Duel(args.model, threads=args.threads, quick=args.quick)
    repeats = args.repeats or (2 if args.quick else 5)
    steps = 6 if args.quick else 24
    long = 512 if args.quick else 4096
    print(f"{duel.description}, {args.threads} threads, {kernels.isa()}; tokens/s, median [range]")
    rows: dict[str, Callable[[], dict[str, Callable[[], float]]]] = {}
    repeats_of: dict[str, int] = {}
    for name, full in PREFILLS.items():
        count = min(full, long) if args.quick else full
        rows[name] = lambda r=name, n=count: duel.prefill_contenders(r, n)
        repeats_of[name] = min(repeats, PREFILL_REPEATS.get(full, repeats))
    for batch in (1, 4, 8, 16, 32):
        enough = max(6, steps // (1 + batch // 4))  # about as many tokens in every row
        rows[f"decode_b{batch}"] = lambda b=batch, n=enough: duel.decode_contenders(b, PROMPT, n)
    for batch, n in (1, steps), (4, max(6, steps // 2)):
        rows[f"decode_4k_b{batch}"] = lambda b=batch, n=n: duel.decode_contenders(b, long, n)
    usual = [name for name in rows if args.long or name not in LONG]
    chosen = args.rows.split(",") if args.rows else usual
    if unknown := set(chosen) - set(rows):
        parser.error(f"no row {', '.join(sorted(unknown))}: there are {', '.join(rows)}")
    result: dict[str, Any] = {}
    samples: dict[str, Any] = {}
    for name, contenders in ((name, rows[name]) for name in chosen):
        measured = report.interleave(contenders(), repeats_of.get(name, repeats))
        duel.end_row()
        result[name] = report.ratio_row(measured, "ours", "llama.cpp")
        samples[name] = report.values(measured)
        print(
            f"  {name:<14} ours {measured['ours']}   llama.cpp {measured['llama.cpp']}"
            f"   ratio {result[name]['ratio']:.2f}",
            flush=True,
        )
    own: dict[str, Any] = {}
    for length in () if args.quick or args.rows else (8192, 32768):
        runs = report.interleave({"ours": duel.own_decode(1, length, steps)}, repeats)
        duel.end_row()
        own[f"decode_{length // 1024}k_b1"] = report.values(runs)["ours"]
        print(f"  decode_{length // 1024}k_b1  ours {runs['ours']}")
    for row, setting in duel.llama_settings.items():
        print(f"  llama.cpp setting for {row}: {setting}")
    details = {
        "gguf": duel.description,
        "threads": args.threads,
        "isa": kernels.isa(),
        "repeats": repeats,
        "decode_4k_context": long,
        "samples": samples,
        "own": own,
        "llama_settings": duel.llama_settings,
        "greedy_hash": duel.greedy_hash(),
        "bench_s": round(time.perf_counter() - began, 1),
    }
    print(f"  {details['bench_s']} s in all")
    duel.close()
    report.finish(result, details=details, json_path=args.json)
    return 0
