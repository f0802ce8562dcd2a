// The work of recurrent mixers over the tokens of one entry, for one head or one run of channels, per
// instruction set.
//
// mixer_scalar.cpp is the definition of these functions; mixer_body.h repeats them on vectors. Pointers
// are those of the first token, and rows are a stride of values apart.
#pragma once

#include <cstddef>

#include "common/dispatch.h"

namespace batchengine {

constexpr size_t CONV_RUN = 128;  // channels that are convolved together, where they have no heads

// The convolution of n channels, at most STATE_HEAD_DIM_MAX, and silu; for a head of q or k of a delta
// network the L2 norm.
struct ConvRun {
    const float* x;  // inputs
    size_t x_stride;
    const float* before;  // the conv_kernel - 1 inputs before them, the oldest first
    size_t before_stride;
    const float* weights;  // [n][conv_kernel]
    const float* bias;     // [n], or null
    size_t conv_kernel;
    size_t n;
    size_t tokens;
    bool is_normed;
    float eps;
    float* out;
    size_t out_stride;
};

namespace {

// Input j of those that token t takes, j = 0 being the oldest.
[[maybe_unused]] inline const float* conv_input(const ConvRun& run, size_t t, size_t j) {
    const size_t i = t + j, n = run.conv_kernel - 1;
    return i < n ? run.before + i * run.before_stride : run.x + (i - n) * run.x_stride;
}

}  // namespace

// The recurrence of one value head, and its gate; of a delta network the norm of its outputs, too.
struct StateHead {
    const float* q;
    const float* k;
    const float* v;
    size_t stride;  // of q, k and v
    const float* z;
    size_t z_stride;
    const float* from;  // the state before, of rows `from_stride` apart: 0 if all are one row of zeros
    size_t from_stride;
    float* to;  // the state after, of rows head_dim apart
    size_t key_dim;
    size_t head_dim;  // of the values
    size_t tokens;
    float* out;
    size_t out_stride;
    float* scratch;  // of key_dim * head_dim values, aligned to cache lines
    const float* decay;   // one per token
    const float* factor;  // one per token: beta of a delta network, the step size of Mamba-2
    const float* norm;    // of delta networks
    float eps;
    float direct;  // of Mamba-2: D of the head
};

// A short convolution of n channels, at most STATE_HEAD_DIM_MAX, of the products b * x, times c.
struct GatedConvRun {
    const float* b;
    const float* c;
    const float* x;
    size_t stride;  // of b, c and x
    const float* before;  // the conv_kernel - 1 products before them, the oldest first
    size_t before_stride;
    const float* weights;  // [n][conv_kernel]
    size_t conv_kernel;
    size_t n;
    size_t tokens;
    float* after;  // the last conv_kernel - 1 products
    size_t after_stride;
    float* out;
    size_t out_stride;
};

struct MixerKernels {
    void (*convolve)(const ConvRun& run);
    void (*recur_delta)(const StateHead& head);
    void (*recur_mamba2)(const StateHead& head);
    void (*convolve_gated)(const GatedConvRun& run);
};

extern const MixerKernels mixer_scalar;
extern const MixerKernels mixer_avx2;
extern const MixerKernels mixer_avx512;
extern const MixerKernels mixer_neon;

inline const MixerKernels& mixer_kernels() {
#if defined(BATCHENGINE_X86)
    if (vector_level() == Level::avx512) return mixer_avx512;
    if (level() == Level::avx2) return mixer_avx2;
#elif defined(BATCHENGINE_ARM)
    if (level() != Level::scalar) return mixer_neon;
#endif
    return mixer_scalar;
}

}  // namespace batchengine
