"""Everything that faces a user: HTTP, CLI, control socket, notifications."""
