// CA-2 rule 2 with AVX512-VNNI.
//
// One lane of a zmm is one row, so an output is one chain of fma in block order and needs no
// horizontal sum. Inside a block the kernel forms an outer product: each packed vector of R row
// tiles is unpacked once and multiplied with the dword of N tokens, which is broadcast once for all
// R tiles. R x N integer sums and R x N float sums fill the 32 registers; 3 x 4 measured best.
#include <type_traits>

#include "linear/linear_level.h"

namespace batchengine {
namespace {

template <int R, int N>
struct Sums {
    __m512i s[R][N];
};
template <int R, int N>
struct Accumulators {
    __m512 a[R][N];
};

template <int R, int N>
SIMD_FN void start(Sums<R, N>& sums, const int32_t* offsets) {
    UNROLL for (int n = 0; n < N; ++n) {
        const __m512i value = _mm512_set1_epi32(offsets[n]);
        UNROLL for (int r = 0; r < R; ++r) sums.s[r][n] = value;
    }
}

// sums += weights[r] (unsigned bytes) times dword g of every token
template <int R, int N>
SIMD_FN void dot(Sums<R, N>& sums, const __m512i (&weights)[R], const int8_t* q, int g) {
    UNROLL for (int n = 0; n < N; ++n) {
        const __m512i x = every_dword(q + n * BLOCK_WIDTH + 4 * g);
        UNROLL for (int r = 0; r < R; ++r)
            sums.s[r][n] = _mm512_dpbusd_epi32(sums.s[r][n], weights[r], x);
    }
}

// acc = fma(float(I), dw * dx, acc); the product of the scales is exact.
template <int R, int N>
SIMD_FN void scale_in(Accumulators<R, N>& acc, const Sums<R, N>& sums, const __m512 (&dw)[R],
                     const float* scale) {
    UNROLL for (int n = 0; n < N; ++n) {
        const __m512 dx = _mm512_set1_ps(scale[n]);
        UNROLL for (int r = 0; r < R; ++r)
            acc.a[r][n] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums.s[r][n]),
                                          _mm512_mul_ps(dw[r], dx), acc.a[r][n]);
    }
}

// acc = fma(S * dx, m, acc), the same number as fma(S, m * dx, acc).
template <int R, int N>
SIMD_FN void minimum_in(Accumulators<R, N>& acc, const __m512 (&mw)[R], const float* sum) {
    UNROLL for (int n = 0; n < N; ++n) {
        const __m512 s = _mm512_set1_ps(sum[n]);
        UNROLL for (int r = 0; r < R; ++r)
            acc.a[r][n] = _mm512_fmadd_ps(s, mw[r], acc.a[r][n]);
    }
}

SIMD_FN __m512 halves_at(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(p)));
}

// The four nibble vectors of a block at nibbles[r]: low nibbles are dwords 0..3, high 4..7. All low ones
// come first and, when sums fill the registers, the bytes are loaded twice: keeping them would spill sums.
template <int R, int N>
SIMD_FN void dot_nibbles(Sums<R, N>& sums, const uint8_t* const (&nibbles)[R], const int8_t* q) {
    const __m512i mask = _mm512_set1_epi8(15);
    const uint8_t* again[R];
    UNROLL for (int r = 0; r < R; ++r) {
        again[r] = nibbles[r];
        if (N > 2) asm("" : "+r"(again[r]));  // or the compiler keeps the first loads
    }
    UNROLL for (int j = 0; j < 4; ++j) {
        __m512i low[R];
        UNROLL for (int r = 0; r < R; ++r)
            low[r] = _mm512_and_si512(_mm512_load_si512(nibbles[r] + 64 * j), mask);
        dot<R, N>(sums, low, q, j);
    }
    UNROLL for (int j = 0; j < 4; ++j) {
        __m512i high[R];
        UNROLL for (int r = 0; r < R; ++r)
            high[r] = _mm512_and_si512(
                _mm512_srli_epi16(_mm512_load_si512(again[r] + 64 * j), 4), mask);
        dot<R, N>(sums, high, q, j + 4);
    }
}

