// Row operations of CA-3 that are not reductions of integers: norm, rope, kv8, fold, softmax scans.
//
// One table of functions per instruction set, all compiled from rowops_body.h, so the scalar unit is
// the definition and the others repeat it. Rows are plain spans; sizes were checked by the callers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/dispatch.h"

namespace batchengine {

struct RowOps {
    // Rule 3: y = RN(RN(x*r)*w), r = RN(1/sqrt(RN(RN(ss/n) + eps))). y may be x.
    void (*rmsnorm)(const float* x, const float* w, size_t n, float eps, float* y);
    // y = RN(y + the same).
    void (*norm_add)(const float* x, const float* w, size_t n, float eps, float* y);
    // Rule 4, in place, on the first 2*half values. neox: pairs (i, i+half); else pairs (2i, 2i+1).
    void (*rope)(float* x, const float* cosines, const float* sines, size_t half, bool neox);
    // Rule 4, in place: the Hadamard transform of each `width` values: 32, 64, 128, 256 or 512.
    void (*hadamard)(float* x, size_t n, size_t width);
    // Rule 7: RN(x * factor) by rule 1, with a scale of NaN for a nonfinite group; offset = -128 * sum
    // of the group's q.
    void (*quantise_query)(const float* x, size_t blocks, float factor, int8_t* q, float* scale,
                           int32_t* offset);
    // Rule 6: `groups` groups of `width` values share one fp16 scale each (K: 32, V: head_dim).
    void (*quantise_kv8)(const float* x, size_t groups, size_t width, int8_t* q, uint16_t* d);
    // V of `tiles` tiles of 16 tokens as pages have it, [4 quads of tokens][head_dim][4 tokens] each, of K of
    // the same tiles, [head_dim/4][16 tokens][4 dims]: bytes are moved, none is changed.
    void (*v_of_k)(const int8_t* k, size_t tiles, size_t head_dim, int8_t* v);
    // Rule 7, fold: adds the partial that follows the accumulator (m, l, o) to it; l = 0 is an empty one.
    void (*fold)(float* m, float* l, float* o, float m_next, float l_next, const float* o_next,
                 size_t head_dim);
    // Rule 7, output: RN(o * RN(1/l)); an l that is not finite gives the canonical NaN. out may be o.
    void (*finish)(float l, const float* o, size_t head_dim, float* out);
    // Largest value of a row and the lowest index that has it; false when any value is NaN or inf.
    bool (*largest)(const float* x, size_t n, float* value, size_t* index);
    // Rule 10: w = integer_weight(expc(RN(RN(x - shift) / temperature))); returns the sum of w.
    int64_t (*weigh)(const float* x, size_t n, float shift, float temperature, int32_t* w);
    // Rule 10: zeroes the weights that are below `least` or outside the cut, which keeps the values
    // above `value` and, of those equal to it, the first `ties` indices; returns the sum of the rest.
    int64_t (*keep)(const float* x, size_t n, float value, size_t ties, int32_t least, int32_t* w);
    // Rule 12: y = RN(y * sigmoid(gate)).
    void (*gate)(const float* gate, size_t n, float* y);
    // Rule 12: y = RN(y + RN(share * x)).
    void (*add_share)(const float* x, size_t n, float share, float* y);
    // y = RN(x * factor). y may be x.
    void (*scale)(const float* x, size_t n, float factor, float* y);
    // y = fma(x, factor, y).
    void (*scaled_add)(const float* x, size_t n, float factor, float* y);
    // Rule 13: ca::capped of each value, in place.
    void (*cap)(float* x, size_t n, float cap);
    // y = ca::gated(gelu, y, factors).
    void (*gelu)(const float* factors, size_t n, float* y);
};

extern const RowOps rowops_scalar;
extern const RowOps rowops_avx2;
extern const RowOps rowops_avx512;
extern const RowOps rowops_neon;

inline const RowOps& rowops() {
#if defined(BATCHENGINE_X86)
    if (vector_level() == Level::avx512) return rowops_avx512;
    if (level() == Level::avx2) return rowops_avx2;
#elif defined(BATCHENGINE_ARM)
    if (level() != Level::scalar) return rowops_neon;
#endif
    return rowops_scalar;
}

}  // namespace batchengine
