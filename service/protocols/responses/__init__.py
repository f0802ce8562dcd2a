"""OpenAI Responses: items of input and output, and the events of a stream."""
