// One block of each kind with AVX512-VNNI, for linear_avx512.cpp: the outer product of R row tiles and
// N tokens.
#pragma once

#include "linear/linear_level.h"

namespace batchengine {
namespace {

template <int R, int N>
struct Sums {
    __m512i s[R][N];
};
template <int R, int N>
struct Accumulators {
    __m512 a[R][N];
};

template <int R, int N>
SIMD_FN void start_at_zero(Sums<R, N>& sums) {
    UNROLL for (int n = 0; n < N; ++n)
        UNROLL for (int r = 0; r < R; ++r) sums.s[r][n] = _mm512_setzero_si512();
}

// sums = offsets << SHIFT, or >> -SHIFT. An offset of a block is -8 * S, of half a block -32 times its sum.
template <int SHIFT, int R, int N>
SIMD_FN void start(Sums<R, N>& sums, const int32_t* offsets) {
    UNROLL for (int n = 0; n < N; ++n) {
        __m512i value = _mm512_set1_epi32(offsets[n]);
        if constexpr (SHIFT > 0) value = _mm512_slli_epi32(value, SHIFT);
        if constexpr (SHIFT < 0) value = _mm512_srai_epi32(value, -SHIFT);
        UNROLL for (int r = 0; r < R; ++r) sums.s[r][n] = value;
    }
}

// sums += weights[r] (unsigned bytes) times dword g of every token
template <int R, int N>
SIMD_FN void dot(Sums<R, N>& sums, const __m512i (&weights)[R], const int8_t* q, int g) {
    UNROLL for (int n = 0; n < N; ++n) {
        const __m512i x = every_dword(q + n * BLOCK_WIDTH + 4 * g);
        UNROLL for (int r = 0; r < R; ++r)
            sums.s[r][n] = _mm512_dpbusd_epi32(sums.s[r][n], weights[r], x);
    }
}

template <int R, int N>
SIMD_FN void add(Sums<R, N>& sums, const Sums<R, N>& more) {
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int n = 0; n < N; ++n)
            sums.s[r][n] = _mm512_add_epi32(sums.s[r][n], more.s[r][n]);
}

// acc = fma(float(I), dw * dx, acc); the product of the scales is exact.
template <int R, int N>
SIMD_FN void scale_in(Accumulators<R, N>& acc, const Sums<R, N>& sums, const __m512 (&dw)[R],
                     const float* scale) {
    UNROLL for (int n = 0; n < N; ++n) {
        const __m512 dx = _mm512_set1_ps(scale[n]);
        UNROLL for (int r = 0; r < R; ++r)
            acc.a[r][n] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums.s[r][n]),
                                          _mm512_mul_ps(dw[r], dx), acc.a[r][n]);
    }
}

// acc = fma(float(I) * dx, power, acc); the first product is exact.
template <int R, int N>
SIMD_FN void power_in(Accumulators<R, N>& acc, const Sums<R, N>& sums, const __m512 (&power)[R],
                      const float* scale) {
    UNROLL for (int n = 0; n < N; ++n) {
        const __m512 dx = _mm512_set1_ps(scale[n]);
        UNROLL for (int r = 0; r < R; ++r)
            acc.a[r][n] = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sums.s[r][n]), dx),
                                          power[r], acc.a[r][n]);
    }
}

// acc = fma(S * dx, m, acc), the same number as fma(S, m * dx, acc).
template <int R, int N>
SIMD_FN void minimum_in(Accumulators<R, N>& acc, const __m512 (&mw)[R], const float* sum) {
    UNROLL for (int n = 0; n < N; ++n) {
        const __m512 s = _mm512_set1_ps(sum[n]);
        UNROLL for (int r = 0; r < R; ++r)
            acc.a[r][n] = _mm512_fmadd_ps(s, mw[r], acc.a[r][n]);
    }
}

SIMD_FN __m512 halves_at(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
}

// The dots of a block, by how its weights are packed: one struct each.

// Nibbles are weights, or the places of theirs in a table; OFFSET makes them the unsigned operand of dots.
struct Plain {
    SIMD_FN __m512i weights(__m512i nibbles) { return nibbles; }
};
template <const int8_t (&VALUES)[16], int OFFSET>
struct Table {
    SIMD_FN __m512i weights(__m512i nibbles) {
        const __m512i table = _mm512_add_epi8(
            _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(VALUES))),
            _mm512_set1_epi8(static_cast<char>(OFFSET)));
        return _mm512_shuffle_epi8(table, nibbles);
    }
};

