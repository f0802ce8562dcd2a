"""Named sessions: operations on them, and their recovery after a restart."""
