// The blocks of packed weights (linear/tiles.h) as a GPU reads them: registers of A for a product of 16
// rows with 8 tokens, and single values for embeddings.
#pragma once

#include "linear/tiles.h"
#include "gpu.h"

namespace gpu {

constexpr int TILE = static_cast<int>(batchengine::TILE_ROWS);
constexpr int SEGMENT_BLOCKS = ca::SEGMENT / ca::BLOCK;

// In the order of Kind in common/types.h.
enum class Kind : int { q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl, q4_k, q5_k, q6_k, f16, bf16, f32 };

// Bytes of a tile of 16 rows of `cols`.
GPU_FN int64_t tile_bytes(Kind kind, int cols) {
    const int64_t blocks = (cols + ca::BLOCK - 1) / ca::BLOCK;
    switch (kind) {
        case Kind::q4_0:
        case Kind::iq4_nl: return (blocks + 1) / 2 * sizeof(batchengine::PackedQ4_0);
        case Kind::q4_1: return blocks * sizeof(batchengine::PackedQ4_1);
        case Kind::q5_0: return (blocks + 1) / 2 * sizeof(batchengine::PackedQ5_0);
        case Kind::q5_1: return blocks * sizeof(batchengine::PackedQ5_1);
        case Kind::q8_0: return (blocks + 1) / 2 * sizeof(batchengine::PackedQ8_0);
        case Kind::q4_k: return blocks / 8 * sizeof(batchengine::PackedQ4_K);
        case Kind::q5_k: return blocks / 8 * sizeof(batchengine::PackedQ5_K);
        case Kind::q6_k: return blocks / 8 * sizeof(batchengine::PackedQ6_K);
        case Kind::f16:
        case Kind::bf16: return blocks * ca::BLOCK * TILE * 2;
        case Kind::f32: return blocks * ca::BLOCK * TILE * 4;
    }
    return 0;
}

// One block of 32 k of one of the two rows that a lane holds in A. q[0]: k = 4t..4t+3, q[1]: 16 further
// on, as unsigned bytes. I = Σ q x - zero * Σ x, times `factor` (factor0 and factor1 of the halves).
struct Part {
    uint32_t q[2];
    float d;
    float m;              // of the minimum, with factor `min`; kinds without one do not read it
    int32_t factor[2];
    int32_t min;
};

// What a kind adds to its weights so that they are unsigned bytes.
GPU_FN constexpr int zero_of(Kind kind) {
    switch (kind) {
        case Kind::q4_0: return 8;
        case Kind::q5_0: return 16;
        case Kind::q8_0:
        case Kind::iq4_nl: return 128;
        case Kind::q6_k: return 32;
        default: return 0;
    }
}
GPU_FN constexpr bool has_minimum(Kind kind) {
    return kind == Kind::q4_1 || kind == Kind::q5_1 || kind == Kind::q4_k || kind == Kind::q5_k;
}

GPU_FN uint32_t dword_at(In<uint8_t> tile, int64_t byte) {
    return in_as<uint32_t>(tile + byte)[0];
}
GPU_FN float half_at(In<uint8_t> tile, int64_t byte) {
    return ca::half_to_float(in_as<uint16_t>(tile + byte)[0]);
}

// Nibbles at `byte`: dword t of row `row`.
GPU_FN void read_nibbles(In<uint8_t> tile, int64_t byte, int row, int t, uint32_t (&q)[2]) {
    const uint32_t both = dword_at(tile, byte + (t * TILE + row) * 4);
    q[0] = both & 0x0F0F0F0Fu;
    q[1] = both >> 4 & 0x0F0F0F0Fu;
}
GPU_FN void read_five_bits(In<uint8_t> tile, int64_t byte, int row, int t, uint32_t (&q)[2]) {
    const uint32_t both = dword_at(tile, byte + (t * TILE + row) * 4);
    const uint32_t low = dword_at(tile, byte + (4 * TILE + row) * 4);
    q[0] = both & 0x1F1F1F1Fu;
    q[1] = (both >> 5 & 0x07070707u) << 2 | (low >> (2 * t) & 0x03030303u);
}

// The weight bytes of IQ4_NL + 128, four indices a word.
#define IQ4_BYTE(i, n) (static_cast<uint32_t>(batchengine::IQ4_VALUES[i + n] + 128) << 8 * n)
#define IQ4_WORD(i) (IQ4_BYTE(i, 0) | IQ4_BYTE(i, 1) | IQ4_BYTE(i, 2) | IQ4_BYTE(i, 3))
constexpr uint32_t IQ4_WORD0 = IQ4_WORD(0), IQ4_WORD1 = IQ4_WORD(4), IQ4_WORD2 = IQ4_WORD(8),
                   IQ4_WORD3 = IQ4_WORD(12);
#undef IQ4_WORD
#undef IQ4_BYTE

// The bytes of four indices, one in each byte.
GPU_FN uint32_t iq4_bytes(uint32_t indices) {
    uint32_t bytes = 0;
    for (int i = 0; i < 32; i += 8) {
        const uint32_t index = indices >> i & 15u;
        const uint32_t low = index & 4u ? IQ4_WORD1 : IQ4_WORD0;
        const uint32_t high = index & 4u ? IQ4_WORD3 : IQ4_WORD2;
        bytes |= ((index & 8u ? high : low) >> (index & 3u) * 8 & 255u) << i;
    }
    return bytes;
}

// Block b of row `row` (0..15) of a tile, for the lane that holds dword t (0..3).
template <Kind kind>
GPU_FN Part read_part(In<uint8_t> tile, int b, int row, int t) {
    using namespace batchengine;
    Part part = {{0, 0}, 0.0f, 0.0f, {1, 1}, 1};
    if constexpr (kind == Kind::q4_0 || kind == Kind::iq4_nl) {
        const int64_t pair = b / 2 * int64_t{sizeof(PackedQ4_0)};
        const int in_pair = b % 2;
        part.d = half_at(tile, pair + (in_pair * TILE + row) * 2);
        read_nibbles(tile, pair + 64 + in_pair * 256, row, t, part.q);
        if constexpr (kind == Kind::iq4_nl)
            for (uint32_t& q : part.q) q = iq4_bytes(q);
    } else if constexpr (kind == Kind::q5_0) {
        const int64_t pair = b / 2 * int64_t{sizeof(PackedQ5_0)};
        const int in_pair = b % 2;
        part.d = half_at(tile, pair + (in_pair * TILE + row) * 2);
        read_five_bits(tile, pair + 64 + in_pair * 320, row, t, part.q);
    } else if constexpr (kind == Kind::q8_0) {
        const int64_t pair = b / 2 * int64_t{sizeof(PackedQ8_0)};
        const int in_pair = b % 2;
        part.d = half_at(tile, pair + (in_pair * TILE + row) * 2);
        for (int half = 0; half < 2; half++)
            part.q[half] = dword_at(tile, pair + 64 + in_pair * 512 +
                                              ((t + 4 * half) * TILE + row) * 4);
    } else if constexpr (kind == Kind::q4_1 || kind == Kind::q5_1) {
        const int64_t at = b * int64_t{kind == Kind::q4_1 ? sizeof(PackedQ4_1) : sizeof(PackedQ5_1)};
        part.d = half_at(tile, at + row * 2);
        part.m = half_at(tile, at + (TILE + row) * 2);
        if constexpr (kind == Kind::q4_1)
            read_nibbles(tile, at + 64, row, t, part.q);
        else
            read_five_bits(tile, at + 64, row, t, part.q);
    } else if constexpr (kind == Kind::q4_k || kind == Kind::q5_k) {
        const int64_t at =
            b / 8 * int64_t{kind == Kind::q4_k ? sizeof(PackedQ4_K) : sizeof(PackedQ5_K)};
        const int sub = b % 8;
        part.d = half_at(tile, at + row * 2);
        part.m = half_at(tile, at + (TILE + row) * 2);
        part.factor[0] = part.factor[1] = tile[at + 64 + sub * TILE + row];
        part.min = tile[at + 192 + sub * TILE + row];
        if constexpr (kind == Kind::q4_k)
            read_nibbles(tile, at + 320 + sub * 256, row, t, part.q);
        else
            read_five_bits(tile, at + 320 + sub * 320, row, t, part.q);
    } else if constexpr (kind == Kind::q6_k) {
        const int64_t at = b / 8 * int64_t{sizeof(PackedQ6_K)};
        const int sub = b % 8;
        part.d = in_as<float>(tile + at)[row];
        for (int half = 0; half < 2; half++)
            part.factor[half] = in_as<int8_t>(tile + (at + 64))[(2 * sub + half) * TILE + row];
        const int64_t block = at + 320 + sub * 384;
        read_nibbles(tile, block, row, t, part.q);
        const uint32_t high = dword_at(tile, block + 256 + (t / 2 * TILE + row) * 4);
        part.q[0] |= (high >> (t % 2 ? 2 : 4) & 0x03030303u) << 4;
        part.q[1] |= (high >> (t % 2 ? 0 : 6) & 0x03030303u) << 4;
    }
    return part;
}

// Weight k of a row of a tile, by rule 2 ("Embedding").
template <Kind kind>
GPU_FN float weight_at(In<uint8_t> tile, int row, int k) {
    const int i = k % ca::BLOCK, half = i / 16;
    const Part part = read_part<kind>(tile, k / ca::BLOCK, row, i % 16 / 4);
    const int32_t n = static_cast<int32_t>(part.q[half] >> i % 4 * 8 & 255u) - zero_of(kind);
    const auto weight = static_cast<float>(n * part.factor[half]);
    if constexpr (!has_minimum(kind)) return ca::mul_rn(weight, part.d);
    if constexpr (kind == Kind::q4_k || kind == Kind::q5_k)
        return ca::fma_rn(weight, part.d, ca::mul_rn(static_cast<float>(part.min), part.m));
    return ca::fma_rn(weight, part.d, part.m);
}

// Value k of a row of a tile of floats.
template <Kind kind>
GPU_FN float float_at(In<uint8_t> tile, int row, int64_t k) {
    if constexpr (kind == Kind::f32) return in_as<float>(tile)[k * TILE + row];
    const uint16_t half = in_as<uint16_t>(tile)[k * TILE + row];
    return kind == Kind::f16 ? ca::half_to_float(half) : ca::bf16_to_float(half);
}

GPU_FN float value_at(Kind kind, In<uint8_t> tile, int row, int k) {
    switch (kind) {
        case Kind::q4_0: return weight_at<Kind::q4_0>(tile, row, k);
        case Kind::q4_1: return weight_at<Kind::q4_1>(tile, row, k);
        case Kind::q5_0: return weight_at<Kind::q5_0>(tile, row, k);
        case Kind::q5_1: return weight_at<Kind::q5_1>(tile, row, k);
        case Kind::q8_0: return weight_at<Kind::q8_0>(tile, row, k);
        case Kind::iq4_nl: return weight_at<Kind::iq4_nl>(tile, row, k);
        case Kind::q4_k: return weight_at<Kind::q4_k>(tile, row, k);
        case Kind::q5_k: return weight_at<Kind::q5_k>(tile, row, k);
        case Kind::q6_k: return weight_at<Kind::q6_k>(tile, row, k);
        case Kind::f16: return float_at<Kind::f16>(tile, row, k);
        case Kind::bf16: return float_at<Kind::bf16>(tile, row, k);
        case Kind::f32: return float_at<Kind::f32>(tile, row, k);
    }
    return 0.0f;
}

}  // namespace gpu
