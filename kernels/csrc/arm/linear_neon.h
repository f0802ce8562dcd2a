// CA-3 rule 2 with NEON: 8 rows of a tile times up to 4 tokens, included by one unit per level.
//
// A register holds four consecutive k of four rows, and sdot multiplies it by a dword of a token,
// chosen by lane: a lane of a sum is a row, as in linear_avx512.cpp. The level neon-i8mm multiplies
// two rows by two tokens over eight k instead (smmla), twice the products per instruction; pairs of
// registers are interleaved for it, and its sums back into rows.
#pragma once

#include "linear/linear_level.h"

namespace batchengine {
namespace {

constexpr int QUADS = 2;  // of rows, side by side

template <int N>
struct Sums {
    int32x4_t s[QUADS][N];
};

SIMD_FN float32x4_t halves_at(const uint16_t* p) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}

// The low nibbles of packed bytes for dwords 0..3, the high ones for 4..7.
template <int G>
SIMD_FN uint8x16_t nibbles(uint8x16_t packed) {
    return G < 4 ? vandq_u8(packed, vdupq_n_u8(15)) : vshrq_n_u8(packed, 4);
}

// Each kind: how many blocks one packed unit holds; its size; whether the scales are powers of two of any
// size, and whether each 16 k have a factor, and one of the minimum; how many times the offset (-8 * S, or of
// 16 k -32 times their sum) a sum starts from; dword G of block i of rows [row, row + 4); their scales, and
// minima if it has them.
template <class Packed>
struct Unit {
    static constexpr size_t BYTES = sizeof(Packed);
    static constexpr bool HAS_MINIMUM = false, HAS_POWER = false, HAS_HALVES = false;
    static constexpr bool HAS_MINIMA = false;
    static constexpr int OFFSETS = 0;
    SIMD_FN const Packed& of(const uint8_t* unit) { return *reinterpret_cast<const Packed*>(unit); }
};

// Two blocks, each with a scale.
template <class Packed>
struct PairUnit : Unit<Packed> {
    static constexpr size_t BLOCKS = 2;
    using Unit<Packed>::of;
    SIMD_FN float32x4_t scale(const uint8_t* unit, size_t i, size_t row) {
        return halves_at(of(unit).d[i] + row);
    }
};

// One block with a scale and a minimum.
template <class Packed>
struct MinimumUnit : Unit<Packed> {
    static constexpr size_t BLOCKS = 1;
    static constexpr bool HAS_MINIMUM = true;
    using Unit<Packed>::of;
    SIMD_FN float32x4_t scale(const uint8_t* unit, size_t, size_t row) {
        return halves_at(of(unit).d + row);
    }
    SIMD_FN float32x4_t minimum(const uint8_t* unit, size_t, size_t row) {
        return halves_at(of(unit).m + row);
    }
};

struct WeightsQ4_0 : PairUnit<PackedQ4_0> {
    static constexpr int OFFSETS = 1;
    template <int G>
    SIMD_FN uint8x16_t dword(const uint8_t* unit, size_t i, size_t row) {
        return nibbles<G>(vld1q_u8(of(unit).q[i][G % 4][row]));
    }
};

struct WeightsQ4_1 : MinimumUnit<PackedQ4_1> {
    template <int G>
    SIMD_FN uint8x16_t dword(const uint8_t* unit, size_t, size_t row) {
        return nibbles<G>(vld1q_u8(of(unit).q[G % 4][row]));
    }
};

// The bytes are weight + 128: the top bit makes them signed.
struct WeightsQ8_0 : PairUnit<PackedQ8_0> {
    template <int G>
    SIMD_FN uint8x16_t dword(const uint8_t* unit, size_t i, size_t row) {
        return veorq_u8(vld1q_u8(of(unit).q[i][G][row]), vdupq_n_u8(128));
    }
};

template <int G>
SIMD_FN uint8x16_t five_bits(const FiveBits& from, size_t row) {
    const uint8x16_t packed = vld1q_u8(from.q[G % 4][row]);
    if constexpr (G < 4) return vandq_u8(packed, vdupq_n_u8(31));
    uint8x16_t lower = vld1q_u8(from.q[4][row]);
    if constexpr (G > 4) lower = vshrq_n_u8(lower, G > 4 ? 2 * (G - 4) : 1);
    const uint8x16_t upper = vshlq_n_u8(vshrq_n_u8(packed, 5), 2);
    return vorrq_u8(upper, vandq_u8(lower, vdupq_n_u8(3)));
}

struct WeightsQ5_0 : PairUnit<PackedQ5_0> {
    static constexpr int OFFSETS = 2;
    template <int G>
    SIMD_FN uint8x16_t dword(const uint8_t* unit, size_t i, size_t row) {
        return five_bits<G>(of(unit).block[i], row);
    }
};

struct WeightsQ5_1 : MinimumUnit<PackedQ5_1> {
    template <int G>
    SIMD_FN uint8x16_t dword(const uint8_t* unit, size_t, size_t row) {
        return five_bits<G>(of(unit).block, row);
    }
};

// The values of a table, of which packed bytes hold the indices.
template <int G>
SIMD_FN uint8x16_t values_of(const int8_t (&table)[16], const uint8_t* packed) {
    return vqtbl1q_u8(vreinterpretq_u8_s8(vld1q_s8(table)), nibbles<G>(vld1q_u8(packed)));
}

struct WeightsIQ4_NL : PairUnit<PackedQ4_0> {
    template <int G>
    SIMD_FN uint8x16_t dword(const uint8_t* unit, size_t i, size_t row) {
        return values_of<G>(IQ4_VALUES, of(unit).q[i][G % 4][row]);
    }
};

// Bytes of four rows as int32.
SIMD_FN uint32x4_t bytes_at(const uint8_t* bytes) {
    uint32_t four;
    std::memcpy(&four, bytes, 4);
    return vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
}

// Four blocks, each with a power of two as its scale.
struct WeightsMXFP4 : Unit<PackedMXFP4> {
    static constexpr size_t BLOCKS = 4;
    static constexpr bool HAS_POWER = true;
    template <int G>
    SIMD_FN uint8x16_t dword(const uint8_t* unit, size_t i, size_t row) {
        return values_of<G>(MXFP4_VALUES, of(unit).q[i][G % 4][row]);
    }
    SIMD_FN float32x4_t scale(const uint8_t* unit, size_t i, size_t row) {
        return vreinterpretq_f32_u32(vshlq_n_u32(bytes_at(of(unit).field[i] + row), 23));
    }
};

// d * scale and m * min of Q4_K and Q5_K are exact in fp32, and so are their products with an
// activation scale; hence these are the steps of the definition, which scales the integers.
template <class Packed>
struct SuperUnit : Unit<Packed> {
    static constexpr size_t BLOCKS = 8;
    static constexpr bool HAS_MINIMUM = true;
    using Unit<Packed>::of;
    SIMD_FN float32x4_t times_bytes(const uint16_t* half, const uint8_t* bytes) {
        return vmulq_f32(halves_at(half), vcvtq_f32_u32(bytes_at(bytes)));
    }
    SIMD_FN float32x4_t scale(const uint8_t* unit, size_t i, size_t row) {
        return times_bytes(of(unit).d + row, of(unit).scale[i] + row);
    }
    SIMD_FN float32x4_t minimum(const uint8_t* unit, size_t i, size_t row) {
        return times_bytes(of(unit).m + row, of(unit).min[i] + row);
    }
};

struct WeightsQ4_K : SuperUnit<PackedQ4_K> {
    template <int G>
    SIMD_FN uint8x16_t dword(const uint8_t* unit, size_t i, size_t row) {
        return nibbles<G>(vld1q_u8(of(unit).q[i][G % 4][row]));
    }
};

struct WeightsQ5_K : SuperUnit<PackedQ5_K> {
    template <int G>
    SIMD_FN uint8x16_t dword(const uint8_t* unit, size_t i, size_t row) {
        return five_bits<G>(of(unit).block[i], row);
    }
};

// Signed bytes of four rows as int32.
SIMD_FN int32x4_t signed_bytes_at(const int8_t* bytes) {
    uint32_t four;
    std::memcpy(&four, bytes, 4);
    return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(vcreate_u8(four)))));
}

