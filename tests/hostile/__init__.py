"""Builders of small GGUF files, valid and hostile, written byte by byte."""
