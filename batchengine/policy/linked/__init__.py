"""Decisions over several daemons: pipelines, rings, layouts of a session, routes of pages."""
