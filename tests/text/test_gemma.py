"""Vocabularies of Gemma 4: ids of llama.cpp, pieces, ends of a turn, and marks that stay text."""

from __future__ import annotations

import ctypes
import importlib
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchengine.core import BatchEngineError
from batchengine.text.encoders import character_bpe, llama
from batchengine.text.encoders.character_bpe import CharacterBpeEncoder
from batchengine.text.encoders.llama import LlamaEncoder
from batchengine.text.vocab import Tokenizer
from batchengine.text.vocab_facts import VocabFacts, read_facts
from tests.text.gemma import IDS, NAMES, merged, write_gemma
from tests.text.test_tokenizer import WORDS, decode

# Tokens of users in the file, which count in every text there, but belong to answers here.
SHOWN = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<tool_response|>", '<|"|>')
TEXT = "the small fox  ran to the lake;\nthea's aaaa bbb!\n\n\n  a <td>1</td> ▁ " * 3 + "".join(
    WORDS
)


@pytest.mark.parametrize("has_words", [True, False])
def test_ids_are_those_of_llama_cpp(has_words: bool, tmp_path: Path) -> None:
    """Random tokens and merges; with and without ones that go over the end of a word."""
    random = Random(f"gemma {has_words}")
    path = write_gemma(tmp_path / "gemma.gguf", *merged(TEXT, random, has_words=has_words))
    ours, theirs = Tokenizer(path), LlamaEncoder(read_facts(path), "compared")
    texts = [TEXT, "", " ", "\n", "\n" * 50, " \n \n", "▁", "a" * 300, "<0x41>"]
    texts += ["".join(first + second for second in WORDS) for first in WORDS]
    choices = (*WORDS, " ", "the", "a", "\n", "\n\n", *IDS)
    texts += ["".join(random.choices(choices, k=200)) for _ in range(30)]
    for text in texts:
        wanted = theirs.encode(text, control=True)
        assert ours.encode(text, special=True, add_bos=False) == wanted
        if not any(mark in text for mark in SHOWN):
            wanted = theirs.encode(text, control=False)
            assert ours.encode(text, add_bos=False) == wanted
    theirs.close()


@pytest.mark.parametrize("has_words", [True, False])
def test_a_text_in_parts_has_the_ids_of_the_whole(
    has_words: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(f"parts {has_words}")
    path = write_gemma(tmp_path / "gemma.gguf", *merged(TEXT, random, has_words=has_words))
    monkeypatch.setattr(character_bpe, "_PART_CHARS", 20)
    text = "".join(random.choices((*WORDS, " the", " a"), k=20_000))
    theirs = LlamaEncoder(read_facts(path), "compared")
    assert Tokenizer(path).encode(text, add_bos=False) == theirs.encode(text, control=False)
    theirs.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gemma(tmp_path_factory.mktemp("vocab") / "gemma.gguf")


def test_texts_have_the_expected_ids(path: Path) -> None:
    tokenizer = Tokenizer(path)
    byte, a = len(NAMES), len(NAMES) + 256
    b, line, lines, space, sp_a, ab = range(a + 1, a + 7)
    bos = IDS["<bos>"]
    assert tokenizer.add_bos  # whatever the file says
    assert tokenizer.encode("ab a") == [bos, ab, sp_a]
    assert tokenizer.encode(" b  a", add_bos=False) == [space, b, space, sp_a]
    assert tokenizer.encode("\n\na\n\n\n", add_bos=False) == [lines, a, *[line] * 3]
    assert tokenizer.encode("é\0", add_bos=False) == [byte + 0xC3, byte + 0xA9, byte]
    assert [tokenizer.piece(one) for one in (sp_a, byte + 0xC3, lines)] == [b" a", b"\xc3", b"\n\n"]
    assert tokenizer.piece(IDS["<|turn>"]) == b"<|turn>"


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60))
@example("<0x00>▁<|turn>\n")
def test_encode_and_decode_return_the_same_text(path: Path, text: str) -> None:
    """But for the character that stands for a space."""
    tokenizer = Tokenizer(path)
    tokens = tokenizer.encode(text, add_bos=False)
    assert decode(tokenizer, tokens) == text.replace("▁", " ")
    assert not tokenizer.control & set(tokens)


def test_marks_of_answers_are_no_text(path: Path) -> None:
    """A message that spells one does not write it, though the file has it as a token of users."""
    tokenizer = Tokenizer(path)
    text = "".join(IDS)
    assert tokenizer.encode(text, special=True, add_bos=False) == list(IDS.values())
    assert not set(tokenizer.encode(text, add_bos=False)) & set(IDS.values())
    assert tokenizer.control == set(IDS.values())


def test_tokens_that_end_a_turn(tmp_path: Path) -> None:
    """`</s>` is text of Gemma 4, as a closing tag of HTML."""
    path = write_gemma(tmp_path / "gemma.gguf", ["a", "b", "ab", "</s>"], ["a b"])
    tokenizer = Tokenizer(path)
    ends = {IDS["<turn|>"], IDS["<eos>"], IDS["<|tool_response>"]}
    assert tokenizer.eog == read_facts(path).closes == ends
    struck = tokenizer.vocab_size - 1
    assert (tokenizer.token_text(struck), tokenizer.piece(struck)) == ("</s>", b"</s>")
    assert struck not in tokenizer.control
    assert struck not in tokenizer.encode("</s>", special=True)


def test_a_file_that_leaves_bytes_out_needs_llama_cpp(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = read_facts(path)
    assert character_bpe.why_unknown(facts) == ""
    byte = facts.tokens.index(b"<0xFE>")
    facts.tokens[byte] = b"other"
    assert character_bpe.why_unknown(facts) == "it has no token <0xFE>"
    monkeypatch.setattr(llama, "_library", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "tokenizers is not installed" in character_bpe.why_unknown(facts)


def test_a_file_without_merges_is_refused(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    data = path.read_bytes()
    other.write_bytes(data.replace(b"tokenizer.ggml.merges", b"tokenizer.ggml.mergez"))
    with pytest.raises(BatchEngineError, match=r"no tokenizer\.ggml\.merges"):
        read_facts(other)


def test_a_merge_of_what_is_no_token_is_left_out(tmp_path: Path) -> None:
    path = write_gemma(tmp_path / "gemma.gguf", ["a", "b"], ["a b", "ab a", "broken"])
    facts: VocabFacts = read_facts(path)
    assert len(CharacterBpeEncoder(facts).encode("abab", control=False)) == 4


def test_pieces_and_ends_are_those_of_llama_cpp(tmp_path: Path) -> None:
    """Of every token; none of the library's flags hides those of control."""
    random = Random("pieces")
    tokens, merges = merged(TEXT, random, has_words=False)
    path = write_gemma(tmp_path / "gemma.gguf", [*tokens, "</s>"], merges)
    ours, theirs = Tokenizer(path), LlamaEncoder(read_facts(path), "compared")
    api, vocab, room = importlib.import_module("llama_cpp.llama_cpp"), theirs._vocab, 256
    for token in range(ours.vocab_size):
        piece = ctypes.create_string_buffer(room)
        count = api.llama_token_to_piece(vocab, token, piece, room, 0, True)
        assert ours.piece(token) == piece.raw[:count]
        assert (token in ours.eog) == api.llama_vocab_is_eog(vocab, token)
    assert ours.bos == api.llama_vocab_bos(vocab)
    assert ours.add_bos == api.llama_vocab_get_add_bos(vocab)
    theirs.close()
