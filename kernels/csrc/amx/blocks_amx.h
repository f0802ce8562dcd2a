// Weights of one row tile as operands of AMX-INT8: signed bytes and fp32 scales of a segment, unpacked once
// for many tokens. Helpers that take blocks apart are those of AVX-512.
#pragma once

#include "amx/tiles.h"
#include "linear/blocks_avx512.h"

namespace batchengine {
namespace {

// What folds the integer sums of a block into an accumulator; see scale_in, power_in, minimum_in and, of minima of
// halves, WeightsQ2_K.
enum class FoldKind { scale, power, scale_and_minimum, scale_and_minima };

constexpr size_t OPERAND_BLOCKS = 32;  // a segment, except with floats in any order, which has none
static_assert(SEGMENT_BLOCKS % OPERAND_BLOCKS == 0);

// A segment of a row tile. Block b is the sum of PARTS products, part 0 counting 128 times when there are two.
template <int PARTS>
struct Operands {
    alignas(64) int8_t weights[OPERAND_BLOCKS][PARTS][GROUPS][64];  // row 16, k of the dword 4
    __m512 scale[OPERAND_BLOCKS];
    __m512 minimum[OPERAND_BLOCKS];
    __m512i minima[OPERAND_BLOCKS];  // of both halves, as two int16: factors of `minimum`
};

SIMD_FN void put(int8_t (&to)[64], __m512i bytes) { _mm512_store_si512(to, bytes); }

// The weights of nibbles: their number less ZERO, or their entry in a table.
template <int ZERO>
struct Number {
    SIMD_FN __m512i weights(__m512i nibbles) {
        return _mm512_sub_epi8(nibbles, _mm512_set1_epi8(ZERO));
    }
};
template <const int8_t (&VALUES)[16]>
using Entry = Table<VALUES, 0>;

template <class Meaning>
SIMD_FN void put_nibbles(const uint8_t* block, int8_t (&to)[GROUPS][64]) {
    const __m512i mask = _mm512_set1_epi8(15);
    UNROLL for (size_t j = 0; j < GROUPS / 2; ++j) {
        const __m512i both = _mm512_load_si512(block + 64 * j);
        put(to[j], Meaning::weights(_mm512_and_si512(both, mask)));
        put(to[j + GROUPS / 2],
            Meaning::weights(_mm512_and_si512(_mm512_srli_epi16(both, 4), mask)));
    }
}

template <int ZERO>
SIMD_FN void put_five_bits(const FiveBits* block, int8_t (&to)[GROUPS][64]) {
    repeat<GROUPS>(EACH(g) {
        put(to[g], _mm512_sub_epi8(five_bits<g>(*block), _mm512_set1_epi8(ZERO)));
    });
}

// Bytes hold weight + 128.
SIMD_FN void put_bytes(const uint8_t* block, int8_t (&to)[GROUPS][64]) {
    const __m512i flip = _mm512_set1_epi8(static_cast<char>(0x80));
    UNROLL for (size_t g = 0; g < GROUPS; ++g)
        put(to[g], _mm512_xor_si512(_mm512_load_si512(block + 64 * g), flip));
}

// Scales of block i of a packed unit, by its layout, and how they are folded.
template <class Packed_>
struct PairScales {
    using Packed = Packed_;
    static constexpr FoldKind FOLD = FoldKind::scale;
    SIMD_FN void put_scales(const Packed& unit, size_t i, Operands<1>& to, size_t b) {
        to.scale[b] = halves_at(unit.d[i]);
    }
};
struct PowerScales {
    using Packed = PackedMXFP4;
    static constexpr FoldKind FOLD = FoldKind::power;
    SIMD_FN void put_scales(const Packed& unit, size_t i, Operands<1>& to, size_t b) {
        to.scale[b] = power_at(unit.field[i]);
    }
};
template <class Packed_>
struct MinimumScales {
    using Packed = Packed_;
    static constexpr FoldKind FOLD = FoldKind::scale_and_minimum;
    SIMD_FN void put_scales(const Packed& unit, size_t, Operands<1>& to, size_t b) {
        to.scale[b] = halves_at(unit.d);
        to.minimum[b] = halves_at(unit.m);
    }
};
// Of superblocks the products with the scales of sub-blocks are exact.
template <class Packed_>
struct SuperblockScales {
    using Packed = Packed_;
    static constexpr FoldKind FOLD = FoldKind::scale_and_minimum;
    SIMD_FN void put_scales(const Packed& unit, size_t i, Operands<1>& to, size_t b) {
        to.scale[b] = _mm512_mul_ps(halves_at(unit.d), bytes_at(unit.scale[i]));
        to.minimum[b] = _mm512_mul_ps(halves_at(unit.m), bytes_at(unit.min[i]));
    }
};
template <int HALVINGS>
struct SignedScales {
    using Packed = PackedIQ4_XS;
    static constexpr FoldKind FOLD = FoldKind::scale;
    SIMD_FN void put_scales(const Packed& unit, size_t i, Operands<1>& to, size_t b) {
        to.scale[b] =
            _mm512_mul_ps(table_scale<HALVINGS>(unit), _mm512_cvtepi32_ps(signed_bytes_at(unit.scale[i])));
    }
};

// A kind by its scales and by what unpacks the weights of a block.
template <class Scales, auto PUT_WEIGHTS>
struct UnpackBlocks : Scales {
    static constexpr int PARTS = 1;
    SIMD_FN void block(const typename Scales::Packed& unit, size_t i, Operands<1>& to, size_t b) {
        Scales::put_scales(unit, i, to, b);
        PUT_WEIGHTS(block_at(unit, i), to.weights[b][0]);
    }
};

// Kinds with a sub-scale for each 16 k, which is multiplied with the weights: |product| <= 4096, so it is
// 128 * its upper part plus a lower one of seven bits.
template <class Packed_, class Meaning>
struct UnpackHalves {
    using Packed = Packed_;
    static constexpr int PARTS = 2;
    static constexpr FoldKind FOLD = FoldKind::scale;
    SIMD_FN void block(const Packed& unit, size_t i, Operands<2>& to, size_t b) {
        to.scale[b] = _mm512_load_ps(unit.d);
        repeat<GROUPS>(EACH(g) {
            constexpr size_t half = g / (GROUPS / 2);
            const __m512i low_half = _mm512_and_si512(sub_scale(unit, 2 * i + half),
                                                      _mm512_set1_epi32(0xFFFF));
            const __m512i scale = _mm512_or_si512(low_half, _mm512_slli_epi32(low_half, 16));
            const __m512i bytes = Meaning::weights(unsigned_weights<g>(unit.block[i]));
            const __m512i even = _mm512_mullo_epi16(
                _mm512_srai_epi16(_mm512_slli_epi16(bytes, 8), 8), scale);
            const __m512i odd = _mm512_mullo_epi16(_mm512_srai_epi16(bytes, 8), scale);
            const __m512i seven = _mm512_set1_epi16(127), byte = _mm512_set1_epi16(255);
            put(to.weights[b][0][g],
                _mm512_or_si512(_mm512_and_si512(_mm512_srai_epi16(even, 7), byte),
                                _mm512_slli_epi16(_mm512_srai_epi16(odd, 7), 8)));
            put(to.weights[b][1][g],
                _mm512_or_si512(_mm512_and_si512(even, seven),
                                _mm512_slli_epi16(_mm512_and_si512(odd, seven), 8)));
        });
    }
};

// Of IQ2_XXS and IQ1_S the halves of a block have one scale.
template <class Weights, class Meaning>
struct UnpackOneScale {
    using Packed = PackedIQ2;
    static constexpr int PARTS = 1;
    static constexpr FoldKind FOLD = FoldKind::scale;
    SIMD_FN void block(const Packed& unit, size_t i, Operands<1>& to, size_t b) {
        to.scale[b] = Weights::block_scale(unit, i);
        repeat<GROUPS>(EACH(g) {
            put(to.weights[b][0][g], Meaning::weights(unsigned_weights<g>(unit.block[i])));
        });
    }
};

// The scales of halves are multiplied with the weights, at most 15 * 3.
struct UnpackQ2_K {
    using Packed = PackedQ2_K;
    static constexpr int PARTS = 1;
    static constexpr FoldKind FOLD = FoldKind::scale_and_minima;
    SIMD_FN void block(const Packed& unit, size_t i, Operands<1>& to, size_t b) {
        const HalfPairs pairs = half_pairs_at(unit, i);
        to.scale[b] = halves_at(unit.d);
        to.minimum[b] = halves_at(unit.m);
        to.minima[b] = pairs.minima;
        const BothScales scales = both_scales(pairs);
        repeat<GROUPS>(EACH(g) {
            put(to.weights[b][0][g],
                _mm512_mullo_epi16(unsigned_weights<g>(unit.block[i]), scales.of[g / 4]));
        });
    }
};

// Of each kind: its packed unit, and block(unit, i, to, b), which unpacks block i of a unit as block b of `to`.
template <class Weights>
struct Unpack;
template <>
struct Unpack<WeightsQ4_0> : UnpackBlocks<PairScales<PackedQ4_0>, put_nibbles<Number<8>>> {};
template <>
struct Unpack<WeightsIQ4_NL> : UnpackBlocks<PairScales<PackedQ4_0>, put_nibbles<Entry<IQ4_VALUES>>> {};
template <>
struct Unpack<WeightsQ5_0> : UnpackBlocks<PairScales<PackedQ5_0>, put_five_bits<16>> {};
template <>
struct Unpack<WeightsQ8_0> : UnpackBlocks<PairScales<PackedQ8_0>, put_bytes> {};
template <>
struct Unpack<WeightsMXFP4> : UnpackBlocks<PowerScales, put_nibbles<Entry<MXFP4_VALUES>>> {};
template <>
struct Unpack<WeightsQ4_1> : UnpackBlocks<MinimumScales<PackedQ4_1>, put_nibbles<Plain>> {};
template <>
struct Unpack<WeightsQ5_1> : UnpackBlocks<MinimumScales<PackedQ5_1>, put_five_bits<0>> {};
template <>
struct Unpack<WeightsQ4_K> : UnpackBlocks<SuperblockScales<PackedQ4_K>, put_nibbles<Plain>> {};
template <>
struct Unpack<WeightsQ5_K> : UnpackBlocks<SuperblockScales<PackedQ5_K>, put_five_bits<0>> {};
template <>
struct Unpack<WeightsIQ4_XS> : UnpackBlocks<SignedScales<0>, put_nibbles<Entry<IQ4_VALUES>>> {};
template <>
struct Unpack<WeightsIQ3_XXS> : UnpackBlocks<SignedScales<1>, put_nibbles<Entry<IQ3_XXS_VALUES>>> {};
template <>
struct Unpack<WeightsIQ3_S> : UnpackBlocks<SignedScales<0>, put_nibbles<Entry<IQ3_S_VALUES>>> {};
template <>
struct Unpack<WeightsQ6_K> : UnpackHalves<PackedQ6_K, Number<32>> {};
template <>
struct Unpack<WeightsQ3_K> : UnpackHalves<PackedQ3_K, Number<4>> {};
template <>
struct Unpack<WeightsIQ2> : UnpackHalves<PackedIQ2, Entry<IQ2_VALUES>> {};
template <>
struct Unpack<WeightsIQ1_M> : UnpackHalves<PackedIQ2, Entry<IQ1_VALUES>> {};
template <>
struct Unpack<WeightsIQ2_XXS> : UnpackOneScale<WeightsIQ2_XXS, Entry<IQ2_VALUES>> {};
template <>
struct Unpack<WeightsIQ1_S> : UnpackOneScale<WeightsIQ1_S, Entry<IQ1_VALUES>> {};
template <>
struct Unpack<WeightsQ2_K> : UnpackQ2_K {};

}  // namespace
}  // namespace batchengine
