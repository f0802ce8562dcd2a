// CA-3 rule 7 with AMX-INT8, for pages that many rows read; attention_scalar.cpp is its definition.
//
// Scores: 16 rows of queries are operand A, a block of 16 tokens' K is operand B as it lies in the page. Outputs:
// the digits of 64 tokens' weights are A, and V of 16 dims is B; sums stay in tiles for the whole page, so
// that only the two sums of a digit leave them.
#include "amx/tiles.h"
#include "attention/avx512/softmax.h"

namespace batchengine {
namespace {

constexpr int TILE = 16;        // rows, tokens or dims of a tile
constexpr int BLOCK_DIMS = 32;  // of one scale
constexpr int RUN_TOKENS = 64;  // whose weights are one row of A

struct Sums {
    alignas(64) int32_t of[TILE][TILE];
};

// Scores of up to 16 rows. `ahead`: V of the same tokens is prefetched.
struct Scores {
    const PageView& page;
    int head_dim;
    int blocks;
    const int8_t* q;  // of the first row
    alignas(64) float q_scale[HEAD_BLOCKS_MAX][TILE];  // 0 of rows that there are not
    Sums sums[2] = {};

    Scores(const PageView& page_, int head_dim_, const QueryRows& rows, int row, int count)
        : page(page_), head_dim(head_dim_), blocks(head_dim_ / BLOCK_DIMS),
          q(rows.q + row * head_dim_) {
        for (int b = 0; b < blocks; b++)
            for (int r = 0; r < TILE; r++)
                q_scale[b][r] = r < count ? rows.scale[(row + r) * blocks + b] : 0.0f;
    }

    void multiply(int tile, int b, bool ahead) {
        const int at = tile * TILE * head_dim + b * TILE * BLOCK_DIMS;
        tile_load<2>(q + b * BLOCK_DIMS, static_cast<size_t>(head_dim));
        tile_zero<0>();
        tile_load<3>(page.k + at, TILE_ROW_BYTES);
        tile_dot<0, 2, 3>();
        tile_store<0>(sums[b % 2].of, TILE_ROW_BYTES);
        if (ahead)
            for (int line = 0; line < TILE * BLOCK_DIMS; line += 64) prefetch(page.v + at + line);
    }

    // Token tiles [tile, tiles) into score[row][token].
    void run(int tile, int tiles, bool ahead, float (*score)[256]) {
        for (; tile < tiles; tile++) {
            __m512 acc[TILE];
            repeat<TILE>(EACH(r) { acc[r] = _mm512_setzero_ps(); });
            multiply(tile, 0, ahead);
            for (int b = 0; b < blocks; b++) {
                if (b + 1 < blocks) multiply(tile, b + 1, ahead);
                const __m512 dk = _mm512_cvtph_ps(_mm256_loadu_si256(
                    reinterpret_cast<const __m256i*>(page.k_scale + (tile * blocks + b) * TILE)));
                repeat<TILE>(EACH(r) {
                    const __m512 scale = _mm512_mul_ps(dk, _mm512_set1_ps(q_scale[b][r]));
                    const __m512i sum = _mm512_load_si512(sums[b % 2].of[r]);
                    acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, acc[r]);
                });
            }
            repeat<TILE>(EACH(r) { _mm512_store_ps(score[r] + tile * TILE, acc[r]); });
        }
    }
};

// Numerators of `count` rows from `row` on, of tokens [first, end), whole runs.
void output_rows(const PageView& page, int head_dim, int row, int count, int first, int end,
                 const AttentionScratch& scratch, const PagePartials& out) {
    const size_t v_stride = 4 * static_cast<size_t>(head_dim);  // of four tokens
    const bool ahead = row == 0 && page.next_k;
    Sums high[2], low[2];
    for (int dim = 0; dim < head_dim; dim += 2 * TILE) {
        tile_zero<0>();
        tile_zero<1>();
        tile_zero<2>();
        tile_zero<3>();
        for (int t = first; t < end; t += RUN_TOKENS) {
            const int8_t* v = page.v + t * head_dim + dim * 4;
            tile_load<4>(scratch.high[row] + t, sizeof scratch.high[0]);
            tile_load<5>(scratch.low[row] + t, sizeof scratch.low[0]);
            tile_load<6>(v, v_stride);
            tile_load<7>(v + TILE_ROW_BYTES, v_stride);
            tile_dot<0, 4, 6>();
            tile_dot<1, 5, 6>();
            tile_dot<2, 4, 7>();
            tile_dot<3, 5, 7>();
            if (!ahead) continue;
            const int8_t* next = page.next_k + (v - page.v);
            for (int i = 0; i < RUN_TOKENS / 4; i++) {
                prefetch(next + static_cast<size_t>(i) * v_stride);
                prefetch(next + static_cast<size_t>(i) * v_stride + TILE_ROW_BYTES);
            }
        }
        tile_store<0>(high[0].of, TILE_ROW_BYTES);
        tile_store<1>(low[0].of, TILE_ROW_BYTES);
        tile_store<2>(high[1].of, TILE_ROW_BYTES);
        tile_store<3>(low[1].of, TILE_ROW_BYTES);
        for (int r = 0; r < count; r++) {
            const __m512 scale = _mm512_set1_ps(scratch.unit[row + r]);
            float* o = out.o + (row + r) * head_dim + dim;
            repeat<2>(EACH(j) {
                const __m512i sum = _mm512_add_epi32(
                    _mm512_slli_epi32(_mm512_load_si512(high[j].of[r]), 7),
                    _mm512_load_si512(low[j].of[r]));
                _mm512_storeu_ps(o + TILE * j, _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale));
            });
        }
    }
}

