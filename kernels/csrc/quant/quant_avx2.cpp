// CA-3 rule 1 with AVX2: four ymm per block.
#include "common/simd.h"
#include "quant/quant.h"

namespace batchengine {
namespace {

uint32_t largest_of_lanes(__m256i eight) {
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return static_cast<uint32_t>(
        _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xB1))));
}

bool quantise_block(const float* row, Activations& out, size_t cell, size_t token) {
    // Magnitudes compare as integers; NaN and infinities are the largest of them.
    __m256 x[4];
    __m256i largest = _mm256_setzero_si256();
    UNROLL for (int i = 0; i < 4; ++i) {
        x[i] = _mm256_loadu_ps(row + 8 * i);
        largest = _mm256_max_epi32(
            largest, _mm256_and_si256(_mm256_castps_si256(x[i]), _mm256_set1_epi32(0x7FFFFFFF)));
    }
    const uint32_t bits = largest_of_lanes(largest);
    const ca::Group kind = ca::group_kind(bits);
    __m256i q[4] = {};
    float scale = 1.0f;
    if (kind == ca::Group::used) {
        scale = ca::group_scale(bits);
        const __m256 inverse = _mm256_set1_ps(1.0f / scale);
        UNROLL for (int i = 0; i < 4; ++i)
            q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(x[i], inverse));
    }
    // The packs work inside 128-bit halves; the permutation puts the dwords back in order.
    const __m256i bytes =
        _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    _mm256_store_si256(
        reinterpret_cast<__m256i*>(out.q.data() + cell * BLOCK_WIDTH),
        _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
    put_sums(out, cell, token, scale, sum_of_lanes(_mm256_add_epi32(q[0], q[1])),
             sum_of_lanes(_mm256_add_epi32(q[2], q[3])));
    return kind != ca::Group::nonfinite;
}

}  // namespace

void quantise_rows_avx2(const float* rows, size_t stride, size_t token, size_t count,
                        Activations& out) {
    for (size_t t = 0; t < count; ++t) quantise_row<quantise_block>(rows + t * stride, token + t, out);
}

}  // namespace batchengine
