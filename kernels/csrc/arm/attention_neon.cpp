// CA-3 rule 7 on NEON's dot product; attention_scalar.cpp is its definition.
//
// Scores: a lane is a token, and sdot multiplies four dims of four tokens by a dword of a query.
// Outputs: a lane is a dim, and sdot multiplies four tokens of four dims by four weights; a 14-bit
// weight is two 7-bit digits, each a dot of its own, as in attention_avx512.cpp.
#include "attention/attention_page.h"
#include "common/simd.h"

namespace batchengine {
namespace {

constexpr int ROWS = 4;  // of queries, side by side; rows left over go one by one

// Scores of R rows against 8 tokens, from token `token` on.
template <int R>
SIMD_FN void score_tokens(const PageView& page, int head_dim, const QueryRows& rows, int row,
                          int token, float (*score)[256]) {
    const int blocks = head_dim / 32;
    const int8_t* k = page.k + token / 16 * 16 * head_dim + token % 16 * 4;
    const uint16_t* k_scale = page.k_scale + token / 16 * 16 * blocks + token % 16;
    const int8_t* q = rows.q + row * head_dim;
    const float* q_scale = rows.scale + row * blocks;
    float32x4_t sum[R][2];
    UNROLL for (int r = 0; r < R; r++) sum[r][0] = sum[r][1] = vdupq_n_f32(0.0f);
    for (int b = 0; b < blocks; b++, k += 8 * 64, k_scale += 16) {
        int32x4_t dot[R][2];
        UNROLL for (int r = 0; r < R; r++) dot[r][0] = dot[r][1] = vdupq_n_s32(0);
        repeat<2>(EACH(half) {
            int8x16_t x[R];
            UNROLL for (int r = 0; r < R; r++)
                x[r] = vld1q_s8(q + r * head_dim + b * 32 + 16 * half);
            repeat<4>(EACH(j) {
                repeat<2>(EACH(i) {
                    const int8x16_t tile = vld1q_s8(k + (4 * half + j) * 64 + 16 * i);
                    repeat<R>(EACH(r) { dot[r][i] = vdotq_laneq_s32(dot[r][i], tile, x[r], j); });
                });
            });
        });
        UNROLL for (int i = 0; i < 2; i++) {
            const float32x4_t dk =
                vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(k_scale + 4 * i)));
            UNROLL for (int r = 0; r < R; r++)
                sum[r][i] = vfmaq_f32(sum[r][i], vcvtq_f32_s32(dot[r][i]),
                                      vmulq_n_f32(dk, q_scale[r * blocks + b]));
        }
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int i = 0; i < 2; i++) vst1q_f32(score[row + r] + token + 4 * i, sum[r][i]);
}

// Digits of 16 weights, tokens in order.
SIMD_FN void store_digits(V16 weights, uint8_t* high, uint8_t* low) {
    uint16x4_t w[4];
    UNROLL for (int i = 0; i < 4; i++) w[i] = vmovn_u32(vcvtnq_u32_f32(weights.v[i]));
    const uint16x8_t a = vcombine_u16(w[0], w[1]), b = vcombine_u16(w[2], w[3]);
    vst1q_u8(high, vcombine_u8(vshrn_n_u16(a, 7), vshrn_n_u16(b, 7)));
    vst1q_u8(low, vandq_u8(vcombine_u8(vmovn_u16(a), vmovn_u16(b)), vdupq_n_u8(127)));
}

// Scores of tokens [first, n) of one row -> m, l and digits of whole runs of 16 tokens. The row is
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
    const V16 shift = vset(m), unit = vset(0x1p22f);
    int32x4_t sum = vdupq_n_s32(0);
    V16 w_top = vzero();
    check = vzero();
    for (int t = begin; t < end; t += 16) {
        const V16 p = vexp2c(vload(s + t) - shift);
        const V16 scaled = p * unit;
        UNROLL for (int i = 0; i < 4; i++) sum = vaddq_s32(sum, vcvtnq_s32_f32(scaled.v[i]));
        const V16 w = p * vload(t + 16 == end ? dv_tail : dv + t);
        check = vfma(w, vzero(), check);
        w_top = vmax(w_top, w);
        vstore(s + t, w);
    }
    if (vany_nonfinite(check)) return false;
    out.l[row] = static_cast<float>(vaddvq_s32(sum)) * 0x1p-22f;

    const ca::WeightUnit weights = ca::weight_unit(ca::bits_of(vreduce_max(w_top)));
    scratch.unit[row] = weights.unit;
    for (int t = begin; t < end; t += 16)
        store_digits(vload(s + t) * vset(weights.inverse), scratch.high[row] + t,
                     scratch.low[row] + t);
    return true;
}

