// The definition of CA-3 rule 2: every other level must give these bits.
//
// Written from the rule, one output at a time. Integer dots are exact; each fp32 operation below
// rounds once, in the order it is written.
#include <algorithm>

#include "common/ca.h"
#include "linear/linear.h"
#include "linear/pack.h"

namespace batchengine {
namespace {

// One block of one token, in the terms of the rule.
struct Cell {
    const int8_t* q;
    float scale;
    int32_t sum;             // of q
    int32_t half0, half1;    // -32 * sum of each half
};

Cell cell_of(const Activations& x, size_t group, size_t block, size_t token) {
    const size_t cell = (group * x.blocks + block) * GROUP_TOKENS + token;
    const int32_t* halves = x.halves.data() + (group * x.blocks + block) * 2 * GROUP_TOKENS + token;
    return {x.q.data() + cell * BLOCK_WIDTH, x.scale[cell], x.offset[cell] / -8, halves[0],
            halves[GROUP_TOKENS]};
}

// sum of nibble(k) * q(k) over the 32 k of a block
int32_t dot_nibbles(const uint8_t (&nibbles)[GROUPS / 2][TILE_ROWS][4], size_t row, const int8_t* q) {
    int32_t sum = 0;
    for (size_t k = 0; k < 16; ++k) {
        const uint8_t byte = nibbles[k / 4][row][k % 4];
        sum += (byte & 15) * q[k] + (byte >> 4) * q[k + 16];
    }
    return sum;
}

// Each returns acc after one block: ca::step with the exact integer dot.
float step_q4_0(float acc, const uint8_t* tile, size_t block, size_t row, const Cell& x) {
    const auto& pair = reinterpret_cast<const PackedQ4_0*>(tile)[block / 2];
    const int32_t dot = dot_nibbles(pair.q[block % 2], row, x.q) - 8 * x.sum;
    return ca::step(acc, dot, ca::half_to_float(pair.d[block % 2][row]), x.scale);
}

// As q4_0, then at once the minimum times the sum of q.
float step_q4_1(float acc, const uint8_t* tile, size_t block, size_t row, const Cell& x) {
    const auto& from = reinterpret_cast<const PackedQ4_1*>(tile)[block];
    acc = ca::step(acc, dot_nibbles(from.q, row, x.q), ca::half_to_float(from.d[row]), x.scale);
    return ca::step(acc, x.sum, ca::half_to_float(from.m[row]), x.scale);
}

int32_t dot_five_bits(const FiveBits& from, size_t row, const int8_t* q) {
    int32_t sum = 0;
    for (size_t k = 0; k < 16; ++k) {
        const uint8_t byte = from.q[k / 4][row][k % 4];
        const int lower = from.q[4][row][k % 4] >> (k / 4 * 2) & 3;
        sum += (byte & 31) * q[k] + (byte >> 5 << 2 | lower) * q[k + 16];
    }
    return sum;
}

float step_q5_0(float acc, const uint8_t* tile, size_t block, size_t row, const Cell& x) {
    const auto& pair = reinterpret_cast<const PackedQ5_0*>(tile)[block / 2];
    const int32_t dot = dot_five_bits(pair.block[block % 2], row, x.q) - 16 * x.sum;
    return ca::step(acc, dot, ca::half_to_float(pair.d[block % 2][row]), x.scale);
}

float step_q5_1(float acc, const uint8_t* tile, size_t block, size_t row, const Cell& x) {
    const auto& from = reinterpret_cast<const PackedQ5_1*>(tile)[block];
    const int32_t dot = dot_five_bits(from.block, row, x.q);
    acc = ca::step(acc, dot, ca::half_to_float(from.d[row]), x.scale);
    return ca::step(acc, x.sum, ca::half_to_float(from.m[row]), x.scale);
}

// sum of values[nibble(k)] * q(k)
int32_t dot_table(const int8_t (&values)[16], const uint8_t (&nibbles)[GROUPS / 2][TILE_ROWS][4],
                  size_t row, const int8_t* q) {
    int32_t sum = 0;
    for (size_t k = 0; k < 16; ++k) {
        const uint8_t byte = nibbles[k / 4][row][k % 4];
        sum += values[byte & 15] * q[k] + values[byte >> 4] * q[k + 16];
    }
    return sum;
}

float step_iq4_nl(float acc, const uint8_t* tile, size_t block, size_t row, const Cell& x) {
    const auto& pair = reinterpret_cast<const PackedQ4_0*>(tile)[block / 2];
    const int32_t dot = dot_table(IQ4_VALUES, pair.q[block % 2], row, x.q);
    return ca::step(acc, dot, ca::half_to_float(pair.d[block % 2][row]), x.scale);
}

// A sub-block of Q4_K or Q5_K whose dot is known: its scale times that with d, then its minimum times
// the sum of q with m.
template <class Packed>
float step_with_minimum(float acc, const Packed& super, size_t sub, size_t row, int32_t dot,
                        const Cell& x) {
    acc = ca::step(acc, super.scale[sub][row] * dot, ca::half_to_float(super.d[row]), x.scale);
    return ca::step(acc, super.min[sub][row] * x.sum, ca::half_to_float(super.m[row]), x.scale);
}

float step_q4_k(float acc, const uint8_t* tile, size_t block, size_t row, const Cell& x) {
    const auto& super = reinterpret_cast<const PackedQ4_K*>(tile)[block / 8];
    const size_t sub = block % 8;
    return step_with_minimum(acc, super, sub, row, dot_nibbles(super.q[sub], row, x.q), x);
}

float step_q5_k(float acc, const uint8_t* tile, size_t block, size_t row, const Cell& x) {
    const auto& super = reinterpret_cast<const PackedQ5_K*>(tile)[block / 8];
    const size_t sub = block % 8;
    return step_with_minimum(acc, super, sub, row, dot_five_bits(super.block[sub], row, x.q), x);
}

float step_q8_0(float acc, const uint8_t* tile, size_t block, size_t row, const Cell& x) {
    const auto& pair = reinterpret_cast<const PackedQ8_0*>(tile)[block / 2];
    int32_t dot = 0;
    for (size_t k = 0; k < BLOCK_WIDTH; ++k)
        dot += (pair.q[block % 2][k / 4][row][k % 4] - 128) * x.q[k];
    return ca::step(acc, dot, ca::half_to_float(pair.d[block % 2][row]), x.scale);
}

// I = scale0 * (dot of the first 16 k) + scale1 * (dot of the last 16 k), |I| < 2^24.
float step_q6_k(float acc, const uint8_t* tile, size_t block, size_t row, const Cell& x) {
    const auto& super = reinterpret_cast<const PackedQ6_K*>(tile)[block / 8];
    const auto& from = super.block[block % 8];
    int32_t half[2] = {x.half0, x.half1};
    for (size_t k = 0; k < 16; ++k) {
        const size_t j = k / 4;
        const uint8_t low = from.low[j][row][k % 4], high = from.high[j / 2][row][k % 4];
        const int first = (low & 15) | ((high >> (j % 2 ? 2 : 4)) & 3) << 4;
        const int last = (low >> 4) | ((high >> (j % 2 ? 0 : 6)) & 3) << 4;
        half[0] += first * x.q[k];
        half[1] += last * x.q[k + 16];
    }
    const size_t sub = block % 8 * 2;
    const int32_t dot = super.scale[sub][row] * half[0] + super.scale[sub + 1][row] * half[1];
    return ca::step(acc, dot, super.d[row], x.scale);
}

// I = scale * (dot of the block), |I| < 2^24; d counts 2^-HALVINGS times.
template <const int8_t (&VALUES)[16], int HALVINGS>
float step_superblock_table(float acc, const uint8_t* tile, size_t block, size_t row, const Cell& x) {
    const auto& super = reinterpret_cast<const PackedIQ4_XS*>(tile)[block / 8];
    const size_t sub = block % 8;
    const int32_t dot = super.scale[sub][row] * dot_table(VALUES, super.q[sub], row, x.q);
    constexpr float UNIT = 1.0f / (1 << HALVINGS);
    return ca::step(acc, dot, ca::mul_rn(ca::half_to_float(super.d[row]), UNIT), x.scale);
}

// Dots of both halves of a block of three bits, whose meanings are values.
struct HalfDots {
    int32_t first, last;
};
HalfDots dot_three_bits(const int8_t (&values)[16], const PackedQ3_K::Block& from, size_t row,
                        const int8_t* q) {
    HalfDots dots = {0, 0};
    for (size_t k = 0; k < 16; ++k) {
        const size_t j = k / 4;
        const uint8_t low = from.low[j / 2][row][k % 4], top = from.top[row][k % 4];
        const int first = (low >> (j % 2 ? 2 : 4) & 3) | (top >> j & 1) << 2;
        const int last = (low >> (j % 2 ? 0 : 6) & 3) | (top >> (j + 4) & 1) << 2;
        dots.first += values[first] * q[k];
        dots.last += values[last] * q[k + 16];
    }
    return dots;
}

// As Q6_K.
float step_q3_k(float acc, const uint8_t* tile, size_t block, size_t row, const Cell& x) {
    static constexpr int8_t VALUES[16] = {-4, -3, -2, -1, 0, 1, 2, 3};
    const auto& super = reinterpret_cast<const PackedQ3_K*>(tile)[block / 8];
    const HalfDots half = dot_three_bits(VALUES, super.block[block % 8], row, x.q);
    const size_t sub = block % 8 * 2;
    const int32_t dot = super.scale[sub][row] * half.first + super.scale[sub + 1][row] * half.last;
    return ca::step(acc, dot, super.d[row], x.scale);
}

// As Q6_K, |I| <= 31 * 43 * 127 * 32 < 2^23.
template <const int8_t (&VALUES)[16]>
float step_iq2(float acc, const uint8_t* tile, size_t block, size_t row, const Cell& x) {
    const auto& super = reinterpret_cast<const PackedIQ2*>(tile)[block / 8];
    const HalfDots half = dot_three_bits(VALUES, super.block[block % 8], row, x.q);
    const int scales = super.scale[block % 8][row];
    const int32_t dot = (2 * (scales & 15) + 1) * half.first + (2 * (scales >> 4) + 1) * half.last;
    return ca::step(acc, dot, super.d[row], x.scale);
}

// I = scale0 * (dot of the first 16 k) + scale1 * (dot of the last 16 k), |I| < 2^18; then the minima times the
// sums of the halves, below 2^16.
float step_q2_k(float acc, const uint8_t* tile, size_t block, size_t row, const Cell& x) {
    const auto& super = reinterpret_cast<const PackedQ2_K*>(tile)[block / 8];
    int32_t half[2] = {0, 0};
    for (size_t k = 0; k < 16; ++k) {
        const size_t j = k / 4;
        const uint8_t low = super.block[block % 8].low[j / 2][row][k % 4];
        half[0] += (low >> (j % 2 ? 2 : 4) & 3) * x.q[k];
        half[1] += (low >> (j % 2 ? 0 : 6) & 3) * x.q[k + 16];
    }
    const uint8_t(&both)[2] = super.scale_and_min[block % 8][row];
    const int32_t dot = (both[0] & 15) * half[0] + (both[1] & 15) * half[1];
    const int32_t least = (both[0] >> 4) * (x.half0 / -32) + (both[1] >> 4) * (x.half1 / -32);
    acc = ca::step(acc, dot, ca::half_to_float(super.d[row]), x.scale);
    return ca::step(acc, least, ca::half_to_float(super.m[row]), x.scale);
}

float step_mxfp4(float acc, const uint8_t* tile, size_t block, size_t row, const Cell& x) {
    const auto& four = reinterpret_cast<const PackedMXFP4*>(tile)[block / 4];
    const int32_t dot = dot_table(MXFP4_VALUES, four.q[block % 4], row, x.q);
    return ca::step_of_power(acc, dot, ca::power_of_field(four.field[block % 4][row]), x.scale);
}

// Segments of 32 blocks, each from +0; their values are added in order.
template <float (*STEP)(float, const uint8_t*, size_t, size_t, const Cell&)>
float dot_blocks(const uint8_t* tile, size_t row, const Activations& x, size_t group, size_t token) {
    float y = 0.0f;
    for (size_t first = 0; first < x.blocks; first += SEGMENT_BLOCKS) {
        float acc = 0.0f;
        for (size_t b = first; b < std::min(first + SEGMENT_BLOCKS, x.blocks); ++b)
            acc = STEP(acc, tile, b, row, cell_of(x, group, b, token));
        y = first == 0 ? acc : y + acc;
    }
    return y;
}

float weight(Kind kind, const uint8_t* tile, size_t index) {
    if (kind == Kind::f32) return reinterpret_cast<const float*>(tile)[index];
    const uint16_t half = reinterpret_cast<const uint16_t*>(tile)[index];
    return kind == Kind::f16 ? ca::half_to_float(half) : ca::bf16_to_float(half);
}

// Float weights: one chain of fma in each segment of 1024 k; the segments are added in order.
float dot_floats(const Matrix& matrix, const uint8_t* tile, size_t row, const Activations& x,
                 size_t token) {
    const float* values = x.values.data() + token * x.padded_width;
    float y = 0.0f;
    for (size_t first = 0; first < x.width; first += SEGMENT_BLOCKS * BLOCK_WIDTH) {
        float acc = 0.0f;
        for (size_t k = first; k < std::min(first + SEGMENT_BLOCKS * BLOCK_WIDTH, x.width); ++k)
            acc = ca::fma_rn(weight(matrix.kind, tile, k * TILE_ROWS + row), values[k], acc);
        y = first == 0 ? acc : y + acc;
    }
    return y;
}

float dot(const Matrix& matrix, const uint8_t* tile, size_t row, const Activations& x, size_t group,
          size_t token) {
    switch (matrix.kind) {
        case Kind::q4_0: return dot_blocks<step_q4_0>(tile, row, x, group, token);
        case Kind::q4_1: return dot_blocks<step_q4_1>(tile, row, x, group, token);
        case Kind::q5_0: return dot_blocks<step_q5_0>(tile, row, x, group, token);
        case Kind::q5_1: return dot_blocks<step_q5_1>(tile, row, x, group, token);
        case Kind::q8_0: return dot_blocks<step_q8_0>(tile, row, x, group, token);
        case Kind::iq4_nl: return dot_blocks<step_iq4_nl>(tile, row, x, group, token);
        case Kind::q4_k: return dot_blocks<step_q4_k>(tile, row, x, group, token);
        case Kind::q5_k: return dot_blocks<step_q5_k>(tile, row, x, group, token);
        case Kind::q6_k: return dot_blocks<step_q6_k>(tile, row, x, group, token);
        case Kind::mxfp4: return dot_blocks<step_mxfp4>(tile, row, x, group, token);
        case Kind::iq4_xs:
            return dot_blocks<step_superblock_table<IQ4_VALUES, 0>>(tile, row, x, group, token);
        case Kind::iq3_xxs:
            return dot_blocks<step_superblock_table<IQ3_XXS_VALUES, 1>>(tile, row, x, group, token);
        case Kind::iq3_s:
            return dot_blocks<step_superblock_table<IQ3_S_VALUES, 0>>(tile, row, x, group, token);
        case Kind::iq2_xxs:
        case Kind::iq2_xs:
        case Kind::iq2_s: return dot_blocks<step_iq2<IQ2_VALUES>>(tile, row, x, group, token);
        case Kind::iq1_s:
        case Kind::iq1_m: return dot_blocks<step_iq2<IQ1_VALUES>>(tile, row, x, group, token);
        case Kind::q3_k: return dot_blocks<step_q3_k>(tile, row, x, group, token);
        case Kind::q2_k: return dot_blocks<step_q2_k>(tile, row, x, group, token);
        default: return dot_floats(matrix, tile, row, x, group * GROUP_TOKENS + token);
    }
}

void multiply(const Matrix& matrix, const Activations& x, size_t tile0, size_t tiles, size_t group,
              size_t tokens, bool, TileResult* results) {
    const size_t bytes = tile_bytes(matrix.kind, matrix.cols);
    for (size_t i = 0; i < tiles; ++i)
        for (size_t token = 0; token < tokens; ++token)
            for (size_t row = 0; row < TILE_ROWS; ++row)
                results[i].y[token][row] =
                    dot(matrix, matrix.data + (tile0 + i) * bytes, row, x, group, token);
}

float biased(const TileResult& result, const float* bias, size_t token, size_t row) {
    return bias ? result.y[token][row] + bias[row] : result.y[token][row];
}

void store(const TileResult& result, const TileTarget& to) {
    for (size_t token = 0; token < to.tokens; ++token)
        for (size_t row = 0; row < to.rows; ++row)
            to.out[token * to.stride + row] = biased(result, to.bias, token, row);
}

void add(const TileResult& result, const TileTarget& to) {
    for (size_t token = 0; token < to.tokens; ++token)
        for (size_t row = 0; row < to.rows; ++row) {
            float& out = to.out[token * to.stride + row];
            out = out + biased(result, to.bias, token, row);
        }
}

void relu2(const TileResult& result, const TileTarget& to) {
    for (size_t token = 0; token < to.tokens; ++token)
        for (size_t row = 0; row < to.rows; ++row)
            to.out[token * to.stride + row] = ca::relu2(biased(result, to.bias, token, row));
}

template <ca::Activation ACTIVATION>
void gate(const TileResult& gate, const float* gate_bias, const TileResult& up,
          const TileTarget& to) {
    for (size_t token = 0; token < to.tokens; ++token)
        for (size_t row = 0; row < to.rows; ++row)
            to.out[token * to.stride + row] =
                ca::gated(ACTIVATION, biased(gate, gate_bias, token, row),
                          biased(up, to.bias, token, row), to.limit);
}

void add_pairs(const TileResult& result, const PairTarget& to) {
    for (size_t pair = 0; pair < to.pairs; ++pair)
        for (size_t row = 0; row < TILE_ROWS; ++row) {
            float& sum = to.sums[static_cast<size_t>(to.token[pair]) * to.stride + row];
            sum = ca::add_expert(sum, to.weight[pair], biased(result, to.bias, pair, row));
        }
}

float multiply_then_add(float a, float b, float c) { return a * b + c; }

}  // namespace

const LinearKernels LINEAR_SCALAR = {1,
                                     multiply,
                                     store,
                                     add,
                                     relu2,
                                     {{gate<ca::Activation::silu>, gate<ca::Activation::oai>,
                                       gate<ca::Activation::gelu>, gate<ca::Activation::limited>}},
                                     add_pairs,
                                     multiply_then_add};

}  // namespace batchengine
