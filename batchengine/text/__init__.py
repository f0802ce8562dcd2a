"""Text to token ids and back, and chat messages to one prompt text, for one model.

Owns the vocabulary of the loaded GGUF (through llama.cpp, loaded lazily and without weights), the
streaming detokeniser, stop strings, the one thread on which all text work runs, and the template's
child process with its limits. Refuses to run a template in this process, to take templates from a
request, and to let text of a request become a control token.
"""
