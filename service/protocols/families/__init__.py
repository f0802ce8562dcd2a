"""Answers in the markup of a model's family: parsers, and the grammars of calls."""
