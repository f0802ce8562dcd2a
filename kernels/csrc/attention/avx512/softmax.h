// Scores of a page -> its weights as digits, with AVX-512; for attention_avx512.cpp and attention_amx.cpp.
#pragma once

#include "attention/attention_page.h"
#include "common/simd.h"

namespace batchengine {
namespace {

SIMD_FN __m512 tail_or(const float* p, __mmask16 mask, float filler) {
    return _mm512_mask_loadu_ps(_mm512_set1_ps(filler), mask, p);
}

// Four vectors of 14-bit weights -> 64 high and 64 low digits, tokens in order. The packs work
// inside 128-bit lanes, so the dwords come out transposed and one permutation puts them right.
SIMD_FN void store_digits(const __m512i w[4], uint8_t* high, uint8_t* low) {
    const __m512i order =
        _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    const __m512i seven = _mm512_set1_epi16(127);
    const __m512i a = _mm512_packus_epi32(w[0], w[1]);
    const __m512i b = _mm512_packus_epi32(w[2], w[3]);
    const __m512i h = _mm512_packus_epi16(_mm512_srli_epi16(a, 7), _mm512_srli_epi16(b, 7));
    const __m512i l =
        _mm512_packus_epi16(_mm512_and_si512(a, seven), _mm512_and_si512(b, seven));
    _mm512_store_si512(high, _mm512_permutexvar_epi32(order, h));
    _mm512_store_si512(low, _mm512_permutexvar_epi32(order, l));
}

// Scores of tokens [first, n) of one row -> m, l and digits of whole runs of 64 tokens; s is overwritten
// with the weights. False when a score or a weight is not finite.
SIMD_FN bool page_softmax(int first, int n, int row, AttentionScratch& scratch,
                          const PagePartials& out) {
    float* const s = scratch.score[row];
    const int begin = first / 16, whole = n / 16;
    const __mmask16 tail = static_cast<__mmask16>((1u << (n % 16)) - 1);
    const int vectors = whole + (tail != 0);
    const __m512 zero = _mm512_setzero_ps();
    for (int t = 16 * begin; t < first; t++) s[t] = s[first];
    // x * 0 is NaN for anything that is not finite and 0 otherwise.
    __m512 top = _mm512_set1_ps(s[first]), check = zero;
    for (int i = begin; i < whole; i++) {
        const __m512 x = _mm512_load_ps(s + 16 * i);
        top = _mm512_max_ps(top, x);
        check = _mm512_fmadd_ps(x, zero, check);
    }
    if (tail) {
        const __m512 x = tail_or(s + 16 * whole, tail, s[first]);
        top = _mm512_max_ps(top, x);
        check = _mm512_fmadd_ps(x, zero, check);
    }
    if (_mm512_cmp_ps_mask(check, zero, _CMP_NEQ_UQ)) return false;
    const float m = __builtin_ceilf(_mm512_reduce_max_ps(top)) + 0.0f;
    out.m[row] = m;
    hide(16 * begin, first, s, scratch.dv);

    const V16 shift = vset(m);
#if defined(BATCHENGINE_FREE_ORDER)
    __m512 sum = zero;
#else
    const __m512 magic = _mm512_set1_ps(ca::ROUND_MAGIC), unit = _mm512_set1_ps(0x1p22f);
    const __m512i magic_bits = _mm512_castps_si512(magic);
    __m512i sum = _mm512_setzero_si512();
#endif
    __m512 w_top = zero;
    check = zero;
    for (int i = begin; i < vectors; i++) {
        const __mmask16 mask = i < whole ? static_cast<__mmask16>(0xFFFF) : tail;
        V16 p = vexp2c(vload(s + 16 * i) - shift);
        p.v = _mm512_maskz_mov_ps(mask, p.v);
#if defined(BATCHENGINE_FREE_ORDER)
        sum = _mm512_add_ps(sum, p.v);
#else
        // fma rounds p * 2^22 to an integer in one step, because that product is exact.
        const __m512i rounded = _mm512_castps_si512(_mm512_fmadd_ps(p.v, unit, magic));
        sum = _mm512_add_epi32(sum, _mm512_sub_epi32(rounded, magic_bits));
#endif
        const __m512 w = _mm512_maskz_mul_ps(mask, p.v, _mm512_load_ps(scratch.dv + 16 * i));
        check = _mm512_fmadd_ps(w, zero, check);
        w_top = _mm512_max_ps(w_top, w);
        _mm512_store_ps(s + 16 * i, w);
    }
    if (_mm512_cmp_ps_mask(check, zero, _CMP_NEQ_UQ)) return false;
#if defined(BATCHENGINE_FREE_ORDER)
    out.l[row] = _mm512_reduce_add_ps(sum);
#else
    out.l[row] = static_cast<float>(_mm512_reduce_add_epi32(sum)) * 0x1p-22f;
#endif

    const ca::WeightUnit weights = ca::weight_unit(ca::bits_of(_mm512_reduce_max_ps(w_top)));
    scratch.unit[row] = weights.unit;
    const __m512 inverse = _mm512_set1_ps(weights.inverse);
    const int run = begin / 4 * 4;
    for (int i = run; i < begin; i++) _mm512_store_ps(s + 16 * i, zero);
    for (int i = vectors; i % 4; i++) _mm512_store_ps(s + 16 * i, zero);
    for (int i = run; i < vectors; i += 4) {
        __m512i w[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++)
            w[j] = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(s + 16 * (i + j)), inverse));
        store_digits(w, scratch.high[row] + 16 * i, scratch.low[row] + 16 * i);
    }
    return true;
}

SIMD_FN void clear(int row, int t, AttentionScratch& scratch) {
    _mm512_store_si512(scratch.high[row] + t, _mm512_setzero_si512());
    _mm512_store_si512(scratch.low[row] + t, _mm512_setzero_si512());
}

}  // namespace
}  // namespace batchengine
