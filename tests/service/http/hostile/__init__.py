"""Hostile requests over HTTP, against a fake engine."""

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