// Each kind: how many blocks one packed unit holds, its size, and one block's step.
struct WeightsQ4_0 {
    static constexpr size_t BLOCKS = 2, BYTES = sizeof(PackedQ4_0);
    template <int R, int N>
    SIMD_FN void block(Accumulators<R, N>& acc, const uint8_t* const (&unit)[R], size_t i,
                             const Panel& x, size_t cell, size_t) {
        Sums<R, N> sums;
        start(sums, x.offset + cell);
        const uint8_t* nibbles[R];
        __m512 dw[R];
        UNROLL for (int r = 0; r < R; ++r) {
            const auto* pair = reinterpret_cast<const PackedQ4_0*>(unit[r]);
            nibbles[r] = &pair->q[i][0][0][0];
            dw[r] = halves_at(pair->d[i]);
        }
        dot_nibbles<R, N>(sums, nibbles, x.q + cell * BLOCK_WIDTH);
        scale_in(acc, sums, dw, x.scale + cell);
    }
};

struct WeightsQ4_1 {
    static constexpr size_t BLOCKS = 1, BYTES = sizeof(PackedQ4_1);
    template <int R, int N>
    SIMD_FN void block(Accumulators<R, N>& acc, const uint8_t* const (&unit)[R], size_t,
                             const Panel& x, size_t cell, size_t) {
        Sums<R, N> sums;
        UNROLL for (int n = 0; n < N; ++n)
            UNROLL for (int r = 0; r < R; ++r) sums.s[r][n] = _mm512_setzero_si512();
        const uint8_t* nibbles[R];
        __m512 dw[R], mw[R];
        UNROLL for (int r = 0; r < R; ++r) {
            const auto* from = reinterpret_cast<const PackedQ4_1*>(unit[r]);
            nibbles[r] = &from->q[0][0][0];
            dw[r] = halves_at(from->d);
            mw[r] = halves_at(from->m);
        }
        dot_nibbles<R, N>(sums, nibbles, x.q + cell * BLOCK_WIDTH);
        scale_in(acc, sums, dw, x.scale + cell);
        minimum_in(acc, mw, x.sum + cell);
    }
};

struct WeightsQ8_0 {
    static constexpr size_t BLOCKS = 2, BYTES = sizeof(PackedQ8_0);
    template <int R, int N>
    SIMD_FN void block(Accumulators<R, N>& acc, const uint8_t* const (&unit)[R], size_t i,
                             const Panel& x, size_t cell, size_t) {
        Sums<R, N> sums;
        // -128 * sum of q, from -8 * sum.
        UNROLL for (int n = 0; n < N; ++n) {
            const __m512i value = _mm512_slli_epi32(_mm512_set1_epi32(x.offset[cell + n]), 4);
            UNROLL for (int r = 0; r < R; ++r) sums.s[r][n] = value;
        }
        const PackedQ8_0* pair[R];
        __m512 dw[R];
        UNROLL for (int r = 0; r < R; ++r) {
            pair[r] = reinterpret_cast<const PackedQ8_0*>(unit[r]);
            dw[r] = halves_at(pair[r]->d[i]);
        }
        UNROLL for (int g = 0; g < 8; ++g) {
            __m512i weights[R];
            UNROLL for (int r = 0; r < R; ++r)
                weights[r] = _mm512_load_si512(&pair[r]->q[i][g][0][0]);
            dot<R, N>(sums, weights, x.q + cell * BLOCK_WIDTH, g);
        }
        scale_in(acc, sums, dw, x.scale + cell);
    }
};

struct WeightsQ6_K {
    static constexpr size_t BLOCKS = 8, BYTES = sizeof(PackedQ6_K);

