// The blocks of packed weights (linear/tiles.h) as a GPU reads them: registers of A for a product of 16
// rows with 8 tokens, and single values for embeddings. Rows g and g + 8 of a product are rows 2g and
// 2g + 1 of a tile, which lie side by side.
#pragma once

#include "linear/tiles.h"
#include "gpu.h"

namespace gpu {

constexpr int TILE = static_cast<int>(batchengine::TILE_ROWS);
constexpr int SEGMENT_BLOCKS = ca::SEGMENT / ca::BLOCK;

// In the order of Kind in common/types.h.
enum class Kind : int {
    q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl, q4_k, q5_k, q6_k, mxfp4, iq4_xs, q3_k, q2_k, iq3_xxs, iq3_s, iq2_xxs,
    iq2_xs, iq2_s, iq1_s, iq1_m, f16, bf16, f32
};

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
        case Kind::mxfp4: return (blocks + 3) / 4 * sizeof(batchengine::PackedMXFP4);
        case Kind::iq4_xs:
        case Kind::iq3_xxs:
        case Kind::iq3_s: return blocks / 8 * sizeof(batchengine::PackedIQ4_XS);
        case Kind::q3_k: return blocks / 8 * sizeof(batchengine::PackedQ3_K);
        case Kind::q2_k: return blocks / 8 * sizeof(batchengine::PackedQ2_K);
        case Kind::iq2_xxs:
        case Kind::iq2_xs:
        case Kind::iq2_s:
        case Kind::iq1_s:
        case Kind::iq1_m: return blocks / 8 * sizeof(batchengine::PackedIQ2);
        case Kind::f16:
        case Kind::bf16: return blocks * ca::BLOCK * TILE * 2;
        case Kind::f32: return blocks * ca::BLOCK * TILE * 4;
    }
    return 0;
}

// One block of 32 k of rows 2g and 2g + 1 of a tile, for lane (g, t) of a product: the registers of A as
// signed bytes. I = Σ q x, times `factor`, of which the halves of a block have one each; q of q2_k are weights times
// that factor. Weights and `d` are
// those of the file times and over 2 to the power of `shift_of`, which is exact.
struct Part {
    uint32_t q[4];  // k = 4t..4t+3 of both rows, and 16 further on
    float d[2];
    float m[2];  // of the minimum, with factor `min`; kinds without one do not read it
    int32_t factor[2][2];
    int32_t min[2];
    uint32_t minima;  // of q2_k in place of `min`: byte 2 * row + half
};

// The same as it lies in memory, so that loads are under way before they are needed.
struct Packed {
    Words2 low, high;
    Words2 d;  // fp16: both in the first word; so are the exponent fields of mxfp4
    uint32_t m, factor, min;
};

// Weights of fewer than 8 bits, less half of their range, lie in the high bits of their bytes: one exclusive
// or then makes signed bytes of unsigned ones.
GPU_FN constexpr int shift_of(Kind kind) {
    switch (kind) {
        case Kind::q4_0: return 4;
        case Kind::q5_0: return 3;
        case Kind::q6_k: return 2;
        case Kind::q3_k: return 5;
        default: return 0;
    }
}
GPU_FN constexpr bool has_sign(Kind kind) {
    return shift_of(kind) > 0 || kind == Kind::q8_0;
}
// Superblocks of nibbles, indices of a table, with a factor for each block.
GPU_FN constexpr bool has_nibbles(Kind kind) {
    return kind == Kind::iq4_xs || kind == Kind::iq3_xxs || kind == Kind::iq3_s;
}
GPU_FN constexpr bool has_table(Kind kind) {
    return kind == Kind::iq4_nl || kind == Kind::mxfp4 || has_nibbles(kind);
}
// Packed as PackedIQ2: indices of three bits. Two kinds stand for all: iq2_s for iq2_*, iq1_m for iq1_*.
GPU_FN constexpr bool has_three_bits(Kind kind) {
    return kind == Kind::iq2_s || kind == Kind::iq1_m;
}
// A factor for each half of a block.
GPU_FN constexpr bool has_halves(Kind kind) {
    return kind == Kind::q6_k || kind == Kind::q3_k || has_three_bits(kind);
}
// A minimum for each half of a block.
GPU_FN constexpr bool has_minima(Kind kind) { return kind == Kind::q2_k; }
// One for all of it.
GPU_FN constexpr bool has_minimum(Kind kind) {
    return kind == Kind::q4_1 || kind == Kind::q5_1 || kind == Kind::q4_k || kind == Kind::q5_k;
}

