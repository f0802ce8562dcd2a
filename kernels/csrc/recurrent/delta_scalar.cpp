// Gated delta networks, the definition by ca.h: see delta_head.h.
#include "common/ca.h"
#include "recurrent/delta_head.h"
#include "recurrent/state.h"

namespace batchengine {
namespace {

void convolve(const ConvHead& head) {
    for (size_t t = 0; t < head.tokens; t++) {
        float* const y = head.out + t * head.out_stride;
        for (size_t i = 0; i < head.head_dim; i++) {
            float x[CONV_KERNEL_MAX];
            for (size_t j = 0; j < head.conv_kernel; j++) x[j] = conv_input(head, t, j)[i];
            const float c = ca::convolved(x, 1, head.weights + i * head.conv_kernel,
                                          static_cast<int>(head.conv_kernel));
            y[i] = ca::sigmoid_times(c, c);
        }
        if (!head.is_normed) continue;
        const float sum = ca::sum_of_squares(y, static_cast<int>(head.head_dim));
        const float factor = ca::unit_factor(sum, head.eps);
        for (size_t i = 0; i < head.head_dim; i++) y[i] = ca::mul_rn(y[i], factor);
    }
}

void recur(const StateHead& head) {
    const size_t n = head.head_dim;
    const int width = static_cast<int>(n);
    const float scale = ca::state_scale(width);
    const float* from = head.from;
    int stride = static_cast<int>(head.from_stride);
    for (size_t t = 0; t < head.tokens; t++) {
        const float *q = head.q + t * head.stride, *k = head.k + t * head.stride;
        const float *v = head.v + t * head.stride, *z = head.z + t * head.z_stride;
        const float decay = head.decay[t], beta = head.beta[t];
        float* const o = head.out + t * head.out_stride;
        float delta[STATE_HEAD_DIM_MAX];
        for (size_t j = 0; j < n; j++)
            delta[j] =
                ca::state_delta(v[j], ca::column_product(from + j, stride, k, width), decay, beta);
        for (size_t i = 0; i < n; i++)
            for (size_t j = 0; j < n; j++)
                head.to[i * n + j] = ca::state_value(from[i * static_cast<size_t>(stride) + j],
                                                     decay, k[i], delta[j]);
        for (size_t j = 0; j < n; j++)
            o[j] = ca::mul_rn(ca::column_product(head.to + j, width, q, width), scale);
        const float factor = ca::norm_factor(ca::sum_of_squares(o, width), width, head.eps);
        for (size_t j = 0; j < n; j++) o[j] = ca::gated_norm(o[j], factor, head.norm[j], z[j]);
        from = head.to;
        stride = width;
    }
}

}  // namespace

extern const DeltaKernels delta_scalar = {convolve, recur};

}  // namespace batchengine
