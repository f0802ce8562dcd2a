// The definition of CA-1 rule 2: every other level must give these bits.
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
    int32_t offset;          // -8 * sum of q
    int32_t half0, half1;    // -32 * sum of each half
};

Cell cell_of(const Activations& x, size_t group, size_t block, size_t token) {
    const size_t cell = (group * x.blocks + block) * GROUP_TOKENS + token;
    const int32_t* halves = x.halves.data() + (group * x.blocks + block) * 2 * GROUP_TOKENS + token;
    return {x.q.data() + cell * BLOCK_WIDTH, x.scale[cell], x.offset[cell], halves[0],
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

// acc after one block: acc = fma(float(I), RN(dw * dx), acc), I the exact integer dot.
float step_q4_0(float acc, const uint8_t* tile, size_t block, size_t row, const Cell& x) {
    const auto& pair = reinterpret_cast<const PackedQ4_0*>(tile)[block / 2];
    const int32_t sum = dot_nibbles(pair.q[block % 2], row, x.q) + x.offset;
    const float d = ca::half_to_float(pair.d[block % 2][row]);
    return ca::fma_rn(static_cast<float>(sum), d * x.scale, acc);
}

// As q4_0, then at once acc = fma(float(sum of q), RN(m * dx), acc).
float step_q4_1(float acc, const uint8_t* tile, size_t block, size_t row, const Cell& x) {
    const auto& from = reinterpret_cast<const PackedQ4_1*>(tile)[block];
    const int32_t sum = dot_nibbles(from.q, row, x.q);
    const float d = ca::half_to_float(from.d[row]), m = ca::half_to_float(from.m[row]);
    acc = ca::fma_rn(static_cast<float>(sum), d * x.scale, acc);
    return ca::fma_rn(static_cast<float>(x.offset / -8), m * x.scale, acc);
}

float step_q8_0(float acc, const uint8_t* tile, size_t block, size_t row, const Cell& x) {
    const auto& pair = reinterpret_cast<const PackedQ8_0*>(tile)[block / 2];
    int32_t sum = 0;
    for (size_t k = 0; k < BLOCK_WIDTH; ++k)
        sum += (pair.q[block % 2][k / 4][row][k % 4] - 128) * x.q[k];
    const float d = ca::half_to_float(pair.d[block % 2][row]);
    return ca::fma_rn(static_cast<float>(sum), d * x.scale, acc);
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
    const int32_t sum = super.scale[sub][row] * half[0] + super.scale[sub + 1][row] * half[1];
    return ca::fma_rn(static_cast<float>(sum), super.d[row] * x.scale, acc);
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
    return kind == Kind::f16 ? ca::half_to_float(half)
                             : ca::float_of(static_cast<uint32_t>(half) << 16);
}

// Float weights: 32 lanes (k mod 32), fma in order, then the tree 16, 8, 4, 2, 1.
float dot_floats(const Matrix& matrix, const uint8_t* tile, size_t row, const Activations& x,
                 size_t token) {
    float lane[32] = {};
    const float* values = x.values.data() + token * x.padded_width;
    for (size_t b = 0; b < x.blocks; ++b)
        for (size_t i = 0; i < 32; ++i)
            lane[i] = ca::fma_rn(weight(matrix.kind, tile, (b * TILE_ROWS + row) * 32 + i),
                                  values[b * 32 + i], lane[i]);
    for (size_t width = 16; width >= 1; width /= 2)
        for (size_t i = 0; i < width; ++i) lane[i] = lane[i] + lane[i + width];
    return lane[0];
}

float dot(const Matrix& matrix, const uint8_t* tile, size_t row, const Activations& x, size_t group,
          size_t token) {
    switch (matrix.kind) {
        case Kind::q4_0: return dot_blocks<step_q4_0>(tile, row, x, group, token);
        case Kind::q4_1: return dot_blocks<step_q4_1>(tile, row, x, group, token);
        case Kind::q8_0: return dot_blocks<step_q8_0>(tile, row, x, group, token);
        case Kind::q6_k: return dot_blocks<step_q6_k>(tile, row, x, group, token);
        default: return dot_floats(matrix, tile, row, x, group * GROUP_TOKENS + token);
    }
}

void multiply(const Matrix& matrix, const Activations& x, size_t tile0, size_t tiles, size_t group,
              size_t tokens, TileResult* results) {
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

void gate(const TileResult& gate, const float* gate_bias, const TileResult& up,
          const TileTarget& to) {
    for (size_t token = 0; token < to.tokens; ++token)
        for (size_t row = 0; row < to.rows; ++row)
            to.out[token * to.stride + row] = ca::silu(biased(gate, gate_bias, token, row)) *
                                              biased(up, to.bias, token, row);
}

float multiply_then_add(float a, float b, float c) { return a * b + c; }

}  // namespace

const LinearKernels LINEAR_SCALAR = {multiply, store, add, gate, multiply_then_add};

}  // namespace batchengine
