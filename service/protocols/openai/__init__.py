"""The chat and text completion routes of OpenAI, and their common envelope."""
