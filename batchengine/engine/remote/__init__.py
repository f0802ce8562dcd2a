"""Turns that a peer computes for this daemon, and turns that this one computes for peers."""
