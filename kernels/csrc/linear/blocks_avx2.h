// One block of each kind with AVX2, for linear_avx2.cpp: eight rows of a tile times N tokens.
//
// Without a dot instruction, maddubs adds two products in int16. 8 x (15*127*2) = 30480,
// 4 x (31*127*2) = 31496 and 2 x (63*127*2) = 32004 still fit, so nibbles sum a whole block in int16,
// five-bit weights half of one and six-bit weights two dwords; eight-bit weights widen at once
// (128*127*2 = 32512).
#pragma once

#include "linear/linear_level.h"

namespace batchengine {
namespace {

SIMD_FN __m256i load32(const void* p) { return _mm256_load_si256(static_cast<const __m256i*>(p)); }

SIMD_FN __m256 halves_at(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
}

// sum += x, in the order written. The compiler may reorder sums of integer vectors: it would hold all
// products before it adds them, in more registers than there are.
SIMD_FN void add_words(__m256i& sum, __m256i x) {
    sum = _mm256_add_epi16(sum, x);
    asm("" : "+x"(sum));
}
SIMD_FN void add_dwords(__m256i& sum, __m256i x) {
    sum = _mm256_add_epi32(sum, x);
    asm("" : "+x"(sum));
}

// int16 pairs to int32
SIMD_FN __m256i widen(__m256i pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }

// acc = fma(float(I), dw * dx, acc); the product of the scales is exact.
template <int N>
SIMD_FN void scale_in(__m256 (&acc)[N], const __m256i (&sums)[N], __m256 dw, const float* scale) {
    UNROLL for (int n = 0; n < N; ++n)
        acc[n] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[n]),
                                 _mm256_mul_ps(dw, _mm256_set1_ps(scale[n])), acc[n]);
}

// acc = fma(float(I) * dx, power, acc); the first product is exact.
template <int N>
SIMD_FN void power_in(__m256 (&acc)[N], const __m256i (&sums)[N], __m256 power, const float* scale) {
    UNROLL for (int n = 0; n < N; ++n)
        acc[n] = _mm256_fmadd_ps(
            _mm256_mul_ps(_mm256_cvtepi32_ps(sums[n]), _mm256_set1_ps(scale[n])), power, acc[n]);
}

// acc = fma(S * dx, m, acc), the same number as fma(S, m * dx, acc).
template <int N>
SIMD_FN void minimum_in(__m256 (&acc)[N], __m256 mw, const float* sum) {
    UNROLL for (int n = 0; n < N; ++n)
        acc[n] = _mm256_fmadd_ps(_mm256_set1_ps(sum[n]), mw, acc[n]);
}

// sums += signed weights times x: |w| times x with the sign of w. 127*127*2 = 32258 fills int16, so every
// product widens at once.
template <int N>
SIMD_FN void add_signed(__m256i (&sums)[N], __m256i weights, const int8_t* q) {
    const __m256i magnitude = _mm256_abs_epi8(weights);
    UNROLL for (int n = 0; n < N; ++n) {
        const __m256i value = _mm256_sign_epi8(every_dword(q + n * BLOCK_WIDTH), weights);
        add_dwords(sums[n], widen(_mm256_maddubs_epi16(magnitude, value)));
    }
}

// The first vector of block i, of eight rows from `row` on.
template <class Packed>
SIMD_FN const uint8_t* vectors_at(const Packed& unit, size_t i, size_t row) {
    return reinterpret_cast<const uint8_t*>(block_at(unit, i)) + 4 * row;
}

