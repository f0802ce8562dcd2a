// CA-3 rule 7 on AVX-512 VNNI; attention_scalar.cpp is its definition.
//
// Scores: lane = token. K^0x80 is an unsigned byte, so vpdpbusd starts at -128 * sum(q). A block of
// R rows x TT token tiles stays in registers, like a small GEMM. Outputs: lane = dim; each 14-bit
// weight is two 7-bit digits, one vpdpbusd each, and a V tile loaded once serves R rows.
#include "attention/avx512/softmax.h"

namespace batchengine {
namespace {

// sum += unsigned bytes * signed bytes, four per lane. Spelled in assembly because the compiler copies
// the accumulator around the intrinsic when registers are scarce, at half the speed.
SIMD_FN void dot_bytes(__m512i& sum, __m512i u8, __m512i s8) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(u8), "v"(s8));
}

// Scores of R rows against token tiles [first_tile, first_tile + TT); AHEAD: prefetches their V.
template <int R, int TT, bool AHEAD>
SIMD_FN void score_block(const PageView& page, int head_dim, const QueryRows& rows, int row,
                         int first_tile, float (*score)[256]) {
    const int blocks = head_dim / 32;
    const __m512i flip = _mm512_set1_epi8(static_cast<char>(0x80));
    const int8_t* k = page.k + first_tile * 16 * head_dim;
    [[maybe_unused]] const int8_t* v = page.v + first_tile * 16 * head_dim;
    const uint16_t* k_scale = page.k_scale + first_tile * 16 * blocks;
    const int8_t* q = rows.q + row * head_dim;
    const float* q_scale = rows.scale + row * blocks;
    const int32_t* offset = rows.offset + row * blocks;
    __m512 sum[R][TT];
    repeat<R>(EACH(r) { repeat<TT>(EACH(t) { sum[r][t] = _mm512_setzero_ps(); }); });
    for (int b = 0; b < blocks; b++) {
        __m512i dot[R][TT];
        repeat<R>(EACH(r) {
            const __m512i start = _mm512_set1_epi32(offset[r * blocks + b]);
            repeat<TT>(EACH(t) { dot[r][t] = start; });
        });
        repeat<8>(EACH(j) {
            __m512i tile[TT];
            repeat<TT>(EACH(t) {
                tile[t] = _mm512_xor_si512(
                    _mm512_loadu_si512(k + t * 16 * head_dim + (b * 8 + j) * 64), flip);
                if constexpr (AHEAD) prefetch(v + t * 16 * head_dim + (b * 8 + j) * 64);
            });
            repeat<R>(EACH(r) {
                const __m512i four = every_dword(q + r * head_dim + b * 32 + j * 4);
                repeat<TT>(EACH(t) { dot_bytes(dot[r][t], tile[t], four); });
            });
        });
        repeat<TT>(EACH(t) {
            const __m512 dk = _mm512_cvtph_ps(_mm256_loadu_si256(
                reinterpret_cast<const __m256i*>(k_scale + (t * blocks + b) * 16)));
            repeat<R>(EACH(r) {
                const __m512 scale = _mm512_mul_ps(dk, _mm512_set1_ps(q_scale[r * blocks + b]));
                sum[r][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[r][t]), scale, sum[r][t]);
            });
        });
    }
    repeat<R>(EACH(r) {
        repeat<TT>(EACH(t) {
            _mm512_store_ps(score[row + r] + (first_tile + t) * 16, sum[r][t]);
        });
    });
}

// Tiles [tile, tiles), TT at once. Other tiles, which no row sees, are in no cache.
template <int R, int TT>
void score_rows(const PageView& page, int head_dim, const QueryRows& rows, int row, int tile,
                int tiles, float (*score)[256]) {
    for (; tile + TT <= tiles; tile += TT)
        if (row == 0)
            score_block<R, TT, true>(page, head_dim, rows, row, tile, score);
        else
            score_block<R, TT, false>(page, head_dim, rows, row, tile, score);
    if constexpr (TT > 1)
        if (tile < tiles) score_rows<R, TT / 2>(page, head_dim, rows, row, tile, tiles, score);
}