GPU_FN uint32_t dword_at(In<uint8_t> tile, int64_t byte) {
    return in_as<uint32_t>(tile + byte)[0];
}
GPU_FN float half_of(uint32_t halves, int i) {
    return ca::half_to_float(static_cast<uint16_t>(halves >> 16 * i));
}

GPU_FN Words2 words_at(In<uint8_t> tile, int64_t byte) {
    return in_as<Words2>(tile + byte)[0];
}
GPU_FN uint32_t pair_at(In<uint8_t> tile, int64_t byte) {
    return in_as<uint16_t>(tile + byte)[0];
}

// The values of a kind with a table, four signed bytes a word.
struct Table {
    uint32_t word[4];
};
GPU_FN constexpr Table table_of(Kind kind) {
    Table table = {};
    for (int i = 0; i < 16; i++) {
        const int8_t value = kind == Kind::mxfp4     ? batchengine::MXFP4_VALUES[i]
                             : kind == Kind::iq3_xxs ? batchengine::IQ3_XXS_VALUES[i]
                             : kind == Kind::iq3_s   ? batchengine::IQ3_S_VALUES[i]
                             : kind == Kind::iq2_s   ? batchengine::IQ2_VALUES[i]
                             : kind == Kind::iq1_m   ? batchengine::IQ1_VALUES[i]
                                                     : batchengine::IQ4_VALUES[i];
        table.word[i / 4] |= static_cast<uint32_t>(static_cast<uint8_t>(value)) << i % 4 * 8;
    }
    return table;
}

// The values of eight indices, two in each byte: those of the low halves of the bytes, then of the high ones.
template <Kind kind>
GPU_FN Words2 values_of(uint32_t indices) {
    constexpr Table TABLE = table_of(kind);
    const uint32_t in_half = indices & 0x77777777u;  // place of a value in its half of the table
    const uint32_t halves = (indices >> 1 & 0x44444444u) | 0x32103210u;
    uint32_t mixed[2];
    GPU_UNROLL
    for (int i = 0; i < 2; i++) {
        const uint32_t places = in_half >> 16 * i;
        const uint32_t first = bytes_of(TABLE.word[0], TABLE.word[1], places);
        if constexpr (has_three_bits(kind)) {  // a table of eight
            mixed[i] = first;
            continue;
        }
        const uint32_t last = bytes_of(TABLE.word[2], TABLE.word[3], places);
        mixed[i] = bytes_of(first, last, halves >> 16 * i);
    }
    return {{bytes_of(mixed[0], mixed[1], 0x6420u), bytes_of(mixed[0], mixed[1], 0x7531u)}};
}