// As SuperUnit, without a minimum; d counts 2^-HALVINGS times.
template <const int8_t (&VALUES)[16], int HALVINGS>
struct TableUnit : Unit<PackedIQ4_XS> {
    static constexpr size_t BLOCKS = 8;
    template <int G>
    SIMD_FN uint8x16_t dword(const uint8_t* unit, size_t i, size_t row) {
        return values_of<G>(VALUES, of(unit).q[i][G % 4][row]);
    }
    SIMD_FN float32x4_t scale(const uint8_t* unit, size_t i, size_t row) {
        const float32x4_t scaled = vmulq_f32(
            halves_at(of(unit).d + row), vcvtq_f32_s32(signed_bytes_at(of(unit).scale[i] + row)));
        return HALVINGS == 0 ? scaled : vmulq_n_f32(scaled, 1.0f / (1 << HALVINGS));
    }
};
struct WeightsIQ4_XS : TableUnit<IQ4_VALUES, 0> {};
struct WeightsIQ3_XXS : TableUnit<IQ3_XXS_VALUES, 1> {};
struct WeightsIQ3_S : TableUnit<IQ3_S_VALUES, 0> {};

// A scale for each 16 k.
template <class Packed>
struct HalvesUnit : Unit<Packed> {
    static constexpr size_t BLOCKS = 8;
    static constexpr bool HAS_HALVES = true;
    using Unit<Packed>::of;
    SIMD_FN float32x4_t scale(const uint8_t* unit, size_t, size_t row) {
        return vld1q_f32(of(unit).d + row);
    }
    // The scales of 16 k.
    SIMD_FN int32x4_t subscale(const uint8_t* unit, size_t sub, size_t row) {
        return signed_bytes_at(of(unit).scale[sub] + row);
    }
};

