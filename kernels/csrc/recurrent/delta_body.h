// The bodies behind delta_head.h, written once on V16. Included by one unit per instruction set.
//
// Columns of a state do not meet before the norm of the outputs. So a block of neighbouring columns,
// which the first cache holds, takes all tokens of an entry, then the next block does. One sweep over
// the block per token updates the state, sums the product with the query, and sums the product with
// the key of the next token.
#pragma once

#include "recurrent/delta_head.h"
#include "recurrent/state.h"
#include "rows/squares.h"

namespace {

using batchengine::conv_input;
using batchengine::ConvHead;
using batchengine::STATE_HEAD_DIM_MAX;
using batchengine::StateHead;

constexpr size_t CHAINS_MAX = STATE_HEAD_DIM_MAX / ca::CHAIN;

template <int taps>
SIMD_FN void convolve_by(const ConvHead& head) {
    float w[taps][STATE_HEAD_DIM_MAX];
    for (size_t i = 0; i < head.head_dim; i++)
        for (int j = 0; j < taps; j++) w[j][i] = head.weights[i * taps + static_cast<size_t>(j)];
    for (size_t t = 0; t < head.tokens; t++) {
        float* const y = head.out + t * head.out_stride;
        const float* x[taps];
        for (int j = 0; j < taps; j++) x[j] = conv_input(head, t, static_cast<size_t>(j));
        for (size_t i = 0; i < head.head_dim; i += 16) {
            V16 sum = vload(x[0] + i) * vload(w[0] + i);
            UNROLL for (int j = 1; j < taps; j++) sum = vfma(vload(x[j] + i), vload(w[j] + i), sum);
            vstore(y + i, vsigmoid_times(sum, sum));
        }
        if (!head.is_normed) continue;
        const V16 factor = vset(ca::unit_factor(sum_of_squares(y, head.head_dim), head.eps));
        for (size_t i = 0; i < head.head_dim; i += 16) vstore(y + i, vload(y + i) * factor);
    }
}

void convolve(const ConvHead& head) {
    if (head.conv_kernel == 2) convolve_by<2>(head);
    if (head.conv_kernel == 3) convolve_by<3>(head);
    if (head.conv_kernel == 4) convolve_by<4>(head);
}

// The sums of the chains of a block's columns.
template <int n>
struct Chains {
    V16 sum[CHAINS_MAX][n];

