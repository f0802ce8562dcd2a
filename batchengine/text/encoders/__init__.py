"""Encoders of text by one vocabulary: BPE, SentencePiece, and llama.cpp for the rest."""
