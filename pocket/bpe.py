"""The vocabulary of the pocket model: trained byte-level BPE, five special tokens.

Owns the file form (JSON: tokens, kinds, merges) and the two ways to get one: train it on the
generated language, or read it back from a GGUF file. Needs the `train` extra.

    python -m pocket.bpe vocab.json [--size 2048]
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path

import gguf
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from pocket import generate, words
from pocket.stories import capital

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CALL_START, CALL_END = "<tool_call>", "</tool_call>"
SPECIAL = (END_OF_TEXT, TURN_START, TURN_END, CALL_START, CALL_END)
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # llama_token_type

# llama.cpp's pre-tokenizer "qwen2": contractions, words, single digits, punctuation, white space.
PRE_TOKENIZER = "qwen2"
_SPLIT = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, their kinds, and merges in order ("a b")."""

    tokens: list[str]
    kinds: list[int]
    merges: list[str]

    def id(self, token: str) -> int:
        """Id of a token by its stored text."""
        return self.tokens.index(token)

    def save(self, path: Path) -> None:
        """Write the JSON form."""
        path.write_text(json.dumps(asdict(self), ensure_ascii=False), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        """Read the JSON form, or the tokenizer keys of a GGUF file."""
        if path.suffix != ".gguf":
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        fields = gguf.GGUFReader(path).fields
        return cls(
            fields["tokenizer.ggml.tokens"].contents(),
            fields["tokenizer.ggml.token_type"].contents(),
            fields["tokenizer.ggml.merges"].contents(),
        )

    def encoder(self) -> Tokenizer:
        """A fast encoder; special tokens in the text count."""
        plain = {
            token: index
            for index, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if kind == NORMAL
        }
        pairs = [(a, b) for a, b in (merge.split(" ") for merge in self.merges)]
        encoder = _bare(models.BPE(vocab=plain, merges=pairs))
        encoder.add_special_tokens(
            [t for t, kind in zip(self.tokens, self.kinds, strict=True) if kind != NORMAL]
        )
        return encoder


def _bare(model: models.BPE | None = None) -> Tokenizer:
    encoder = Tokenizer(model or models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    encoder.decoder = decoders.ByteLevel()
    return encoder


def corpus(rng: random.Random, conversations: int) -> list[str]:
    """Texts to train on: turns as the model sees them, and every listed word more than once."""
    texts = [
        f"{turn.role}\n{turn.text}".replace(CALL_START, "").replace(CALL_END, "")
        for _ in range(conversations)
        for turn in generate.conversation(rng, 400)
    ]
    for _ in range(20):
        shuffled = rng.sample(words.LISTED, len(words.LISTED))
        texts += [" ".join(shuffled), ", ".join(map(capital, shuffled[:60]))]
    return texts


def train(size: int = 2048, seed: int = 7, conversations: int = 2500) -> Vocabulary:
    """A vocabulary of `size` tokens: 256 bytes, merges of the corpus, the special tokens last."""
    encoder = _bare()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    encoder.train_from_iterator(corpus(random.Random(f"bpe {seed}"), conversations), trainer)
    stored = json.loads(encoder.to_str())["model"]
    tokens = sorted(stored["vocab"], key=stored["vocab"].__getitem__)
    kinds = [NORMAL] * len(tokens) + [CONTROL] * 3 + [USER_DEFINED] * 2
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in stored["merges"]]
    return Vocabulary([*tokens, *SPECIAL], kinds, merges)


def main() -> None:
    """Train and write a vocabulary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    vocabulary = train(options.size, options.seed)
    vocabulary.save(options.out)
    print(f"{len(vocabulary.tokens)} tokens, {len(vocabulary.merges)} merges: {options.out}")


if __name__ == "__main__":
    main()
