// Packs GGUF tensors into the tiles of linear/tiles.h.
#pragma once

#include "common/pool.h"
#include "common/types.h"
#include "linear/tiles.h"

namespace batchengine {

constexpr int PACK_VERSION = 2;  // recorded in the cache file: change it with any layout of tiles.h

const char* kind_name(Kind kind);
Kind kind_of(const std::string& name);                            // throws std::invalid_argument
void require_shape(Kind kind, size_t rows, size_t cols);          // throws std::invalid_argument
size_t source_bytes(Kind kind, size_t rows, size_t cols);         // the tensor's size in a GGUF file
size_t tile_bytes(Kind kind, size_t cols);
size_t packed_bytes(Kind kind, size_t rows, size_t cols);

// Throws std::invalid_argument naming the first row and block whose scale (or row and column whose
// value) is NaN or infinite, or of mxfp4 above 2^32; the destination is then unspecified.
void pack(Pool& pool, Kind kind, size_t rows, size_t cols, const uint8_t* source, uint8_t* packed);

// Row `row` as fp32, the weights' exact meaning:
//   q4_0, q5_0, q8_0, iq4_nl  RN(float(q) * d)       q4_1, q5_1  fma(float(q), d, m)
//   q2_k, q4_k, q5_k  fma(float(q * scale), d, RN(float(min) * m))
//   q3_k, q6_k, iq4_xs  RN(float(scale * q) * d)     f16, bf16, f32  the value itself
//   iq3_s       float(scale * q) * d, exact; so is that of iq3_xxs, with d / 2, and of iq2_* and iq1_*, with d / 8
//   mxfp4       float(q) * 2^(e - 128), exact, +0 for e < 2
// Where the file's d is 0, q * d is +0 (but of kinds without a weight 0, iq*).
void unpack_row(const Matrix& matrix, size_t row, float* out);

}  // namespace batchengine
