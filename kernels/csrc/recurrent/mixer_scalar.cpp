// Recurrent mixers, the definition by ca.h: see mixer_level.h.
#include "common/ca.h"
#include "recurrent/mixer_level.h"
#include "recurrent/state.h"

namespace batchengine {
namespace {

void convolve(const ConvRun& run) {
    for (size_t t = 0; t < run.tokens; t++) {
        float* const y = run.out + t * run.out_stride;
        for (size_t i = 0; i < run.n; i++) {
            float x[CONV_KERNEL_MAX];
            for (size_t j = 0; j < run.conv_kernel; j++) x[j] = conv_input(run, t, j)[i];
            float c = ca::convolved(x, 1, run.weights + i * run.conv_kernel,
                                    static_cast<int>(run.conv_kernel));
            if (run.bias) c = ca::add_rn(c, run.bias[i]);
            y[i] = ca::sigmoid_times(c, c);
        }
        if (!run.is_normed) continue;
        const float sum = ca::sum_of_squares(y, static_cast<int>(run.n));
        const float factor = ca::unit_factor(sum, run.eps);
        for (size_t i = 0; i < run.n; i++) y[i] = ca::mul_rn(y[i], factor);
    }
}

// One token: the state `from`, whose rows are `stride` apart, becomes head.to, which decays and learns
// `delta`; o becomes its product with q.
void change_state(const StateHead& head, const float* from, int stride, size_t t, const float* delta,
                  float* o) {
    const float *const k = head.k + t * head.stride, *const q = head.q + t * head.stride;
    const size_t n = head.head_dim;
    for (size_t i = 0; i < head.key_dim; i++)
        for (size_t j = 0; j < n; j++)
            head.to[i * n + j] = ca::state_value(from[i * static_cast<size_t>(stride) + j],
                                                 head.decay[t], k[i], delta[j]);
    for (size_t j = 0; j < n; j++)
        o[j] = ca::column_product(head.to + j, static_cast<int>(n), q, static_cast<int>(head.key_dim));
}

void recur_delta(const StateHead& head) {
    const size_t n = head.head_dim;
    const int width = static_cast<int>(n), keys = static_cast<int>(head.key_dim);
    const float scale = ca::state_scale(keys);
    const float* from = head.from;
    int stride = static_cast<int>(head.from_stride);
    for (size_t t = 0; t < head.tokens; t++) {
        const float *v = head.v + t * head.stride, *z = head.z + t * head.z_stride;
        const float* k = head.k + t * head.stride;
        float* const o = head.out + t * head.out_stride;
        float delta[STATE_HEAD_DIM_MAX];
        for (size_t j = 0; j < n; j++)
            delta[j] = ca::state_delta(v[j], ca::column_product(from + j, stride, k, keys),
                                       head.decay[t], head.factor[t]);
        change_state(head, from, stride, t, delta, o);
        for (size_t j = 0; j < n; j++) o[j] = ca::mul_rn(o[j], scale);
        const float factor = ca::norm_factor(ca::sum_of_squares(o, width), width, head.eps);
        for (size_t j = 0; j < n; j++) o[j] = ca::gated_norm(o[j], factor, head.norm[j], z[j]);
        from = head.to;
        stride = width;
    }
}

void recur_mamba2(const StateHead& head) {
    const size_t n = head.head_dim;
    const float* from = head.from;
    int stride = static_cast<int>(head.from_stride);
    for (size_t t = 0; t < head.tokens; t++) {
        const float *x = head.v + t * head.stride, *z = head.z + t * head.z_stride;
        float* const o = head.out + t * head.out_stride;
        float input[STATE_HEAD_DIM_MAX];
        for (size_t j = 0; j < n; j++) input[j] = ca::mul_rn(x[j], head.factor[t]);
        change_state(head, from, stride, t, input, o);
        for (size_t j = 0; j < n; j++) o[j] = ca::gated_state(o[j], head.direct, x[j], z[j]);
        from = head.to;
        stride = static_cast<int>(n);
    }
}

void convolve_gated(const GatedConvRun& run) {
    const size_t taps = run.conv_kernel;
    for (size_t i = 0; i < run.n; i++) {
        float u[CONV_KERNEL_MAX];  // the products of a token and of those before it
        for (size_t j = 0; j + 1 < taps; j++) u[j] = run.before[j * run.before_stride + i];
        for (size_t t = 0; t < run.tokens; t++) {
            const size_t at = t * run.stride + i;
            u[taps - 1] = ca::mul_rn(run.b[at], run.x[at]);
            const float c = ca::convolved(u, 1, run.weights + i * taps, static_cast<int>(taps));
            run.out[t * run.out_stride + i] = ca::mul_rn(run.c[at], c);
            for (size_t j = 0; j + 1 < taps; j++) u[j] = u[j + 1];
        }
        for (size_t j = 0; j + 1 < taps; j++) run.after[j * run.after_stride + i] = u[j];
    }
}

}  // namespace

extern const MixerKernels mixer_scalar = {convolve, recur_delta, recur_mamba2, convolve_gated};

}  // namespace batchengine