struct WeightsQ6_K : HalvesUnit<PackedQ6_K> {
    static constexpr int OFFSETS = 1;
    template <int G>
    SIMD_FN uint8x16_t dword(const uint8_t* unit, size_t i, size_t row) {
        const PackedQ6_K::Block& from = of(unit).block[i];
        const uint8x16_t low = nibbles<G>(vld1q_u8(from.low[G % 4][row]));
        const uint8x16_t upper = vld1q_u8(from.high[G % 4 / 2][row]);
        constexpr int at = G % 2 == 0 ? (G < 4 ? 4 : 6) : (G < 4 ? 2 : 0);
        uint8x16_t moved = upper;
        if constexpr (at > 4) moved = vshrq_n_u8(upper, at - 4);
        if constexpr (at < 4) moved = vshlq_n_u8(upper, 4 - at);
        return vorrq_u8(low, vandq_u8(moved, vdupq_n_u8(0x30)));
    }
};

// Weights of three bits.
template <int G>
SIMD_FN uint8x16_t three_bits(const PackedQ3_K::Block& from, size_t row) {
    constexpr int at = G % 2 == 0 ? (G < 4 ? 4 : 6) : (G < 4 ? 2 : 0);
    uint8x16_t low = vld1q_u8(from.low[G % 4 / 2][row]), top = vld1q_u8(from.top[row]);
    if constexpr (at > 0) low = vshrq_n_u8(low, at > 0 ? at : 1);
    if constexpr (G < 2) top = vshlq_n_u8(top, G < 2 ? 2 - G : 1);
    if constexpr (G > 2) top = vshrq_n_u8(top, G > 2 ? G - 2 : 1);
    return vorrq_u8(vandq_u8(low, vdupq_n_u8(3)), vandq_u8(top, vdupq_n_u8(4)));
}

// Weights less 4, as signed bytes.
struct WeightsQ3_K : HalvesUnit<PackedQ3_K> {
    template <int G>
    SIMD_FN uint8x16_t dword(const uint8_t* unit, size_t i, size_t row) {
        return vsubq_u8(three_bits<G>(of(unit).block[i], row), vdupq_n_u8(4));
    }
};

// Entries of a table, as signed bytes; a scale is an odd number.
template <const int8_t (&VALUES)[16]>
struct WeightsThreeBits : HalvesUnit<PackedIQ2> {
    template <int G>
    SIMD_FN uint8x16_t dword(const uint8_t* unit, size_t i, size_t row) {
        return vqtbl1q_u8(vreinterpretq_u8_s8(vld1q_s8(VALUES)),
                          three_bits<G>(of(unit).block[i], row));
    }
    SIMD_FN int32x4_t subscale(const uint8_t* unit, size_t sub, size_t row) {
        const uint32x4_t both = bytes_at(of(unit).scale[sub / 2] + row);
        const uint32x4_t stored =
            sub % 2 ? vshrq_n_u32(both, 4) : vandq_u32(both, vdupq_n_u32(15));
        return vreinterpretq_s32_u32(vaddq_u32(vshlq_n_u32(stored, 1), vdupq_n_u32(1)));
    }
};
struct WeightsIQ2 : WeightsThreeBits<IQ2_VALUES> {};
struct WeightsIQ1_M : WeightsThreeBits<IQ1_VALUES> {};

