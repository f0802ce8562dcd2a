// The parts that the vector units share: the panel of a token group, the choice of a product by
// kind, and the epilogues (bias, residual, gate) on 16 lanes. Included by these units only; all of it
// has internal linkage, so each keeps its own copy.
#pragma once

#include "common/simd.h"
#include "linear/linear.h"
#include "linear/pack.h"

namespace batchengine {
namespace {

#if defined(SIMD_AVX512)
constexpr int FLOAT_TILES = 3;
SIMD_FN V16 vload_bf16(const uint16_t* p) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}
#elif defined(__AVX2__)
constexpr int FLOAT_TILES = 1;
SIMD_FN __m256 load_bf16(const uint16_t* p) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
SIMD_FN V16 vload_bf16(const uint16_t* p) { return {load_bf16(p), load_bf16(p + 8)}; }
#else
constexpr int FLOAT_TILES = 1;
SIMD_FN V16 vload_bf16(const uint16_t* p) {
    return each_four(EACH(i) {
        return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16));
    });
}
#endif

// The panel of one token group, from its first block.
struct Panel {
    const int8_t* q;
    const float* scale;
    const int32_t* offset;
    const float* sum;
    const int32_t* halves;
    size_t blocks;

    Panel(const Activations& x, size_t group)
        : q(x.q.data() + group * x.blocks * GROUP_TOKENS * BLOCK_WIDTH),
          scale(x.scale.data() + group * x.blocks * GROUP_TOKENS),
          offset(x.offset.data() + group * x.blocks * GROUP_TOKENS),
          sum(x.sum.data() + group * x.blocks * GROUP_TOKENS),
          halves(x.halves.data() + group * x.blocks * GROUP_TOKENS * 2), blocks(x.blocks) {}

    // The panel `groups` groups further on.
    Panel after(size_t groups) const {
        Panel panel = *this;
        const size_t cells = groups * blocks * GROUP_TOKENS;
        panel.q += cells * BLOCK_WIDTH;
        panel.scale += cells;
        panel.offset += cells;
        panel.sum += cells;
        panel.halves += 2 * cells;
        return panel;
    }
};

// The sums of both halves of a block of one token as two int16, the first one below. halves: of the block, from
// the token on.
[[maybe_unused]] SIMD_FN int32_t half_sums(const int32_t* halves) {
    return (-halves[0] >> 5 & 0xFFFF) | -halves[GROUP_TOKENS] >> 5 << 16;
}

// How far ahead weights are prefetched for one token, which memory bandwidth bounds. Into the second
// level: prefetches into the first fill its few miss buffers and cost a third of the bandwidth.
constexpr size_t STREAM_AHEAD_BYTES = 9216;

// What one pass over R tiles prefetches: of each packed unit `bytes` further on, a share of the lines at
// every block. All passes of a token group share the work, because a burst fills the miss buffers and
// stalls the loads behind it.
struct Ahead {
    size_t bytes;  // 0: nothing
    size_t lines;  // of each block
    size_t first;  // line of the pass's first block

    template <class Weights>
    SIMD_FN void fetch(const uint8_t* unit, size_t block, const Ahead& from) {
        constexpr size_t UNIT_LINES = Weights::BYTES / CACHE_LINE;
        constexpr size_t ALL = (UNIT_LINES + Weights::BLOCKS - 1) / Weights::BLOCKS;
        if (from.lines == ALL) {  // one pass alone: without a loop
            UNROLL for (size_t line = 0; line < ALL; ++line)
                __builtin_prefetch(unit + from.bytes + (block * ALL + line) * CACHE_LINE, 0, 2);
            return;
        }
        size_t line = from.first + block * from.lines;
        for (const size_t end = line + from.lines; line < end && line < UNIT_LINES; ++line)
            __builtin_prefetch(unit + from.bytes + line * CACHE_LINE, 0, 2);
    }
};

