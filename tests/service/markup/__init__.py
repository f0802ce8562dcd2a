"""Tests of the parsers of answers and of grammars."""