// The four nibble vectors of a block at block[r]: low nibbles are dwords 0..3, high 4..7. All low ones
// come first and, when sums fill the registers, the bytes are loaded twice: keeping them would spill sums.
template <class Meaning>
struct NibbleDots {
    template <int R, int N>
    SIMD_FN void dot_block(Sums<R, N>& sums, const uint8_t* const (&block)[R], const int8_t* q) {
        const __m512i mask = _mm512_set1_epi8(15);
        const uint8_t* again[R];
        UNROLL for (int r = 0; r < R; ++r) {
            again[r] = block[r];
            if (N > 2) asm("" : "+r"(again[r]));  // or the compiler keeps the first loads
        }
        UNROLL for (int j = 0; j < 4; ++j) {
            __m512i low[R];
            UNROLL for (int r = 0; r < R; ++r)
                low[r] = Meaning::weights(
                    _mm512_and_si512(_mm512_load_si512(block[r] + 64 * j), mask));
            dot<R, N>(sums, low, q, j);
        }
        UNROLL for (int j = 0; j < 4; ++j) {
            __m512i high[R];
            UNROLL for (int r = 0; r < R; ++r)
                high[r] = Meaning::weights(_mm512_and_si512(
                    _mm512_srli_epi16(_mm512_load_si512(again[r] + 64 * j), 4), mask));
            dot<R, N>(sums, high, q, j + 4);
        }
    }
};

struct ByteDots {
    template <int R, int N>
    SIMD_FN void dot_block(Sums<R, N>& sums, const uint8_t* const (&block)[R], const int8_t* q) {
        UNROLL for (int g = 0; g < 8; ++g) {
            __m512i weights[R];
            UNROLL for (int r = 0; r < R; ++r) weights[r] = _mm512_load_si512(block[r] + 64 * g);
            dot<R, N>(sums, weights, q, g);
        }
    }
};

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

struct FiveBitDots {
    template <int R, int N>
    SIMD_FN void dot_block(Sums<R, N>& sums, const FiveBits* const (&block)[R], const int8_t* q) {
        repeat<8>(EACH(g) {
            __m512i weights[R];
            UNROLL for (int r = 0; r < R; ++r) weights[r] = five_bits<g>(*block[r]);
            dot<R, N>(sums, weights, q, g);
        });
    }
};

// Each kind: how many blocks one packed unit holds, its size, and one block's step.

// Two blocks, each with a scale. Sums start at -8 * S << SHIFT.
template <class Packed, class Dots, int SHIFT>
struct PairUnit {
    static constexpr size_t BLOCKS = 2, BYTES = sizeof(Packed);
    template <int R, int N>
    SIMD_FN void block(Accumulators<R, N>& acc, const uint8_t* const (&unit)[R], size_t i,
                       const Panel& x, size_t cell, size_t) {
        Sums<R, N> sums;
        start<SHIFT>(sums, x.offset + cell);
        BlockOf<Packed> block[R];
        __m512 dw[R];
        UNROLL for (int r = 0; r < R; ++r) {
            const auto* pair = reinterpret_cast<const Packed*>(unit[r]);
            block[r] = block_at(*pair, i);
            dw[r] = halves_at(pair->d[i]);
        }
        Dots::template dot_block<R, N>(sums, block, x.q + cell * BLOCK_WIDTH);
        scale_in(acc, sums, dw, x.scale + cell);
    }
};
struct WeightsQ4_0 : PairUnit<PackedQ4_0, NibbleDots<Plain>, 0> {};
struct WeightsQ5_0 : PairUnit<PackedQ5_0, FiveBitDots, 1> {};
struct WeightsQ8_0 : PairUnit<PackedQ8_0, ByteDots, 4> {};
struct WeightsIQ4_NL : PairUnit<PackedQ4_0, NibbleDots<Table<IQ4_VALUES, 128>>, 4> {};

SIMD_FN __m512 power_at(const uint8_t* fields) {
    const __m128i field = _mm_load_si128(reinterpret_cast<const __m128i*>(fields));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(field), 23));
}

