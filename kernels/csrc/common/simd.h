// V16: sixteen binary32 lanes with one meaning on every instruction set.
//
// A unit compiled with AVX-512 flags gets one zmm, with AVX2 flags two ymm, with those of ARM's dot
// product four q registers, otherwise a plain array.
// Bodies written on V16 therefore compile once per ISA unit and give the same bits in each: every
// operation is the IEEE one, lane by lane, and fma appears only where it is written. The only
// reductions over lanes are exact ones (maximum, flags, integer sums) and the one tree that CA-3
// prescribes. All of it has internal linkage.
#pragma once

#include "common/ca.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#include <type_traits>
#include <utility>

#define SIMD_FN static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

namespace {

// repeat<N>(EACH(i) { ... }) runs the body for the constants 0..N-1. Unlike an unrolled loop it is
// expanded before the compiler decides which arrays to keep in registers, so it keeps them all there.
template <class F, int... I>
SIMD_FN void repeat_for(std::integer_sequence<int, I...>, F&& body) {
    (body(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
SIMD_FN void repeat(F&& body) {
    repeat_for(std::make_integer_sequence<int, N>{}, body);
}
#define EACH(i) [&](auto i) __attribute__((always_inline))

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define SIMD_AVX512 1

struct V16 {
    __m512 v;
};

// The four bytes at `p`, in every dword.
SIMD_FN __m512i every_dword(const void* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}
SIMD_FN V16 vzero() { return {_mm512_setzero_ps()}; }
SIMD_FN V16 vset(float x) { return {_mm512_set1_ps(x)}; }
SIMD_FN V16 vload(const float* p) { return {_mm512_loadu_ps(p)}; }
SIMD_FN void vstore(float* p, V16 a) { _mm512_storeu_ps(p, a.v); }
// Past the caches, to an address that is aligned to a cache line; vstream_end() before others read it.
SIMD_FN void vstream(float* p, V16 a) { _mm512_stream_ps(p, a.v); }
SIMD_FN void vstream_end() { _mm_sfence(); }
SIMD_FN V16 vload_half(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
SIMD_FN V16 operator+(V16 a, V16 b) { return {_mm512_add_ps(a.v, b.v)}; }
SIMD_FN V16 operator-(V16 a, V16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
SIMD_FN V16 operator*(V16 a, V16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
SIMD_FN V16 operator/(V16 a, V16 b) { return {_mm512_div_ps(a.v, b.v)}; }
SIMD_FN V16 vfma(V16 a, V16 b, V16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
SIMD_FN V16 vmax(V16 a, V16 b) { return {_mm512_max_ps(a.v, b.v)}; }
SIMD_FN V16 vmin(V16 a, V16 b) { return {_mm512_min_ps(a.v, b.v)}; }
SIMD_FN V16 vabs(V16 a) { return {_mm512_abs_ps(a.v)}; }
SIMD_FN V16 vneg(V16 a) { return {_mm512_xor_ps(a.v, _mm512_set1_ps(-0.0f))}; }
// Lane i gets lane i ^ step; step is 1, 2, 4 or 8.
template <int step>
SIMD_FN V16 vswap(V16 a) {
    if constexpr (step == 1) return {_mm512_permute_ps(a.v, 0xB1)};
    if constexpr (step == 2) return {_mm512_permute_ps(a.v, 0x4E)};
    if constexpr (step == 4) return {_mm512_shuffle_f32x4(a.v, a.v, 0xB1)};
    if constexpr (step == 8) return {_mm512_shuffle_f32x4(a.v, a.v, 0x4E)};
}
// x >= bound ? a : b, lane by lane (a NaN in x chooses b).
SIMD_FN V16 vselect_ge(V16 x, float bound, V16 a, V16 b) {
    return {_mm512_mask_mov_ps(b.v, _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(bound), _CMP_GE_OQ),
                               a.v)};
}
// The bits of p plus ((bits of t - magic) << 23): multiplies p by 2^n when t = n + magic.
SIMD_FN V16 vscale_by_magic(V16 p, V16 t) {
    const __m512i n = _mm512_sub_epi32(_mm512_castps_si512(t.v),
                                       _mm512_set1_epi32(static_cast<int>(ca::ROUND_MAGIC_BITS)));
    return {_mm512_castsi512_ps(
        _mm512_add_epi32(_mm512_castps_si512(p.v), _mm512_slli_epi32(n, 23)))};
}
SIMD_FN bool vany_nonfinite(V16 a) {
    return _mm512_fpclass_ps_mask(a.v, 0x99) != 0;  // quiet NaN, signalling NaN, +inf, -inf
}
SIMD_FN float vreduce_max(V16 a) { return _mm512_reduce_max_ps(a.v); }
// Rounds to nearest even and keeps the low byte; the caller guarantees |x| <= 127.
SIMD_FN void vstore_i8(int8_t* p, V16 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}
// Rounds to nearest even; the caller guarantees 0 <= x < 2^31.
SIMD_FN void vstore_i32(int32_t* p, V16 a) { _mm512_storeu_si512(p, _mm512_cvtps_epi32(a.v)); }
// Lane i + lane i + 8, then + 4, + 2, + 1, as written: one number.
SIMD_FN float vtree(V16 x) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
// Sum of 32 values as vstore_i8 would store them.
SIMD_FN int32_t vsum_rounded(V16 x, V16 y) {
    return _mm512_reduce_add_epi32(
        _mm512_add_epi32(_mm512_cvtps_epi32(x.v), _mm512_cvtps_epi32(y.v)));
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

struct V16 {
    __m256 a, b;
};

SIMD_FN __m256i every_dword(const void* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return _mm256_set1_epi32(four);
}
SIMD_FN int32_t sum_of_lanes(__m256i eight) {
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
}
SIMD_FN V16 vzero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
SIMD_FN V16 vset(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
SIMD_FN V16 vload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
SIMD_FN void vstore(float* p, V16 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
SIMD_FN void vstream(float* p, V16 x) {
    _mm256_stream_ps(p, x.a);
    _mm256_stream_ps(p + 8, x.b);
}
SIMD_FN void vstream_end() { _mm_sfence(); }
SIMD_FN V16 vload_half(const uint16_t* p) {
    const __m128i* h = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(h)), _mm256_cvtph_ps(_mm_loadu_si128(h + 1))};
}
SIMD_FN V16 operator+(V16 x, V16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
SIMD_FN V16 operator-(V16 x, V16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
SIMD_FN V16 operator*(V16 x, V16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
SIMD_FN V16 operator/(V16 x, V16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
SIMD_FN V16 vfma(V16 x, V16 y, V16 z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
SIMD_FN V16 vmax(V16 x, V16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
SIMD_FN V16 vmin(V16 x, V16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
SIMD_FN V16 vabs(V16 x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
SIMD_FN V16 vneg(V16 x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_xor_ps(x.a, sign), _mm256_xor_ps(x.b, sign)};
}
// Lane i gets lane i ^ step; step is 1, 2, 4 or 8.
template <int step>
SIMD_FN V16 vswap(V16 x) {
    if constexpr (step == 1) return {_mm256_permute_ps(x.a, 0xB1), _mm256_permute_ps(x.b, 0xB1)};
    if constexpr (step == 2) return {_mm256_permute_ps(x.a, 0x4E), _mm256_permute_ps(x.b, 0x4E)};
    if constexpr (step == 4)
        return {_mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1)};
    if constexpr (step == 8) return {x.b, x.a};
}
SIMD_FN V16 vselect_ge(V16 x, float bound, V16 y, V16 z) {
    const __m256 limit = _mm256_set1_ps(bound);
    return {_mm256_blendv_ps(z.a, y.a, _mm256_cmp_ps(x.a, limit, _CMP_GE_OQ)),
            _mm256_blendv_ps(z.b, y.b, _mm256_cmp_ps(x.b, limit, _CMP_GE_OQ))};
}
SIMD_FN __m256 scale_half_by_magic(__m256 p, __m256 t) {
    const __m256i n = _mm256_sub_epi32(_mm256_castps_si256(t),
                                       _mm256_set1_epi32(static_cast<int>(ca::ROUND_MAGIC_BITS)));
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(n, 23)));
}
SIMD_FN V16 vscale_by_magic(V16 p, V16 t) {
    return {scale_half_by_magic(p.a, t.a), scale_half_by_magic(p.b, t.b)};
}
SIMD_FN bool vany_nonfinite(V16 x) {
    const V16 size = vabs(x);
    const __m256 limit = _mm256_set1_ps(0x1.fffffep127f);
    return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(size.a, limit, _CMP_NLE_UQ),
                                           _mm256_cmp_ps(size.b, limit, _CMP_NLE_UQ))) != 0;
}
SIMD_FN float vreduce_max(V16 x) {
    const __m256 m8 = _mm256_max_ps(x.a, x.b);
    const __m128 m4 = _mm_max_ps(_mm256_castps256_ps128(m8), _mm256_extractf128_ps(m8, 1));
    const __m128 m2 = _mm_max_ps(m4, _mm_movehl_ps(m4, m4));
    return _mm_cvtss_f32(_mm_max_ss(m2, _mm_movehdup_ps(m2)));
}
SIMD_FN void vstore_i8(int8_t* p, V16 x) {
    const __m256i words = _mm256_permute4x64_epi64(
        _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)), 0xD8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm_packs_epi16(_mm256_castsi256_si128(words),
                                     _mm256_extracti128_si256(words, 1)));
}
// Rounds to nearest even; the caller guarantees 0 <= x < 2^31.
SIMD_FN void vstore_i32(int32_t* p, V16 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_cvtps_epi32(x.a));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), _mm256_cvtps_epi32(x.b));
}
// Lane i + lane i + 8, then + 4, + 2, + 1, as written: one number.
SIMD_FN float vtree(V16 x) {
    const __m256 eight = _mm256_add_ps(x.a, x.b);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
// Sum of 32 values as vstore_i8 would store them.
SIMD_FN int32_t vsum_rounded(V16 x, V16 y) {
    return sum_of_lanes(_mm256_add_epi32(
        _mm256_add_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)),
        _mm256_add_epi32(_mm256_cvtps_epi32(y.a), _mm256_cvtps_epi32(y.b))));
}

#elif defined(__ARM_FEATURE_DOTPROD)

struct V16 {
    float32x4_t v[4];
};

template <class F>
SIMD_FN V16 each_four(F f) {
    return {{f(0), f(1), f(2), f(3)}};
}
SIMD_FN uint32x4_t bits_of_four(float32x4_t x) { return vreinterpretq_u32_f32(x); }
SIMD_FN V16 vset(float x) {
    const float32x4_t four = vdupq_n_f32(x);
    return {{four, four, four, four}};
}
SIMD_FN V16 vzero() { return vset(0.0f); }
SIMD_FN V16 vload(const float* p) {
    return each_four(EACH(i) { return vld1q_f32(p + 4 * i); });
}
SIMD_FN void vstore(float* p, V16 a) {
    UNROLL for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.v[i]);
}
SIMD_FN void vstream(float* p, V16 a) { vstore(p, a); }
SIMD_FN void vstream_end() {}
SIMD_FN V16 vload_half(const uint16_t* p) {
    return each_four(EACH(i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
SIMD_FN V16 operator+(V16 a, V16 b) {
    return each_four(EACH(i) { return vaddq_f32(a.v[i], b.v[i]); });
}
SIMD_FN V16 operator-(V16 a, V16 b) {
    return each_four(EACH(i) { return vsubq_f32(a.v[i], b.v[i]); });
}
SIMD_FN V16 operator*(V16 a, V16 b) {
    return each_four(EACH(i) { return vmulq_f32(a.v[i], b.v[i]); });
}
SIMD_FN V16 operator/(V16 a, V16 b) {
    return each_four(EACH(i) { return vdivq_f32(a.v[i], b.v[i]); });
}
SIMD_FN V16 vfma(V16 a, V16 b, V16 c) {
    return each_four(EACH(i) { return vfmaq_f32(c.v[i], a.v[i], b.v[i]); });
}
// As maxps: the second operand when the lanes are equal or unordered. vmaxq would return the NaN.
SIMD_FN V16 vmax(V16 a, V16 b) {
    return each_four(EACH(i) { return vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
SIMD_FN V16 vmin(V16 a, V16 b) {
    return each_four(EACH(i) { return vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]); });
}
SIMD_FN V16 vabs(V16 a) {
    return each_four(EACH(i) { return vabsq_f32(a.v[i]); });
}
SIMD_FN V16 vneg(V16 a) {
    return each_four(EACH(i) { return vnegq_f32(a.v[i]); });
}
// Lane i gets lane i ^ step; step is 1, 2, 4 or 8.
template <int step>
SIMD_FN V16 vswap(V16 a) {
    if constexpr (step == 1) return each_four(EACH(i) { return vrev64q_f32(a.v[i]); });
    if constexpr (step == 2) return each_four(EACH(i) { return vextq_f32(a.v[i], a.v[i], 2); });
    if constexpr (step == 4) return {{a.v[1], a.v[0], a.v[3], a.v[2]}};
    if constexpr (step == 8) return {{a.v[2], a.v[3], a.v[0], a.v[1]}};
}
SIMD_FN V16 vselect_ge(V16 x, float bound, V16 a, V16 b) {
    const float32x4_t limit = vdupq_n_f32(bound);
    return each_four(EACH(i) { return vbslq_f32(vcgeq_f32(x.v[i], limit), a.v[i], b.v[i]); });
}
SIMD_FN V16 vscale_by_magic(V16 p, V16 t) {
    const uint32x4_t magic = vdupq_n_u32(ca::ROUND_MAGIC_BITS);
    return each_four(EACH(i) {
        const uint32x4_t n = vsubq_u32(bits_of_four(t.v[i]), magic);
        return vreinterpretq_f32_u32(vaddq_u32(bits_of_four(p.v[i]), vshlq_n_u32(n, 23)));
    });
}
SIMD_FN bool vany_nonfinite(V16 a) {
    uint32x4_t largest = vdupq_n_u32(0);
    UNROLL for (int i = 0; i < 4; i++)
        largest = vmaxq_u32(largest, bits_of_four(vabsq_f32(a.v[i])));
    return vmaxvq_u32(largest) >= ca::INFINITY_BITS;
}
SIMD_FN float vreduce_max(V16 a) {
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3])));
}
// Rounds to nearest even and keeps the low byte; the caller guarantees |x| <= 127.
SIMD_FN void vstore_i8(int8_t* p, V16 a) {
    int16x4_t half[4];
    UNROLL for (int i = 0; i < 4; i++) half[i] = vmovn_s32(vcvtnq_s32_f32(a.v[i]));
    vst1q_s8(p, vcombine_s8(vmovn_s16(vcombine_s16(half[0], half[1])),
                            vmovn_s16(vcombine_s16(half[2], half[3]))));
}
// Rounds to nearest even; the caller guarantees 0 <= x < 2^31.
SIMD_FN void vstore_i32(int32_t* p, V16 a) {
    UNROLL for (int i = 0; i < 4; i++) vst1q_s32(p + 4 * i, vcvtnq_s32_f32(a.v[i]));
}
// Lane i + lane i + 8, then + 4, + 2, + 1, as written: one number.
SIMD_FN float vtree(V16 x) {
    const float32x4_t four = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}
// Sum of 32 values as vstore_i8 would store them.
SIMD_FN int32_t vsum_rounded(V16 x, V16 y) {
    int32x4_t sum = vdupq_n_s32(0);
    UNROLL for (int i = 0; i < 4; i++)
        sum = vaddq_s32(sum, vaddq_s32(vcvtnq_s32_f32(x.v[i]), vcvtnq_s32_f32(y.v[i])));
    return vaddvq_s32(sum);
}

#else

struct V16 {
    float lane[16];
};

template <class F>
SIMD_FN V16 each_lane(F f) {
    V16 out;
    for (int i = 0; i < 16; i++) out.lane[i] = f(i);
    return out;
}

SIMD_FN V16 vset(float x) {
    return each_lane([&](int) { return x; });
}
SIMD_FN V16 vzero() { return vset(0.0f); }
SIMD_FN V16 vload(const float* p) {
    return each_lane([&](int i) { return p[i]; });
}
SIMD_FN void vstore(float* p, V16 a) {
    for (int i = 0; i < 16; i++) p[i] = a.lane[i];
}
SIMD_FN V16 vload_half(const uint16_t* p) {
    return each_lane([&](int i) { return ca::half_to_float(p[i]); });
}
SIMD_FN V16 operator+(V16 a, V16 b) {
    return each_lane([&](int i) { return a.lane[i] + b.lane[i]; });
}
SIMD_FN V16 operator-(V16 a, V16 b) {
    return each_lane([&](int i) { return a.lane[i] - b.lane[i]; });
}
SIMD_FN V16 operator*(V16 a, V16 b) {
    return each_lane([&](int i) { return a.lane[i] * b.lane[i]; });
}
SIMD_FN V16 operator/(V16 a, V16 b) {
    return each_lane([&](int i) { return a.lane[i] / b.lane[i]; });
}
SIMD_FN V16 vfma(V16 a, V16 b, V16 c) {
    return each_lane([&](int i) { return ca::fma_rn(a.lane[i], b.lane[i], c.lane[i]); });
}
// As maxps: the second operand when the lanes are equal or unordered.
SIMD_FN V16 vmax(V16 a, V16 b) {
    return each_lane([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
SIMD_FN V16 vmin(V16 a, V16 b) {
    return each_lane([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
SIMD_FN V16 vabs(V16 a) {
    return each_lane([&](int i) { return ca::float_of(ca::bits_of(a.lane[i]) & 0x7FFFFFFFu); });
}
SIMD_FN V16 vneg(V16 a) {
    return each_lane([&](int i) { return -a.lane[i]; });
}
// Lane i gets lane i ^ step; step is 1, 2, 4 or 8.
template <int step>
SIMD_FN V16 vswap(V16 a) {
    return each_lane([&](int i) { return a.lane[i ^ step]; });
}
SIMD_FN V16 vselect_ge(V16 x, float bound, V16 a, V16 b) {
    return each_lane([&](int i) { return x.lane[i] >= bound ? a.lane[i] : b.lane[i]; });
}
SIMD_FN V16 vscale_by_magic(V16 p, V16 t) {
    return each_lane([&](int i) {
        return ca::float_of(ca::bits_of(p.lane[i]) +
                             ((ca::bits_of(t.lane[i]) - ca::ROUND_MAGIC_BITS) << 23));
    });
}
SIMD_FN bool vany_nonfinite(V16 a) {
    bool any = false;
    for (int i = 0; i < 16; i++) any = any || !ca::is_finite(a.lane[i]);
    return any;
}
SIMD_FN float vreduce_max(V16 a) {
    float m = a.lane[0];
    for (int i = 1; i < 16; i++) m = a.lane[i] > m ? a.lane[i] : m;
    return m;
}
SIMD_FN void vstore_i8(int8_t* p, V16 a) {
    for (int i = 0; i < 16; i++) p[i] = static_cast<int8_t>(ca::round_to_int(a.lane[i]));
}
// Rounds to nearest even; the caller guarantees 0 <= x < 2^31.
SIMD_FN void vstore_i32(int32_t* p, V16 a) {
    for (int i = 0; i < 16; i++) p[i] = ca::round_large(a.lane[i]);
}
// Lane i + lane i + 8, then + 4, + 2, + 1, as written: one number.
SIMD_FN float vtree(V16 x) {
    for (int step = 8; step; step >>= 1)
        for (int i = 0; i < step; i++) x.lane[i] = x.lane[i] + x.lane[i + step];
    return x.lane[0];
}
// Sum of 32 values as vstore_i8 would store them.
SIMD_FN int32_t vsum_rounded(V16 x, V16 y) {
    int32_t sum = 0;
    for (int i = 0; i < 16; i++) sum += ca::round_to_int(x.lane[i]) + ca::round_to_int(y.lane[i]);
    return sum;
}

#endif

#if defined(BATCHENGINE_FREE_ORDER) && defined(SIMD_AVX512)
#include "common/free_order.h"
#else

// Lane by lane the trees of ca.h, which documents the ranges. max(0, x) is the value below the
// range: 0 for a number, and the NaN itself for a NaN, because maxps returns its second operand.
SIMD_FN V16 vexp2c(V16 x) {
    const V16 magic = vset(ca::ROUND_MAGIC);
    const V16 t = x + magic;
    const V16 r = x - (t - magic);
    V16 p = vset(1.535336188e-4f);
    p = vfma(p, r, vset(1.339887440e-3f));
    p = vfma(p, r, vset(9.618437357e-3f));
    p = vfma(p, r, vset(5.550332471e-2f));
    p = vfma(p, r, vset(2.402264791e-1f));
    p = vfma(p, r, vset(6.931472028e-1f));
    p = vfma(p, r, vset(1.0f));
    return vselect_ge(x, -126.0f, vscale_by_magic(p, t), vmax(vzero(), x));
}

SIMD_FN V16 vexpc(V16 x) {
    const V16 magic = vset(ca::ROUND_MAGIC);
    const V16 t = vfma(x, vset(ca::LOG2_E), magic);
    const V16 n = t - magic;
    V16 r = vfma(n, vset(-0.693145752f), x);
    r = vfma(n, vset(-1.42860677e-6f), r);
    V16 p = vset(1.9875691500e-4f);
    p = vfma(p, r, vset(1.3981999507e-3f));
    p = vfma(p, r, vset(8.3334519073e-3f));
    p = vfma(p, r, vset(4.1665795894e-2f));
    p = vfma(p, r, vset(1.6666665459e-1f));
    p = vfma(p, r, vset(5.0000001201e-1f));
    p = vfma(p, r * r, r);
    p = p + vset(1.0f);
    const float above_88 = 0x1.600002p6f;
    const V16 y = vselect_ge(x, above_88, vset(ca::float_of(0x7F800000u)), vscale_by_magic(p, t));
    return vselect_ge(x, -87.0f, y, vmax(vzero(), x));
}

SIMD_FN V16 vsigmoid_times(V16 x, V16 w) { return x / (vset(1.0f) + vexpc(vneg(w))); }

#endif

SIMD_FN V16 vsigmoid(V16 x) {
    return vfma(x, vzero(), vset(1.0f)) / (vset(1.0f) + vexpc(vneg(x)));
}

// max|x| of a group whose width is a multiple of 32; nonfinite when any value is NaN or infinite.
SIMD_FN float largest_magnitude(const float* x, size_t width, bool* finite) {
    V16 a = vzero(), check = vzero();
    for (size_t i = 0; i < width; i += 16) {
        const V16 v = vload(x + i);
        a = vmax(a, vabs(v));
        check = vfma(v, vzero(), check);  // NaN when v is not finite, else 0
    }
    *finite = !vany_nonfinite(check);
    return vreduce_max(a);
}

}  // namespace
