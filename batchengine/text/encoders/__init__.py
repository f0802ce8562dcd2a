"""Encoders of text by one vocabulary: byte-level BPE, SentencePiece, and llama.cpp for the rest."""