// The share of pass `pass` of `passes`; nothing for a pass that finds no line left.
template <class Weights>
Ahead share_of(size_t bytes, size_t pass, size_t passes) {
    constexpr size_t UNIT_LINES = Weights::BYTES / CACHE_LINE;
    const size_t lines = (UNIT_LINES + passes * Weights::BLOCKS - 1) / (passes * Weights::BLOCKS);
    const size_t first = pass * Weights::BLOCKS * lines;
    return {first < UNIT_LINES ? bytes : 0, lines, first};
}

// Each unit defines these: the quantised kinds and their product. `cold`: no cache holds the weights.
struct WeightsQ4_0;
struct WeightsQ4_1;
struct WeightsQ5_0;
struct WeightsQ5_1;
struct WeightsQ8_0;
struct WeightsIQ4_NL;
struct WeightsQ4_K;
struct WeightsQ5_K;
struct WeightsQ6_K;
struct WeightsMXFP4;
struct WeightsIQ4_XS;
struct WeightsQ3_K;
struct WeightsQ2_K;
struct WeightsIQ3_XXS;
struct WeightsIQ3_S;
struct WeightsIQ2_XXS;
struct WeightsIQ2;  // of IQ2_XS and IQ2_S
struct WeightsIQ1_S;
struct WeightsIQ1_M;
template <class Weights>
void multiply_blocks(const uint8_t* tile, size_t bytes, size_t tiles, const Panel& x, size_t tokens,
                     bool cold, TileResult* results);

// The first weights of block i of a packed unit.
SIMD_FN const uint8_t* block_at(const PackedQ4_0& unit, size_t i) { return unit.q[i][0][0]; }
SIMD_FN const uint8_t* block_at(const PackedQ4_1& unit, size_t) { return unit.q[0][0]; }
SIMD_FN const uint8_t* block_at(const PackedQ8_0& unit, size_t i) { return unit.q[i][0][0]; }
SIMD_FN const uint8_t* block_at(const PackedQ4_K& unit, size_t i) { return unit.q[i][0][0]; }
SIMD_FN const uint8_t* block_at(const PackedMXFP4& unit, size_t i) { return unit.q[i][0][0]; }
SIMD_FN const uint8_t* block_at(const PackedIQ4_XS& unit, size_t i) { return unit.q[i][0][0]; }
SIMD_FN const FiveBits* block_at(const PackedQ5_0& unit, size_t i) { return &unit.block[i]; }
SIMD_FN const FiveBits* block_at(const PackedQ5_1& unit, size_t) { return &unit.block; }
SIMD_FN const FiveBits* block_at(const PackedQ5_K& unit, size_t i) { return &unit.block[i]; }
template <class Packed>
using BlockOf = decltype(block_at(*static_cast<const Packed*>(nullptr), 0));

// Sixteen float weights of one k.
template <Kind KIND>
SIMD_FN V16 weights_at(const uint8_t* tile, size_t k) {
    if constexpr (KIND == Kind::f32)
        return vload(reinterpret_cast<const float*>(tile) + k * TILE_ROWS);
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(tile) + k * TILE_ROWS;
    return KIND == Kind::f16 ? vload_half(halves) : vload_bf16(halves);
}

// R tiles of float weights times N tokens from `token` on: one chain of fma per output and segment.
template <Kind KIND, int R, int N>
void product_floats(const uint8_t* tile, size_t bytes, const Activations& x, size_t token,
                    TileResult* results, size_t lane) {
    const float* values = x.values.data() + token * x.padded_width;
    constexpr size_t SEGMENT = SEGMENT_BLOCKS * BLOCK_WIDTH;
    for (size_t first = 0; first < x.width; first += SEGMENT) {
        const size_t end = first + SEGMENT < x.width ? first + SEGMENT : x.width;
        V16 acc[R][N];
        UNROLL for (int r = 0; r < R; ++r) UNROLL for (int n = 0; n < N; ++n) acc[r][n] = vzero();
        for (size_t k = first; k < end; ++k) {
            V16 w[R];
            UNROLL for (int r = 0; r < R; ++r)
                w[r] = weights_at<KIND>(tile + static_cast<size_t>(r) * bytes, k);
            UNROLL for (int n = 0; n < N; ++n) {
                const V16 value = vset(values[static_cast<size_t>(n) * x.padded_width + k]);
                UNROLL for (int r = 0; r < R; ++r) acc[r][n] = vfma(w[r], value, acc[r][n]);
            }
        }
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int n = 0; n < N; ++n) {
                float* y = results[r].y[lane + static_cast<size_t>(n)];
                vstore(y, first == 0 ? acc[r][n] : vload(y) + acc[r][n]);
            }
    }
}

