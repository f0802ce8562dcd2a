// The work of one head of a gated delta network over the tokens of one entry, per instruction set.
//
// delta_scalar.cpp is the definition of both functions; delta_body.h repeats them on vectors. Pointers
// are those of the first token, and rows are a stride of values apart.
#pragma once

#include <cstddef>

#include "common/dispatch.h"

namespace batchengine {

// The convolution of the head_dim channels of one head, silu, and for q and k the L2 norm.
struct ConvHead {
    const float* x;  // inputs
    size_t x_stride;
    const float* before;  // the conv_kernel - 1 inputs before them, the oldest first
    size_t before_stride;
    const float* weights;  // [head_dim][conv_kernel]
    size_t conv_kernel;
    size_t head_dim;
    size_t tokens;
    bool is_normed;
    float eps;
    float* out;
    size_t out_stride;
};

namespace {

// Input j of those that token t takes, j = 0 being the oldest.
[[maybe_unused]] inline const float* conv_input(const ConvHead& head, size_t t, size_t j) {
    const size_t i = t + j, n = head.conv_kernel - 1;
    return i < n ? head.before + i * head.before_stride : head.x + (i - n) * head.x_stride;
}

}  // namespace

// The recurrence of one value head, the norm of its outputs, and the gate.
struct StateHead {
    const float* q;
    const float* k;
    const float* v;
    size_t stride;  // of q, k and v
    const float* z;
    size_t z_stride;
    const float* decay;  // one per token
    const float* beta;   // one per token
    const float* from;   // the state before, of rows `from_stride` apart: 0 if all are one row of zeros
    size_t from_stride;
    float* to;  // the state after, of rows head_dim apart
    const float* norm;
    float eps;
    size_t head_dim;
    size_t tokens;
    float* out;
    size_t out_stride;
    float* scratch;  // of head_dim * head_dim values, aligned to cache lines
};

struct DeltaKernels {
    void (*convolve)(const ConvHead& head);
    void (*recur)(const StateHead& head);
};

extern const DeltaKernels delta_scalar;
extern const DeltaKernels delta_avx2;
extern const DeltaKernels delta_avx512;
extern const DeltaKernels delta_neon;

inline const DeltaKernels& delta_kernels() {
#if defined(BATCHENGINE_X86)
    if (vector_level() == Level::avx512) return delta_avx512;
    if (level() == Level::avx2) return delta_avx2;
#elif defined(BATCHENGINE_ARM)
    if (level() != Level::scalar) return delta_neon;
#endif
    return delta_scalar;
}

}  // namespace batchengine
