// Block types with more than a nibble and a scale, for linear_avx512.cpp alone, which includes this
// after the parts that all kinds share: Q5_0, Q5_1, IQ4_NL, and the superblocks Q4_K and Q5_K.
#pragma once

namespace batchengine {
namespace {

SIMD_FN void zero(__m512i& sum) { sum = _mm512_setzero_si512(); }

template <int R, int N>
SIMD_FN void start_at_zero(Sums<R, N>& sums) {
    UNROLL for (int n = 0; n < N; ++n) UNROLL for (int r = 0; r < R; ++r) zero(sums.s[r][n]);
}

// Weights of dword g.
template <int G>
SIMD_FN __m512i five_bits(const FiveBits& from) {
    const __m512i packed = _mm512_load_si512(&from.q[G % 4][0][0]), all = _mm512_set1_epi8(31);
    if constexpr (G < 4) return _mm512_and_si512(packed, all);
    const __m512i upper = _mm512_srli_epi16(packed, 3);
    const __m512i lower = _mm512_srli_epi16(_mm512_load_si512(&from.q[4][0][0]), 2 * (G % 4));
    // Bits 2, 3 and 4 of upper, the other ones of lower.
    const __m512i both = _mm512_ternarylogic_epi32(upper, lower, _mm512_set1_epi8(0x1C), 0xE4);
    return _mm512_and_si512(both, all);
}

template <int R, int N>
SIMD_FN void dot_five_bits(Sums<R, N>& sums, const FiveBits* const (&from)[R], const int8_t* q) {
    repeat<8>(EACH(g) {
        __m512i weights[R];
        UNROLL for (int r = 0; r < R; ++r) weights[r] = five_bits<g>(*from[r]);
        dot<R, N>(sums, weights, q, g);
    });
}

struct WeightsQ5_0 {
    static constexpr size_t BLOCKS = 2, BYTES = sizeof(PackedQ5_0);
    template <int R, int N>
    SIMD_FN void block(Accumulators<R, N>& acc, const uint8_t* const (&unit)[R], size_t i,
                             const Panel& x, size_t cell, size_t) {
        Sums<R, N> sums;
        // -16 * S, from -8 * S.
        UNROLL for (int n = 0; n < N; ++n) {
            const __m512i value = _mm512_slli_epi32(_mm512_set1_epi32(x.offset[cell + n]), 1);
            UNROLL for (int r = 0; r < R; ++r) sums.s[r][n] = value;
        }
        const FiveBits* from[R];
        __m512 dw[R];
        UNROLL for (int r = 0; r < R; ++r) {
            const auto* pair = reinterpret_cast<const PackedQ5_0*>(unit[r]);
            from[r] = &pair->block[i];
            dw[r] = halves_at(pair->d[i]);
        }
        dot_five_bits<R, N>(sums, from, x.q + cell * BLOCK_WIDTH);
        scale_in(acc, sums, dw, x.scale + cell);
    }
};

struct WeightsQ5_1 {
    static constexpr size_t BLOCKS = 1, BYTES = sizeof(PackedQ5_1);
    template <int R, int N>
    SIMD_FN void block(Accumulators<R, N>& acc, const uint8_t* const (&unit)[R], size_t,
                             const Panel& x, size_t cell, size_t) {
        Sums<R, N> sums;
        start_at_zero(sums);
        const FiveBits* from[R];
        __m512 dw[R], mw[R];
        UNROLL for (int r = 0; r < R; ++r) {
            const auto* block = reinterpret_cast<const PackedQ5_1*>(unit[r]);
            from[r] = &block->block;
            dw[r] = halves_at(block->d);
            mw[r] = halves_at(block->m);
        }
        dot_five_bits<R, N>(sums, from, x.q + cell * BLOCK_WIDTH);
        scale_in(acc, sums, dw, x.scale + cell);
        minimum_in(acc, mw, x.sum + cell);
    }
};

// The table plus 128, as the unsigned operand of the dots.
struct WeightsIQ4_NL {
    static constexpr size_t BLOCKS = 2, BYTES = sizeof(PackedQ4_0);
    template <int R, int N>
    SIMD_FN void block(Accumulators<R, N>& acc, const uint8_t* const (&unit)[R], size_t i,
                             const Panel& x, size_t cell, size_t) {
        const __m512i mask = _mm512_set1_epi8(15);
        const __m512i table = _mm512_xor_si512(
            _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(IQ4_VALUES))),
            _mm512_set1_epi8(-128));
        Sums<R, N> sums;
        // -128 * S, from -8 * S.
        UNROLL for (int n = 0; n < N; ++n) {
            const __m512i value = _mm512_slli_epi32(_mm512_set1_epi32(x.offset[cell + n]), 4);
            UNROLL for (int r = 0; r < R; ++r) sums.s[r][n] = value;
        }
        const PackedQ4_0* pair[R];
        __m512 dw[R];
        UNROLL for (int r = 0; r < R; ++r) {
            pair[r] = reinterpret_cast<const PackedQ4_0*>(unit[r]);
            dw[r] = halves_at(pair[r]->d[i]);
        }
        UNROLL for (int j = 0; j < 4; ++j) {
            __m512i low[R], high[R];
            UNROLL for (int r = 0; r < R; ++r) {
                const __m512i packed = _mm512_load_si512(&pair[r]->q[i][j][0][0]);
                low[r] = _mm512_shuffle_epi8(table, _mm512_and_si512(packed, mask));
                high[r] = _mm512_shuffle_epi8(
                    table, _mm512_and_si512(_mm512_srli_epi16(packed, 4), mask));
            }
            dot<R, N>(sums, low, x.q + cell * BLOCK_WIDTH, j);
            dot<R, N>(sums, high, x.q + cell * BLOCK_WIDTH, j + 4);
        }
        scale_in(acc, sums, dw, x.scale + cell);
    }
};

