"""The pocket model: a tiny trained model, the language it speaks, and the programs that make it.

Owns the shipped weights, their generator, trainer, exporter, evaluation and oracle. Nothing the
daemon imports; only `train` and `export` need torch, only `bpe` needs the tokenizers package.
"""