    // Weights of dword g (four k of 16 rows): low nibble or high nibble, plus two upper bits.
    template <int G>
    SIMD_FN __m512i weights(const PackedQ6_K::Block& from) {
        const __m512i packed = _mm512_load_si512(&from.low[G % 4][0][0]);
        const __m512i upper = _mm512_load_si512(&from.high[G % 4 / 2][0][0]);
        const __m512i low =
            _mm512_and_si512(G < 4 ? packed : _mm512_srli_epi16(packed, 4), _mm512_set1_epi8(15));
        constexpr int at = G % 2 == 0 ? (G < 4 ? 4 : 6) : (G < 4 ? 2 : 0);
        const __m512i moved = at > 4   ? _mm512_srli_epi16(upper, at > 4 ? at - 4 : 0)
                              : at < 4 ? _mm512_slli_epi16(upper, at < 4 ? 4 - at : 0)
                                       : upper;
        // low | (moved & 0x30)
        return _mm512_ternarylogic_epi32(low, moved, _mm512_set1_epi8(0x30), 0xF8);
    }
    template <int R, int N, int G>
    SIMD_FN void dot_four(Sums<R, N>& sums, const PackedQ6_K::Block* const (&from)[R],
                                const int8_t* q) {
        __m512i w[R];
        UNROLL for (int r = 0; r < R; ++r) w[r] = weights<G>(*from[r]);
        dot<R, N>(sums, w, q, G);
    }
    // sums *= the sub-scale of 16 k, exact in int32
    template <int R, int N>
    SIMD_FN void scale_half(Sums<R, N>& sums, const PackedQ6_K* const (&super)[R], size_t sub) {
        UNROLL for (int r = 0; r < R; ++r) {
            const __m512i scale = _mm512_cvtepi8_epi32(
                _mm_load_si128(reinterpret_cast<const __m128i*>(super[r]->scale[sub])));
            UNROLL for (int n = 0; n < N; ++n)
                sums.s[r][n] = _mm512_mullo_epi32(sums.s[r][n], scale);
        }
    }
    template <int R, int N>
    SIMD_FN void block(Accumulators<R, N>& acc, const uint8_t* const (&unit)[R], size_t i,
                             const Panel& x, size_t cell, size_t halves) {
        const PackedQ6_K* super[R];
        const PackedQ6_K::Block* from[R];
        __m512 dw[R];
        UNROLL for (int r = 0; r < R; ++r) {
            super[r] = reinterpret_cast<const PackedQ6_K*>(unit[r]);
            from[r] = &super[r]->block[i];
            dw[r] = _mm512_load_ps(super[r]->d);
        }
        const int8_t* q = x.q + cell * BLOCK_WIDTH;
        Sums<R, N> first, last;
        start(first, x.halves + halves);
        repeat<4>(EACH(g) { dot_four<R, N, g>(first, from, q); });
        scale_half(first, super, 2 * i);
        start(last, x.halves + halves + GROUP_TOKENS);
        repeat<4>(EACH(g) { dot_four<R, N, g + 4>(last, from, q); });
        scale_half(last, super, 2 * i + 1);
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int n = 0; n < N; ++n)
                first.s[r][n] = _mm512_add_epi32(first.s[r][n], last.s[r][n]);
        scale_in(acc, first, dw, x.scale + cell);
    }
};

}  // namespace
}  // namespace batchengine

#include "linear/blocks_avx512.h"

namespace batchengine {
namespace {

template <int R, int N>
SIMD_FN void fold(const Accumulators<R, N>& acc, bool first, size_t token, TileResult* results) {
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int n = 0; n < N; ++n) {
            float* y = results[r].y[token + static_cast<size_t>(n)];
            _mm512_store_ps(y, first ? acc.a[r][n] : _mm512_add_ps(_mm512_load_ps(y), acc.a[r][n]));
        }
}

// R tiles times N tokens of the panel, from token `token` on.
template <class Weights, int R, int N>
void product(const uint8_t* tiles, size_t bytes, const Panel& x, size_t token, const Ahead& ahead,
             TileResult* results) {
    const uint8_t* unit[R];
    UNROLL for (int r = 0; r < R; ++r) unit[r] = tiles + static_cast<size_t>(r) * bytes;
    for (size_t first = 0; first < x.blocks; first += SEGMENT_BLOCKS) {
        const size_t end = first + SEGMENT_BLOCKS < x.blocks ? first + SEGMENT_BLOCKS : x.blocks;
        Accumulators<R, N> acc;
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int n = 0; n < N; ++n) acc.a[r][n] = _mm512_setzero_ps();
        for (size_t b = first; b < end; b += Weights::BLOCKS) {
            UNROLL for (size_t i = 0; i < Weights::BLOCKS; ++i) {
                if (Weights::BLOCKS == 2 && b + i >= end) break;
                const size_t cell = (b + i) * GROUP_TOKENS + token;
                Weights::template block<R, N>(acc, unit, i, x, cell, 2 * cell - token);
                if (ahead.bytes)
                    UNROLL for (int r = 0; r < R; ++r)
                        Ahead::fetch<Weights>(unit[r], i, ahead);
            }
            UNROLL for (int r = 0; r < R; ++r) unit[r] += Weights::BYTES;
        }
        fold<R, N>(acc, first == 0, token, results);
    }
}