// The dots of a block, by how its weights are packed. block: the first 32 bytes, of eight rows; the next
// vectors follow 64 bytes apart. OFFSETS: how many times -8 * S must be added to the sums.
struct NibbleDots {
    static constexpr int OFFSETS = 1;
    template <int N>
    SIMD_FN void dot_block(__m256i (&sums)[N], const uint8_t* block, const int8_t* q) {
        const __m256i mask = _mm256_set1_epi8(15);
        __m256i pairs[N];
        UNROLL for (int n = 0; n < N; ++n) pairs[n] = _mm256_setzero_si256();
        UNROLL for (int j = 0; j < 4; ++j) {
            const __m256i packed = load32(block + 64 * j);
            const __m256i low = _mm256_and_si256(packed, mask);
            const __m256i high = _mm256_and_si256(_mm256_srli_epi16(packed, 4), mask);
            UNROLL for (int n = 0; n < N; ++n) {
                const int8_t* x = q + n * BLOCK_WIDTH;
                add_words(pairs[n], _mm256_maddubs_epi16(low, every_dword(x + 4 * j)));
                add_words(pairs[n], _mm256_maddubs_epi16(high, every_dword(x + 4 * (j + 4))));
            }
        }
        UNROLL for (int n = 0; n < N; ++n) sums[n] = widen(pairs[n]);
    }
};

struct ByteDots {
    static constexpr int OFFSETS = 0;
    template <int N>
    SIMD_FN void dot_block(__m256i (&sums)[N], const uint8_t* block, const int8_t* q) {
        UNROLL for (int n = 0; n < N; ++n) sums[n] = _mm256_setzero_si256();
        // Back to signed weights.
        UNROLL for (int g = 0; g < 8; ++g)
            add_signed<N>(sums, _mm256_xor_si256(load32(block + 64 * g), _mm256_set1_epi8(-128)),
                          q + 4 * g);
    }
};

SIMD_FN __m256i table_of(const int8_t (&values)[16]) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(values)));
}

struct TableDots {
    static constexpr int OFFSETS = 0;
    template <int N>
    SIMD_FN void dot_block(__m256i (&sums)[N], const uint8_t* block, const int8_t* q) {
        const __m256i mask = _mm256_set1_epi8(15), table = table_of(IQ4_VALUES);
        UNROLL for (int n = 0; n < N; ++n) sums[n] = _mm256_setzero_si256();
        UNROLL for (int j = 0; j < 4; ++j) {
            const __m256i packed = load32(block + 64 * j);
            const __m256i upper = _mm256_srli_epi16(packed, 4);
            add_signed<N>(sums, _mm256_shuffle_epi8(table, _mm256_and_si256(packed, mask)),
                          q + 4 * j);
            add_signed<N>(sums, _mm256_shuffle_epi8(table, _mm256_and_si256(upper, mask)),
                          q + 4 * (j + 4));
        }
    }
};

// Weights of five bits: dword G of eight rows.
struct FiveBitWeights {
    template <int G>
    SIMD_FN __m256i dword(const uint8_t* block) {
        const __m256i packed = load32(block + 64 * (G % 4));
        if constexpr (G < 4) return _mm256_and_si256(packed, _mm256_set1_epi8(31));
        const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(packed, 3), _mm256_set1_epi8(0x1C));
        const __m256i lower = _mm256_srli_epi16(load32(block + 64 * 4), 2 * (G % 4));
        return _mm256_or_si256(upper, _mm256_and_si256(lower, _mm256_set1_epi8(3)));
    }
};

// The values of a table plus ZERO, which makes them unsigned.
template <const int8_t (&VALUES)[16], int ZERO>
struct TableWeights {
    template <int G>
    SIMD_FN __m256i dword(const uint8_t* block) {
        const __m256i packed = load32(block + 64 * (G % 4));
        const __m256i indices =
            _mm256_and_si256(G < 4 ? packed : _mm256_srli_epi16(packed, 4), _mm256_set1_epi8(15));
        const __m256i table = _mm256_add_epi8(table_of(VALUES), _mm256_set1_epi8(ZERO));
        return _mm256_shuffle_epi8(table, indices);
    }
};

