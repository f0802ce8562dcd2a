// Quantised activations of one step on a GPU: rule 1, as linear.cu reads them.
#pragma once

#include "gpu.h"

namespace gpu {

// Rows of `blocks` groups of 32:
//   q          int8   [token][32 * blocks]
//   scale      fp32   [token][blocks]
//   sums       uint32 [token][blocks]   sums of q[0..15] and of q[16..31], as the low and the high int16
//   nonfinite  uint8  [token]           1: every product of this token is NaN
// Float matrices read the fp32 rows themselves.

GPU_FN uint32_t packed_sums(int32_t first, int32_t second) {
    return (static_cast<uint32_t>(first) & 0xFFFFu) | static_cast<uint32_t>(second) << 16;
}
GPU_FN int32_t first_sum(uint32_t sums) { return static_cast<int16_t>(sums & 0xFFFFu); }
GPU_FN int32_t second_sum(uint32_t sums) { return static_cast<int16_t>(sums >> 16); }

}  // namespace gpu