// Four blocks, each with a power of two as its scale.
struct WeightsMXFP4 {
    static constexpr size_t BLOCKS = 4, BYTES = sizeof(PackedMXFP4);
    template <int R, int N>
    SIMD_FN void block(Accumulators<R, N>& acc, const uint8_t* const (&unit)[R], size_t i,
                       const Panel& x, size_t cell, size_t) {
        Sums<R, N> sums;
        start<1>(sums, x.offset + cell);
        const uint8_t* block[R];
        __m512 power[R];
        UNROLL for (int r = 0; r < R; ++r) {
            const auto* four = reinterpret_cast<const PackedMXFP4*>(unit[r]);
            block[r] = block_at(*four, i);
            power[r] = power_at(four->field[i]);
        }
        NibbleDots<Table<MXFP4_VALUES, 16>>::dot_block<R, N>(sums, block, x.q + cell * BLOCK_WIDTH);
        power_in(acc, sums, power, x.scale + cell);
    }
};

// One block with a scale and a minimum.
template <class Packed, class Dots>
struct MinimumUnit {
    static constexpr size_t BLOCKS = 1, BYTES = sizeof(Packed);
    template <int R, int N>
    SIMD_FN void block(Accumulators<R, N>& acc, const uint8_t* const (&unit)[R], size_t i,
                       const Panel& x, size_t cell, size_t) {
        Sums<R, N> sums;
        start_at_zero(sums);
        BlockOf<Packed> block[R];
        __m512 dw[R], mw[R];
        UNROLL for (int r = 0; r < R; ++r) {
            const auto* from = reinterpret_cast<const Packed*>(unit[r]);
            block[r] = block_at(*from, i);
            dw[r] = halves_at(from->d);
            mw[r] = halves_at(from->m);
        }
        Dots::template dot_block<R, N>(sums, block, x.q + cell * BLOCK_WIDTH);
        scale_in(acc, sums, dw, x.scale + cell);
        minimum_in(acc, mw, x.sum + cell);
    }
};
struct WeightsQ4_1 : MinimumUnit<PackedQ4_1, NibbleDots<Plain>> {};
struct WeightsQ5_1 : MinimumUnit<PackedQ5_1, FiveBitDots> {};

SIMD_FN __m512 bytes_at(const uint8_t* p) {
    return _mm512_cvtepi32_ps(
        _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p))));
}

// Q4_K and Q5_K. d * scale and m * min are exact in fp32, and so are their products with an activation
// scale; hence the steps are those of the definition, which scales the integers.
template <class Packed, class Dots>
struct Superblock {
    static constexpr size_t BLOCKS = 8, BYTES = sizeof(Packed);

    // Scales of R superblocks and of their sub-blocks.
    template <int R>
    struct Unpacked {
        __m512 super_d[R], super_m[R];
        __m512 d[8][R], m[8][R];
    };
    static constexpr size_t TOKENS_UNPACKED = 2;

    template <int R>
    SIMD_FN void unpack_scales(const uint8_t* const (&unit)[R], Unpacked<R>& to) {
        UNROLL for (int r = 0; r < R; ++r) {
            const auto* super = reinterpret_cast<const Packed*>(unit[r]);
            to.super_d[r] = halves_at(super->d);
            to.super_m[r] = halves_at(super->m);
        }
    }
    template <int R, int N, bool FIRST>
    SIMD_FN void sub_block(Accumulators<R, N>& acc, const uint8_t* const (&unit)[R],
                           Unpacked<R>& scales, size_t b, const Panel& x, size_t cell, size_t) {
        BlockOf<Packed> block[R];
        UNROLL for (int r = 0; r < R; ++r) {
            const auto* super = reinterpret_cast<const Packed*>(unit[r]);
            block[r] = block_at(*super, b);
            if (FIRST) {
                scales.d[b][r] = _mm512_mul_ps(scales.super_d[r], bytes_at(super->scale[b]));
                scales.m[b][r] = _mm512_mul_ps(scales.super_m[r], bytes_at(super->min[b]));
            }
        }
        Sums<R, N> sums;
        start_at_zero(sums);
        Dots::template dot_block<R, N>(sums, block, x.q + cell * BLOCK_WIDTH);
        scale_in(acc, sums, scales.d[b], x.scale + cell);
        minimum_in(acc, scales.m[b], x.sum + cell);
    }
    template <int R, int N>
    SIMD_FN void block(Accumulators<R, N>& acc, const uint8_t* const (&unit)[R], size_t b,
                       const Panel& x, size_t cell, size_t halves) {
        Unpacked<R> scales;
        unpack_scales(unit, scales);
        sub_block<R, N, true>(acc, unit, scales, b, x, cell, halves);
    }
};
struct WeightsQ4_K : Superblock<PackedQ4_K, NibbleDots<Plain>> {};
struct WeightsQ5_K : Superblock<PackedQ5_K, FiveBitDots> {};