SIMD_FN void clear(int row, int t, AttentionScratch& scratch) {
    vst1q_u8(scratch.high[row] + t, vdupq_n_u8(0));
    vst1q_u8(scratch.low[row] + t, vdupq_n_u8(0));
}

// Numerators of R rows for dims [dim, dim + 8), from tiles [first, tiles) of 16 tokens.
template <int R>
SIMD_FN void output_dims(const PageView& page, int head_dim, int row, int dim, int first, int tiles,
                         const AttentionScratch& scratch, const PagePartials& out) {
    int32x4_t high[R][2], low[R][2];
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int i = 0; i < 2; i++) high[r][i] = low[r][i] = vdupq_n_s32(0);
    const int8_t* v = page.v + first * 16 * head_dim + dim * 4;
    for (int tile = first; tile < tiles; tile++, v += 16 * head_dim) {
        int8x16_t wh[R], wl[R];
        UNROLL for (int r = 0; r < R; r++) {
            wh[r] = vreinterpretq_s8_u8(vld1q_u8(scratch.high[row + r] + 16 * tile));
            wl[r] = vreinterpretq_s8_u8(vld1q_u8(scratch.low[row + r] + 16 * tile));
        }
        repeat<4>(EACH(j) {
            repeat<2>(EACH(i) {
                const int8x16_t four = vld1q_s8(v + j * 4 * head_dim + 16 * i);
                repeat<R>(EACH(r) {
                    high[r][i] = vdotq_laneq_s32(high[r][i], four, wh[r], j);
                    low[r][i] = vdotq_laneq_s32(low[r][i], four, wl[r], j);
                });
            });
        });
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int i = 0; i < 2; i++) {
            const int32x4_t whole = vaddq_s32(vshlq_n_s32(high[r][i], 7), low[r][i]);
            vst1q_f32(out.o + (row + r) * head_dim + dim + 4 * i,
                      vmulq_n_f32(vcvtq_f32_s32(whole), scratch.unit[row + r]));
        }
}

template <int R>
void score_rows(const PageView& page, int head_dim, const QueryRows& rows, int row,
                float (*score)[256]) {
    for (int token = rows.hidden[row] / 8 * 8; token < rows.visible[row + R - 1]; token += 8)
        score_tokens<R>(page, head_dim, rows, row, token, score);
}

template <int R>
void output_rows(const PageView& page, int head_dim, const QueryRows& rows, int row,
                 const AttentionScratch& scratch, const PagePartials& out) {
    const int first = rows.hidden[row] / 16, tiles = (rows.visible[row + R - 1] + 15) / 16;
    for (int dim = 0; dim < head_dim; dim += 8)
        output_dims<R>(page, head_dim, row, dim, first, tiles, scratch, out);
}

}  // namespace

void page_partials_neon(const PageView& page, int head_dim, const QueryRows& rows,
                        AttentionScratch& scratch, const PagePartials& out) {
    const int first_tile = rows.hidden[0] / 16, tiles = (rows.visible[rows.rows - 1] + 15) / 16;
    const int fours = rows.rows / ROWS * ROWS;
    for (int row = 0; row < fours; row += ROWS)
        score_rows<ROWS>(page, head_dim, rows, row, scratch.score);
    for (int row = fours; row < rows.rows; row++)
        score_rows<1>(page, head_dim, rows, row, scratch.score);
    for (int i = first_tile * 16; i < tiles * 16; i += 16)
        vstore(scratch.dv + i, vload_half(page.v_scale + i));
    page_softmax_rows<16, page_softmax, clear>(rows, scratch, out);
    for (int row = 0; row < fours; row += ROWS)
        output_rows<ROWS>(page, head_dim, rows, row, scratch, out);
    for (int row = fours; row < rows.rows; row++)
        output_rows<1>(page, head_dim, rows, row, scratch, out);
}

}  // namespace batchengine