// Block b of a tile, for lane (g, t).
template <Kind kind>
GPU_FN Packed load_part(In<uint8_t> tile, int b, int g, int t) {
    using namespace batchengine;
    Packed to = {{{0, 0}}, {{0, 0}}, {{0, 0}}, 0, 0, 0};
    const int at_lane = t * TILE * 4 + g * 8;
    if constexpr (kind == Kind::q4_0 || kind == Kind::iq4_nl) {
        const int64_t pair = b / 2 * int64_t{sizeof(PackedQ4_0)};
        to.d.word[0] = dword_at(tile, pair + b % 2 * TILE * 2 + g * 4);
        to.low = words_at(tile, pair + 64 + b % 2 * 256 + at_lane);
    } else if constexpr (kind == Kind::q5_0) {
        const int64_t pair = b / 2 * int64_t{sizeof(PackedQ5_0)}, block = pair + 64 + b % 2 * 320;
        to.d.word[0] = dword_at(tile, pair + b % 2 * TILE * 2 + g * 4);
        to.low = words_at(tile, block + at_lane);
        to.high = words_at(tile, block + 256 + g * 8);
    } else if constexpr (kind == Kind::q8_0) {
        const int64_t pair = b / 2 * int64_t{sizeof(PackedQ8_0)}, block = pair + 64 + b % 2 * 512;
        to.d.word[0] = dword_at(tile, pair + b % 2 * TILE * 2 + g * 4);
        to.low = words_at(tile, block + at_lane);
        to.high = words_at(tile, block + 256 + at_lane);
    } else if constexpr (kind == Kind::q4_1 || kind == Kind::q5_1) {
        const int64_t at = b * int64_t{kind == Kind::q4_1 ? sizeof(PackedQ4_1) : sizeof(PackedQ5_1)};
        to.d.word[0] = dword_at(tile, at + g * 4);
        to.m = dword_at(tile, at + TILE * 2 + g * 4);
        to.low = words_at(tile, at + 64 + at_lane);
        if constexpr (kind == Kind::q5_1) to.high = words_at(tile, at + 64 + 256 + g * 8);
    } else if constexpr (kind == Kind::q4_k || kind == Kind::q5_k) {
        const int64_t at =
            b / 8 * int64_t{kind == Kind::q4_k ? sizeof(PackedQ4_K) : sizeof(PackedQ5_K)};
        const int sub = b % 8;
        const int64_t block = at + 320 + sub * (kind == Kind::q4_k ? 256 : 320);
        to.d.word[0] = dword_at(tile, at + g * 4);
        to.m = dword_at(tile, at + TILE * 2 + g * 4);
        to.factor = pair_at(tile, at + 64 + sub * TILE + g * 2);
        to.min = pair_at(tile, at + 192 + sub * TILE + g * 2);
        to.low = words_at(tile, block + at_lane);
        if constexpr (kind == Kind::q5_k) to.high = words_at(tile, block + 256 + g * 8);
    } else if constexpr (kind == Kind::q6_k) {
        const int64_t at = b / 8 * int64_t{sizeof(PackedQ6_K)};
        const int sub = b % 8;
        const int64_t scales = at + 64 + 2 * sub * TILE + g * 2, block = at + 320 + sub * 384;
        to.d = words_at(tile, at + g * 8);
        to.factor = pair_at(tile, scales) | pair_at(tile, scales + TILE) << 16;
        to.low = words_at(tile, block + at_lane);
        to.high = words_at(tile, block + 256 + t / 2 * TILE * 4 + g * 8);
    } else if constexpr (kind == Kind::mxfp4) {
        const int64_t four = b / 4 * int64_t{sizeof(PackedMXFP4)};
        to.d.word[0] = pair_at(tile, four + b % 4 * TILE + g * 2);
        to.low = words_at(tile, four + 64 + b % 4 * 256 + at_lane);
    } else if constexpr (kind == Kind::q3_k) {
        const int64_t at = b / 8 * int64_t{sizeof(PackedQ3_K)};
        const int sub = b % 8;
        const int64_t scales = at + 64 + 2 * sub * TILE + g * 2, block = at + 320 + sub * 192;
        to.d = words_at(tile, at + g * 8);
        to.factor = pair_at(tile, scales) | pair_at(tile, scales + TILE) << 16;
        to.low = words_at(tile, block + t / 2 * TILE * 4 + g * 8);
        to.high = words_at(tile, block + 128 + g * 8);
    } else if constexpr (kind == Kind::q2_k) {
        const int64_t at = b / 8 * int64_t{sizeof(PackedQ2_K)};
        const int sub = b % 8;
        to.d.word[0] = dword_at(tile, at + g * 4);
        to.m = dword_at(tile, at + TILE * 2 + g * 4);
        to.factor = dword_at(tile, at + 64 + sub * TILE * 2 + g * 4);
        to.low = words_at(tile, at + 320 + sub * 128 + t / 2 * TILE * 4 + g * 8);
    } else if constexpr (has_three_bits(kind)) {
        const int64_t at = b / 8 * int64_t{sizeof(PackedIQ2)};
        const int sub = b % 8;
        const int64_t block = at + 192 + sub * 192;
        to.d = words_at(tile, at + g * 8);
        to.factor = pair_at(tile, at + 64 + sub * TILE + g * 2);
        to.low = words_at(tile, block + t / 2 * TILE * 4 + g * 8);
        to.high = words_at(tile, block + 128 + g * 8);
    } else if constexpr (has_nibbles(kind)) {
        const int64_t at = b / 8 * int64_t{sizeof(PackedIQ4_XS)};
        const int sub = b % 8;
        to.d.word[0] = dword_at(tile, at + g * 4);
        to.factor = pair_at(tile, at + 32 + sub * TILE + g * 2);
        to.low = words_at(tile, at + 192 + sub * 256 + at_lane);
    }
    return to;
}

