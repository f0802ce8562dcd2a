"""GPU kernels of the canonical arithmetic: CUDA C++ in `src`, compiled at run time.

Every kernel gives the bits of its scalar definition (docs/numerics.md). Nothing here knows a
request, a session or a file of the store.
"""
