// Matrix times activations (CA-3 rule 2) and what follows it in the same pass: bias, residual, activation.
//
// A level supplies LinearKernels; the driver in linear.cpp cuts the output into pieces and hands
// them to the pool. A piece is whole row tiles for whole token groups, so neither the number of
// threads nor the batch can change an output.
#pragma once

#include <algorithm>
#include <vector>

#include "common/pool.h"
#include "common/types.h"
#include "linear/tiles.h"

namespace batchengine {

// One tile's results: [token in group][row in tile].
struct TileResult {
    alignas(CACHE_LINE) float y[GROUP_TOKENS][TILE_ROWS];
};

// Where finished results go: rows [row0, row0 + count) of `tokens` output rows.
struct TileTarget {
    float* out;          // output row of the group's first token, at the tile's first row
    size_t stride;       // floats between the output rows of two tokens
    const float* bias;   // 16 values, or null
    size_t tokens;       // 1..16
    size_t rows;         // 1..16
    float limit = 0.0f;  // of ca::Activation::limited
};

// Where the results of pairs of tokens and experts are added: each to the sums of its token.
struct PairTarget {
    const int32_t* token;  // of each pair
    const float* weight;   // of each pair
    const float* bias;     // 16 values, or null
    size_t pairs;          // 1..16
    float* sums;           // 16 values of token 0
    size_t stride;         // floats between those of two tokens
};

// out = ca::gated(activation, RN(gate + gate_bias), RN(up + bias), limit), of one activation
using GateTile = void (*)(const TileResult& gate, const float* gate_bias, const TileResult& up,
                          const TileTarget& target);

// Those of all activations, in the order of ca::Activation.
struct GateTiles {
    GateTile of[ca::ACTIVATIONS];
};

struct LinearKernels {
    // Most token groups of one call of multiply: above 1 where weights are unpacked for all of them.
    size_t groups_max;
    // results[g * tiles + i] = tile (tile0 + i) times the tokens of group `group` + g, without bias;
    // `tokens` is the number of all. Of a nonfinite token the results are unspecified. `cold`: no cache
    // holds these weights.
    void (*multiply)(const Matrix& matrix, const Activations& x, size_t tile0, size_t tiles,
                     size_t group, size_t tokens, bool cold, TileResult* results);
    void (*store)(const TileResult& result, const TileTarget& target);   // out = RN(y + bias)
    void (*add)(const TileResult& result, const TileTarget& target);     // out = RN(out + RN(y + bias))
    void (*relu2)(const TileResult& result, const TileTarget& target);   // out = ca::relu2(RN(y + bias))
    GateTiles gates;
    // sums of token = fma(weight of the pair, RN(y + bias), sums of token), for each pair of a group
    // and 16 rows
    void (*add_pairs)(const TileResult& result, const PairTarget& target);
    // RN(RN(a * b) + c): differs from one fma when the compiler contracted this level's code.
    float (*multiply_then_add)(float a, float b, float c);

    GateTile gate(ca::Activation activation) const {
        return gates.of[static_cast<int>(activation)];
    }
};
const LinearKernels& linear_kernels();  // of the level in use

extern const LinearKernels LINEAR_SCALAR;
#if defined(BATCHENGINE_X86)
extern const LinearKernels LINEAR_AVX2;
extern const LinearKernels LINEAR_AVX512;
extern const LinearKernels LINEAR_AMX;
#elif defined(BATCHENGINE_ARM)
extern const LinearKernels LINEAR_NEON;
extern const LinearKernels LINEAR_I8MM;
#endif

// Row tiles that run together: those of the widest register tile of the kernels (kinds with a scale for each 16 k
// have two sums per output); few enough that weights, 16 tokens and results stay in cache.
constexpr size_t RUN_TILES_MAX = 3;
constexpr size_t run_tiles(Kind kind) {
    switch (kind) {
        case Kind::q6_k:
        case Kind::q3_k:
        case Kind::q2_k:
        case Kind::iq2_xs:
        case Kind::iq2_s:
        case Kind::iq1_m: return 2;
        default: return RUN_TILES_MAX;
    }
}

// Most bytes of weights in a piece, in the level-2 cache: every token group of it reads them again.
constexpr size_t REREAD_BYTES = size_t{384} << 10;
// Least bytes of a piece of a step that streams its weights from memory.
constexpr size_t STREAM_BYTES = size_t{48} << 10;

constexpr size_t RUN_GROUPS_MAX = 8;  // of any level's groups_max

// The results of one call of multiply.
struct RunResults {
    TileResult of[RUN_GROUPS_MAX * RUN_TILES_MAX];
};

// Calls body(group, its tokens, the place of its first result) for each group of a call of multiply.
template <class Body>
void each_group(size_t group, size_t tokens, size_t tiles, Body&& body) {
    size_t place = 0;
    for (size_t first = 0; first < tokens; first += GROUP_TOKENS, place += tiles)
        body(group++, std::min(GROUP_TOKENS, tokens - first), place);
}

// Token groups that run together: more of float weights would share nothing.
constexpr size_t run_groups(const LinearKernels& kernels, Kind kind) {
    return kind < Kind::f16 ? kernels.groups_max : 1;
}

// kernels.multiply(), then the canonical NaN in every output of a nonfinite token. Callers read
// linear_kernels() once: by another level than its groups_max a call may be too large.
void multiply_tiles(const LinearKernels& kernels, const Matrix& matrix, const Activations& x, size_t tile, size_t tiles,
                    size_t group, size_t tokens, bool cold, TileResult* results);

struct LinearPart {
    const Matrix* matrix;
    const Vector* bias;  // or null
};

// What becomes of the products of a gate and an up matrix: ca::gated.
struct GateFunction {
    ca::Activation activation;
    float limit = 0.0f;  // of ca::Activation::limited
};

void linear(Pool& pool, const Activations& x, const std::vector<LinearPart>& parts, size_t tokens,
            Rows& out);
void linear_add(Pool& pool, const Activations& x, const LinearPart& part, size_t tokens, Rows& out);
void linear_gated(Pool& pool, const Activations& x, const LinearPart& gate, const LinearPart& up,
                  const GateFunction& function, size_t tokens, Rows& out);
// The same without a gate: out = ca::relu2(up * x + bias).
void linear_relu2(Pool& pool, const Activations& x, const LinearPart& up, size_t tokens, Rows& out);

// out row i = RN(value * scale) of row tokens[i] of the matrix.
void embed(Pool& pool, const Matrix& matrix, const int32_t* tokens, size_t count, float scale,
           Rows& out);

}  // namespace batchengine
