"""Files that lie: builders of small GGUF files, honest and hostile, written byte by byte."""
