// The sum of squares of CA-3 rule 3 on V16. Included by one unit per instruction set.
#pragma once

#include "common/simd.h"

namespace {

// The last, incomplete group of a span, padded with a neutral value.
struct Tail {
    float lane[16];
    Tail(const float* x, size_t count, float neutral) {
        for (size_t i = 0; i < 16; i++) lane[i] = i < count ? x[i] : neutral;
    }
};

// Lanes i mod 64 kept in four vectors -> one number: 32, 16, 8, 4, 2, 1.
SIMD_FN float tree_64(const V16 lanes[4]) {
#if defined(BATCHENGINE_FREE_ORDER) && defined(SIMD_AVX512)
    return _mm512_reduce_add_ps(((lanes[0] + lanes[2]) + (lanes[1] + lanes[3])).v);
#endif
    return vtree((lanes[0] + lanes[2]) + (lanes[1] + lanes[3]));
}

SIMD_FN float sum_of_squares(const float* x, size_t n) {
    V16 lanes[4] = {vzero(), vzero(), vzero(), vzero()};
    size_t i = 0;
    for (; i + 64 <= n; i += 64)
        for (size_t j = 0; j < 4; j++) {
            const V16 v = vload(x + i + 16 * j);
            lanes[j] = vfma(v, v, lanes[j]);
        }
    // fma(0, 0, lane) leaves a lane as it is, so lanes past the end may stay untouched.
    for (size_t j = 0; i < n; i += 16, j++) {
        const V16 v = n - i >= 16 ? vload(x + i) : vload(Tail(x + i, n - i, 0.0f).lane);
        lanes[j] = vfma(v, v, lanes[j]);
    }
    return tree_64(lanes);
}

}  // namespace