// Blocks of a unit of packed weights.
GPU_FN constexpr int unit_blocks(Kind kind) {
    switch (kind) {
        case Kind::q4_k:
        case Kind::q5_k:
        case Kind::q6_k:
        case Kind::q3_k:
        case Kind::q2_k:
        case Kind::iq3_xxs:
        case Kind::iq3_s:
        case Kind::iq2_s:
        case Kind::iq1_m:
        case Kind::iq4_xs: return 8;
        case Kind::mxfp4: return 4;
        default: return 2;  // q4_1 and q5_1: two units
    }
}

// The same, where b = first + i, and `first` is a multiple of `multiple`: of units, if these are not larger,
// so that a constant i costs nothing.
template <Kind kind, int multiple>
GPU_FN Packed load_part_from(In<uint8_t> tile, int first, int i, int g, int t) {
    constexpr int UNIT = unit_blocks(kind);
    if constexpr (multiple % UNIT) return load_part<kind>(tile, first + i, g, t);
    return load_part<kind>(tile + first / UNIT * tile_bytes(kind, UNIT * ca::BLOCK), i, g, t);
}

template <Kind kind>
GPU_FN Part unpack(const Packed& from, int t) {
    Part part;
    GPU_UNROLL
    for (int row = 0; row < 2; row++) {
        const uint32_t low = from.low.word[row], high = from.high.word[row];
        uint32_t first = low & 0x0F0F0F0Fu, second = low >> 4 & 0x0F0F0F0Fu;
        if constexpr (kind == Kind::q4_0) {
            first = low << 4 & 0xF0F0F0F0u;
            second = low & 0xF0F0F0F0u;
        } else if constexpr (has_table(kind)) {
            const Words2 values = values_of<kind>(low);
            first = values.word[0];
            second = values.word[1];
        } else if constexpr (kind == Kind::q5_0) {
            first = low << 3 & 0xF8F8F8F8u;
            second = (low & 0xE0E0E0E0u) | (high >> (2 * t) << 3 & 0x18181818u);
        } else if constexpr (kind == Kind::q5_1 || kind == Kind::q5_k) {
            first = low & 0x1F1F1F1Fu;
            second = (low >> 5 & 0x07070707u) << 2 | (high >> (2 * t) & 0x03030303u);
        } else if constexpr (kind == Kind::q8_0) {
            first = low;
            second = high;
        } else if constexpr (kind == Kind::q6_k) {
            first = (low << 2 & 0x3C3C3C3Cu) | (high << (t % 2 ? 4 : 2) & 0xC0C0C0C0u);
            second = (low >> 2 & 0x3C3C3C3Cu) | (high << (t % 2 ? 6 : 0) & 0xC0C0C0C0u);
        } else if constexpr (kind == Kind::q3_k) {
            first = (low << (t % 2 ? 3 : 1) & 0x60606060u) | (high >> t << 7 & 0x80808080u);
            second = ((t % 2 ? low << 5 : low >> 1) & 0x60606060u) | (high >> t << 3 & 0x80808080u);
        } else if constexpr (has_three_bits(kind)) {
            const uint32_t even = (low >> (t % 2 ? 2 : 4) & 0x03030303u) | (high >> t << 2 & 0x04040404u);
            const uint32_t odd = (low >> (t % 2 ? 0 : 6) & 0x03030303u) | (high >> (t + 4) << 2 & 0x04040404u);
            const Words2 values = values_of<kind>(even | odd << 4);
            first = values.word[0];
            second = values.word[1];
        } else if constexpr (kind == Kind::q2_k) {  // at most 3 * 15: no product leaves its byte
            const uint32_t both = from.factor >> 16 * row;
            first = (low >> (t % 2 ? 2 : 4) & 0x03030303u) * (both & 15u);
            second = (low >> (t % 2 ? 0 : 6) & 0x03030303u) * (both >> 8 & 15u);
        }
        constexpr uint32_t SIGN = has_sign(kind) ? 0x80808080u : 0;
        part.q[row] = first ^ SIGN;
        part.q[row + 2] = second ^ SIGN;
        if constexpr (has_halves(kind))
            part.d[row] = ca::float_of(from.d.word[row]);
        else if constexpr (kind == Kind::mxfp4)
            part.d[row] = ca::power_of_field(from.d.word[0] >> 8 * row & 255u);
        else
            part.d[row] = half_of(from.d.word[0], row);
        if constexpr (shift_of(kind) > 0) part.d[row] = ca::mul_rn(part.d[row], 1.0f / (1 << shift_of(kind)));
        if constexpr (kind == Kind::iq3_xxs) part.d[row] = ca::mul_rn(part.d[row], 0.5f);
        part.m[row] = half_of(from.m, row);
        part.factor[row][0] = part.factor[row][1] = part.min[row] = 1;
        part.minima = from.factor >> 4 & 0x0F0F0F0Fu;
        if constexpr (kind == Kind::q4_k || kind == Kind::q5_k) {
            part.factor[row][0] = part.factor[row][1] =
                static_cast<int32_t>(from.factor >> 8 * row & 255u);
            part.min[row] = static_cast<int32_t>(from.min >> 8 * row & 255u);
        } else if constexpr (has_nibbles(kind)) {
            part.factor[row][0] = part.factor[row][1] =
                static_cast<int8_t>(from.factor >> 8 * row);
        } else if constexpr (has_three_bits(kind)) {
            for (int half = 0; half < 2; half++)
                part.factor[row][half] =
                    static_cast<int32_t>(2 * (from.factor >> (8 * row + 4 * half) & 15u) + 1);
        } else if constexpr (has_halves(kind)) {
            for (int half = 0; half < 2; half++)
                part.factor[row][half] = static_cast<int8_t>(from.factor >> (16 * half + 8 * row));
        }
    }
    return part;
}

