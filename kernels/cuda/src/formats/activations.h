// Quantised activations of one step on a GPU: rule 1, as linear.cu reads them.
#pragma once

#include "gpu.h"

namespace gpu {

// Rows of groups of 32, in whole spans of four groups:
//   q      uint32 [token][span][t][block of the span][half]   k = 4t..4t+3 of a block, or 16 more
//   scale  fp32   [token][block]   NaN: a value is not finite, so that no product of the token is
//   sums   int32  [token][block]   of the q of a group
// Thus what a lane of a product reads of a span lies together. Groups past the last of a row have any
// value. Float matrices read the fp32 rows themselves, and the scales.
constexpr int SPAN = 4;
constexpr int SPAN_WORDS = SPAN * ca::BLOCK / 4;

GPU_FN int64_t spans_of(int cols) { return (cols + SPAN * ca::BLOCK - 1) / (SPAN * ca::BLOCK); }

// Dword i (k = 4i..4i+3) of a block of a span.
GPU_FN int span_word(int block, int i) { return i % 4 * 8 + block * 2 + i / 4; }

struct Quantised {
    Out<uint32_t> q;
    Out<float> scale;
    Out<int32_t> sums;
};

// Quantises a group of a row of `width` values, of which the k-th is `value(k)`: eight lanes a group. All
// lanes of a warp are here; those of a group that is not there write nothing.
template <class Value>
GPU_FN void quantise_group(Value value, int width, int64_t token, int group, bool is_there,
                           const Quantised& to) {
    const int word = lane() % 8, first = group * ca::BLOCK + word * 4;
    float x[4];
    uint32_t largest = 0;
    GPU_UNROLL
    for (int i = 0; i < 4; i++) x[i] = is_there && first + i < width ? value(first + i) : 0.0f;
    GPU_UNROLL
    for (int i = 0; i < 4; i++)
        largest = ca::magnitude_bits(x[i]) > largest ? ca::magnitude_bits(x[i]) : largest;
    for (int mask = 4; mask >= 1; mask /= 2) {
        const uint32_t other = shuffle_xor(largest, mask);
        largest = other > largest ? other : largest;
    }
    const ca::Group kind = ca::group_kind(largest);
    const float t = kind == ca::Group::used ? ca::group_scale(largest) : 1.0f;
    const float inverse = kind == ca::Group::used ? ca::div_rn(1.0f, t) : 0.0f;
    uint32_t bytes = 0;
    int32_t sum = 0;
    GPU_UNROLL
    for (int i = 0; i < 4; i++) {
        const int32_t n =
            kind == ca::Group::nonfinite ? 0 : ca::round_to_int(ca::mul_rn(x[i], inverse));
        bytes |= (static_cast<uint32_t>(n) & 255u) << 8 * i;
        sum += n;
    }
    for (int mask = 4; mask >= 1; mask /= 2) sum += shuffle_xor(sum, mask);
    if (!is_there) return;
    const int64_t at = token * spans_of(width) * SPAN + group;
    to.q[at / SPAN * SPAN_WORDS + span_word(group % SPAN, word)] = bytes;
    if (word == 0) {
        to.scale[at] = kind == ca::Group::nonfinite ? ca::canonical_nan() : t;
        to.sums[at] = sum;
    }
}

}  // namespace gpu
