"""Agents that use a daemon: their configuration, and its speed as they see it."""
