"""Recurrent states of the sessions of one lane."""

from __future__ import annotations

from batchengine.kv.states.lane_states import EntryStates, LaneStates, StateChores
from batchengine.kv.states.pool import StatePool, save_interval

__all__ = ["EntryStates", "LaneStates", "StateChores", "StatePool", "save_interval"]