// Half a block adds up in int16.
template <class Weights>
struct FiveBitDots {
    static constexpr int OFFSETS = 2;
    template <int N>
    SIMD_FN void dot_block(__m256i (&sums)[N], const uint8_t* block, const int8_t* q) {
        __m256i pairs[2][N];
        UNROLL for (int n = 0; n < N; ++n) pairs[0][n] = pairs[1][n] = _mm256_setzero_si256();
        repeat<8>(EACH(g) {
            const __m256i weights = Weights::template dword<g>(block);
            UNROLL for (int n = 0; n < N; ++n)
                add_words(pairs[g / 4][n],
                          _mm256_maddubs_epi16(weights, every_dword(q + n * BLOCK_WIDTH + 4 * g)));
        });
        UNROLL for (int n = 0; n < N; ++n)
            sums[n] = _mm256_add_epi32(widen(pairs[0][n]), widen(pairs[1][n]));
    }
};

// Two dwords of six bits add up in int16.
template <class Weights>
struct SixBitDots {
    static constexpr int OFFSETS = 4;
    template <int N>
    SIMD_FN void dot_block(__m256i (&sums)[N], const uint8_t* block, const int8_t* q) {
        UNROLL for (int n = 0; n < N; ++n) sums[n] = _mm256_setzero_si256();
        repeat<4>(EACH(g) {
            const __m256i w0 = Weights::template dword<g>(block);
            const __m256i w1 = Weights::template dword<g + 4>(block);
            UNROLL for (int n = 0; n < N; ++n) {
                const int8_t* x = q + n * BLOCK_WIDTH;
                __m256i pairs = _mm256_maddubs_epi16(w0, every_dword(x + 4 * g));
                add_words(pairs, _mm256_maddubs_epi16(w1, every_dword(x + 4 * (g + 4))));
                add_dwords(sums[n], widen(pairs));
            }
        });
    }
};

// Each kind: how many blocks one packed unit holds, its size, and one block's step.

template <class Dots, int N>
SIMD_FN void add_offsets(__m256i (&sums)[N], const int32_t* offsets) {
    if constexpr (Dots::OFFSETS != 0)
        UNROLL for (int n = 0; n < N; ++n)
            sums[n] = _mm256_add_epi32(sums[n], _mm256_set1_epi32(Dots::OFFSETS * offsets[n]));
}

// Two blocks, each with a scale.
template <class Packed, class Dots>
struct PairUnit {
    static constexpr size_t BLOCKS = 2, BYTES = sizeof(Packed);
    template <int N>
    SIMD_FN void block(__m256 (&acc)[N], const uint8_t* unit, size_t i, size_t row,
                       const Panel& x, size_t cell, size_t) {
        const auto& pair = *reinterpret_cast<const Packed*>(unit);
        __m256i sums[N];
        Dots::template dot_block<N>(sums, vectors_at(pair, i, row), x.q + cell * BLOCK_WIDTH);
        add_offsets<Dots>(sums, x.offset + cell);
        scale_in<N>(acc, sums, halves_at(pair.d[i] + row), x.scale + cell);
    }
};
struct WeightsQ4_0 : PairUnit<PackedQ4_0, NibbleDots> {};
struct WeightsQ5_0 : PairUnit<PackedQ5_0, FiveBitDots<FiveBitWeights>> {};
struct WeightsQ8_0 : PairUnit<PackedQ8_0, ByteDots> {};
struct WeightsIQ4_NL : PairUnit<PackedQ4_0, TableDots> {};

// Four blocks, each with a power of two as its scale.
struct WeightsMXFP4 {
    static constexpr size_t BLOCKS = 4, BYTES = sizeof(PackedMXFP4);
    template <int N>
    SIMD_FN void block(__m256 (&acc)[N], const uint8_t* unit, size_t i, size_t row,
                       const Panel& x, size_t cell, size_t) {
        using Dots = FiveBitDots<TableWeights<MXFP4_VALUES, 16>>;  // 4 to 28
        const auto& four = *reinterpret_cast<const PackedMXFP4*>(unit);
        __m256i sums[N];
        Dots::dot_block<N>(sums, vectors_at(four, i, row), x.q + cell * BLOCK_WIDTH);
        add_offsets<Dots>(sums, x.offset + cell);
        const __m128i field = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(four.field[i] + row));
        const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(field), 23);
        power_in<N>(acc, sums, _mm256_castsi256_ps(bits), x.scale + cell);
    }
};

