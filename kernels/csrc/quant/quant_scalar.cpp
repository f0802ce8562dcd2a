// The definition of CA-1 rule 1, and the choice of its implementation.
#include <algorithm>
#include <cmath>

#include "common/ca.h"
#include "common/dispatch.h"
#include "quant/quant.h"

namespace batchengine {

// Per 32 values: a = max|x|; below 2^-96 the block is zero. d = RN(a/127), id = RN(127/a),
// q = rint(RN(x*id)). A block that holds a NaN or an infinity is nonfinite: q = 0, d = NaN, so every
// output that depends on it is NaN, on every level alike.
static void quantise_block(const float* x, Activations& out, size_t cell, size_t token) {
    float a = 0.0f;
    bool finite = true;
    for (size_t i = 0; i < BLOCK_WIDTH; ++i) {
        finite = finite && ca::is_finite(x[i]);
        a = std::max(a, std::fabs(x[i]));
    }
    const bool zero = !finite || a < ca::TINY;
    const float id = zero ? 0.0f : 127.0f / a;
    int8_t* q = out.q.data() + cell * BLOCK_WIDTH;
    int32_t half[2] = {0, 0};
    for (size_t i = 0; i < BLOCK_WIDTH; ++i) {
        const int32_t value = zero ? 0 : ca::round_to_int(x[i] * id);
        q[i] = static_cast<int8_t>(value);
        half[i / 16] += value;
    }
    put_sums(out, cell, token, !finite ? ca::canonical_nan() : zero ? 0.0f : a / 127.0f, half[0],
             half[1]);
}

void quantise_rows_scalar(const float* rows, size_t stride, size_t token, size_t count,
                          Activations& out) {
    for (size_t t = 0; t < count; ++t) quantise_row<quantise_block>(rows + t * stride, token + t, out);
}

QuantiseRows quantise_rows() {
    switch (level()) {
#if defined(BATCHENGINE_X86)
        case Level::avx512: return quantise_rows_avx512;
        case Level::avx2: return quantise_rows_avx2;
#endif
        default: return quantise_rows_scalar;
    }
}

}  // namespace batchengine
