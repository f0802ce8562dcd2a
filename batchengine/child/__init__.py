"""Child processes: how each is started, and what it gives up."""