SIMD_FN __m512i signed_bytes_at(const int8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(p)));
}

// d of a superblock of nibbles with a table, times 2^-HALVINGS.
template <int HALVINGS>
SIMD_FN __m512 table_scale(const PackedIQ4_XS& super) {
    const __m512 d = halves_at(super.d);
    return HALVINGS == 0 ? d : _mm512_mul_ps(d, _mm512_set1_ps(1.0f / (1 << HALVINGS)));
}

// As Superblock, without a minimum: d * scale is exact in fp32, and so is its product with an activation
// scale. Sums start at -8 * S << SHIFT, which the table's values are made unsigned by.
template <const int8_t (&VALUES)[16], int SHIFT, int HALVINGS>
struct TableSuperblock {
    static constexpr size_t BLOCKS = 8, BYTES = sizeof(PackedIQ4_XS);
    using Dots = NibbleDots<Table<VALUES, 8 << SHIFT>>;

    template <int R>
    struct Unpacked {
        __m512 super_d[R];
        __m512 d[8][R];
    };
    static constexpr size_t TOKENS_UNPACKED = 2;

    template <int R>
    SIMD_FN void unpack_scales(const uint8_t* const (&unit)[R], Unpacked<R>& to) {
        UNROLL for (int r = 0; r < R; ++r)
            to.super_d[r] = table_scale<HALVINGS>(*reinterpret_cast<const PackedIQ4_XS*>(unit[r]));
    }
    template <int R, int N, bool FIRST>
    SIMD_FN void sub_block(Accumulators<R, N>& acc, const uint8_t* const (&unit)[R],
                           Unpacked<R>& scales, size_t b, const Panel& x, size_t cell, size_t) {
        const uint8_t* block[R];
        UNROLL for (int r = 0; r < R; ++r) {
            const auto* super = reinterpret_cast<const PackedIQ4_XS*>(unit[r]);
            block[r] = block_at(*super, b);
            if (FIRST)
                scales.d[b][r] = _mm512_mul_ps(
                    scales.super_d[r], _mm512_cvtepi32_ps(signed_bytes_at(super->scale[b])));
        }
        Sums<R, N> sums;
        start<SHIFT>(sums, x.offset + cell);
        Dots::template dot_block<R, N>(sums, block, x.q + cell * BLOCK_WIDTH);
        scale_in(acc, sums, scales.d[b], x.scale + cell);
    }
    template <int R, int N>
    SIMD_FN void block(Accumulators<R, N>& acc, const uint8_t* const (&unit)[R], size_t b,
                       const Panel& x, size_t cell, size_t halves) {
        Unpacked<R> scales;
        unpack_scales(unit, scales);
        sub_block<R, N, true>(acc, unit, scales, b, x, cell, halves);
    }
};

struct WeightsIQ4_XS : TableSuperblock<IQ4_VALUES, 4, 0> {};
struct WeightsIQ3_XXS : TableSuperblock<IQ3_XXS_VALUES, 2, 1> {};
struct WeightsIQ3_S : TableSuperblock<IQ3_S_VALUES, 1, 0> {};

