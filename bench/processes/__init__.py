"""Engines in processes of their own that a bench kills, and what must hold after each death."""
