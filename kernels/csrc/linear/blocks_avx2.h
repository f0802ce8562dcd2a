// Block types with more than a nibble and a scale, for linear_avx2.cpp alone, which includes this
// after the parts that all kinds share: Q5_0, Q5_1, IQ4_NL, and the superblocks Q4_K and Q5_K.
#pragma once

namespace batchengine {
namespace {

// Weights of dword g for eight rows.
template <int G>
SIMD_FN __m256i five_bits(const FiveBits& from, size_t row) {
    const __m256i packed = load32(from.q[G % 4][row]);
    if constexpr (G < 4) return _mm256_and_si256(packed, _mm256_set1_epi8(31));
    const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(packed, 3), _mm256_set1_epi8(0x1C));
    const __m256i lower = _mm256_srli_epi16(load32(from.q[4][row]), 2 * (G % 4));
    return _mm256_or_si256(upper, _mm256_and_si256(lower, _mm256_set1_epi8(3)));
}

// 4 x (31*127*2) = 31496: half a block adds up in int16.
template <int N>
SIMD_FN void dot_five_bits(__m256i (&sums)[N], const FiveBits& from, size_t row, const int8_t* q) {
    __m256i pairs[2][N];
    UNROLL for (int n = 0; n < N; ++n) pairs[0][n] = pairs[1][n] = _mm256_setzero_si256();
    repeat<8>(EACH(g) {
        const __m256i weights = five_bits<g>(from, row);
        UNROLL for (int n = 0; n < N; ++n)
            add_words(pairs[g / 4][n],
                      _mm256_maddubs_epi16(weights, every_dword(q + n * BLOCK_WIDTH + 4 * g)));
    });
    UNROLL for (int n = 0; n < N; ++n)
        sums[n] = _mm256_add_epi32(widen(pairs[0][n]), widen(pairs[1][n]));
}

struct WeightsQ5_0 {
    static constexpr size_t BLOCKS = 2, BYTES = sizeof(PackedQ5_0);
    template <int N>
    SIMD_FN void block(__m256 (&acc)[N], const uint8_t* unit, size_t i, size_t row,
                             const Panel& x, size_t cell, size_t) {
        const auto* pair = reinterpret_cast<const PackedQ5_0*>(unit);
        __m256i sums[N];
        dot_five_bits<N>(sums, pair->block[i], row, x.q + cell * BLOCK_WIDTH);
        // -16 * S, from -8 * S.
        UNROLL for (int n = 0; n < N; ++n)
            sums[n] = _mm256_add_epi32(sums[n], _mm256_set1_epi32(2 * x.offset[cell + n]));
        scale_in<N>(acc, sums, halves_at(pair->d[i] + row), x.scale + cell);
    }
};

struct WeightsQ5_1 {
    static constexpr size_t BLOCKS = 1, BYTES = sizeof(PackedQ5_1);
    template <int N>
    SIMD_FN void block(__m256 (&acc)[N], const uint8_t* unit, size_t, size_t row, const Panel& x,
                             size_t cell, size_t) {
        const auto* from = reinterpret_cast<const PackedQ5_1*>(unit);
        __m256i sums[N];
        dot_five_bits<N>(sums, from->block, row, x.q + cell * BLOCK_WIDTH);
        scale_in<N>(acc, sums, halves_at(from->d + row), x.scale + cell);
        minimum_in<N>(acc, halves_at(from->m + row), x.sum + cell);
    }
};

// |w| times x with the sign of w: 127*127*2 = 32258 fills int16, so every product widens at once.
struct WeightsIQ4_NL {
    static constexpr size_t BLOCKS = 2, BYTES = sizeof(PackedQ4_0);
    template <int N>
    SIMD_FN void add(__m256i (&sums)[N], __m256i weights, const int8_t* q) {
        const __m256i magnitude = _mm256_abs_epi8(weights);
        UNROLL for (int n = 0; n < N; ++n) {
            const __m256i value = _mm256_sign_epi8(every_dword(q + n * BLOCK_WIDTH), weights);
            add_dwords(sums[n], widen(_mm256_maddubs_epi16(magnitude, value)));
        }
    }
    template <int N>
    SIMD_FN void block(__m256 (&acc)[N], const uint8_t* unit, size_t i, size_t row,
                             const Panel& x, size_t cell, size_t) {
        const auto* pair = reinterpret_cast<const PackedQ4_0*>(unit);
        const int8_t* q = x.q + cell * BLOCK_WIDTH;
        const __m256i mask = _mm256_set1_epi8(15);
        const __m256i table = _mm256_broadcastsi128_si256(
            _mm_loadu_si128(reinterpret_cast<const __m128i*>(IQ4_VALUES)));
        __m256i sums[N];
        UNROLL for (int n = 0; n < N; ++n) sums[n] = _mm256_setzero_si256();
        UNROLL for (int j = 0; j < 4; ++j) {
            const __m256i packed = load32(pair->q[i][j][row]);
            const __m256i upper = _mm256_srli_epi16(packed, 4);
            add<N>(sums, _mm256_shuffle_epi8(table, _mm256_and_si256(packed, mask)), q + 4 * j);
            add<N>(sums, _mm256_shuffle_epi8(table, _mm256_and_si256(upper, mask)), q + 4 * (j + 4));
        }
        scale_in<N>(acc, sums, halves_at(pair->d[i] + row), x.scale + cell);
    }
};

SIMD_FN __m256 bytes_at(const uint8_t* p) {
    return _mm256_cvtepi32_ps(
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

// d * scale and m * min are exact in fp32, and so are their products with an activation scale; hence these are the
// steps of the definition, which scales the integers.
template <class Packed, int N>
SIMD_FN void sub_block(__m256 (&acc)[N], const __m256i (&sums)[N], const Packed& super, size_t b,
                       size_t row, const Panel& x, size_t cell) {
    const __m256 dw = _mm256_mul_ps(halves_at(super.d + row), bytes_at(super.scale[b] + row));
    const __m256 mw = _mm256_mul_ps(halves_at(super.m + row), bytes_at(super.min[b] + row));
    scale_in<N>(acc, sums, dw, x.scale + cell);
    minimum_in<N>(acc, mw, x.sum + cell);
}

struct WeightsQ4_K {
    static constexpr size_t BLOCKS = 8, BYTES = sizeof(PackedQ4_K);
    template <int N>
    SIMD_FN void block(__m256 (&acc)[N], const uint8_t* unit, size_t b, size_t row,
                             const Panel& x, size_t cell, size_t) {
        const auto& super = *reinterpret_cast<const PackedQ4_K*>(unit);
        __m256i sums[N];
        dot_nibbles<N>(sums, super.q[b][0][row], x.q + cell * BLOCK_WIDTH);
        sub_block<PackedQ4_K, N>(acc, sums, super, b, row, x, cell);
    }
};

struct WeightsQ5_K {
    static constexpr size_t BLOCKS = 8, BYTES = sizeof(PackedQ5_K);
    template <int N>
    SIMD_FN void block(__m256 (&acc)[N], const uint8_t* unit, size_t b, size_t row,
                             const Panel& x, size_t cell, size_t) {
        const auto& super = *reinterpret_cast<const PackedQ5_K*>(unit);
        __m256i sums[N];
        dot_five_bits<N>(sums, super.block[b], row, x.q + cell * BLOCK_WIDTH);
        sub_block<PackedQ5_K, N>(acc, sums, super, b, row, x, cell);
    }
};

}  // namespace
}  // namespace batchengine