// Weights of dword g (four k of 16 rows): low nibble or high nibble, plus two upper bits.
template <int G>
SIMD_FN __m512i unsigned_weights(const PackedQ6_K::Block& from) {
    const __m512i packed = _mm512_load_si512(&from.low[G % 4][0][0]);
    const __m512i upper = _mm512_load_si512(&from.high[G % 4 / 2][0][0]);
    const __m512i low =
        _mm512_and_si512(G < 4 ? packed : _mm512_srli_epi16(packed, 4), _mm512_set1_epi8(15));
    constexpr int at = G % 2 == 0 ? (G < 4 ? 4 : 6) : (G < 4 ? 2 : 0);
    const __m512i moved = at > 4   ? _mm512_srli_epi16(upper, at > 4 ? at - 4 : 0)
                          : at < 4 ? _mm512_slli_epi16(upper, at < 4 ? 4 - at : 0)
                                   : upper;
    // low | (moved & 0x30)
    return _mm512_ternarylogic_epi32(low, moved, _mm512_set1_epi8(0x30), 0xF8);
}
template <int G>
SIMD_FN __m512i unsigned_weights(const PackedQ3_K::Block& from) {
    constexpr int at = G % 2 == 0 ? (G < 4 ? 4 : 6) : (G < 4 ? 2 : 0);
    const __m512i low = _mm512_srli_epi16(_mm512_load_si512(&from.low[G % 4 / 2][0][0]), at);
    const __m512i packed = _mm512_load_si512(&from.top[0][0]);
    const __m512i top = G < 2 ? _mm512_slli_epi16(packed, G < 2 ? 2 - G : 0)
                              : _mm512_srli_epi16(packed, G < 2 ? 0 : G - 2);
    // Bits 0 and 1 of low, bit 2 of top.
    const __m512i both = _mm512_ternarylogic_epi32(top, low, _mm512_set1_epi8(4), 0xE4);
    return _mm512_and_si512(both, _mm512_set1_epi8(7));
}

// The scale of 16 k.
template <class Packed>
SIMD_FN __m512i sub_scale(const Packed& super, size_t sub) {
    return signed_bytes_at(super.scale[sub]);
}
SIMD_FN __m512i sub_scale(const PackedIQ2& super, size_t sub) {
    const __m128i both = _mm_load_si128(reinterpret_cast<const __m128i*>(super.scale[sub / 2]));
    const __m512i wide = _mm512_cvtepu8_epi32(both);
    const __m512i stored = sub % 2 ? _mm512_srli_epi32(wide, 4)
                                   : _mm512_and_si512(wide, _mm512_set1_epi32(15));
    return _mm512_add_epi32(_mm512_slli_epi32(stored, 1), _mm512_set1_epi32(1));
}

// A scale for each 16 k. Sums start at the offset of a half << SHIFT.
template <class Packed, int SHIFT, class Meaning = Plain>
struct HalvesUnit {
    static constexpr size_t BLOCKS = 8, BYTES = sizeof(Packed);
    static constexpr bool HAS_TWO_SUMS = true;  // per output

    template <int R, int N, int G>
    SIMD_FN void dot_four(Sums<R, N>& sums, const typename Packed::Block* const (&from)[R],
                          const int8_t* q) {
        __m512i w[R];
        UNROLL for (int r = 0; r < R; ++r) w[r] = Meaning::weights(unsigned_weights<G>(*from[r]));
        dot<R, N>(sums, w, q, G);
    }
    // sums *= the sub-scale of 16 k, exact in int32
    template <int R, int N>
    SIMD_FN void scale_half(Sums<R, N>& sums, const Packed* const (&super)[R], size_t sub) {
        UNROLL for (int r = 0; r < R; ++r) {
            const __m512i scale = sub_scale(*super[r], sub);
            UNROLL for (int n = 0; n < N; ++n)
                sums.s[r][n] = _mm512_mullo_epi32(sums.s[r][n], scale);
        }
    }
    template <int R, int N>
    SIMD_FN void block(Accumulators<R, N>& acc, const uint8_t* const (&unit)[R], size_t i,
                       const Panel& x, size_t cell, size_t halves) {
        const Packed* super[R];
        const typename Packed::Block* from[R];
        __m512 dw[R];
        UNROLL for (int r = 0; r < R; ++r) {
            super[r] = reinterpret_cast<const Packed*>(unit[r]);
            from[r] = &super[r]->block[i];
            dw[r] = _mm512_load_ps(super[r]->d);
        }
        const int8_t* q = x.q + cell * BLOCK_WIDTH;
        Sums<R, N> first, last;
        start<SHIFT>(first, x.halves + halves);
        repeat<4>(EACH(g) { dot_four<R, N, g>(first, from, q); });
        scale_half(first, super, 2 * i);
        start<SHIFT>(last, x.halves + halves + GROUP_TOKENS);
        repeat<4>(EACH(g) { dot_four<R, N, g + 4>(last, from, q); });
        scale_half(last, super, 2 * i + 1);
        add(first, last);
        scale_in(acc, first, dw, x.scale + cell);
    }

