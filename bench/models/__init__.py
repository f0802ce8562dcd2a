"""Models of benches: synthetic GGUFs, a hash in place of a model, llama.cpp, a local runner."""
