"""Vocabularies that leave a choice, read as llama.cpp reads them; and those that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchengine.core import BatchEngineError
from batchengine.text.control_tokens import ControlGuard
from batchengine.text.encoders.llama import LlamaEncoder
from batchengine.text.vocab import Tokenizer
from batchengine.text.vocab_facts import read_facts
from tests.text.test_tokenizer import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER,
    byte_alphabet,
    write_vocab,
)

BYTES = [(character, NORMAL) for character in byte_alphabet()]


def compare(path: Path, text: str) -> list[int]:
    """The ids of a text with control tokens, which are those of llama.cpp."""
    ours, theirs = Tokenizer(path), LlamaEncoder(read_facts(path), "compared")
    wanted = theirs.encode(text, control=True)
    assert ours.encode(text, special=True, add_bos=False) == wanted
    theirs.close()
    ours.close()
    return wanted


def test_tokens_without_text_are_no_words(tmp_path: Path) -> None:
    tokens = [*BYTES, ("", NORMAL), ("th", NORMAL), ("", NORMAL)]
    path = write_vocab(
        tmp_path / "v.gguf", "gpt2", tokens, tokenizer_pre="qwen2", token_merges=["t h"]
    )
    assert compare(path, "th") == [257]
    assert Tokenizer(path).piece(256) == b""


def test_of_special_tokens_the_one_of_most_bytes_counts(tmp_path: Path) -> None:
    """Not of most characters: both may begin in the same text."""
    tokens = [*BYTES, ("<ab", CONTROL), ("b｜｜", CONTROL)]
    path = write_vocab(
        tmp_path / "v.gguf", "gpt2", tokens, tokenizer_pre="qwen2", token_merges=["a b"]
    )
    assert compare(path, "<ab｜｜") == [ord("<"), ord("a"), 257]


def test_tokens_of_phi_3_take_white_space_along(tmp_path: Path) -> None:
    tokens = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    tokens += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    tokens += [("▁", NORMAL), ("a", NORMAL), ("▁a", NORMAL)]
    tokens += [("<|user|>", CONTROL), ("<|end|>", USER), ("<|endoftext|>", CONTROL)]
    user, end = 262, 263
    text = "<|user|>\n a \t<|end|>\v\n<|user|>a<s> \na<|endoftext|> a"
    path = write_vocab(tmp_path / "phi.gguf", "llama", tokens, name="Phi-3 mini, as a llama")
    found = compare(path, text)
    assert found[:5] == [user, 261, 259, 3 + 9, end]
    tokenizer = Tokenizer(path)
    chat = {"content": "<|user|>"}  # forged, so the template's text is encoded part by part
    ids = ControlGuard(tokenizer).encode_chat(
        chat,
        lambda values: f"<|user|>\n a{values['content']}",  # type: ignore[index]
    )
    assert ids[:3] == [tokenizer.bos, user, 261]
    tokenizer.close()
    path = write_vocab(tmp_path / "other.gguf", "llama", tokens, name="another llama")
    assert compare(path, text)[:5] != found[:5]


@pytest.mark.parametrize(
    ("model", "tokens", "keys", "why"),
    [
        ("gpt2", BYTES, {"tokenizer_pre": "qwen2"}, "no tokenizer.ggml.merges"),
        (
            "llama",
            [(f"<0x{byte:02X}>", BYTE) for byte in range(256)],
            {"token_scores": [0.0] * 9},
            "tokenizer.ggml.scores",
        ),
    ],
    ids=["no merges", "few scores"],
)
def test_what_an_encoder_would_miss_is_refused_when_the_file_is_read(
    model: str, tokens: list[tuple[str, int]], keys: dict[str, object], why: str, tmp_path: Path
) -> None:
    path = write_vocab(tmp_path / "v.gguf", model, tokens, **keys)
    with pytest.raises(BatchEngineError, match=why) as caught:
        read_facts(path)
    assert caught.value.code == "BE1501"


@pytest.mark.parametrize(
    ("pre", "is_whole"),
    [
        *(("glm4", True), ("chatglm-bpe", False), ("lfm2", True), ("pixtral", True)),
        *(("glm5", True), ("youtu", True), ("kimi-k2", False), ("deepseek-v3", False)),
        *(("dbrx", False), ("refact", False), ("granite-docling", False)),
    ],
)
def test_words_that_are_tokens_stay_whole_where_the_pre_tokenizer_says_so(
    pre: str, is_whole: bool, tmp_path: Path
) -> None:
    """Those of GLM 4, LFM2 and Nemotron-H; older ones of GLM, and those of Granite, are merged."""
    tokens = [*BYTES, ("abcd", NORMAL), ("th", NORMAL)]
    path = write_vocab(tmp_path / "v.gguf", "gpt2", tokens, tokenizer_pre=pre, token_merges=["t h"])
    assert (256 in compare(path, "abcd th 12345")) == is_whole


def test_the_marks_of_the_next_message_end_an_answer_of_glm(tmp_path: Path) -> None:
    """Whatever kinds the file gives them, and also where it names the end of a text alone."""
    marks = ["<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"]
    tokens = [*BYTES, ("th", NORMAL), *((mark, USER) for mark in marks)]
    path = write_vocab(
        tmp_path / "v.gguf",
        "gpt2",
        tokens,
        tokenizer_pre="glm4",
        token_merges=["t h"],
        eos_token_id=257,
    )
    facts = read_facts(path)
    assert facts.ends == facts.closes == {257, 260, 262}
    assert {260, 262} <= Tokenizer(path).control
    others = [*BYTES, ("th", NORMAL), ("<|end|>", CONTROL), ("<|user|>", CONTROL)]
    path = write_vocab(
        tmp_path / "phi.gguf", "gpt2", others, tokenizer_pre="qwen2", token_merges=["t h"]
    )
    assert read_facts(path).ends == {257}


@pytest.mark.parametrize(
    ("pre", "begins"),
    [("lfm2", True), ("pixtral", True), ("dbrx", False), ("refact", False)],
)
def test_texts_begin_with_bos_where_the_pre_tokenizer_says_so(
    pre: str, begins: bool, tmp_path: Path
) -> None:
    """Unless the file says otherwise."""
    tokens = [*BYTES, ("th", NORMAL), ("<s>", CONTROL)]
    keys: dict[str, object] = {"tokenizer_pre": pre, "token_merges": ["t h"], "bos_token_id": 257}
    path = write_vocab(tmp_path / "v.gguf", "gpt2", tokens, **keys)
    assert Tokenizer(path).encode("th") == [257] * begins + [256]
    path = write_vocab(tmp_path / "no.gguf", "gpt2", tokens, **keys, add_bos_token=False)
    assert Tokenizer(path).encode("th") == [256]