// One block with a scale and a minimum.
template <class Packed, class Dots>
struct MinimumUnit {
    static constexpr size_t BLOCKS = 1, BYTES = sizeof(Packed);
    template <int N>
    SIMD_FN void block(__m256 (&acc)[N], const uint8_t* unit, size_t i, size_t row,
                       const Panel& x, size_t cell, size_t) {
        const auto& from = *reinterpret_cast<const Packed*>(unit);
        __m256i sums[N];
        Dots::template dot_block<N>(sums, vectors_at(from, i, row), x.q + cell * BLOCK_WIDTH);
        scale_in<N>(acc, sums, halves_at(from.d + row), x.scale + cell);
        minimum_in<N>(acc, halves_at(from.m + row), x.sum + cell);
    }
};
struct WeightsQ4_1 : MinimumUnit<PackedQ4_1, NibbleDots> {};
struct WeightsQ5_1 : MinimumUnit<PackedQ5_1, FiveBitDots<FiveBitWeights>> {};

SIMD_FN __m256 bytes_at(const uint8_t* p) {
    return _mm256_cvtepi32_ps(
        _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

// Q4_K and Q5_K. d * scale and m * min are exact in fp32, and so are their products with an activation
// scale; hence these are the steps of the definition, which scales the integers.
template <class Packed, class Dots>
struct Superblock {
    static constexpr size_t BLOCKS = 8, BYTES = sizeof(Packed);
    template <int N>
    SIMD_FN void block(__m256 (&acc)[N], const uint8_t* unit, size_t b, size_t row,
                       const Panel& x, size_t cell, size_t) {
        const auto& super = *reinterpret_cast<const Packed*>(unit);
        __m256i sums[N];
        Dots::template dot_block<N>(sums, vectors_at(super, b, row), x.q + cell * BLOCK_WIDTH);
        const __m256 dw = _mm256_mul_ps(halves_at(super.d + row), bytes_at(super.scale[b] + row));
        const __m256 mw = _mm256_mul_ps(halves_at(super.m + row), bytes_at(super.min[b] + row));
        scale_in<N>(acc, sums, dw, x.scale + cell);
        minimum_in<N>(acc, mw, x.sum + cell);
    }
};
struct WeightsQ4_K : Superblock<PackedQ4_K, NibbleDots> {};
struct WeightsQ5_K : Superblock<PackedQ5_K, FiveBitDots<FiveBitWeights>> {};

// Eight bytes as int32.
SIMD_FN __m256i signed_bytes_at(const int8_t* p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}

// As Superblock, without a minimum: d * scale is exact in fp32, and so is its product with an activation
// scale.
template <class Dots, int HALVINGS>
struct TableSuperblock {
    static constexpr size_t BLOCKS = 8, BYTES = sizeof(PackedIQ4_XS);
    template <int N>
    SIMD_FN void block(__m256 (&acc)[N], const uint8_t* unit, size_t b, size_t row,
                       const Panel& x, size_t cell, size_t) {
        const auto& super = *reinterpret_cast<const PackedIQ4_XS*>(unit);
        __m256i sums[N];
        Dots::template dot_block<N>(sums, vectors_at(super, b, row), x.q + cell * BLOCK_WIDTH);
        add_offsets<Dots>(sums, x.offset + cell);
        const __m256 factor = _mm256_cvtepi32_ps(signed_bytes_at(super.scale[b] + row));
        __m256 dw = _mm256_mul_ps(halves_at(super.d + row), factor);
        if constexpr (HALVINGS > 0) dw = _mm256_mul_ps(dw, _mm256_set1_ps(1.0f / (1 << HALVINGS)));
        scale_in<N>(acc, sums, dw, x.scale + cell);
    }
};
struct WeightsIQ4_XS : TableSuperblock<TableDots, 0> {};
struct WeightsIQ3_XXS : TableSuperblock<SixBitDots<TableWeights<IQ3_XXS_VALUES, 32>>, 1> {};
struct WeightsIQ3_S : TableSuperblock<FiveBitDots<TableWeights<IQ3_S_VALUES, 16>>, 0> {};

// A scale for each 16 k. Weights::half adds the product of such a half of a block.
template <class Weights, class Packed>
struct HalvesUnit {
    static constexpr size_t BLOCKS = 8, BYTES = sizeof(Packed);

    template <int N>
    SIMD_FN void block(__m256 (&acc)[N], const uint8_t* unit, size_t i, size_t row,
                       const Panel& x, size_t cell, size_t halves) {
        const auto& super = *reinterpret_cast<const Packed*>(unit);
        const int8_t* q = x.q + cell * BLOCK_WIDTH;
        __m256i sums[N];
        UNROLL for (int n = 0; n < N; ++n) sums[n] = _mm256_setzero_si256();
        Weights::template half<N, 0>(sums, super, i, row, q, x.halves + halves);
        Weights::template half<N, 4>(sums, super, i, row, q, x.halves + halves + GROUP_TOKENS);
        scale_in<N>(acc, sums, _mm256_load_ps(super.d + row), x.scale + cell);
    }
};

struct WeightsQ6_K : HalvesUnit<WeightsQ6_K, PackedQ6_K> {
    template <int G>
    SIMD_FN __m256i weights(const PackedQ6_K::Block& from, size_t row) {
        const __m256i packed = load32(from.low[G % 4][row]);
        const __m256i upper = load32(from.high[G % 4 / 2][row]);
        const __m256i low =
            _mm256_and_si256(G < 4 ? packed : _mm256_srli_epi16(packed, 4), _mm256_set1_epi8(15));
        constexpr int at = G % 2 == 0 ? (G < 4 ? 4 : 6) : (G < 4 ? 2 : 0);
        const __m256i moved = at > 4   ? _mm256_srli_epi16(upper, at > 4 ? at - 4 : 0)
                              : at < 4 ? _mm256_slli_epi16(upper, at < 4 ? 4 - at : 0)
                                       : upper;
        return _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(0x30)));
    }
    template <int N, int G>
    SIMD_FN void dot_two(__m256i (&sums)[N], const PackedQ6_K::Block& from, size_t row,
                         const int8_t* q) {
        const __m256i w0 = weights<G>(from, row), w1 = weights<G + 1>(from, row);
        UNROLL for (int n = 0; n < N; ++n) {
            const int8_t* x = q + n * BLOCK_WIDTH;
            __m256i pairs = _mm256_maddubs_epi16(w0, every_dword(x + 4 * G));
            add_words(pairs, _mm256_maddubs_epi16(w1, every_dword(x + 4 * (G + 1))));
            add_dwords(sums[n], widen(pairs));
        }
    }
    // out += scale * (offset + dot of 16 k)
    template <int N, int G>
    SIMD_FN void half(__m256i (&out)[N], const PackedQ6_K& super, size_t i, size_t row,
                      const int8_t* q, const int32_t* offsets) {
        __m256i sums[N];
        UNROLL for (int n = 0; n < N; ++n) sums[n] = _mm256_set1_epi32(offsets[n]);
        dot_two<N, G>(sums, super.block[i], row, q);
        dot_two<N, G + 2>(sums, super.block[i], row, q);
        const __m256i scale = signed_bytes_at(super.scale[2 * i + G / 4] + row);
        UNROLL for (int n = 0; n < N; ++n)
            out[n] = _mm256_add_epi32(out[n], _mm256_mullo_epi32(sums[n], scale));
    }
};

