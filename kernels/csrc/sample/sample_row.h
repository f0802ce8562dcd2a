// The parameters of one row as the kernel `sample` of a GPU reads them.
#pragma once

#include "common/ca.h"

namespace batchengine {

// Tokens of the history and of biases are below the vocabulary.
struct alignas(8) SampleRow {
    float temperature;
    float top_p;  // 1: all
    float min_p;  // 0: all
    float repetition;
    float frequency;
    float presence;
    int32_t top_k;     // 0: all
    int32_t logprobs;  // -1: none, 0: of the token, n: and of the n best, at most 32
    uint64_t seed;
    uint64_t position;
    uint32_t draw;
    int32_t first_history;  // index of its first token in `history`
    int32_t n_history;
    int32_t first_bias;  // index of its first bias
    int32_t n_bias;
    int32_t first_mask;  // index of the first word of its mask; -1: none
};
static_assert(sizeof(SampleRow) == 72);

}  // namespace batchengine