    // One superblock of R tiles, unpacked: bytes for the dot, sub-scales as int32.
    template <int R>
    struct Unpacked {
        __m512i weights[8][GROUPS][R];
        __m512i scale[16][R];
        __m512 d[R];
    };
    // Fewest tokens that share what the first of them unpack: unpacking costs as much as two tokens' dots.
    static constexpr size_t TOKENS_UNPACKED = 5;

    template <int R>
    SIMD_FN void unpack_scales(const uint8_t* const (&unit)[R], Unpacked<R>& to) {
        UNROLL for (int r = 0; r < R; ++r)
            to.d[r] = _mm512_load_ps(reinterpret_cast<const Packed*>(unit[r])->d);
    }
    // Half `H` of block `b`: four dots, then the sub-scale. FIRST also unpacks, dword by dword: all of
    // a half at once would push accumulators out of the registers.
    template <int R, int N, int H, bool FIRST>
    SIMD_FN void half_block(Sums<R, N>& sums, const uint8_t* const (&unit)[R], Unpacked<R>& from,
                            size_t b, const int32_t* offsets, const int8_t* q) {
        const Packed* super[R];
        UNROLL for (int r = 0; r < R; ++r)
            super[r] = reinterpret_cast<const Packed*>(unit[r]);
        start<SHIFT>(sums, offsets + H * GROUP_TOKENS);
        repeat<4>(EACH(i) {
            constexpr int G = 4 * H + i;
            if (FIRST)
                UNROLL for (int r = 0; r < R; ++r)
                    from.weights[b][G][r] =
                        Meaning::weights(unsigned_weights<G>(super[r]->block[b]));
            dot<R, N>(sums, from.weights[b][G], q, G);
        });
        const size_t sub = 2 * b + H;
        UNROLL for (int r = 0; r < R; ++r) {
            if (FIRST) from.scale[sub][r] = sub_scale(*super[r], sub);
            UNROLL for (int n = 0; n < N; ++n)
                sums.s[r][n] = _mm512_mullo_epi32(sums.s[r][n], from.scale[sub][r]);
        }
    }
    template <int R, int N, bool FIRST>
    SIMD_FN void sub_block(Accumulators<R, N>& acc, const uint8_t* const (&unit)[R],
                           Unpacked<R>& from, size_t b, const Panel& x, size_t cell, size_t halves) {
        const int8_t* q = x.q + cell * BLOCK_WIDTH;
        Sums<R, N> first, last;
        half_block<R, N, 0, FIRST>(first, unit, from, b, x.halves + halves, q);
        half_block<R, N, 1, FIRST>(last, unit, from, b, x.halves + halves, q);
        add(first, last);
        scale_in(acc, first, from.d, x.scale + cell);
    }
};
struct WeightsQ6_K : HalvesUnit<PackedQ6_K, 0> {};
struct WeightsQ3_K : HalvesUnit<PackedQ3_K, -3> {};
struct WeightsIQ2 : HalvesUnit<PackedIQ2, 1, Table<IQ2_VALUES, 64>> {};
struct WeightsIQ1_M : HalvesUnit<PackedIQ2, 0, Table<IQ1_VALUES, 32>> {};

// Of IQ2_XXS and IQ1_S the halves of a block have one scale. d * scale is exact in fp32, and so is its product with an
// activation scale. Sums start at -8 * S << SHIFT, which the table's values are made unsigned by.
template <const int8_t (&VALUES)[16], int SHIFT>
struct OneScaleUnit {
    static constexpr size_t BLOCKS = 8, BYTES = sizeof(PackedIQ2);
    using Meaning = Table<VALUES, 8 << SHIFT>;