// Of IQ2_XXS and IQ1_S the halves of a block have one scale.
template <const int8_t (&VALUES)[16]>
struct WeightsOneScale : WeightsThreeBits<VALUES> {
    static constexpr bool HAS_HALVES = false;
    using Halves = WeightsThreeBits<VALUES>;
    SIMD_FN float32x4_t scale(const uint8_t* unit, size_t i, size_t row) {
        return vmulq_f32(Halves::scale(unit, i, row),
                         vcvtq_f32_s32(Halves::subscale(unit, 2 * i, row)));
    }
};
struct WeightsIQ2_XXS : WeightsOneScale<IQ2_VALUES> {};
struct WeightsIQ1_S : WeightsOneScale<IQ1_VALUES> {};

// A scale and a minimum for each 16 k.
struct WeightsQ2_K : Unit<PackedQ2_K> {
    static constexpr size_t BLOCKS = 8;
    static constexpr bool HAS_HALVES = true, HAS_MINIMA = true;
    template <int G>
    SIMD_FN uint8x16_t dword(const uint8_t* unit, size_t i, size_t row) {
        constexpr int at = G % 2 == 0 ? (G < 4 ? 4 : 6) : (G < 4 ? 2 : 0);
        uint8x16_t low = vld1q_u8(of(unit).block[i].low[G % 4 / 2][row]);
        if constexpr (at > 0) low = vshrq_n_u8(low, at > 0 ? at : 1);
        return vandq_u8(low, vdupq_n_u8(3));
    }
    SIMD_FN float32x4_t scale(const uint8_t* unit, size_t, size_t row) {
        return halves_at(of(unit).d + row);
    }
    SIMD_FN float32x4_t minimum(const uint8_t* unit, size_t, size_t row) {
        return halves_at(of(unit).m + row);
    }
    // The bytes of a half of four rows.
    SIMD_FN int32x4_t both(const uint8_t* unit, size_t sub, size_t row) {
        const uint8_t* two = of(unit).scale_and_min[sub / 2][row];
        const uint16x4_t bytes = vreinterpret_u16_u8(vld1_u8(two));
        const uint16x4_t one = sub % 2 ? vshr_n_u16(bytes, 8) : vand_u16(bytes, vdup_n_u16(255));
        return vreinterpretq_s32_u32(vmovl_u16(one));
    }
    SIMD_FN int32x4_t subscale(const uint8_t* unit, size_t sub, size_t row) {
        return vandq_s32(both(unit, sub, row), vdupq_n_s32(15));
    }
    SIMD_FN int32x4_t subminimum(const uint8_t* unit, size_t sub, size_t row) {
        return vshrq_n_s32(both(unit, sub, row), 4);
    }
};

template <class Weights, int G>
SIMD_FN int8x16_t weights_of(const uint8_t* unit, size_t i, size_t row, int quad) {
    return vreinterpretq_s8_u8(
        Weights::template dword<G>(unit, i, row + 4 * static_cast<size_t>(quad)));
}

