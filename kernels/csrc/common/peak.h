// Measured peaks of this machine, with which the kernel benches compare.
#pragma once

#include <cstddef>

namespace batchengine {

// Giga-operations per second (a multiply and an add count as two) of the int8 dots of the level in
// use, those of vectors where it has tiles, on `threads` threads for about `seconds`: the sum of what
// each did in its best 5 ms. 0 where a level has none.
double peak_int8_gops(int threads, double seconds);

// The same of fp32 fma, the roof of float matrices.
double peak_float_gops(int threads, double seconds);

// GB/s of sequential reads, each thread over its own buffer of `bytes` bytes, best of `repeats`.
// The buffers must be far beyond the last cache, or the figure is that of the cache. `bytes` 0: for
// all threads together 16 times the last cache that the machine reports, at least 512 MiB.
double peak_read_gbps(int threads, std::size_t bytes, int repeats);

}  // namespace batchengine
