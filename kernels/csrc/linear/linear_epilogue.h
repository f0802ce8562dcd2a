// The epilogues of a product (bias, residual, gate) on 16 lanes: included by the level units only.
#pragma once

#include "common/simd.h"
#include "linear/linear.h"

namespace {

using batchengine::TILE_ROWS;
using batchengine::TileResult;
using batchengine::TileTarget;

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
    return lanes[0] == plain ? plain : ca1::canonical_nan();
}

}  // namespace
