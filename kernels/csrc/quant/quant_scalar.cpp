// The definition of CA-3 rule 1, and the choice of its implementation.
#include "common/dispatch.h"
#include "quant/quant.h"

namespace batchengine {

static bool quantise_block(const float* x, Activations& out, size_t cell, size_t token) {
    int8_t* q = out.q.data() + cell * BLOCK_WIDTH;
    float scale;
    int32_t half[2] = {0, 0};
    const bool finite = ca::quantise_group(x, q, &scale);
    for (size_t i = 0; i < BLOCK_WIDTH; ++i) half[i / 16] += q[i];
    put_sums(out, cell, token, scale, half[0], half[1]);
    return finite;
}

void quantise_rows_scalar(const float* rows, size_t stride, size_t token, size_t count,
                          Activations& out) {
    for (size_t t = 0; t < count; ++t) quantise_row<quantise_block>(rows + t * stride, token + t, out);
}

QuantiseRows quantise_rows() {
    switch (vector_level()) {
#if defined(BATCHENGINE_X86)
        case Level::avx512: return quantise_rows_avx512;
        case Level::avx2: return quantise_rows_avx2;
#elif defined(BATCHENGINE_ARM)
        case Level::neon_dotprod:
        case Level::neon_i8mm: return quantise_rows_neon;
#endif
        default: return quantise_rows_scalar;
    }
}

}  // namespace batchengine
