"""What benches run: synthetic models, a hash in place of a model, llama.cpp, one sequence alone."""
