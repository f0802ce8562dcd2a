// The parts that the AVX2 and AVX-512 units share: the panel of a token group, the choice of a product by
// kind, and the epilogues (bias, residual, gate) on 16 lanes. Included by these units only; all of it
// has internal linkage, so each keeps its own copy.
#pragma once

#include "common/simd.h"
#include "linear/linear.h"
#include "linear/pack.h"

namespace batchengine {
namespace {

// The panel of one token group, from its first block.
struct Panel {
    const int8_t* q;
    const float* scale;
    const int32_t* offset;
    const int32_t* halves;
    size_t blocks;

    Panel(const Activations& x, size_t group)
        : q(x.q.data() + group * x.blocks * GROUP_TOKENS * BLOCK_WIDTH),
          scale(x.scale.data() + group * x.blocks * GROUP_TOKENS),
          offset(x.offset.data() + group * x.blocks * GROUP_TOKENS),
          halves(x.halves.data() + group * x.blocks * GROUP_TOKENS * 2), blocks(x.blocks) {}
};

// Each unit defines these: the quantised kinds, and two products. `cold`: no cache holds the weights.
struct WeightsQ4_0;
struct WeightsQ4_1;
struct WeightsQ8_0;
struct WeightsQ6_K;
template <class Weights>
void multiply_blocks(const uint8_t* tile, size_t bytes, size_t tiles, const Panel& x, size_t tokens,
                     bool cold, TileResult* results);
// Four rows times N tokens of float weights.
template <Kind KIND, int N>
void product_floats(const uint8_t* tile, size_t row, const Activations& x, size_t group,
                    size_t token, TileResult& result);

template <Kind KIND>
void multiply_floats(const uint8_t* tile, size_t bytes, size_t tiles, const Activations& x,
                     size_t group, size_t tokens, TileResult* results) {
    for (size_t t = 0; t < tiles; ++t)
        for (size_t row = 0; row < TILE_ROWS; row += 4) {
            size_t token = 0;
            for (; token + 2 <= tokens; token += 2)
                product_floats<KIND, 2>(tile + t * bytes, row, x, group, token, results[t]);
            if (token < tokens)
                product_floats<KIND, 1>(tile + t * bytes, row, x, group, token, results[t]);
        }
}

void multiply(const Matrix& matrix, const Activations& x, size_t tile0, size_t tiles, size_t group,
              size_t tokens, TileResult* results) {
    const size_t bytes = tile_bytes(matrix.kind, matrix.cols);
    const uint8_t* tile = matrix.data + tile0 * bytes;
    const Panel panel(x, group);
    const bool cold = group == 0;  // later groups find the weights in the cache
    switch (matrix.kind) {
        case Kind::q4_0:
            return multiply_blocks<WeightsQ4_0>(tile, bytes, tiles, panel, tokens, cold, results);
        case Kind::q4_1:
            return multiply_blocks<WeightsQ4_1>(tile, bytes, tiles, panel, tokens, cold, results);
        case Kind::q8_0:
            return multiply_blocks<WeightsQ8_0>(tile, bytes, tiles, panel, tokens, cold, results);
        case Kind::q6_k:
            return multiply_blocks<WeightsQ6_K>(tile, bytes, tiles, panel, tokens, cold, results);
        case Kind::f16:
            return multiply_floats<Kind::f16>(tile, bytes, tiles, x, group, tokens, results);
        case Kind::bf16:
            return multiply_floats<Kind::bf16>(tile, bytes, tiles, x, group, tokens, results);
        case Kind::f32:
            return multiply_floats<Kind::f32>(tile, bytes, tiles, x, group, tokens, results);
    }
}

SIMD_FN V16 biased(const TileResult& result, const float* bias, size_t token) {
    const V16 y = vload(result.y[token]);
    return bias ? y + vload(bias) : y;
}

// Whole tiles are stored as vectors; the last tile of an odd row count value by value.
SIMD_FN void put(const TileTarget& to, size_t token, V16 value) {
    float* out = to.out + token * to.stride;
    if (to.rows == TILE_ROWS) {
        vstore(out, value);
        return;
    }
    float lanes[TILE_ROWS];
    vstore(lanes, value);
    for (size_t row = 0; row < to.rows; ++row) out[row] = lanes[row];
}

SIMD_FN V16 get(const TileTarget& to, size_t token) {
    const float* out = to.out + token * to.stride;
    if (to.rows == TILE_ROWS) return vload(out);
    float lanes[TILE_ROWS] = {};
    for (size_t row = 0; row < to.rows; ++row) lanes[row] = out[row];
    return vload(lanes);
}

void store_tile(const TileResult& result, const TileTarget& to) {
    for (size_t token = 0; token < to.tokens; ++token)
        put(to, token, biased(result, to.bias, token));
}

void add_tile(const TileResult& result, const TileTarget& to) {
    for (size_t token = 0; token < to.tokens; ++token)
        put(to, token, get(to, token) + biased(result, to.bias, token));
}

void gate_tile(const TileResult& gate, const float* gate_bias, const TileResult& up,
               const TileTarget& to) {
    for (size_t token = 0; token < to.tokens; ++token)
        put(to, token, vsilu(biased(gate, gate_bias, token)) * biased(up, to.bias, token));
}

// NaN if the vector and the plain expression differ, as a compiler may fuse only one of them.
float multiply_then_add(float a, float b, float c) {
    float lanes[TILE_ROWS];
    vstore(lanes, vset(a) * vset(b) + vset(c));
    const float plain = a * b + c;
    return lanes[0] == plain ? plain : ca::canonical_nan();
}

}  // namespace
}  // namespace batchengine
