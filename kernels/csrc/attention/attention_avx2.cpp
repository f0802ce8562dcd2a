// CA-3 rule 7 on AVX2; attention_scalar.cpp is its definition.
//
// Scores: lane = token, two vectors of eight per tile. vpmaddubsw needs one unsigned operand, so it
// gets |k| and q with the sign of k; a pair sums to at most 2 * 127 * 127, which fits int16. Outputs:
// lane = (dim, token pair); vpmaddwd multiplies V and the 14-bit weights as int16.
#include "attention/attention_page.h"
#include "common/simd.h"

namespace batchengine {
namespace {

SIMD_FN __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// Scores of R rows against one tile of 16 tokens.
template <int R>
SIMD_FN void score_tile(const PageView& page, int head_dim, const QueryRows& rows, int row, int tile,
                        float (*score)[256]) {
    const int blocks = head_dim / 32;
    const __m256i ones = _mm256_set1_epi16(1);
    const int8_t* k = page.k + tile * 16 * head_dim;
    const int8_t* v = row == 0 ? page.v + tile * 16 * head_dim : nullptr;
    const int8_t* q = rows.q + row * head_dim;
    V16 sum[R];
    repeat<R>(EACH(r) { sum[r] = vzero(); });
    for (int b = 0; b < blocks; b++) {
        __m256i low[R], high[R];
        repeat<R>(EACH(r) { low[r] = high[r] = _mm256_setzero_si256(); });
        for (int j = 0; j < 8; j++) {
            if (v) prefetch(v + (b * 8 + j) * 64);
            const __m256i k0 = load(k + (b * 8 + j) * 64), k1 = load(k + (b * 8 + j) * 64 + 32);
            const __m256i a0 = _mm256_abs_epi8(k0), a1 = _mm256_abs_epi8(k1);
            repeat<R>(EACH(r) {
                const __m256i all = every_dword(q + r * head_dim + b * 32 + j * 4);
                const __m256i p0 = _mm256_maddubs_epi16(a0, _mm256_sign_epi8(all, k0));
                const __m256i p1 = _mm256_maddubs_epi16(a1, _mm256_sign_epi8(all, k1));
                low[r] = _mm256_add_epi32(low[r], _mm256_madd_epi16(p0, ones));
                high[r] = _mm256_add_epi32(high[r], _mm256_madd_epi16(p1, ones));
            });
        }
        const V16 dk = vload_half(page.k_scale + (tile * blocks + b) * 16);
        repeat<R>(EACH(r) {
            const V16 dot = {_mm256_cvtepi32_ps(low[r]), _mm256_cvtepi32_ps(high[r])};
            sum[r] = vfma(dot, dk * vset(rows.scale[(row + r) * blocks + b]), sum[r]);
        });
    }
    repeat<R>(EACH(r) { vstore(score[row + r] + tile * 16, sum[r]); });
}

template <int R>
void score_rows(const PageView& page, int head_dim, const QueryRows& rows, int row, int tile,
                int tiles, float (*score)[256]) {
    for (; tile < tiles; tile++)
        score_tile<R>(page, head_dim, rows, row, tile, score);
}

void score_page(const PageView& page, int head_dim, const QueryRows& rows, int tile, int tiles,
                float (*score)[256]) {
    int row = 0;
    for (; row + 2 <= rows.rows; row += 2)
        score_rows<2>(page, head_dim, rows, row, tile, tiles, score);
    if (row < rows.rows) score_rows<1>(page, head_dim, rows, row, tile, tiles, score);
}

// Scores of tokens [first, n) of one row -> m, l and 14-bit weights of whole runs of 16 tokens. The row is
// first padded: scores of other tokens may be stale. False when a score or a weight is not finite.
SIMD_FN bool page_softmax(int first, int n, int row, AttentionScratch& scratch,
                          const PagePartials& out) {
    float* const s = scratch.score[row];
    float* const dv = scratch.dv;
    const int begin = first / 16 * 16, end = (n + 15) / 16 * 16;
    for (int t = begin; t < first; t++) s[t] = s[first];
    for (int t = n; t < end; t++) s[t] = s[first];
    V16 top = vset(s[first]), check = vzero();
    for (int t = begin; t < end; t += 16) {
        const V16 x = vload(s + t);
        top = vmax(top, x);
        check = vfma(x, vzero(), check);  // NaN when x is not finite, else 0
    }
    if (vany_nonfinite(check)) return false;
    const float m = __builtin_ceilf(vreduce_max(top)) + 0.0f;
    out.m[row] = m;

    // Hidden tokens: exp2c gives exactly 0, and their V scale, which may be NaN, is kept out.
    hide(begin, first, s, dv);
    float dv_tail[16];
    for (int t = end - 16; t < end; t++) dv_tail[t % 16] = t < n ? dv[t] : 0.0f;
    for (int t = n; t < end; t++) s[t] = -0x1p127f;
    const V16 shift = vset(m), magic = vset(ca::ROUND_MAGIC), unit = vset(0x1p22f);
    const __m256i magic_bits = _mm256_castps_si256(magic.a);
    __m256i sum = _mm256_setzero_si256();
    V16 w_top = vzero();
    check = vzero();
    for (int t = begin; t < end; t += 16) {
        const V16 p = vexp2c(vload(s + t) - shift);
        // fma rounds p * 2^22 to an integer in one step, because that product is exact.
        const V16 rounded = vfma(p, unit, magic);
        sum = _mm256_add_epi32(sum, _mm256_sub_epi32(_mm256_castps_si256(rounded.a), magic_bits));
        sum = _mm256_add_epi32(sum, _mm256_sub_epi32(_mm256_castps_si256(rounded.b), magic_bits));
        const V16 w = p * vload(t + 16 == end ? dv_tail : dv + t);
        check = vfma(w, vzero(), check);
        w_top = vmax(w_top, w);
        vstore(s + t, w);
    }
    if (vany_nonfinite(check)) return false;
    out.l[row] = static_cast<float>(sum_of_lanes(sum)) * 0x1p-22f;

    const ca::WeightUnit weights = ca::weight_unit(ca::bits_of(vreduce_max(w_top)));
    scratch.unit[row] = weights.unit;
    const V16 inverse = vset(weights.inverse);
    for (int t = begin; t < end; t += 16) {
        const V16 scaled = vload(s + t) * inverse;
        const __m256i packed =
            _mm256_packus_epi32(_mm256_cvtps_epi32(scaled.a), _mm256_cvtps_epi32(scaled.b));
        _mm256_store_si256(reinterpret_cast<__m256i*>(scratch.weight[row] + t),
                           _mm256_permute4x64_epi64(packed, 0xD8));
    }
    return true;
}

SIMD_FN void clear(int row, int t, AttentionScratch& scratch) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(scratch.weight[row] + t), _mm256_setzero_si256());
}

