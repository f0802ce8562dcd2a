// The bodies behind mixer_level.h, written once on V16. Included by one unit per instruction set.
//
// Columns of a state do not meet before the norm of the outputs. So a block of neighbouring columns,
// which the first cache holds, takes all tokens of an entry, then the next block does. One sweep over
// the block per token updates the state, sums the product with the query, and, of a delta network, sums
// the product with the key of the next token.
#pragma once

#include "recurrent/mixer_level.h"
#include "recurrent/state.h"
#include "rows/squares.h"

namespace {

using batchengine::conv_input;
using batchengine::ConvRun;
using batchengine::GatedConvRun;
using batchengine::STATE_HEAD_DIM_MAX;
using batchengine::StateHead;

constexpr size_t CHAINS_MAX = STATE_HEAD_DIM_MAX / ca::CHAIN;

// The weights of channels, those of each tap together.
template <int taps>
struct Taps {
    float w[taps][STATE_HEAD_DIM_MAX];

    Taps(const float* weights, size_t n) {
        for (size_t i = 0; i < n; i++)
            for (int j = 0; j < taps; j++) w[j][i] = weights[i * taps + static_cast<size_t>(j)];
    }
};

template <int taps, bool HAS_BIAS>
SIMD_FN void convolve_by(const ConvRun& run) {
    const Taps<taps> own(run.weights, run.n);
    for (size_t t = 0; t < run.tokens; t++) {
        float* const y = run.out + t * run.out_stride;
        const float* x[taps];
        for (int j = 0; j < taps; j++) x[j] = conv_input(run, t, static_cast<size_t>(j));
        for (size_t i = 0; i < run.n; i += 16) {
            V16 sum = vload(x[0] + i) * vload(own.w[0] + i);
            UNROLL for (int j = 1; j < taps; j++)
                sum = vfma(vload(x[j] + i), vload(own.w[j] + i), sum);
            if constexpr (HAS_BIAS) sum = sum + vload(run.bias + i);
            vstore(y + i, vsigmoid_times(sum, sum));
        }
        if (!run.is_normed) continue;
        const V16 factor = vset(ca::unit_factor(sum_of_squares(y, run.n), run.eps));
        for (size_t i = 0; i < run.n; i += 16) vstore(y + i, vload(y + i) * factor);
    }
}

template <int taps>
void convolve_taps(const ConvRun& run) {
    if (run.bias)
        convolve_by<taps, true>(run);
    else
        convolve_by<taps, false>(run);
}

void convolve(const ConvRun& run) {
    if (run.conv_kernel == 2) convolve_taps<2>(run);
    if (run.conv_kernel == 3) convolve_taps<3>(run);
    if (run.conv_kernel == 4) convolve_taps<4>(run);
}

// The products of the last tokens are in a ring: that of token t and of the conv_kernel - 1 before it in
// row (t + j) % taps, the oldest first.
template <int taps>
void convolve_gated_by(const GatedConvRun& run) {
    const Taps<taps> own(run.weights, run.n);
    float ring[taps][STATE_HEAD_DIM_MAX];
    for (size_t j = 0; j + 1 < taps; j++)
        for (size_t i = 0; i < run.n; i += 16)
            vstore(ring[j] + i, vload(run.before + j * run.before_stride + i));
    for (size_t t = 0; t < run.tokens; t++) {
        const size_t at = t * run.stride;
        float* u[taps];
        for (size_t j = 0; j < taps; j++) u[j] = ring[(t + j) % taps];
        for (size_t i = 0; i < run.n; i += 16) {
            const V16 last = vload(run.b + at + i) * vload(run.x + at + i);
            vstore(u[taps - 1] + i, last);
            V16 sum = vload(u[0] + i) * vload(own.w[0] + i);
            UNROLL for (int j = 1; j < taps - 1; j++)
                sum = vfma(vload(u[j] + i), vload(own.w[j] + i), sum);
            sum = vfma(last, vload(own.w[taps - 1] + i), sum);
            vstore(run.out + t * run.out_stride + i, vload(run.c + at + i) * sum);
        }
    }
    for (size_t j = 0; j + 1 < taps; j++)
        for (size_t i = 0; i < run.n; i += 16)
            vstore(run.after + j * run.after_stride + i, vload(ring[(run.tokens + j) % taps] + i));
}

void convolve_gated(const GatedConvRun& run) {
    if (run.conv_kernel == 2) convolve_gated_by<2>(run);
    if (run.conv_kernel == 3) convolve_gated_by<3>(run);
    if (run.conv_kernel == 4) convolve_gated_by<4>(run);
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
// after the last token of the entry, that with the next key. Then rows bypass the caches.
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

// A delta network: all tokens for columns [j, j + 16 * n).
struct DeltaBlocks {
    static constexpr int LEAST = 2;

    template <int n>
    static void recur(const StateHead& head, size_t j) {
        const size_t chains = head.key_dim / ca::CHAIN;
        const V16 scale = vset(ca::state_scale(static_cast<int>(head.key_dim)));
        Block block{head.from + (head.from_stride ? j : 0), head.from_stride, head.scratch, 16 * n};
        Chains<n> u, o;
        multiply<n>(block, head.k, chains, u);
        for (size_t t = 0; t < head.tokens; t++) {
            const size_t at = t * head.stride;
            const float *const k = head.k + at, *const q = head.q + at;
            const V16 g = vset(head.decay[t]), beta = vset(head.factor[t]);
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
};

// `count` tokens of Mamba-2 from token t on, of which none waits for a product with the state: a row is read
// and written once for all of them. After the last token of an entry, rows bypass the caches.
template <int n, int count, bool IS_LAST>
SIMD_FN void sweep_together(const StateHead& head, const Block& block, size_t j, size_t t) {
    const size_t at = t * head.stride, chains = head.key_dim / ca::CHAIN;
    const float *row = block.from, *key = head.k + at, *query = head.q + at, *values = head.v + at + j;
    float* to = block.to;
    V16 g[count], delta[count][n];
    Chains<n> outputs[count];
    repeat<count>(EACH(m) {
        g[m] = vset(head.decay[t + m]);
        const V16 size = vset(head.factor[t + m]);
        repeat<n>(EACH(v) { delta[m][v] = vload(values + m * head.stride + 16 * v) * size; });
    });
    for (size_t c = 0; c < chains; c++) {
        V16 o[count][n];
        repeat<count>(EACH(m) { repeat<n>(EACH(v) { o[m][v] = vzero(); }); });
        for (int i = 0; i < ca::CHAIN; i++, key++, query++) {
            V16 s[n];
            repeat<n>(EACH(v) { s[v] = vload(row + 16 * v); });
            repeat<count>(EACH(m) {
                const V16 k = vset(key[m * head.stride]), q = vset(query[m * head.stride]);
                repeat<n>(EACH(v) {
                    s[v] = vfma(k, delta[m][v], g[m] * s[v]);
                    o[m][v] = vfma(q, s[v], o[m][v]);
                });
            });
            repeat<n>(EACH(v) { IS_LAST ? vstream(to + 16 * v, s[v]) : vstore(to + 16 * v, s[v]); });
            row += block.from_stride;
            to += block.to_stride;
        }
        repeat<count>(EACH(m) { repeat<n>(EACH(v) { outputs[m].sum[c][v] = o[m][v]; }); });
    }
    const V16 direct = vset(head.direct);
    repeat<count>(EACH(m) {
        outputs[m].fold(chains);
        float* const out = head.out + (t + m) * head.out_stride + j;
        repeat<n>(EACH(v) {
            const V16 value = vload(values + m * head.stride + 16 * v);
            vstore(out + 16 * v, vfma(direct, value, outputs[m].sum[0][v]));
        });
    });
}

// Mamba-2: all tokens for columns [j, j + 16 * n), `count` in a sweep, then the rest one by one.
template <int count>
struct Mamba2Blocks {
    static constexpr int LEAST = 1;

    template <int n>
    static void recur(const StateHead& head, size_t j) {
        Block block{head.from + (head.from_stride ? j : 0), head.from_stride, head.scratch, 16 * n};
        size_t t = 0;
        for (; t + count <= head.tokens; t += count) advance<n, count>(head, block, j, t);
        for (; t < head.tokens; t++) advance<n, 1>(head, block, j, t);
    }

  private:
    template <int n, int tokens>
    static void advance(const StateHead& head, Block& block, size_t j, size_t t) {
        if (t + tokens < head.tokens) {
            sweep_together<n, tokens, false>(head, block, j, t);
            block.from = block.to;
            block.from_stride = block.to_stride;
        } else {
            block.to = head.to + j;
            block.to_stride = head.head_dim;
            sweep_together<n, tokens, true>(head, block, j, t);
        }
    }
};

// The norm of each token's outputs, and the gate.
void norm_outputs(const StateHead& head) {
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

// The gate of each token's outputs.
void gate_outputs(const StateHead& head) {
    for (size_t t = 0; t < head.tokens; t++) {
        float* const o = head.out + t * head.out_stride;
        const float* const z = head.z + t * head.z_stride;
        for (size_t i = 0; i < head.head_dim; i += 16) {
            const V16 gate = vload(z + i);
            vstore(o + i, vload(o + i) * vsigmoid_times(gate, gate));
        }
    }
}

// Vectors of a block, and tokens of Mamba-2 in a sweep: what keeps all sums in registers, and for entries of
// one token longer runs of memory.
#if defined(SIMD_AVX512)
constexpr int WIDE = 4, WIDE_ALONE = 8, WIDE_TOGETHER = 2, TOGETHER = 4;
#elif defined(__AVX2__)
constexpr int WIDE = 2, WIDE_ALONE = 4, WIDE_TOGETHER = 2, TOGETHER = 2;
#else
constexpr int WIDE = 2, WIDE_ALONE = 2, WIDE_TOGETHER = 1, TOGETHER = 2;
#endif

// Columns from j on, in blocks of n vectors and the rest in smaller ones.
template <int n, class Blocks>
void recur_blocks(const StateHead& head, size_t j = 0) {
    for (; j + 16 * n <= head.head_dim; j += 16 * n) Blocks::template recur<n>(head, j);
    if constexpr (n > Blocks::LEAST) recur_blocks<n / 2, Blocks>(head, j);
}

void recur_delta(const StateHead& head) {
    if (head.tokens == 1)
        recur_blocks<WIDE_ALONE, DeltaBlocks>(head);
    else
        recur_blocks<WIDE, DeltaBlocks>(head);
    vstream_end();
    norm_outputs(head);
}

void recur_mamba2(const StateHead& head) {
    if (head.tokens < TOGETHER)
        recur_blocks<WIDE_ALONE, Mamba2Blocks<1>>(head);
    else
        recur_blocks<WIDE_TOGETHER, Mamba2Blocks<TOGETHER>>(head);
    vstream_end();
    gate_outputs(head);
}

}  // namespace
