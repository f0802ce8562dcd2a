"""`python -m bench tokenizer`: ids of this package's encoders against llama.cpp's.

Every way of splitting text is compared on all code points between letters, signs and digits, on
random mixtures of what splits treat apart, and on this repository's own texts: more than a million
characters each, with the vocabulary of `--vocab`, whose `tokenizer.ggml.pre` is replaced. One
difference makes the bench fail. Start time and characters per second stand beside.
"""

from __future__ import annotations

import argparse
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from batchengine.text.encoders.bpe import SPLITS
from batchengine.text.encoders.llama import LlamaEncoder
from batchengine.text.vocab import Tokenizer
from batchengine.text.vocab_facts import read_facts
from bench import report

ROOT = Path(__file__).resolve().parents[2]
KEY = b"tokenizer.ggml.pre"
FRAMES = ("a{0}a ", "!{0}!{0}{0} ", "A{0}b1{0}2\n", "it'{0}e x'{0} ", "{0}\n{0}  {0}x", "{0} ")
WORDS = (
    *(
        "the",
        "Hello",
        "WORLD",
        "camelCase",
        "a",
        "B",
        "Z",
        "é",
        "ß",
        "Ж",
        "ж",
        "中",
        "한",
        "ا",
        "ƻ",
    ),
    *(
        "ǅ",
        "ʰ",
        "e\u0301",
        "\u093f",
        "\u200d",
        "\u200b",
        "ſ",
        "K",
        "İ",
        "1",
        "9",
        "12345",
        "²",
        "Ⅷ",
    ),
    *("٣", "!", ".", "/", "-", "_", "$", "€", "😀", " ", "  ", "\n", "\r", "\r\n", "\t", "\x0b"),
    *("\u00a0", "\u3000", "\u2028", "\x85", "'s", "'S", "'ll", "'LL", "'Re", "'", "''", "'ſ", "\0"),
    *("\x1f", "\ufffd", "\U000e0001", "▁", "<|im_end|>", "<|endoftext|>", "<tool_call>", "<|im_"),
)


def texts(frames: int) -> Iterator[tuple[str, str]]:
    """(name, text) of every comparison."""
    points = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    for frame in FRAMES[:frames]:
        yield f"all code points in {frame!r}", "".join(frame.format(point) for point in points)
    for seed in range(4):
        yield f"random words {seed}", "".join(Random(seed).choices(WORDS, k=50_000))
    own = sorted(
        p for ending in ("*.py", "*.md") for p in ROOT.rglob(ending) if ".venv" not in p.parts
    )
    yield "this repository", "\n".join(path.read_text() for path in own)[:1_500_000]


def relabelled(path: Path, to: Path, pre: str) -> Path:
    """A copy of a vocabulary whose texts are split as those of `pre` are."""
    data = path.read_bytes()
    at = data.index(KEY) + len(KEY) + 4
    end = at + 8 + struct.unpack_from("<Q", data, at)[0]
    head = data[:8] + struct.pack("<Q", 0) + data[16:at]  # no tensors: their offsets would be wrong
    to.write_bytes(head + struct.pack("<Q", len(pre)) + pre.encode() + data[end:])
    return to


def compare(path: Path, frames: int) -> dict[str, float]:
    """Figures of one vocabulary; the number of differing texts is one."""
    began = time.perf_counter()
    ours = Tokenizer(path)
    read_ms = (time.perf_counter() - began) * 1e3
    ours.prepare()
    start_ms = (time.perf_counter() - began) * 1e3
    began = time.perf_counter()
    theirs = LlamaEncoder(read_facts(path), "compared")
    llama_start_ms = (time.perf_counter() - began) * 1e3
    characters, differing, seconds, llama_seconds = 0, 0, 0.0, 0.0
    for name, text in texts(frames):
        for control in (False, True) if name.startswith("random") else (False,):
            began = time.perf_counter()
            ids = ours.encode(text, special=control, add_bos=False)
            middle = time.perf_counter()
            wanted = theirs.encode(text, control=control)
            seconds += middle - began
            llama_seconds += time.perf_counter() - middle
            characters += len(text)
            if ids != wanted:
                differing += 1
                print(f"  differs: {name}")
    theirs.close()
    ours.close()
    return {
        "characters": characters,
        "differing": differing,
        "read_ms": round(read_ms, 1),
        "start_ms": round(start_ms, 1),
        "llama_start_ms": round(llama_start_ms, 1),
        "mchars_per_s": round(characters / seconds / 1e6, 3),
        "llama_mchars_per_s": round(characters / llama_seconds / 1e6, 3),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench tokenizer", description=__doc__)
    parser.add_argument("--vocab", type=Path, default=ROOT / "pocket" / "pocket-q4_0.gguf")
    parser.add_argument(
        "--pre", nargs="*", default=sorted({v: k for k, v in SPLITS.items()}.values())
    )
    parser.add_argument("--frames", type=int, default=len(FRAMES))
    parser.add_argument("--json")
    options = parser.parse_args(arguments)
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for pre in options.pre:
            path = relabelled(options.vocab, Path(folder) / "vocab.gguf", pre)
            rows[pre] = compare(path, options.frames)
            print(f"{pre:<18}", rows[pre], flush=True)
    failed = sum(1 for row in rows.values() if row["differing"])
    result = {
        "splits": len(rows),
        "differing": failed,
        "characters": sum(r["characters"] for r in rows.values()),
    }
    report.finish(result, details=rows, json_path=options.json)
    return 1 if failed else 0