void score_page(const PageView& page, int head_dim, const QueryRows& rows, int tile, int tiles,
                float (*score)[256]) {
    int row = 0;
    for (; row + 6 <= rows.rows; row += 6)
        score_rows<6, 2>(page, head_dim, rows, row, tile, tiles, score);
    switch (rows.rows - row) {
        case 1: return score_rows<1, 8>(page, head_dim, rows, row, tile, tiles, score);
        case 2: return score_rows<2, 4>(page, head_dim, rows, row, tile, tiles, score);
        case 3: return score_rows<3, 4>(page, head_dim, rows, row, tile, tiles, score);
        case 4: return score_rows<4, 2>(page, head_dim, rows, row, tile, tiles, score);
        case 5: return score_rows<5, 2>(page, head_dim, rows, row, tile, tiles, score);
        default: return;
    }
}

// Numerators of R rows for dims [dim, dim + 16 * N), from quads [first, quads) of tokens.
template <int R, int N>
SIMD_FN void output_block(const PageView& page, int head_dim, int row, int dim, int first, int quads,
                          const AttentionScratch& scratch, const PagePartials& out) {
    __m512i high[R][N], low[R][N];
    repeat<R>(EACH(r) {
        repeat<N>(EACH(j) { high[r][j] = low[r][j] = _mm512_setzero_si512(); });
    });
    const int8_t* v = page.v + (first * head_dim + dim) * 4;
    const int8_t* next = row == 0 && page.next_k ? page.next_k + dim * 4 : nullptr;
    for (int t = first; t < quads; t++, v += head_dim * 4) {
        __m512i tile[N];
        repeat<N>(EACH(j) { tile[j] = _mm512_loadu_si512(v + 64 * j); });
        if (next) repeat<N>(EACH(j) { prefetch(next + t * head_dim * 4 + 64 * j); });
        repeat<R>(EACH(r) {
            const __m512i wh = every_dword(scratch.high[row + r] + 4 * t);
            const __m512i wl = every_dword(scratch.low[row + r] + 4 * t);
            repeat<N>(EACH(j) { dot_bytes(high[r][j], wh, tile[j]); });
            repeat<N>(EACH(j) { dot_bytes(low[r][j], wl, tile[j]); });
        });
    }
    repeat<R>(EACH(r) {
        const __m512 scale = _mm512_set1_ps(scratch.unit[row + r]);
        repeat<N>(EACH(j) {
            const __m512i sum = _mm512_add_epi32(_mm512_slli_epi32(high[r][j], 7), low[r][j]);
            _mm512_storeu_ps(out.o + (row + r) * head_dim + dim + 16 * j,
                             _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale));
        });
    });
}

template <int R>
void output_rows(const PageView& page, int head_dim, int row, int first, int quads,
                 const AttentionScratch& scratch, const PagePartials& out) {
    int dim = 0;
    for (; dim + 64 <= head_dim; dim += 64)
        output_block<R, 4>(page, head_dim, row, dim, first, quads, scratch, out);
    if (dim < head_dim) output_block<R, 2>(page, head_dim, row, dim, first, quads, scratch, out);
}

}  // namespace

void page_partials_avx512(const PageView& page, int head_dim, const QueryRows& rows,
                          AttentionScratch& scratch, const PagePartials& out) {
    const int hidden_min = rows.hidden[0], visible_max = rows.visible[rows.rows - 1];
    const int first_tile = hidden_min / 16, tiles = (visible_max + 15) / 16;
    score_page(page, head_dim, rows, first_tile, tiles, scratch.score);
    for (int i = first_tile * 16; i < tiles * 16; i += 16)
        vstore(scratch.dv + i, vload_half(page.v_scale + i));
    page_softmax_rows<64, page_softmax, clear>(rows, scratch, out);
    const int first = hidden_min / 4, quads = (visible_max + 3) / 4;
    prefetch_next_scales(page, head_dim, tiles);
    int row = 0;
    for (; row + 3 <= rows.rows; row += 3)
        output_rows<3>(page, head_dim, row, first, quads, scratch, out);
    if (rows.rows - row == 2) output_rows<2>(page, head_dim, row, first, quads, scratch, out);
    if (rows.rows - row == 1) output_rows<1>(page, head_dim, row, first, quads, scratch, out);
}

}  // namespace batchengine
