// CA-1 rule 1 with AVX2: four ymm per block.
#include <immintrin.h>

#include "common/ca1.h"
#include "quant/quant.h"

namespace batchengine {
namespace {

int32_t sum_lanes(__m256i v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1));
    return _mm_cvtsi128_si32(s);
}

float max_lanes(__m256 v) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    m = _mm_max_ss(m, _mm_shuffle_ps(m, m, 1));
    return _mm_cvtss_f32(m);
}

void quantise_block(const float* row, Activations& out, size_t cell, size_t lane) {
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
    const __m256 infinity = _mm256_castsi256_ps(_mm256_set1_epi32(0x7F800000));
    __m256 x[4], a_lanes = _mm256_setzero_ps(), bad = _mm256_setzero_ps();
    for (int i = 0; i < 4; ++i) {
        x[i] = _mm256_loadu_ps(row + 8 * i);
        const __m256 absolute = _mm256_and_ps(x[i], magnitude);
        // "not less than infinity" is true for a NaN as well
        bad = _mm256_or_ps(bad, _mm256_cmp_ps(absolute, infinity, _CMP_NLT_UQ));
        a_lanes = _mm256_max_ps(a_lanes, absolute);
    }
    float scale = 0.0f, id = 0.0f;
    if (_mm256_movemask_ps(bad) != 0) {
        scale = ca1::canonical_nan();
        for (auto& part : x) part = _mm256_setzero_ps();
    } else if (const float a = max_lanes(a_lanes); a >= ca1::TINY) {
        scale = a / 127.0f;
        id = 127.0f / a;
    }
    const __m256 by = _mm256_set1_ps(id);
    __m256i q[4];
    for (int i = 0; i < 4; ++i) q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(x[i], by));
    const int32_t half0 = sum_lanes(_mm256_add_epi32(q[0], q[1]));
    const int32_t half1 = sum_lanes(_mm256_add_epi32(q[2], q[3]));
    // The packs work inside 128-bit halves; the permutation puts the dwords back in order.
    const __m256i bytes =
        _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    _mm256_store_si256(
        reinterpret_cast<__m256i*>(out.q.data() + cell * BLOCK_WIDTH),
        _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
    out.scale[cell] = scale;
    out.offset[cell] = -8 * (half0 + half1);
    int32_t* halves = out.halves.data() + (2 * cell - lane);
    halves[0] = -32 * half0;
    halves[GROUP_TOKENS] = -32 * half1;
}

void quantise_one(const float* row, size_t token, Activations& out) {
    if (out.keep_float)
        std::memcpy(out.values.data() + token * out.padded_width, row, out.width * sizeof(float));
    const size_t lane = token % GROUP_TOKENS, whole = out.width / BLOCK_WIDTH;
    for (size_t block = 0; block < whole; ++block)
        quantise_block(row + block * BLOCK_WIDTH, out, out.cell(token, block), lane);
    if (whole == out.blocks) return;
    float tail[BLOCK_WIDTH] = {};
    std::memcpy(tail, row + whole * BLOCK_WIDTH, out.width % BLOCK_WIDTH * sizeof(float));
    quantise_block(tail, out, out.cell(token, whole), lane);
}

}  // namespace

void quantise_rows_avx2(const float* rows, size_t stride, size_t token, size_t count,
                        Activations& out) {
    for (size_t t = 0; t < count; ++t) quantise_one(rows + t * stride, token + t, out);
}

}  // namespace batchengine