// All tokens of a group for R tiles: fours, then the rest. The passes prefetch the tiles that follow
// these.
template <class Weights, int R>
void tokens_of(const uint8_t* tiles, size_t bytes, const Panel& x, size_t tokens, bool cold,
               TileResult* results) {
    const size_t distance = !cold ? 0 : tokens == 1 ? STREAM_AHEAD_BYTES : R * bytes;
    const size_t passes = (tokens + 3) / 4;
    size_t token = 0;
    for (; token + 4 <= tokens; token += 4)
        product<Weights, R, 4>(tiles, bytes, x, token,
                               share_of<Weights>(distance, token / 4, passes), results);
    const Ahead rest = share_of<Weights>(distance, passes - 1, passes);
    switch (tokens - token) {
        case 3: return product<Weights, R, 3>(tiles, bytes, x, token, rest, results);
        case 2: return product<Weights, R, 2>(tiles, bytes, x, token, rest, results);
        case 1: return product<Weights, R, 1>(tiles, bytes, x, token, rest, results);
    }
}

// One superblock of R tiles of Q6_K, unpacked: bytes for the dot, sub-scales as int32.
template <int R>
struct Unpacked {
    __m512i weights[8][GROUPS][R];
    __m512i scale[16][R];
    __m512 d[R];
};

// Half `H` of block `b`: four dots, then the sub-scale. FIRST also unpacks, dword by dword: all of a
// half at once would push accumulators out of the registers.
template <int R, int N, int H, bool FIRST>
SIMD_FN void half_block(Sums<R, N>& sums, const PackedQ6_K* const (&super)[R], Unpacked<R>& from,
                        size_t b, const int32_t* offsets, const int8_t* q) {
    start(sums, offsets + H * GROUP_TOKENS);
    repeat<4>(EACH(i) {
        constexpr int G = 4 * H + i;
        if (FIRST)
            UNROLL for (int r = 0; r < R; ++r)
                from.weights[b][G][r] = WeightsQ6_K::weights<G>(super[r]->block[b]);
        dot<R, N>(sums, from.weights[b][G], q, G);
    });
    const size_t sub = 2 * b + H;
    UNROLL for (int r = 0; r < R; ++r) {
        if (FIRST)
            from.scale[sub][r] = _mm512_cvtepi8_epi32(
                _mm_load_si128(reinterpret_cast<const __m128i*>(super[r]->scale[sub])));
        UNROLL for (int n = 0; n < N; ++n)
            sums.s[r][n] = _mm512_mullo_epi32(sums.s[r][n], from.scale[sub][r]);
    }
}

// Adds one superblock to the running segment of N tokens. The first tokens of a group also unpack the
// weights, so that the stores overlap with dots, and prefetch the tiles that follow: shared between the
// passes, as in product(), it was slower.
template <int R, int N, bool FIRST>
void superblock(__m512 (&running)[GROUP_TOKENS][R], const uint8_t* const (&unit)[R],
                Unpacked<R>& from, const Panel& x, size_t block, size_t token,
                const Ahead& ahead) {
    const PackedQ6_K* super[R];
    UNROLL for (int r = 0; r < R; ++r) super[r] = reinterpret_cast<const PackedQ6_K*>(unit[r]);
    if (FIRST) UNROLL for (int r = 0; r < R; ++r) from.d[r] = _mm512_load_ps(super[r]->d);
    Accumulators<R, N> acc;
    UNROLL for (int n = 0; n < N; ++n)
        UNROLL for (int r = 0; r < R; ++r)
            acc.a[r][n] = block % SEGMENT_BLOCKS == 0
                              ? _mm512_setzero_ps()
                              : running[token + static_cast<size_t>(n)][r];
    for (size_t b = 0; b < 8; ++b) {
        const size_t cell = (block + b) * GROUP_TOKENS + token;
        const int32_t* offsets = x.halves + (2 * cell - token);
        const int8_t* q = x.q + cell * BLOCK_WIDTH;
        Sums<R, N> first, last;
        half_block<R, N, 0, FIRST>(first, super, from, b, offsets, q);
        half_block<R, N, 1, FIRST>(last, super, from, b, offsets, q);
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int n = 0; n < N; ++n)
                first.s[r][n] = _mm512_add_epi32(first.s[r][n], last.s[r][n]);
        scale_in(acc, first, from.d, x.scale + cell);
        if (FIRST && ahead.bytes)
            UNROLL for (int r = 0; r < R; ++r) Ahead::fetch<WeightsQ6_K>(unit[r], b, ahead);
    }
    UNROLL for (int n = 0; n < N; ++n)
        UNROLL for (int r = 0; r < R; ++r)
            running[token + static_cast<size_t>(n)][r] = acc.a[r][n];
}