template <Kind KIND, int R>
void floats_of(const uint8_t* tile, size_t bytes, const Activations& x, size_t token, size_t tokens,
               TileResult* results) {
    size_t lane = 0;
    for (; lane + 4 <= tokens; lane += 4)
        product_floats<KIND, R, 4>(tile, bytes, x, token + lane, results, lane);
    switch (tokens - lane) {
        case 3: return product_floats<KIND, R, 3>(tile, bytes, x, token + lane, results, lane);
        case 2: return product_floats<KIND, R, 2>(tile, bytes, x, token + lane, results, lane);
        case 1: return product_floats<KIND, R, 1>(tile, bytes, x, token + lane, results, lane);
    }
}

// FLOAT_TILES tiles times four tokens fill the registers; one token alone takes three tiles, so that
// its chains of fma do not wait for themselves.
template <Kind KIND>
void multiply_floats(const uint8_t* tile, size_t bytes, size_t tiles, const Activations& x,
                     size_t group, size_t tokens, TileResult* results) {
    const size_t token = group * GROUP_TOKENS;
    size_t t = 0;
    if (tokens == 1)
        for (; t + 3 <= tiles; t += 3)
            product_floats<KIND, 3, 1>(tile + t * bytes, bytes, x, token, results + t, 0);
    for (; t + FLOAT_TILES <= tiles; t += FLOAT_TILES)
        floats_of<KIND, FLOAT_TILES>(tile + t * bytes, bytes, x, token, tokens, results + t);
    for (; t < tiles; ++t)
        floats_of<KIND, 1>(tile + t * bytes, bytes, x, token, tokens, results + t);
}

// body<Weights>() of a quantised kind; false of a float kind.
template <class Body>
bool of_blocks(Kind kind, Body&& body) {
    switch (kind) {
        case Kind::q4_0: body.template operator()<WeightsQ4_0>(); return true;
        case Kind::q4_1: body.template operator()<WeightsQ4_1>(); return true;
        case Kind::q5_0: body.template operator()<WeightsQ5_0>(); return true;
        case Kind::q5_1: body.template operator()<WeightsQ5_1>(); return true;
        case Kind::q8_0: body.template operator()<WeightsQ8_0>(); return true;
        case Kind::iq4_nl: body.template operator()<WeightsIQ4_NL>(); return true;
        case Kind::q4_k: body.template operator()<WeightsQ4_K>(); return true;
        case Kind::q5_k: body.template operator()<WeightsQ5_K>(); return true;
        case Kind::q6_k: body.template operator()<WeightsQ6_K>(); return true;
        case Kind::mxfp4: body.template operator()<WeightsMXFP4>(); return true;
        case Kind::iq4_xs: body.template operator()<WeightsIQ4_XS>(); return true;
        case Kind::q3_k: body.template operator()<WeightsQ3_K>(); return true;
        case Kind::q2_k: body.template operator()<WeightsQ2_K>(); return true;
        case Kind::iq3_xxs: body.template operator()<WeightsIQ3_XXS>(); return true;
        case Kind::iq3_s: body.template operator()<WeightsIQ3_S>(); return true;
        case Kind::iq2_xxs: body.template operator()<WeightsIQ2_XXS>(); return true;
        case Kind::iq2_xs:
        case Kind::iq2_s: body.template operator()<WeightsIQ2>(); return true;
        case Kind::iq1_s: body.template operator()<WeightsIQ1_S>(); return true;
        case Kind::iq1_m: body.template operator()<WeightsIQ1_M>(); return true;
        case Kind::f16:
        case Kind::bf16:
        case Kind::f32: break;
    }
    return false;
}