// Weights of three bits: dword G of eight rows.
template <int G>
SIMD_FN __m256i three_bits(const PackedQ3_K::Block& from, size_t row) {
    constexpr int at = G % 2 == 0 ? (G < 4 ? 4 : 6) : (G < 4 ? 2 : 0);
    const __m256i low = _mm256_srli_epi16(load32(from.low[G % 4 / 2][row]), at);
    const __m256i packed = load32(from.top[row]);
    const __m256i top = G < 2 ? _mm256_slli_epi16(packed, G < 2 ? 2 - G : 0)
                              : _mm256_srli_epi16(packed, G < 2 ? 0 : G - 2);
    return _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi8(3)),
                           _mm256_and_si256(top, _mm256_set1_epi8(4)));
}

// A half of a block adds up in int16 with its offset (4*7*127*2 + 4*127*16 = 15240), which the low words hold;
// its scale then takes the place of ones.
struct WeightsQ3_K : HalvesUnit<WeightsQ3_K, PackedQ3_K> {
    // out += scale * (offset + dot of 16 k); an offset of half a block is -32 times its sum.
    template <int N, int G>
    SIMD_FN void half(__m256i (&out)[N], const PackedQ3_K& super, size_t i, size_t row,
                      const int8_t* q, const int32_t* offsets) {
        __m256i pairs[N];
        UNROLL for (int n = 0; n < N; ++n)
            pairs[n] = _mm256_set1_epi32(offsets[n] >> 3 & 0xFFFF);
        repeat<4>(EACH(g) {
            const __m256i w = three_bits<G + g>(super.block[i], row);
            UNROLL for (int n = 0; n < N; ++n)
                add_words(pairs[n],
                          _mm256_maddubs_epi16(w, every_dword(q + n * BLOCK_WIDTH + 4 * (G + g))));
        });
        const __m256i scale = signed_bytes_at(super.scale[2 * i + G / 4] + row);
        const __m256i both = _mm256_blend_epi16(scale, _mm256_slli_epi32(scale, 16), 0xAA);
        UNROLL for (int n = 0; n < N; ++n) add_dwords(out[n], _mm256_madd_epi16(pairs[n], both));
    }
};

