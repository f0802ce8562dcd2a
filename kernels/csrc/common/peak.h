// Measured peaks of this machine, with which the kernel benches compare.
#pragma once

#include <cstddef>

namespace batchengine {

// Giga-operations per second (a multiply and an add count as two) of the widest int8 dot
// instruction this machine has, on `threads` threads for about `seconds`.
double peak_int8_gops(int threads, double seconds);

// GB/s of sequential reads, each thread over its own buffer of `bytes` bytes, best of `repeats`.
double peak_read_gbps(int threads, std::size_t bytes, int repeats);

}  // namespace batchengine