SIMD_FN __m512 bytes_at(const uint8_t* p) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p))));
}

// Scales of the sub-blocks of R superblocks: d * scale and m * min, exact in fp32. So are their
// products with an activation scale, hence the steps are those of the definition, which scales the integers.
template <int R>
struct SubScales {
    __m512 d[8][R];
    __m512 m[8][R];
};

// d and m of R superblocks.
template <int R>
struct SuperScales {
    __m512 d[R], m[R];
};

template <class Packed, int R>
SIMD_FN SuperScales<R> super_scales(const uint8_t* const (&unit)[R]) {
    SuperScales<R> of;
    UNROLL for (int r = 0; r < R; ++r) {
        const auto* super = reinterpret_cast<const Packed*>(unit[r]);
        of.d[r] = halves_at(super->d);
        of.m[r] = halves_at(super->m);
    }
    return of;
}

template <class Packed, int R>
SIMD_FN void unpack_scales(const uint8_t* const (&unit)[R], const SuperScales<R>& of, size_t b,
                           SubScales<R>& to) {
    UNROLL for (int r = 0; r < R; ++r) {
        const auto* super = reinterpret_cast<const Packed*>(unit[r]);
        to.d[b][r] = _mm512_mul_ps(of.d[r], bytes_at(super->scale[b]));
        to.m[b][r] = _mm512_mul_ps(of.m[r], bytes_at(super->min[b]));
    }
}

template <class Weights, int R, int N>
SIMD_FN void sub_block(Accumulators<R, N>& acc, const uint8_t* const (&unit)[R],
                       const SubScales<R>& scales, size_t b, const Panel& x, size_t cell) {
    Sums<R, N> sums;
    start_at_zero(sums);
    Weights::template dots<R, N>(sums, unit, b, x.q + cell * BLOCK_WIDTH);
    scale_in(acc, sums, scales.d[b], x.scale + cell);
    minimum_in(acc, scales.m[b], x.sum + cell);
}

struct WeightsQ4_K {
    using Packed = PackedQ4_K;
    static constexpr size_t BLOCKS = 8, BYTES = sizeof(PackedQ4_K);
    template <int R, int N>
    SIMD_FN void dots(Sums<R, N>& sums, const uint8_t* const (&unit)[R], size_t b, const int8_t* q) {
        const uint8_t* nibbles[R];
        UNROLL for (int r = 0; r < R; ++r)
            nibbles[r] = &reinterpret_cast<const PackedQ4_K*>(unit[r])->q[b][0][0][0];
        dot_nibbles<R, N>(sums, nibbles, q);
    }
    template <int R, int N>
    SIMD_FN void block(Accumulators<R, N>& acc, const uint8_t* const (&unit)[R], size_t b,
                             const Panel& x, size_t cell, size_t) {
        SubScales<R> scales;
        unpack_scales<Packed, R>(unit, super_scales<Packed, R>(unit), b, scales);
        sub_block<WeightsQ4_K, R, N>(acc, unit, scales, b, x, cell);
    }
};

