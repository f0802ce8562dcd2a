// CA-3 rule 2 with AVX2: the outer product of linear_avx512.cpp on 8 rows times up to 4 tokens.
#include "linear/blocks_avx2.h"

namespace batchengine {
namespace {

constexpr size_t HALF_ROWS = 8;

// Eight rows (from `row` on) of a tile times N tokens from `token` on.
template <class Weights, int N>
void product(const uint8_t* tile, size_t row, const Panel& x, size_t token, const Ahead& ahead,
             TileResult& result) {
    for (size_t first = 0; first < x.blocks; first += SEGMENT_BLOCKS) {
        const size_t end = first + SEGMENT_BLOCKS < x.blocks ? first + SEGMENT_BLOCKS : x.blocks;
        __m256 acc[N];
        UNROLL for (int n = 0; n < N; ++n) acc[n] = _mm256_setzero_ps();
        for (size_t b = first; b < end; ++b) {
            const uint8_t* unit = tile + b / Weights::BLOCKS * Weights::BYTES;
            const size_t cell = b * GROUP_TOKENS + token;
            Weights::template block<N>(acc, unit, b % Weights::BLOCKS, row, x, cell,
                                       2 * cell - token);
            if (ahead.bytes) Ahead::fetch<Weights>(unit, b % Weights::BLOCKS, ahead);
        }
        UNROLL for (int n = 0; n < N; ++n) {
            float* y = result.y[token + static_cast<size_t>(n)] + row;
            _mm256_store_ps(y, first == 0 ? acc[n] : _mm256_add_ps(_mm256_load_ps(y), acc[n]));
        }
    }
}

// Every pass prefetches a share of the next tile.
template <class Weights>
void multiply_blocks(const uint8_t* tile, size_t bytes, size_t tiles, const Panel& x, size_t tokens,
                     bool cold, TileResult* results) {
    const size_t distance = !cold ? 0 : tokens == 1 ? STREAM_AHEAD_BYTES : bytes;
    const size_t fours = (tokens + 3) / 4, passes = TILE_ROWS / HALF_ROWS * fours;
    for (size_t t = 0; t < tiles; ++t, tile += bytes)
        for (size_t pass = 0; pass < passes; ++pass) {
            const size_t row = pass / fours * HALF_ROWS, token = pass % fours * 4;
            const Ahead ahead = share_of<Weights>(distance, pass, passes);
            switch (tokens - token) {
                case 1: product<Weights, 1>(tile, row, x, token, ahead, results[t]); break;
                case 2: product<Weights, 2>(tile, row, x, token, ahead, results[t]); break;
                case 3: product<Weights, 3>(tile, row, x, token, ahead, results[t]); break;
                default: product<Weights, 4>(tile, row, x, token, ahead, results[t]);
            }
        }
}

}  // namespace

const LinearKernels LINEAR_AVX2 = {1, multiply, store_tile, add_tile, relu2_tile,
                                   GATES, add_pairs, multiply_then_add};

}  // namespace batchengine
