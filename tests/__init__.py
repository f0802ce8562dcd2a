"""The default suite: no network, no accelerator, nothing outside the repository."""
