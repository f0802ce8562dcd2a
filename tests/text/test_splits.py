"""Where texts are split into words, by pre-tokenizer: the ids are those of llama.cpp."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from batchengine.text.encoders.llama import LlamaEncoder
from batchengine.text.vocab import Tokenizer
from batchengine.text.vocab_facts import read_facts
from tests.text.test_tokenizer import (
    CONTROL,
    NORMAL,
    USER,
    WORDS,
    byte_alphabet,
    relabelled,
    write_vocab,
)

PRES = (
    "gpt-2 smollm qwen2 qwen35 llama-bpe glm4 chatglm-bpe dbrx tekken gpt-4o minimax-m2 lfm2"
    " kimi-k2 deepseek-v3 hunyuan-dense joyai-llm hy_v4 deepseek-llm deepseek-coder youtu"
    " glm5 gigachat kanana2 hunyuan spark2_5"
)


@pytest.fixture(scope="session")
def pairs_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Any two bytes of WORDS can become one token, so ids tell where texts were split."""
    alphabet = byte_alphabet()
    used = [alphabet[byte] for byte in sorted({*"".join(WORDS).encode()})]
    pairs = [(first, second) for first in used for second in used]
    Random(1).shuffle(pairs)
    tokens = [*alphabet, *map("".join, pairs)]
    return write_vocab(
        tmp_path_factory.mktemp("vocab") / "pairs.gguf",
        "gpt2",
        [*((text, NORMAL) for text in tokens), ("</s>", CONTROL), ("<call>", USER)],
        tokenizer_pre="qwen2",
        token_merges=[" ".join(pair) for pair in pairs],
        eos_token_id=len(tokens),
    )


@pytest.mark.parametrize("pre", PRES.split())
def test_ids_are_those_of_llama_cpp(pre: str, pairs_path: Path, tmp_path: Path) -> None:
    """Every pair of a list of hostile words, and random texts; `bench tokenizer` has the rest."""
    path = relabelled(pairs_path, tmp_path / "other.gguf", pre)
    ours, theirs = Tokenizer(path), LlamaEncoder(read_facts(path), "compared")
    random = Random(pre)
    texts = ["".join(first + second for second in WORDS) for first in WORDS]
    texts += ["".join(random.choices(WORDS, k=100)) for _ in range(50)]
    for text in texts:
        for special in (False, True):
            wanted = theirs.encode(text, control=special)
            assert ours.encode(text, special=special, add_bos=False) == wanted
    theirs.close()
    ours.close()


@pytest.mark.parametrize("pre", ["qwen2", "kimi-k2", "deepseek-v3", "deepseek-llm"])
def test_a_text_in_parts_has_the_ids_of_the_whole(
    pre: str, pairs_path: Path, tmp_path: Path
) -> None:
    """Also where the split leaves some letters, and the space in front of them, as they are."""
    path = relabelled(pairs_path, tmp_path / "other.gguf", pre)
    ours, theirs = Tokenizer(path), LlamaEncoder(read_facts(path), "compared")
    text = "".join(Random(3).choices((*WORDS, " the", " a", "☃ ƻ", " 中"), k=60_000))
    assert ours.encode(text) == theirs.encode(text, control=False)
    theirs.close()
    ours.close()
