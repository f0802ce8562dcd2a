"""What the compilers make of the kernels."""
