"""Decisions as pure functions over frozen views: what a lane computes next, which lane, what a
step costs."""
