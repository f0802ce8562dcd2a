"""Markups whose calls have the name of the tool in front of a mark: DeepSeek and Kimi."""
