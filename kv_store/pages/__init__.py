"""Sealed pages: their index, slots, sealing, loading and maintenance."""