[[maybe_unused]] void multiply(const Matrix& matrix, const Activations& x, size_t tile0, size_t tiles,
                               size_t group, size_t tokens, bool cold, TileResult* results) {
    const size_t bytes = tile_bytes(matrix.kind, matrix.cols);
    const uint8_t* tile = matrix.data + tile0 * bytes;
    const bool is_quantised = of_blocks(matrix.kind, [&]<class Weights>() {
        multiply_blocks<Weights>(tile, bytes, tiles, Panel(x, group), tokens, cold, results);
    });
    if (is_quantised) return;
    if (matrix.kind == Kind::f16)
        multiply_floats<Kind::f16>(tile, bytes, tiles, x, group, tokens, results);
    else if (matrix.kind == Kind::bf16)
        multiply_floats<Kind::bf16>(tile, bytes, tiles, x, group, tokens, results);
    else
        multiply_floats<Kind::f32>(tile, bytes, tiles, x, group, tokens, results);
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

void relu2_tile(const TileResult& result, const TileTarget& to) {
    for (size_t token = 0; token < to.tokens; ++token) {
        const V16 y = biased(result, to.bias, token);
        const V16 r = vselect_ge(y, 0.0f, y, y * vzero());
        put(to, token, r * r);
    }
}

// Lane by lane ca::one_if_finite.
SIMD_FN V16 one_if_finite(V16 gate, V16 up) { return vfma(gate, vzero(), vfma(up, vzero(), vset(1.0f))); }

// Lane by lane ca::gated.
template <ca::Activation ACTIVATION>
SIMD_FN V16 gated(V16 gate, V16 up, float limit) {
    if constexpr (ACTIVATION == ca::Activation::oai) {
        const V16 most = vset(ca::OAI_LIMIT), one = one_if_finite(gate, up);
        const V16 g = vmin(gate, most), u = vmin(vmax(up, vset(-ca::OAI_LIMIT)), most);
        return vsigmoid_times(g, g * vset(ca::OAI_SLOPE)) * (u + one);
    } else if constexpr (ACTIVATION == ca::Activation::limited) {
        const V16 most = vset(limit), u = vmin(vmax(up, vset(-limit)), most);
        return vmin(vsigmoid_times(gate, gate), most) * (u * one_if_finite(gate, up));
    } else if constexpr (ACTIVATION == ca::Activation::gelu) {
        const V16 slope = vfma(gate * gate, vset(ca::GELU_CUBIC), vset(ca::GELU_LINEAR));
        return vsigmoid_times(gate, gate * slope) * up;
    } else {
        return vsigmoid_times(gate, gate) * up;
    }
}

template <ca::Activation ACTIVATION>
void gate_tile(const TileResult& gate, const float* gate_bias, const TileResult& up,
               const TileTarget& to) {
    for (size_t token = 0; token < to.tokens; ++token)
        put(to, token,
            gated<ACTIVATION>(biased(gate, gate_bias, token), biased(up, to.bias, token), to.limit));
}

void add_pairs(const TileResult& result, const PairTarget& to) {
    for (size_t pair = 0; pair < to.pairs; ++pair) {
        float* sums = to.sums + static_cast<size_t>(to.token[pair]) * to.stride;
        vstore(sums, vfma(vset(to.weight[pair]), biased(result, to.bias, pair), vload(sums)));
    }
}

constexpr GateTiles GATES = {{gate_tile<ca::Activation::silu>, gate_tile<ca::Activation::oai>,
                              gate_tile<ca::Activation::gelu>, gate_tile<ca::Activation::limited>}};

// NaN if the vector and the plain expression differ, as a compiler may fuse only one of them.
float multiply_then_add(float a, float b, float c) {
    float lanes[TILE_ROWS];
    vstore(lanes, vset(a) * vset(b) + vset(c));
    const float plain = a * b + c;
    return lanes[0] == plain ? plain : ca::canonical_nan();
}

}  // namespace
}  // namespace batchengine