    SIMD_FN __m512 block_scale(const PackedIQ2& super, size_t i) {
        return _mm512_mul_ps(_mm512_load_ps(super.d), _mm512_cvtepi32_ps(sub_scale(super, 2 * i)));
    }
    template <int R, int N>
    SIMD_FN void block(Accumulators<R, N>& acc, const uint8_t* const (&unit)[R], size_t i,
                       const Panel& x, size_t cell, size_t) {
        const PackedIQ2* super[R];
        __m512 dw[R];
        UNROLL for (int r = 0; r < R; ++r) {
            super[r] = reinterpret_cast<const PackedIQ2*>(unit[r]);
            dw[r] = block_scale(*super[r], i);
        }
        Sums<R, N> sums;
        start<SHIFT>(sums, x.offset + cell);
        repeat<GROUPS>(EACH(g) {
            __m512i w[R];
            UNROLL for (int r = 0; r < R; ++r)
                w[r] = Meaning::weights(unsigned_weights<g>(super[r]->block[i]));
            dot<R, N>(sums, w, x.q + cell * BLOCK_WIDTH, g);
        });
        scale_in(acc, sums, dw, x.scale + cell);
    }

    // One superblock of R tiles, unpacked.
    template <int R>
    struct Unpacked {
        __m512i weights[8][GROUPS][R];
        __m512 d[8][R];
    };
    static constexpr size_t TOKENS_UNPACKED = 5;

    template <int R>
    SIMD_FN void unpack_scales(const uint8_t* const (&)[R], Unpacked<R>&) {}
    template <int R, int N, bool FIRST>
    SIMD_FN void sub_block(Accumulators<R, N>& acc, const uint8_t* const (&unit)[R],
                           Unpacked<R>& from, size_t b, const Panel& x, size_t cell, size_t) {
        Sums<R, N> sums;
        start<SHIFT>(sums, x.offset + cell);
        repeat<GROUPS>(EACH(g) {
            if (FIRST)
                UNROLL for (int r = 0; r < R; ++r) {
                    const auto* super = reinterpret_cast<const PackedIQ2*>(unit[r]);
                    from.weights[b][g][r] = Meaning::weights(unsigned_weights<g>(super->block[b]));
                }
            dot<R, N>(sums, from.weights[b][g], x.q + cell * BLOCK_WIDTH, g);
        });
        if (FIRST)
            UNROLL for (int r = 0; r < R; ++r)
                from.d[b][r] = block_scale(*reinterpret_cast<const PackedIQ2*>(unit[r]), b);
        scale_in(acc, sums, from.d[b], x.scale + cell);
    }
};
struct WeightsIQ2_XXS : OneScaleUnit<IQ2_VALUES, 3> {};
struct WeightsIQ1_S : OneScaleUnit<IQ1_VALUES, 1> {};

template <int G>
SIMD_FN __m512i unsigned_weights(const PackedQ2_K::Block& from) {
    constexpr int at = G % 2 == 0 ? (G < 4 ? 4 : 6) : (G < 4 ? 2 : 0);
    const __m512i packed = _mm512_load_si512(&from.low[G % 4 / 2][0][0]);
    return _mm512_and_si512(_mm512_srli_epi16(packed, at), _mm512_set1_epi8(3));
}

// Scales and minima of block i of Q2_K: of each row those of both halves, as two int16.
struct HalfPairs {
    __m512i scales, minima;
};
SIMD_FN HalfPairs half_pairs_at(const PackedQ2_K& from, size_t i) {
    const __m512i both = _mm512_cvtepu8_epi16(
        _mm256_load_si256(reinterpret_cast<const __m256i*>(from.scale_and_min[i])));
    return {_mm512_and_si512(both, _mm512_set1_epi16(15)), _mm512_srli_epi16(both, 4)};
}

// The scale of each half in both words of its row: two bytes times it, at most 3 * 15 each, stay in their places.
struct BothScales {
    __m512i of[2];
};
SIMD_FN BothScales both_scales(const HalfPairs& pairs) {
    return {{_mm512_mask_blend_epi16(0xAAAAAAAAu, pairs.scales, _mm512_slli_epi32(pairs.scales, 16)),
             _mm512_mask_blend_epi16(0xAAAAAAAAu, _mm512_srli_epi32(pairs.scales, 16), pairs.scales)}};
}

// acc = fma(J, m * dx, acc), where J is the sum of both minima times the sums of their halves.
template <int R, int N>
SIMD_FN void minima_in(Accumulators<R, N>& acc, const __m512i (&minima)[R], const __m512 (&mw)[R],
                       const int32_t* halves, const float* scale) {
    UNROLL for (int n = 0; n < N; ++n) {
        const __m512i sums = _mm512_set1_epi32(half_sums(halves + n));
        const __m512 dx = _mm512_set1_ps(scale[n]);
        UNROLL for (int r = 0; r < R; ++r)
            acc.a[r][n] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_madd_epi16(sums, minima[r])),
                                          _mm512_mul_ps(mw[r], dx), acc.a[r][n]);
    }
}