// Two dwords add up in int16, as |w| times x with the sign of w (2*43*127*2 = 21844); a scale then takes the place
// of ones.
template <const int8_t (&VALUES)[16]>
struct WeightsThreeBits : HalvesUnit<WeightsThreeBits<VALUES>, PackedIQ2> {
    // out += scale * (dot of 16 k)
    template <int N, int G>
    SIMD_FN void half(__m256i (&out)[N], const PackedIQ2& super, size_t i, size_t row,
                      const int8_t* q, const int32_t*) {
        const __m128i both =
            _mm_loadl_epi64(reinterpret_cast<const __m128i*>(super.scale[i] + row));
        const __m256i stored = _mm256_and_si256(
            _mm256_srli_epi32(_mm256_cvtepu8_epi32(both), G), _mm256_set1_epi32(15));
        const __m256i scale =
            _mm256_add_epi32(_mm256_slli_epi32(stored, 1), _mm256_set1_epi32(1));
        const __m256i twice = _mm256_or_si256(scale, _mm256_slli_epi32(scale, 16));
        const __m256i table = table_of(VALUES);
        repeat<2>(EACH(two) {
            constexpr int first = G + 2 * two;
            const __m256i w0 = _mm256_shuffle_epi8(table, three_bits<first>(super.block[i], row));
            const __m256i w1 =
                _mm256_shuffle_epi8(table, three_bits<first + 1>(super.block[i], row));
            const __m256i size0 = _mm256_abs_epi8(w0), size1 = _mm256_abs_epi8(w1);
            UNROLL for (int n = 0; n < N; ++n) {
                const int8_t* x = q + n * BLOCK_WIDTH + 4 * first;
                __m256i pairs =
                    _mm256_maddubs_epi16(size0, _mm256_sign_epi8(every_dword(x), w0));
                add_words(pairs, _mm256_maddubs_epi16(
                                     size1, _mm256_sign_epi8(every_dword(x + 4), w1)));
                add_dwords(out[n], _mm256_madd_epi16(pairs, twice));
            }
        });
    }
};
struct WeightsIQ2 : WeightsThreeBits<IQ2_VALUES> {};
struct WeightsIQ2_XXS : WeightsIQ2 {};
struct WeightsIQ1_M : WeightsThreeBits<IQ1_VALUES> {};
struct WeightsIQ1_S : WeightsIQ1_M {};

