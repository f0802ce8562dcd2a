// CA-1 rule 1 with AVX2: four ymm per block.
#include "common/simd.h"
#include "quant/quant.h"

namespace batchengine {
namespace {

void quantise_block(const float* row, Activations& out, size_t cell, size_t token) {
    bool finite;
    const float a = largest_magnitude(row, BLOCK_WIDTH, &finite);
    const bool zero = !finite || a < ca::TINY;
    __m256i q[4] = {};
    if (!zero) {
        const __m256 by = _mm256_set1_ps(127.0f / a);
        UNROLL for (int i = 0; i < 4; ++i)
            q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(row + 8 * i), by));
    }
    // The packs work inside 128-bit halves; the permutation puts the dwords back in order.
    const __m256i bytes =
        _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    _mm256_store_si256(
        reinterpret_cast<__m256i*>(out.q.data() + cell * BLOCK_WIDTH),
        _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
    put_sums(out, cell, token, !finite ? ca::canonical_nan() : zero ? 0.0f : a / 127.0f,
             sum_of_lanes(_mm256_add_epi32(q[0], q[1])), sum_of_lanes(_mm256_add_epi32(q[2], q[3])));
}

}  // namespace

void quantise_rows_avx2(const float* rows, size_t stride, size_t token, size_t count,
                        Activations& out) {
    for (size_t t = 0; t < count; ++t) quantise_row<quantise_block>(rows + t * stride, token + t, out);
}

}  // namespace batchengine