// A scale and a minimum for each 16 k.
struct WeightsQ2_K {
    static constexpr size_t BLOCKS = 8, BYTES = sizeof(PackedQ2_K);
    static constexpr bool HAS_TWO_SUMS = true;  // per output

    // The dots of both halves fit int16 (16*3*127 = 6096): one instruction multiplies them with their scales and
    // adds the products.
    template <int R, int N>
    SIMD_FN void block(Accumulators<R, N>& acc, const uint8_t* const (&unit)[R], size_t i,
                       const Panel& x, size_t cell, size_t halves) {
        const PackedQ2_K* super[R];
        __m512i minima[R];
        __m512 dw[R], mw[R];
        UNROLL for (int r = 0; r < R; ++r)
            super[r] = reinterpret_cast<const PackedQ2_K*>(unit[r]);
        Sums<R, N> first, last;
        start_at_zero(first);
        start_at_zero(last);
        repeat<GROUPS>(EACH(g) {
            __m512i w[R];
            UNROLL for (int r = 0; r < R; ++r) w[r] = unsigned_weights<g>(super[r]->block[i]);
            dot<R, N>(g < 4 ? first : last, w, x.q + cell * BLOCK_WIDTH, g);
        });
        UNROLL for (int r = 0; r < R; ++r) {
            const HalfPairs pairs = half_pairs_at(*super[r], i);
            minima[r] = pairs.minima;
            dw[r] = halves_at(super[r]->d);
            mw[r] = halves_at(super[r]->m);
            UNROLL for (int n = 0; n < N; ++n)
                first.s[r][n] = _mm512_madd_epi16(
                    _mm512_mask_blend_epi16(0xAAAAAAAAu, first.s[r][n],
                                            _mm512_slli_epi32(last.s[r][n], 16)),
                    pairs.scales);
        }
        scale_in(acc, first, dw, x.scale + cell);
        minima_in(acc, minima, mw, x.halves + halves, x.scale + cell);
    }

    // One superblock of R tiles, unpacked: weights times their scales, at most 45.
    template <int R>
    struct Unpacked {
        __m512i weights[8][GROUPS][R];
        __m512i minima[8][R];
        __m512 d[R], m[R];
    };
    static constexpr size_t TOKENS_UNPACKED = 5;

    template <int R>
    SIMD_FN void unpack_scales(const uint8_t* const (&unit)[R], Unpacked<R>& to) {
        UNROLL for (int r = 0; r < R; ++r) {
            const auto* super = reinterpret_cast<const PackedQ2_K*>(unit[r]);
            to.d[r] = halves_at(super->d);
            to.m[r] = halves_at(super->m);
        }
    }
    template <int R, int N, bool FIRST>
    SIMD_FN void sub_block(Accumulators<R, N>& acc, const uint8_t* const (&unit)[R],
                           Unpacked<R>& from, size_t b, const Panel& x, size_t cell, size_t halves) {
        BothScales scales[R];
        if (FIRST)
            UNROLL for (int r = 0; r < R; ++r) {
                const auto* super = reinterpret_cast<const PackedQ2_K*>(unit[r]);
                const HalfPairs pairs = half_pairs_at(*super, b);
                scales[r] = both_scales(pairs);
                from.minima[b][r] = pairs.minima;
            }
        Sums<R, N> sums;
        start_at_zero(sums);
        repeat<GROUPS>(EACH(g) {
            if (FIRST)
                UNROLL for (int r = 0; r < R; ++r) {
                    const auto* super = reinterpret_cast<const PackedQ2_K*>(unit[r]);
                    from.weights[b][g][r] =
                        _mm512_mullo_epi16(unsigned_weights<g>(super->block[b]), scales[r].of[g / 4]);
                }
            dot<R, N>(sums, from.weights[b][g], x.q + cell * BLOCK_WIDTH, g);
        });
        scale_in(acc, sums, from.d, x.scale + cell);
        minima_in(acc, from.minima[b], from.m, x.halves + halves, x.scale + cell);
    }
};

}  // namespace
}  // namespace batchengine