// Numerators of R rows for dims [dim, dim + 16), from quads [first, quads) of tokens.
template <int R>
SIMD_FN void output_block(const PageView& page, int head_dim, int row, int dim, int first, int quads,
                          const AttentionScratch& scratch, const PagePartials& out) {
    __m256i sum[R][4];  // dims 4i..4i+3, two token pairs each
    repeat<R>(EACH(r) { repeat<4>(EACH(i) { sum[r][i] = _mm256_setzero_si256(); }); });
    const int8_t* v = page.v + (first * head_dim + dim) * 4;
    const int8_t* next = row == 0 && page.next_k ? page.next_k + dim * 4 : nullptr;
    for (int t = first; t < quads; t++, v += head_dim * 4) {
        if (next) prefetch(next + t * head_dim * 4);
        __m256i tile[4];
        repeat<4>(EACH(i) {
            tile[i] = _mm256_cvtepi8_epi16(
                _mm_loadu_si128(reinterpret_cast<const __m128i*>(v + 16 * i)));
        });
        repeat<R>(EACH(r) {
            int64_t four;
            __builtin_memcpy(&four, scratch.weight[row + r] + 4 * t, 8);
            const __m256i w = _mm256_set1_epi64x(four);
            repeat<4>(EACH(i) {
                sum[r][i] = _mm256_add_epi32(sum[r][i], _mm256_madd_epi16(tile[i], w));
            });
        });
    }
    repeat<R>(EACH(r) {
        const __m256 scale = _mm256_set1_ps(scratch.unit[row + r]);
        repeat<2>(EACH(i) {
            const __m256i whole = _mm256_permute4x64_epi64(
                _mm256_hadd_epi32(sum[r][2 * i], sum[r][2 * i + 1]), 0xD8);
            _mm256_storeu_ps(out.o + (row + r) * head_dim + dim + 8 * i,
                             _mm256_mul_ps(_mm256_cvtepi32_ps(whole), scale));
        });
    });
}

template <int R>
void output_rows(const PageView& page, int head_dim, int row, int first, int quads,
                 const AttentionScratch& scratch, const PagePartials& out) {
    for (int dim = 0; dim < head_dim; dim += 16)
        output_block<R>(page, head_dim, row, dim, first, quads, scratch, out);
}

}  // namespace

void page_partials_avx2(const PageView& page, int head_dim, const QueryRows& rows,
                        AttentionScratch& scratch, const PagePartials& out) {
    const int hidden_min = rows.hidden[0], visible_max = rows.visible[rows.rows - 1];
    const int first_tile = hidden_min / 16, tiles = (visible_max + 15) / 16;
    score_page(page, head_dim, rows, first_tile, tiles, scratch.score);
    for (int i = first_tile * 16; i < tiles * 16; i += 16)
        vstore(scratch.dv + i, vload_half(page.v_scale + i));
    page_softmax_rows<16, page_softmax, clear>(rows, scratch, out);
    const int first = hidden_min / 4, quads = (visible_max + 3) / 4;
    prefetch_next_scales(page, head_dim, tiles);
    int row = 0;
    for (; row + 2 <= rows.rows; row += 2)
        output_rows<2>(page, head_dim, row, first, quads, scratch, out);
    if (row < rows.rows) output_rows<1>(page, head_dim, row, first, quads, scratch, out);
}

}  // namespace batchengine
