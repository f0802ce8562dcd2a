// Quantised activations of one step on a GPU: rule 1, as linear.cu reads them.
#pragma once

#include "gpu.h"

namespace gpu {

// Rows of groups of 32, in whole spans of four groups:
//   q      uint32 [token][span][t][block of the span][half]   k = 4t..4t+3 of a block, or 16 more
//   scale  fp32   [token][block]   NaN: a value is not finite, so that no product of the token is
//   sums   int32  [token][block]   of the q of a group
// Thus what a lane of a product reads of a span lies together. Float matrices read the fp32 rows
// themselves, and the scales.
constexpr int SPAN = 4;
constexpr int SPAN_WORDS = SPAN * ca::BLOCK / 4;

GPU_FN int64_t spans_of(int cols) { return (cols + SPAN * ca::BLOCK - 1) / (SPAN * ca::BLOCK); }

// Dword i (k = 4i..4i+3) of a block of a span.
GPU_FN int span_word(int block, int i) { return i % 4 * 8 + block * 2 + i / 4; }

}  // namespace gpu
