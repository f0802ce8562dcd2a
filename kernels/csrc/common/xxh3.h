// XXH3, 64-bit variant with a seed (little-endian hosts), written from the published description.
#pragma once

#include <cstddef>
#include <cstdint>

namespace batchengine {

uint64_t xxh3_64(const void* input, size_t size, uint64_t seed);

}  // namespace batchengine
