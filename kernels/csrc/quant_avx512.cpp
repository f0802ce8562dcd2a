// CA-1 rule 1 with AVX-512: two zmm per block.
#include <immintrin.h>

#include "ca1.h"
#include "quant.h"

namespace batchengine {
namespace {

// One block; `to` has room for 32 bytes. Lanes past the end of a row are zero.
void quantise_block(__m512 x0, __m512 x1, Activations& out, size_t cell, size_t lane) {
    const __m512 a_lanes = _mm512_max_ps(_mm512_abs_ps(x0), _mm512_abs_ps(x1));
    // fpclass: quiet and signalling NaN, both infinities.
    const bool poisoned = (_mm512_fpclass_ps_mask(x0, 0x99) | _mm512_fpclass_ps_mask(x1, 0x99)) != 0;
    const float a = _mm512_reduce_max_ps(a_lanes);
    float scale = 0.0f, id = 0.0f;
    if (poisoned) {
        scale = ca1::poison();
        x0 = x1 = _mm512_setzero_ps();
    } else if (a >= ca1::TINY) {
        scale = a / 127.0f;
        id = 127.0f / a;
    }
    const __m512 by = _mm512_set1_ps(id);
    const __m512i q0 = _mm512_cvtps_epi32(_mm512_mul_ps(x0, by));
    const __m512i q1 = _mm512_cvtps_epi32(_mm512_mul_ps(x1, by));
    auto* q = reinterpret_cast<__m128i*>(out.q.data() + cell * BLOCK_WIDTH);
    _mm_store_si128(q, _mm512_cvtepi32_epi8(q0));
    _mm_store_si128(q + 1, _mm512_cvtepi32_epi8(q1));
    const int32_t half0 = _mm512_reduce_add_epi32(q0), half1 = _mm512_reduce_add_epi32(q1);
    out.scale[cell] = scale;
    out.offset[cell] = -8 * (half0 + half1);
    int32_t* halves = out.halves.data() + (2 * cell - lane);
    halves[0] = -32 * half0;
    halves[GROUP_TOKENS] = -32 * half1;
}

}  // namespace

void quantise_row_avx512(const float* row, size_t token, Activations& out) {
    if (out.keep_float)
        std::memcpy(out.values.data() + token * out.padded_width, row, out.width * sizeof(float));
    const size_t lane = token % GROUP_TOKENS, whole = out.width / BLOCK_WIDTH;
    for (size_t block = 0; block < whole; ++block)
        quantise_block(_mm512_loadu_ps(row + 32 * block), _mm512_loadu_ps(row + 32 * block + 16),
                       out, out.cell(token, block), lane);
    if (whole == out.blocks) return;
    const unsigned valid = (1u << (out.width % BLOCK_WIDTH)) - 1u;
    const float* tail = row + whole * BLOCK_WIDTH;
    quantise_block(_mm512_maskz_loadu_ps(static_cast<__mmask16>(valid), tail),
                   _mm512_maskz_loadu_ps(static_cast<__mmask16>(valid >> 16), tail + 16), out,
                   out.cell(token, whole), lane);
}

}  // namespace batchengine
