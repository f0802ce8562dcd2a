// The attention primitive: rows of queries against one page of one KV head (CA-3 rule 7).
//
// attention_scalar.cpp defines it; the other units equal it bit for bit. Functions here have internal
// linkage, so that units of every instruction set may include this file.
#pragma once

#include <cstdint>

#include "common/ca.h"
#include "common/dispatch.h"

namespace batchengine {

constexpr int ATTENTION_ROWS_MAX = 32;  // rows of one call: enough to amortise a page read from L2
constexpr int HEAD_BLOCKS_MAX = 18;     // blocks of 32 dims of a head

struct PageView {
    const int8_t* k;
    const uint16_t* k_scale;
    const int8_t* v;
    const uint16_t* v_scale;
    const int8_t* next_k;  // K and K scale of the page read next, or null: a hint for prefetching
};

namespace {

// Prefetches a cache line into L2: a page is larger than L1. While K is read, V is prefetched, and
// while V is read, the next page's K, one line per line read: a core has few requests in flight, and
// a burst of them would block loads from L2 until DRAM has answered.
[[maybe_unused]] inline void prefetch(const int8_t* p) { __builtin_prefetch(p, 0, 2); }

// The next page's K scales, of as many tiles as this page shows.
[[maybe_unused]] inline void prefetch_next_scales(const PageView& page, int head_dim, int tiles) {
    if (!page.next_k) return;
    for (int i = 0; i < tiles * head_dim; i += 64) prefetch(page.next_k + 256 * head_dim + i);
}

}  // namespace

// Contiguous rows that read the same KV head. Row r sees the tokens [hidden[r], visible[r]) of the page,
// one at least; the others, which may be stale, must not affect results. Neither falls with r.
struct QueryRows {
    const int8_t* q;        // [rows][head_dim]
    const float* scale;     // [rows][head_dim/32], NaN in a nonfinite group
    const int32_t* offset;  // [rows][head_dim/32]
    const int32_t* hidden;   // [rows]
    const int32_t* visible;  // [rows]
    int rows;
};

// m: base-2 maximum, an integer; l: denominator; o: numerator. A nonfinite row has l = NaN.
struct PagePartials {
    float* m;  // [rows]
    float* l;  // [rows]
    float* o;  // [rows][head_dim]
};

struct AttentionScratch {
    alignas(64) float score[ATTENTION_ROWS_MAX][256];
    union {
        alignas(64) uint16_t weight[ATTENTION_ROWS_MAX][256];  // 14 bits
        struct {
            alignas(64) uint8_t high[ATTENTION_ROWS_MAX][256];  // weight >> 7
            alignas(64) uint8_t low[ATTENTION_ROWS_MAX][256];   // weight & 127
        };
    };
    alignas(64) float dv[256];                          // the page's V scales in fp32
    float unit[ATTENTION_ROWS_MAX];                     // of the weights: a power of two, or 0
};

namespace {

// Tokens [begin, first) of a row get a weight of exactly 0, also where their V scale is NaN.
[[maybe_unused]] inline void hide(int begin, int first, float* score, float* dv) {
    for (int t = begin; t < first; t++) score[t] = -0x1p127f, dv[t] = 0.0f;
}

// Scores -> m, l, unit and weights of every row. SOFTEN(first, n, row, scratch, out) does it for the tokens
// [first, n) that a row sees, with weights of whole runs of STEP tokens, and returns false when the row is
// not finite. CLEAR(row, t, scratch) zeroes the weights of STEP tokens from t on, which only other rows see.
// A token that a row does not see before `first` no later row sees, so that SOFTEN may overwrite its dv.
template <int STEP, auto SOFTEN, auto CLEAR>
void page_softmax_rows(const QueryRows& rows, AttentionScratch& scratch, const PagePartials& out) {
    const int begin = rows.hidden[0] / STEP * STEP, end = rows.visible[rows.rows - 1];
    for (int row = 0; row < rows.rows; row++) {
        const int first = rows.hidden[row], n = rows.visible[row];
        int from = first / STEP * STEP, filled = (n + STEP - 1) / STEP * STEP;
        if (!SOFTEN(first, n, row, scratch, out)) {
            out.m[row] = 0.0f;
            out.l[row] = ca::canonical_nan();
            scratch.unit[row] = 0.0f;
            filled = from = begin;
        }
        for (; from > begin; from -= STEP) CLEAR(row, from - STEP, scratch);
        for (; filled < end; filled += STEP) CLEAR(row, filled, scratch);
    }
}

}  // namespace

using PageKernel = void (*)(const PageView& page, int head_dim, const QueryRows& rows,
                            AttentionScratch& scratch, const PagePartials& out);

void page_partials_scalar(const PageView&, int, const QueryRows&, AttentionScratch&,
                          const PagePartials&);
#if defined(BATCHENGINE_X86)
void page_partials_avx2(const PageView&, int, const QueryRows&, AttentionScratch&, const PagePartials&);
void page_partials_avx512(const PageView&, int, const QueryRows&, AttentionScratch&,
                          const PagePartials&);
void page_partials_amx(const PageView&, int, const QueryRows&, AttentionScratch&, const PagePartials&);
#elif defined(BATCHENGINE_ARM)
void page_partials_neon(const PageView&, int, const QueryRows&, AttentionScratch&, const PagePartials&);
#endif

}  // namespace batchengine
