// CA-1 rule 7, the definition: one row of queries against the visible tokens of one page.
//
// Every sum over tokens or dims is an exact integer; floats appear only where a rounding is written.
#include "attention/attention_page.h"
#include "common/ca.h"

namespace batchengine {
namespace {

// s_t = chain over the 32-blocks: fma(float(I_b), RN(dk*dq), s).
float score(const PageView& page, int head_dim, int t, const int8_t* q, const float* q_scale) {
    const int blocks = head_dim / 32;
    float s = 0.0f;
    for (int b = 0; b < blocks; b++) {
        int32_t dot = 0;
        for (int d = b * 32; d < b * 32 + 32; d++) {
            const int k = page.k[(((t / 16) * (head_dim / 4) + d / 4) * 16 + t % 16) * 4 + d % 4];
            dot += k * q[d];
        }
        const uint16_t half = page.k_scale[((t / 16) * blocks + b) * 16 + t % 16];
        const float scale = ca::half_to_float(half) * q_scale[b];
        s = ca::fma_rn(static_cast<float>(dot), scale, s);
    }
    return s;
}

struct RowResult {
    float m, l, weight_scale;
};

// Scores -> maximum, denominator and 14-bit weights. False when a score or a weight is not finite.
bool soften(const PageView& page, int n, const float* s, int32_t* weight, RowResult& row) {
    float top = s[0];
    for (int t = 0; t < n; t++) {
        if (!ca::is_finite(s[t])) return false;
        if (s[t] > top) top = s[t];
    }
    row.m = __builtin_ceilf(top) + 0.0f;
    float w[256];
    float w_max = 0.0f;
    int32_t sum = 0;
    for (int t = 0; t < n; t++) {
        const float p = ca::exp2c(s[t] - row.m);
        sum += ca::round_to_int(p * 0x1p22f);
        w[t] = p * ca::half_to_float(page.v_scale[t]);
        if (!ca::is_finite(w[t])) return false;
        if (w[t] > w_max) w_max = w[t];
    }
    row.l = static_cast<float>(sum) * 0x1p-22f;
    // As in rule 1, a maximum this small counts as zero: 16383/w_max must not overflow. Such a page
    // adds nothing to o, but its tokens keep their share of l.
    const bool empty = w_max < ca::TINY;
    row.weight_scale = empty ? 0.0f : w_max / 16383.0f;
    const float inverse = empty ? 0.0f : 16383.0f / w_max;
    for (int t = 0; t < n; t++) weight[t] = ca::round_to_int(w[t] * inverse);
    return true;
}

}  // namespace

void page_partials_scalar(const PageView& page, int head_dim, const QueryRows& rows,
                          AttentionScratch&, const PagePartials& out) {
    for (int r = 0; r < rows.rows; r++) {
        const int n = rows.visible[r];
        const int8_t* q = rows.q + r * head_dim;
        const float* q_scale = rows.scale + r * (head_dim / 32);
        float* o = out.o + r * head_dim;
        float s[256] = {};
        int32_t weight[256];
        RowResult row{};
        for (int t = 0; t < n; t++) s[t] = score(page, head_dim, t, q, q_scale);
        if (!soften(page, n, s, weight, row)) {
            out.m[r] = 0.0f;
            out.l[r] = ca::canonical_nan();
            for (int d = 0; d < head_dim; d++) o[d] = 0.0f;
            continue;
        }
        out.m[r] = row.m;
        out.l[r] = row.l;
        for (int d = 0; d < head_dim; d++) {
            int32_t sum = 0;
            for (int t = 0; t < n; t++)
                sum += weight[t] * page.v[((t / 4) * head_dim + d) * 4 + t % 4];
            o[d] = static_cast<float>(sum) * row.weight_scale;
        }
    }
}

}  // namespace batchengine