    // The first chain becomes their sum.
    __attribute__((always_inline)) void fold(size_t chains) {
        for (; chains > 1; chains = (chains + 1) / 2) {
            for (size_t c = 0; c < chains / 2; c++)
                repeat<n>(EACH(v) { sum[c][v] = sum[2 * c][v] + sum[2 * c + 1][v]; });
            if (chains % 2) repeat<n>(EACH(v) { sum[chains / 2][v] = sum[chains - 1][v]; });
        }
    }
};

// Rows of 16 * n columns of a state.
struct Block {
    const float* from;
    size_t from_stride;
    float* to;
    size_t to_stride;
};

// The product of the columns with `key`.
template <int n>
SIMD_FN void multiply(const Block& block, const float* key, size_t chains, Chains<n>& out) {
    const float* row = block.from;
    for (size_t c = 0; c < chains; c++) {
        V16 sum[n];
        repeat<n>(EACH(v) { sum[v] = vzero(); });
        for (int i = 0; i < ca::CHAIN; i++, key++, row += block.from_stride) {
            const V16 k = vset(*key);
            repeat<n>(EACH(v) { sum[v] = vfma(k, vload(row + 16 * v), sum[v]); });
        }
        repeat<n>(EACH(v) { out.sum[c][v] = sum[v]; });
    }
    out.fold(chains);
}

// One token: the state changes by `delta`, `outputs` becomes its product with the query and `next`, but
// after the last token of the entry, that with the next key.
template <int n, bool IS_LAST>
SIMD_FN void sweep(const Block& block, float decay, const V16 (&delta)[n], const float* key,
                   const float* query, const float* next_key, size_t chains, Chains<n>& outputs,
                   Chains<n>& next) {
    const float* row = block.from;
    float* to = block.to;
    const V16 g = vset(decay);
    for (size_t c = 0; c < chains; c++) {
        V16 o[n], u[n];
        repeat<n>(EACH(v) { o[v] = u[v] = vzero(); });
        for (int i = 0; i < ca::CHAIN; i++, row += block.from_stride, to += block.to_stride) {
            const V16 k = vset(*key++), q = vset(*query++);
            V16 s[n];
            repeat<n>(EACH(v) {
                s[v] = vfma(k, delta[v], g * vload(row + 16 * v));
                IS_LAST ? vstream(to + 16 * v, s[v]) : vstore(to + 16 * v, s[v]);
                o[v] = vfma(q, s[v], o[v]);
            });
            if constexpr (!IS_LAST) {
                const V16 k_next = vset(*next_key++);
                repeat<n>(EACH(v) { u[v] = vfma(k_next, s[v], u[v]); });
            }
        }
        repeat<n>(EACH(v) { outputs.sum[c][v] = o[v], next.sum[c][v] = u[v]; });
    }
    outputs.fold(chains);
    if constexpr (!IS_LAST) next.fold(chains);
}

// All tokens for columns [j, j + 16 * n).
template <int n>
void recur_block(const StateHead& head, size_t j) {
    const size_t chains = head.head_dim / ca::CHAIN;
    const V16 scale = vset(ca::state_scale(static_cast<int>(head.head_dim)));
    Block block{head.from + (head.from_stride ? j : 0), head.from_stride, head.scratch, 16 * n};
    Chains<n> u, o;
    multiply<n>(block, head.k, chains, u);
    for (size_t t = 0; t < head.tokens; t++) {
        const size_t at = t * head.stride;
        const float *const k = head.k + at, *const q = head.q + at;
        const V16 g = vset(head.decay[t]), beta = vset(head.beta[t]);
        V16 delta[n];
        repeat<n>(EACH(v) {
            delta[v] = (vload(head.v + at + j + 16 * v) - g * u.sum[0][v]) * beta;
        });
        if (t + 1 < head.tokens) {
            sweep<n, false>(block, head.decay[t], delta, k, q, k + head.stride, chains, o, u);
            block.from = block.to;
            block.from_stride = block.to_stride;
        } else {
            block.to = head.to + j;
            block.to_stride = head.head_dim;
            sweep<n, true>(block, head.decay[t], delta, k, q, nullptr, chains, o, u);
        }
        float* const out = head.out + t * head.out_stride + j;
        repeat<n>(EACH(v) { vstore(out + 16 * v, o.sum[0][v] * scale); });
    }
}

// The norm of each token's outputs, and the gate.
void gate_outputs(const StateHead& head) {
    const size_t n = head.head_dim;
    for (size_t t = 0; t < head.tokens; t++) {
        float* const o = head.out + t * head.out_stride;
        const float* const z = head.z + t * head.z_stride;
        const V16 factor =
            vset(ca::norm_factor(sum_of_squares(o, n), static_cast<int>(n), head.eps));
        for (size_t i = 0; i < n; i += 16) {
            const V16 gate = vload(z + i);
            vstore(o + i,
                   vload(o + i) * factor * vload(head.norm + i) * vsigmoid_times(gate, gate));
        }
    }
}

// Vectors of a block: what keeps all sums in registers, and for entries of one token, which have no
// product with a next key, longer runs of memory.
#if defined(SIMD_AVX512)
constexpr int WIDE = 4, WIDE_ALONE = 8;
#elif defined(__AVX2__)
constexpr int WIDE = 2, WIDE_ALONE = 4;
#else
constexpr int WIDE = 2, WIDE_ALONE = 2;
#endif

// All columns, in blocks of n vectors, or of 2 where those do not divide a row.
template <int n>
void recur_blocks(const StateHead& head) {
    if (head.head_dim % (16 * n) == 0)
        for (size_t j = 0; j < head.head_dim; j += 16 * n) recur_block<n>(head, j);
    else
        for (size_t j = 0; j < head.head_dim; j += 32) recur_block<2>(head, j);
}

void recur(const StateHead& head) {
    if (head.tokens == 1)
        recur_blocks<WIDE_ALONE>(head);
    else
        recur_blocks<WIDE>(head);
    vstream_end();
    gate_outputs(head);
}

}  // namespace
