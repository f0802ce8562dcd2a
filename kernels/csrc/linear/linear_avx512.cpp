// CA-3 rule 2 with AVX512-VNNI.
//
// One lane of a zmm is one row, so an output is one chain of fma in block order and needs no
// horizontal sum. Inside a block the kernel forms an outer product: each packed vector of R row
// tiles is unpacked once and multiplied with the dword of N tokens, which is broadcast once for all
// R tiles. R x N integer sums and R x N float sums fill the 32 registers; 3 x 4 measured best.
#include "linear/blocks_avx512.h"

namespace batchengine {
namespace {

constexpr size_t SUPERBLOCK = 8;  // blocks; units of fewer may end within a row's last one

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
                if (Weights::BLOCKS < SUPERBLOCK && b + i >= end) break;
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

// Adds one superblock to the running segment of N tokens. The first tokens of a group also unpack it,
// so that the stores overlap with dots, and prefetch the tiles that follow: shared between the passes, as
// in product(), it was slower.
template <class Weights, int R, int N, bool FIRST>
void add_superblock(__m512 (&running)[GROUP_TOKENS][R], const uint8_t* const (&unit)[R],
                    typename Weights::template Unpacked<R>& unpacked, const Panel& x, size_t block,
                    size_t token, const Ahead& ahead) {
    Accumulators<R, N> acc;
    UNROLL for (int n = 0; n < N; ++n)
        UNROLL for (int r = 0; r < R; ++r)
            acc.a[r][n] = block % SEGMENT_BLOCKS == 0
                              ? _mm512_setzero_ps()
                              : running[token + static_cast<size_t>(n)][r];
    if (FIRST) Weights::unpack_scales(unit, unpacked);
    for (size_t b = 0; b < Weights::BLOCKS; ++b) {
        const size_t cell = (block + b) * GROUP_TOKENS + token;
        Weights::template sub_block<R, N, FIRST>(acc, unit, unpacked, b, x, cell, 2 * cell - token);
        if (FIRST && ahead.bytes)
            UNROLL for (int r = 0; r < R; ++r) Ahead::fetch<Weights>(unit[r], b, ahead);
    }
    UNROLL for (int n = 0; n < N; ++n)
        UNROLL for (int r = 0; r < R; ++r)
            running[token + static_cast<size_t>(n)][r] = acc.a[r][n];
}

// Several tokens of superblocks: all tokens of the group pass one superblock of R tiles before the
// next, so that it is unpacked once and stays in the level-1 cache.
template <class Weights, int R>
void tokens_of_superblocks(const uint8_t* tiles, size_t bytes, const Panel& x, size_t tokens,
                           bool cold, TileResult* results) {
    const uint8_t* unit[R];
    UNROLL for (int r = 0; r < R; ++r) unit[r] = tiles + static_cast<size_t>(r) * bytes;
    const Ahead ahead = share_of<Weights>(cold ? R * bytes : 0, 0, 1);
    typename Weights::template Unpacked<R> unpacked;
    __m512 running[GROUP_TOKENS][R];
    for (size_t block = 0; block < x.blocks; block += Weights::BLOCKS) {
        size_t token = 0;
        const auto pass = [&]<int N, bool FIRST>() {
            add_superblock<Weights, R, N, FIRST>(running, unit, unpacked, x, block, token, ahead);
            token += N;
        };
        if (Weights::TOKENS_UNPACKED > 3 || tokens > 3)
            pass.template operator()<4, true>();
        else if (tokens == 3)
            pass.template operator()<3, true>();
        else
            pass.template operator()<2, true>();
        while (token + 4 <= tokens) pass.template operator()<4, false>();
        switch (tokens - token) {
            case 3: pass.template operator()<3, false>(); break;
            case 2: pass.template operator()<2, false>(); break;
            case 1: pass.template operator()<1, false>(); break;
        }
        UNROLL for (int r = 0; r < R; ++r) unit[r] += Weights::BYTES;
        const size_t next = block + Weights::BLOCKS;
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

template <class Weights, int R>
SIMD_FN void run_tiles(const uint8_t* tile, size_t bytes, const Panel& x, size_t tokens, bool cold,
                       TileResult* results) {
    if constexpr (requires { Weights::TOKENS_UNPACKED; })
        if (tokens >= Weights::TOKENS_UNPACKED)
            return tokens_of_superblocks<Weights, R>(tile, bytes, x, tokens, cold, results);
    tokens_of<Weights, R>(tile, bytes, x, tokens, cold, results);
}

// Kinds with a scale for each 16 k have two sums per output, so two tiles fill the registers. One token alone reads one
// tile after the other, because memory serves a single stream fastest.
template <class Weights>
void multiply_blocks(const uint8_t* tile, size_t bytes, size_t tiles, const Panel& x, size_t tokens,
                     bool cold, TileResult* results) {
    constexpr size_t WIDEST = requires { Weights::HAS_TWO_SUMS; } ? 2 : 3;
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

const LinearKernels LINEAR_AVX512 = {1, multiply, store_tile, add_tile, relu2_tile,
                                     GATES, add_pairs, multiply_then_add};

}  // namespace batchengine
