"""Masks of constrained answers, computed in a process of its own.

`matchers` is the engine's side: a matcher per turn, and the process that computes. `process` is
that process. What a grammar means is in `batchengine.text.grammar`.
"""
