"""Answers in the markup of a model: parsers, and the grammars of calls."""