// sums += dwords [4 * H, 4 * H + 4) of the rows times those of N tokens.
template <class Weights, int N, int H>
SIMD_FN void dot_half(Sums<N>& sums, const uint8_t* unit, size_t i, size_t row, const int8_t* q) {
    int8x16_t x[N];
    UNROLL for (int n = 0; n < N; ++n) x[n] = vld1q_s8(q + n * BLOCK_WIDTH + 16 * H);
    repeat<4>(EACH(g) {
        repeat<QUADS>(EACH(quad) {
            const int8x16_t w = weights_of<Weights, 4 * H + g>(unit, i, row, quad);
            repeat<N>(EACH(n) { sums.s[quad][n] = vdotq_laneq_s32(sums.s[quad][n], w, x[n], g); });
        });
    });
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
// sums += dwords [FIRST, FIRST + COUNT) of the rows times those of N tokens, two by two.
template <class Weights, int N, int FIRST, int COUNT>
SIMD_FN void dot_pairs(Sums<N>& sums, const uint8_t* unit, size_t i, size_t row, const int8_t* q) {
    // Of each quad rows 0 1 and rows 2 3; lanes (row, token) = 0 0, 0 1, 1 0, 1 1.
    int32x4_t products[QUADS][2][N / 2];
    UNROLL for (int quad = 0; quad < QUADS; ++quad)
        UNROLL for (int n = 0; n < N / 2; ++n)
            products[quad][0][n] = products[quad][1][n] = vdupq_n_s32(0);
    repeat<COUNT / 2>(EACH(pair) {
        constexpr int G = FIRST + 2 * pair;
        int8x16_t x[N / 2];
        UNROLL for (int n = 0; n < N / 2; ++n) {
            const int8_t* two = q + 2 * n * BLOCK_WIDTH + 4 * G;
            x[n] = vcombine_s8(vld1_s8(two), vld1_s8(two + BLOCK_WIDTH));
        }
        repeat<QUADS>(EACH(quad) {
            const int32x4_t w0 = vreinterpretq_s32_s8(weights_of<Weights, G>(unit, i, row, quad));
            const int32x4_t w1 =
                vreinterpretq_s32_s8(weights_of<Weights, G + 1>(unit, i, row, quad));
            const int8x16_t low = vreinterpretq_s8_s32(vzip1q_s32(w0, w1));
            const int8x16_t high = vreinterpretq_s8_s32(vzip2q_s32(w0, w1));
            UNROLL for (int n = 0; n < N / 2; ++n) {
                products[quad][0][n] = vmmlaq_s32(products[quad][0][n], low, x[n]);
                products[quad][1][n] = vmmlaq_s32(products[quad][1][n], high, x[n]);
            }
        });
    });
    UNROLL for (int quad = 0; quad < QUADS; ++quad)
        UNROLL for (int n = 0; n < N; ++n) {
            const int32x4_t low = products[quad][0][n / 2], high = products[quad][1][n / 2];
            sums.s[quad][n] = vaddq_s32(
                sums.s[quad][n], n % 2 ? vuzp2q_s32(low, high) : vuzp1q_s32(low, high));
        }
}
#endif

// sums = times * offsets + dwords [FIRST, FIRST + COUNT), a half or the whole of a block.
template <class Weights, int N, int FIRST, int COUNT>
SIMD_FN void dot(Sums<N>& sums, const uint8_t* unit, size_t i, size_t row, const int8_t* q,
                 const int32_t* offsets, int times) {
    UNROLL for (int n = 0; n < N; ++n)
        UNROLL for (int quad = 0; quad < QUADS; ++quad)
            sums.s[quad][n] = vdupq_n_s32(times * offsets[n]);
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if constexpr (N % 2 == 0) return dot_pairs<Weights, N, FIRST, COUNT>(sums, unit, i, row, q);
#endif
    repeat<COUNT / 4>(EACH(half) { dot_half<Weights, N, FIRST / 4 + half>(sums, unit, i, row, q); });
}

// The integer dots of a block.
template <class Weights, int N>
SIMD_FN void dot_block(Sums<N>& sums, const uint8_t* unit, size_t i, size_t row, const Panel& x,
                       size_t cell, size_t halves) {
    const int8_t* q = x.q + cell * BLOCK_WIDTH;
    if constexpr (!Weights::HAS_HALVES) {
        (void)halves;
        dot<Weights, N, 0, 8>(sums, unit, i, row, q, x.offset + cell, Weights::OFFSETS);
    } else {
        Sums<N> last;
        constexpr int OFFSETS = Weights::OFFSETS;
        dot<Weights, N, 0, 4>(sums, unit, i, row, q, x.halves + halves, OFFSETS);
        dot<Weights, N, 4, 4>(last, unit, i, row, q, x.halves + halves + GROUP_TOKENS, OFFSETS);
        UNROLL for (int quad = 0; quad < QUADS; ++quad) {
            const size_t at = row + 4 * static_cast<size_t>(quad);
            const int32x4_t scale0 = Weights::subscale(unit, 2 * i, at);
            const int32x4_t scale1 = Weights::subscale(unit, 2 * i + 1, at);
            UNROLL for (int n = 0; n < N; ++n)
                sums.s[quad][n] = vmlaq_s32(vmulq_s32(sums.s[quad][n], scale0), last.s[quad][n],
                                            scale1);
        }
    }
}

// Eight rows (from `row` on) of a tile times N tokens from `token` on.
template <class Weights, int N>
void product(const uint8_t* tile, size_t row, const Panel& x, size_t token, TileResult& result) {
    for (size_t first = 0; first < x.blocks; first += SEGMENT_BLOCKS) {
        const size_t end = first + SEGMENT_BLOCKS < x.blocks ? first + SEGMENT_BLOCKS : x.blocks;
        float32x4_t acc[QUADS][N];
        UNROLL for (int quad = 0; quad < QUADS; ++quad)
            UNROLL for (int n = 0; n < N; ++n) acc[quad][n] = vdupq_n_f32(0.0f);
        for (size_t b = first; b < end; ++b) {
            const uint8_t* unit = tile + b / Weights::BLOCKS * Weights::BYTES;
            const size_t i = b % Weights::BLOCKS, cell = b * GROUP_TOKENS + token;
            Sums<N> sums;
            dot_block<Weights, N>(sums, unit, i, row, x, cell, 2 * cell - token);
            UNROLL for (int quad = 0; quad < QUADS; ++quad) {
                const size_t at = row + 4 * static_cast<size_t>(quad);
                // acc = fma(float(I), dw * dx, acc), or of powers fma(float(I) * dx, dw, acc); the first
                // product is exact.
                const float32x4_t dw = Weights::scale(unit, i, at);
                UNROLL for (int n = 0; n < N; ++n) {
                    const float32x4_t integer = vcvtq_f32_s32(sums.s[quad][n]);
                    const float32x4_t scaled = Weights::HAS_POWER ? integer : dw;
                    acc[quad][n] = vfmaq_f32(acc[quad][n], Weights::HAS_POWER ? dw : integer,
                                             vmulq_n_f32(scaled, x.scale[cell + n]));
                }
                // acc = fma(S * dx, m, acc), the same number as fma(S, m * dx, acc).
                if constexpr (Weights::HAS_MINIMA) {
                    const int32x4_t least0 = Weights::subminimum(unit, 2 * i, at);
                    const int32x4_t least1 = Weights::subminimum(unit, 2 * i + 1, at);
                    const float32x4_t mw = Weights::minimum(unit, i, at);
                    UNROLL for (int n = 0; n < N; ++n) {
                        const int32_t* halves = x.halves + 2 * cell - token + n;
                        const int32x4_t sum =
                            vmlaq_n_s32(vmulq_n_s32(least0, -halves[0] / 32), least1,
                                        -halves[GROUP_TOKENS] / 32);
                        acc[quad][n] = vfmaq_f32(acc[quad][n], vcvtq_f32_s32(sum),
                                                 vmulq_n_f32(mw, x.scale[cell + n]));
                    }
                }
                if constexpr (Weights::HAS_MINIMUM) {
                    const float32x4_t mw = Weights::minimum(unit, i, at);
                    UNROLL for (int n = 0; n < N; ++n)
                        acc[quad][n] = vfmaq_n_f32(acc[quad][n], mw, x.sum[cell + n]);
                }
            }
        }
        UNROLL for (int quad = 0; quad < QUADS; ++quad)
            UNROLL for (int n = 0; n < N; ++n) {
                float* y = result.y[token + static_cast<size_t>(n)] + row + 4 * quad;
                vst1q_f32(y, first == 0 ? acc[quad][n] : vaddq_f32(vld1q_f32(y), acc[quad][n]));
            }
    }
}

template <class Weights>
void multiply_blocks(const uint8_t* tile, size_t bytes, size_t tiles, const Panel& x, size_t tokens,
                     bool, TileResult* results) {
    for (size_t t = 0; t < tiles; ++t, tile += bytes)
        for (size_t row = 0; row < TILE_ROWS; row += 4 * QUADS) {
            size_t token = 0;
            for (; token + 4 <= tokens; token += 4)
                product<Weights, 4>(tile, row, x, token, results[t]);
            if (tokens - token == 3) product<Weights, 3>(tile, row, x, token, results[t]);
            if (tokens - token == 2) product<Weights, 2>(tile, row, x, token, results[t]);
            if (tokens - token == 1) product<Weights, 1>(tile, row, x, token, results[t]);
        }
}

}  // namespace
}  // namespace batchengine