// A scale and a minimum for each 16 k. Both halves of a block add up in int16 (4*3*127*2 = 3048); a scale then takes
// the place of ones, and so does a minimum beside the sums of the activations.
struct WeightsQ2_K {
    static constexpr size_t BLOCKS = 8, BYTES = sizeof(PackedQ2_K);

    template <int G>
    SIMD_FN __m256i weights(const PackedQ2_K::Block& from, size_t row) {
        constexpr int at = G % 2 == 0 ? (G < 4 ? 4 : 6) : (G < 4 ? 2 : 0);
        return _mm256_and_si256(_mm256_srli_epi16(load32(from.low[G % 4 / 2][row]), at),
                                _mm256_set1_epi8(3));
    }
    // sums += scale * (dot of 16 k); scale: twice in each row.
    template <int N, int G>
    SIMD_FN void half(__m256i (&sums)[N], const PackedQ2_K::Block& from, __m256i scale, size_t row,
                      const int8_t* q) {
        __m256i pairs[N];
        UNROLL for (int n = 0; n < N; ++n) pairs[n] = _mm256_setzero_si256();
        repeat<4>(EACH(g) {
            const __m256i w = weights<G + g>(from, row);
            UNROLL for (int n = 0; n < N; ++n)
                add_words(pairs[n],
                          _mm256_maddubs_epi16(w, every_dword(q + n * BLOCK_WIDTH + 4 * (G + g))));
        });
        UNROLL for (int n = 0; n < N; ++n) add_dwords(sums[n], _mm256_madd_epi16(pairs[n], scale));
    }
    template <int N>
    SIMD_FN void block(__m256 (&acc)[N], const uint8_t* unit, size_t i, size_t row,
                       const Panel& x, size_t cell, size_t halves) {
        const auto& super = *reinterpret_cast<const PackedQ2_K*>(unit);
        const __m256i both = _mm256_cvtepu8_epi16(
            _mm_load_si128(reinterpret_cast<const __m128i*>(super.scale_and_min[i][row])));
        const __m256i scales = _mm256_and_si256(both, _mm256_set1_epi16(15));
        const __m256i first =
            _mm256_blend_epi16(scales, _mm256_slli_epi32(scales, 16), 0xAA);
        const __m256i last = _mm256_blend_epi16(_mm256_srli_epi32(scales, 16), scales, 0xAA);
        const int8_t* q = x.q + cell * BLOCK_WIDTH;
        __m256i sums[N];
        UNROLL for (int n = 0; n < N; ++n) sums[n] = _mm256_setzero_si256();
        half<N, 0>(sums, super.block[i], first, row, q);
        half<N, 4>(sums, super.block[i], last, row, q);
        scale_in<N>(acc, sums, halves_at(super.d + row), x.scale + cell);
        const __m256i minima = _mm256_srli_epi16(both, 4);
        UNROLL for (int n = 0; n < N; ++n)
            sums[n] = _mm256_madd_epi16(minima, _mm256_set1_epi32(half_sums(x.halves + halves + n)));
        scale_in<N>(acc, sums, halves_at(super.m + row), x.scale + cell);
    }
};

}  // namespace
}  // namespace batchengine