struct WeightsQ5_K {
    using Packed = PackedQ5_K;
    static constexpr size_t BLOCKS = 8, BYTES = sizeof(PackedQ5_K);
    template <int R, int N>
    SIMD_FN void dots(Sums<R, N>& sums, const uint8_t* const (&unit)[R], size_t b, const int8_t* q) {
        const FiveBits* from[R];
        UNROLL for (int r = 0; r < R; ++r)
            from[r] = &reinterpret_cast<const PackedQ5_K*>(unit[r])->block[b];
        dot_five_bits<R, N>(sums, from, q);
    }
    template <int R, int N>
    SIMD_FN void block(Accumulators<R, N>& acc, const uint8_t* const (&unit)[R], size_t b,
                             const Panel& x, size_t cell, size_t) {
        SubScales<R> scales;
        unpack_scales<Packed, R>(unit, super_scales<Packed, R>(unit), b, scales);
        sub_block<WeightsQ5_K, R, N>(acc, unit, scales, b, x, cell);
    }
};

// Adds one superblock to the running segment of N tokens. The first tokens of a group also unpack the
// scales and prefetch the tiles that follow.
template <class Weights, int R, int N, bool FIRST>
void add_superblock(__m512 (&running)[GROUP_TOKENS][R], const uint8_t* const (&unit)[R],
                    SubScales<R>& scales, const Panel& x, size_t block, size_t token, size_t ahead) {
    constexpr size_t LINES = (Weights::BYTES / CACHE_LINE + 7) / 8;
    Accumulators<R, N> acc;
    UNROLL for (int n = 0; n < N; ++n)
        UNROLL for (int r = 0; r < R; ++r)
            acc.a[r][n] = block % SEGMENT_BLOCKS == 0
                              ? _mm512_setzero_ps()
                              : running[token + static_cast<size_t>(n)][r];
    using Packed = typename Weights::Packed;
    SuperScales<R> of;
    if (FIRST) of = super_scales<Packed, R>(unit);
    for (size_t b = 0; b < 8; ++b) {
        if (FIRST) unpack_scales<Packed, R>(unit, of, b, scales);
        sub_block<Weights, R, N>(acc, unit, scales, b, x, (block + b) * GROUP_TOKENS + token);
        if (FIRST && ahead)
            UNROLL for (int r = 0; r < R; ++r)
                UNROLL for (size_t line = 0; line < LINES; ++line)
                    _mm_prefetch(reinterpret_cast<const char*>(unit[r]) + ahead +
                                     (LINES * b + line) * CACHE_LINE,
                                 _MM_HINT_T1);
    }
    UNROLL for (int n = 0; n < N; ++n)
        UNROLL for (int r = 0; r < R; ++r)
            running[token + static_cast<size_t>(n)][r] = acc.a[r][n];
}

// Several tokens of Q4_K or Q5_K: all tokens of the group pass one superblock before the next,
// so that its scales are unpacked once and its weights stay in the level-1 cache.
template <class Weights, int R>
void tokens_of_superblocks(const uint8_t* tiles, size_t bytes, const Panel& x, size_t tokens,
                           bool cold, TileResult* results) {
    const uint8_t* unit[R];
    UNROLL for (int r = 0; r < R; ++r) unit[r] = tiles + static_cast<size_t>(r) * bytes;
    const size_t ahead = cold ? R * bytes : 0;
    SubScales<R> scales;
    __m512 running[GROUP_TOKENS][R];
    for (size_t block = 0; block < x.blocks; block += Weights::BLOCKS) {
        size_t token = 4;
        switch (tokens) {
            case 2: add_superblock<Weights, R, 2, true>(running, unit, scales, x, block, 0, ahead); break;
            case 3: add_superblock<Weights, R, 3, true>(running, unit, scales, x, block, 0, ahead); break;
            default: add_superblock<Weights, R, 4, true>(running, unit, scales, x, block, 0, ahead);
        }
        for (; token + 4 <= tokens; token += 4)
            add_superblock<Weights, R, 4, false>(running, unit, scales, x, block, token, 0);
        if (token + 3 == tokens)
            add_superblock<Weights, R, 3, false>(running, unit, scales, x, block, token, 0);
        if (token + 2 == tokens)
            add_superblock<Weights, R, 2, false>(running, unit, scales, x, block, token, 0);
        if (token + 1 == tokens)
            add_superblock<Weights, R, 1, false>(running, unit, scales, x, block, token, 0);
        UNROLL for (int r = 0; r < R; ++r) unit[r] += Weights::BYTES;
        const size_t next = block + Weights::BLOCKS;
        if (next % SEGMENT_BLOCKS != 0 && next < x.blocks) continue;
        for (token = 0; token < tokens; ++token)
            UNROLL for (int r = 0; r < R; ++r) {
                float* y = results[r].y[token];
                const __m512 sum = running[token][r];
                _mm512_store_ps(y, next <= SEGMENT_BLOCKS ? sum
                                                          : _mm512_add_ps(_mm512_load_ps(y), sum));
            }
    }
}

}  // namespace
}  // namespace batchengine
