"""Engines in processes of their own that a bench kills, and the checks after each kill."""
