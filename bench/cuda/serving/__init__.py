"""A whole engine with a lane of a GPU beside a lane of the CPU: moves, and co-execution."""
