"""Text to token ids and back, and chat messages to one prompt text, for one model.

Owns the vocabulary of the loaded GGUF (through llama.cpp, loaded lazily and without weights), the
streaming detokeniser, stop strings, and the processes in which texts are tokenised and templates
run. Refuses to do either in this process, to take templates from a
request, and to let text of a request become a control token.
"""
