// The norm of rule 3 over a block of threads.
#pragma once

#include "gpu.h"

namespace gpu {

constexpr int NORM_VALUES = 4096;  // of a row that are held at once

// The factor by rule 3 of `width` values, value k of them `value(k)`. At least 64 threads: lane i mod 64 of
// the rule is thread i mod 64.
template <class Value>
GPU_FN float norm_factor(Value value, int width, float eps, Shared<float, NORM_VALUES>& part,
                         Shared<float, 64>& lanes) {
    float chain = 0.0f;
    for (int first = 0; first < width; first += NORM_VALUES) {  // the chains wait for no memory
        const int n = width - first < NORM_VALUES ? width - first : NORM_VALUES;
        GPU_UNROLL_4
        for (int i = thread(); i < n; i += threads()) part[i] = value(first + i);
        barrier();
        if (thread() < 64) {
            GPU_UNROLL_4
            for (int i = thread(); i < n; i += 64) {
                const float of = part[i];
                chain = ca::fma_rn(of, of, chain);
            }
        }
        barrier();
    }
    if (thread() < 64) lanes[thread()] = chain;
    barrier();
    if (warp() == 0) {  // the tree: a sum of two has the same bits in either order
        float sum = ca::add_rn(lanes[lane()], lanes[lane() + 32]);
        for (int mask = 16; mask >= 1; mask /= 2)
            sum = ca::add_rn(sum, shuffle_xor(sum, mask));
        warp_barrier();
        if (lane() == 0) lanes[0] = sum;
    }
    barrier();
    return ca::norm_factor(lanes[0], width, eps);
}

}  // namespace gpu
