"""Turns that ended, and what goes on behind them."""