constexpr TileShapes score_shapes(int rows) {
    return TileShapes()
        .set(0, rows, TILE_ROW_BYTES)
        .set(2, rows, BLOCK_DIMS)
        .set(3, BLOCK_DIMS / 4, TILE_ROW_BYTES);
}
constexpr TileShapes output_shapes(int rows) {
    TileShapes shapes;
    for (int tile = 0; tile < 6; tile++) shapes.set(tile, rows, TILE_ROW_BYTES);
    return shapes.set(6, RUN_TOKENS / 4, TILE_ROW_BYTES).set(7, RUN_TOKENS / 4, TILE_ROW_BYTES);
}

// Calls body(row, count) for the rows of a page, 16 at a time.
template <class Body>
void each_tile(int rows, Body&& body) {
    for (int row = 0; row < rows; row += TILE) body(row, rows - row < TILE ? rows - row : TILE);
}

// Fewest scores of a page that pay for the tiles, as measured: seven rows of 256 tokens.
constexpr int SCORES_MIN = 7 * 256;

}  // namespace

void page_partials_amx(const PageView& page, int head_dim, const QueryRows& rows,
                       AttentionScratch& scratch, const PagePartials& out) {
    const int hidden_min = rows.hidden[0], visible_max = rows.visible[rows.rows - 1];
    if (rows.rows * (visible_max - hidden_min) < SCORES_MIN)
        return page_partials_avx512(page, head_dim, rows, scratch, out);
    const int first_tile = hidden_min / TILE, tiles = (visible_max + TILE - 1) / TILE;
    each_tile(rows.rows, [&](int row, int count) {
        Scores scores(page, head_dim, rows, row, count);
        const TilesInUse in_use(score_shapes(count));
        scores.run(first_tile, tiles, row == 0, scratch.score + row);
    });
    for (int i = first_tile * TILE; i < tiles * TILE; i += TILE)
        vstore(scratch.dv + i, vload_half(page.v_scale + i));
    page_softmax_rows<RUN_TOKENS, page_softmax, clear>(rows, scratch, out);
    prefetch_next_scales(page, head_dim, tiles);
    const int first = hidden_min / RUN_TOKENS * RUN_TOKENS;
    each_tile(rows.rows, [&](int row, int count) {
        const TilesInUse in_use(output_shapes(count));
        output_rows(page, head_dim, row, count, first, visible_max, scratch, out);
    });
}

}  // namespace batchengine
