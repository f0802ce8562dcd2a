// CA-3 rule 7 by the functions of ca.h: one row of queries against the visible tokens of one page.
//
// Every sum over tokens or dims is an exact integer; floats appear only where a rounding is written.
#include "attention/attention_page.h"
#include "common/ca.h"

namespace batchengine {
namespace {

// s_t = chain over the 32-blocks: fma(float(I_b), dk * dq, s).
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
        const float scale = ca::mul_rn(ca::half_to_float(half), q_scale[b]);
        s = ca::fma_rn(static_cast<float>(dot), scale, s);
    }
    return s;
}

}  // namespace

void page_partials_scalar(const PageView& page, int head_dim, const QueryRows& rows,
                          AttentionScratch&, const PagePartials& out) {
    for (int r = 0; r < rows.rows; r++) {
        const int first = rows.hidden[r], n = rows.visible[r] - first;
        const int8_t* q = rows.q + r * head_dim;
        const float* q_scale = rows.scale + r * (head_dim / 32);
        float* o = out.o + r * head_dim;
        float s[256], p[256];
        int32_t weight[256];
        ca::PageSoftmax row{};
        for (int t = 0; t < n; t++) s[t] = score(page, head_dim, first + t, q, q_scale);
        if (!ca::page_softmax(s, page.v_scale + first, n, p, weight, row)) {
            out.m[r] = 0.0f;
            out.l[r] = ca::canonical_nan();
            for (int d = 0; d < head_dim; d++) o[d] = 0.0f;
            continue;
        }
        out.m[r] = row.m;
        out.l[r] = row.l;
        for (int d = 0; d < head_dim; d++) {
            int32_t sum = 0;
            for (int i = 0; i < n; i++) {
                const int t = first + i;
                sum += weight[i] * page.v[((t / 4) * head_dim + d) * 4 + t % 4];
            }
            o[d] = ca::numerator(sum, row.unit);
        }
    }
}

}  // namespace batchengine
