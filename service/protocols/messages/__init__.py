"""The protocol of Anthropic's Messages: requests, content blocks, events."""
