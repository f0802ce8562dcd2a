"""Which lane computes a session: routing decisions, their log, and migration."""
