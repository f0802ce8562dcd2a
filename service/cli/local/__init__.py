"""Daemons that a command starts itself and stops: `chat MODEL.gguf`, the demos, the cluster."""