// Weight k of a row of a tile, by rule 2 ("Embedding").
template <Kind kind>
GPU_FN float weight_at(In<uint8_t> tile, int row, int k) {
    const int i = k % ca::BLOCK, half = i / 16, t = i % 16 / 4;
    const Part part = unpack<kind>(load_part<kind>(tile, k / ca::BLOCK, row / 2, t), t);
    const bool odd = row % 2;
    const uint32_t bytes = half ? (odd ? part.q[3] : part.q[2]) : (odd ? part.q[1] : part.q[0]);
    const int32_t n = static_cast<int8_t>(bytes >> i % 4 * 8);
    const int32_t even_factor = half ? part.factor[0][1] : part.factor[0][0];
    const int32_t odd_factor = half ? part.factor[1][1] : part.factor[1][0];
    const auto weight = static_cast<float>(n * (odd ? odd_factor : even_factor));
    const float d = odd ? part.d[1] : part.d[0], m = odd ? part.m[1] : part.m[0];
    int32_t min = odd ? part.min[1] : part.min[0];
    if constexpr (has_minima(kind))
        min = static_cast<int32_t>(part.minima >> (16 * odd + 8 * half) & 255u);
    if constexpr (!has_minimum(kind) && !has_minima(kind)) return ca::mul_rn(weight, d);
    if constexpr (kind == Kind::q4_k || kind == Kind::q5_k || kind == Kind::q2_k)
        return ca::fma_rn(weight, d, ca::mul_rn(static_cast<float>(min), m));
    return ca::fma_rn(weight, d, m);
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
        case Kind::mxfp4: return weight_at<Kind::mxfp4>(tile, row, k);
        case Kind::iq4_xs: return weight_at<Kind::iq4_xs>(tile, row, k);
        case Kind::q3_k: return weight_at<Kind::q3_k>(tile, row, k);
        case Kind::q2_k: return weight_at<Kind::q2_k>(tile, row, k);
        case Kind::iq3_xxs: return weight_at<Kind::iq3_xxs>(tile, row, k);
        case Kind::iq3_s: return weight_at<Kind::iq3_s>(tile, row, k);
        case Kind::iq2_xxs:
        case Kind::iq2_xs:
        case Kind::iq2_s: return weight_at<Kind::iq2_s>(tile, row, k);
        case Kind::iq1_s:
        case Kind::iq1_m: return weight_at<Kind::iq1_m>(tile, row, k);
        case Kind::f16: return float_at<Kind::f16>(tile, row, k);
        case Kind::bf16: return float_at<Kind::bf16>(tile, row, k);
        case Kind::f32: return float_at<Kind::f32>(tile, row, k);
    }
    return 0.0f;
}

}  // namespace gpu
