"""Routes that llama-server has beside those of OpenAI."""
