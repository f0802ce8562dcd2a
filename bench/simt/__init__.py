"""A GPU emulated on the CPU, and kernels with planted faults."""