// More than four tokens: unpacking Q6_K costs as much as two tokens' dots, so R tiles are unpacked
// once, a superblock at a time (8 KiB for two tiles), and all tokens read that.
template <int R>
void tokens_of_unpacked(const uint8_t* tiles, size_t bytes, const Panel& x, size_t tokens,
                        bool cold, TileResult* results) {
    const uint8_t* unit[R];
    UNROLL for (int r = 0; r < R; ++r) unit[r] = tiles + static_cast<size_t>(r) * bytes;
    const Ahead ahead = share_of<WeightsQ6_K>(cold ? R * bytes : 0, 0, 1);
    Unpacked<R> super;
    __m512 running[GROUP_TOKENS][R];
    for (size_t block = 0; block < x.blocks; block += WeightsQ6_K::BLOCKS) {
        superblock<R, 4, true>(running, unit, super, x, block, 0, ahead);
        size_t token = 4;
        for (; token + 4 <= tokens; token += 4)
            superblock<R, 4, false>(running, unit, super, x, block, token, ahead);
        switch (tokens - token) {
            case 3: superblock<R, 3, false>(running, unit, super, x, block, token, ahead); break;
            case 2: superblock<R, 2, false>(running, unit, super, x, block, token, ahead); break;
            case 1: superblock<R, 1, false>(running, unit, super, x, block, token, ahead); break;
        }
        UNROLL for (int r = 0; r < R; ++r) unit[r] += WeightsQ6_K::BYTES;
        const size_t next = block + WeightsQ6_K::BLOCKS;
        if (next % SEGMENT_BLOCKS != 0 && next < x.blocks) continue;
        for (token = 0; token < tokens; ++token)
            UNROLL for (int r = 0; r < R; ++r) {
                float* y = results[r].y[token];
                const __m512 sum = running[token][r];
                _mm512_store_ps(y, next <= SEGMENT_BLOCKS ? sum
                                                          : _mm512_add_ps(_mm512_load_ps(y), sum));
            }
    }
}

// Which register tile a kind runs: Q6_K has two sums per output, so two tiles fill the registers.
template <class Weights, int R>
SIMD_FN void run_tiles(const uint8_t* tile, size_t bytes, const Panel& x, size_t tokens, bool cold,
                      TileResult* results) {
    if constexpr (std::is_same_v<Weights, WeightsQ6_K>)
        if (tokens > 4) return tokens_of_unpacked<R>(tile, bytes, x, tokens, cold, results);
    if constexpr (std::is_same_v<Weights, WeightsQ4_K> || std::is_same_v<Weights, WeightsQ5_K>)
        if (tokens > 1)
            return tokens_of_superblocks<Weights, R>(tile, bytes, x, tokens, cold, results);
    tokens_of<Weights, R>(tile, bytes, x, tokens, cold, results);
}

// One token alone reads one tile after the other, because memory serves a single stream fastest.
template <class Weights>
void multiply_blocks(const uint8_t* tile, size_t bytes, size_t tiles, const Panel& x, size_t tokens,
                     bool cold, TileResult* results) {
    constexpr size_t WIDEST = std::is_same_v<Weights, WeightsQ6_K> ? 2 : 3;
    const size_t widest = tokens == 1 ? 1 : WIDEST;
    while (tiles > 0) {
        const size_t now = tiles < widest ? tiles : widest;
        if (now == 3) {
            if constexpr (WIDEST == 3)
                run_tiles<Weights, 3>(tile, bytes, x, tokens, cold, results);
        } else if (now == 2) {
            run_tiles<Weights, 2>(tile, bytes, x, tokens, cold, results);
        } else {
            run_tiles<Weights, 1>(tile, bytes, x, tokens, cold, results);
        }
        tile += now * bytes;
        results += now;
        tiles -= now;
    }
}

}  // namespace

const LinearKernels LINEAR_AVX512 = {multiply, store_tile, add_tile, gate_tile, multiply_then_add};

}  // namespace batchengine
