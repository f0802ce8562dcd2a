// CA-1, the canonical scalar arithmetic: the only definition of the engine's float formulas.
//
// Every function here is a fixed expression tree of correctly rounded binary32 operations, so any
// compiler that neither contracts nor reorders (-ffp-contract=off, never -ffast-math) gives the same
// bits. The vector code of simd.h repeats these trees lane by lane. Nothing here allocates or throws.
// The header also compiles as CUDA C++.
#pragma once

#include <cstdint>

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define CA1_FN __host__ __device__ __forceinline__
#else
#include <cmath>
#include <cstring>
// Internal linkage: each ISA unit must keep its own copy, or the linker could hand AVX-512 code to
// the scalar level.
#define CA1_FN static inline
#endif

namespace ca1 {

// A page holds 256 tokens: 255·127·256 and 256·2²² stay inside int32, and a page is one store unit.
constexpr int PAGE_TOKENS = 256;
// Pages fold inside groups of four (1024 tokens, absolute alignment) before the groups fold.
constexpr int SUPERPAGE_PAGES = 4;
// Width of every quantisation group: activations, queries, K.
constexpr int BLOCK = 32;
// Below this maximum 127/a could overflow, so the whole group counts as zero.
constexpr float TINY = 0x1p-96f;
// Adding and subtracting 1.5·2²³ rounds to the nearest integer, ties to even.
constexpr float ROUND_MAGIC = 12582912.0f;
constexpr uint32_t ROUND_MAGIC_BITS = 0x4B400000u;
constexpr float LOG2_E = 1.44269504f;
// The only NaN that a nonfinite result carries, so that failures have one bit pattern too.
constexpr uint32_t NAN_BITS = 0x7FC00000u;
constexpr uint16_t POISON_HALF = 0x7E00u;

CA1_FN uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(x);
#else
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
#endif
}

CA1_FN float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
#endif
}

CA1_FN float fma_rn(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
    return __fmaf_rn(a, b, c);
#else
    return std::fmaf(a, b, c);
#endif
}

CA1_FN float canonical_nan() { return float_of(NAN_BITS); }
CA1_FN bool is_finite(float x) { return (bits_of(x) & 0x7F800000u) != 0x7F800000u; }

// rint under round-to-nearest-even for |x| < 2²²: by the magic number, as every unit can.
CA1_FN int32_t round_to_int(float x) {
    return static_cast<int32_t>(bits_of(x + ROUND_MAGIC) - ROUND_MAGIC_BITS);
}

// binary16 -> binary32, exact; subnormals, infinities and NaN included.
CA1_FN float half_to_float(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t exponent = (half >> 10) & 31u;
    const uint32_t mantissa = half & 1023u;
    if (exponent == 31u) {
        // A signalling NaN turns quiet, as the hardware conversion does.
        const uint32_t quiet = mantissa ? 0x400000u : 0u;
        return float_of(sign | 0x7F800000u | quiet | (mantissa << 13));
    }
    if (exponent == 0u) {
        const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
        return float_of(sign | bits_of(magnitude));
    }
    return float_of(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

// binary32 -> binary16, round to nearest even; overflow gives infinity, subnormals are kept.
CA1_FN uint16_t float_to_half(float x) {
    const uint32_t bits = bits_of(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > 0x7F800000u)  // NaN: keep the top payload bits, quiet
        return static_cast<uint16_t>(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));
    if (magnitude >= 0x477FF000u)  // 65520 and above round to infinity
        return static_cast<uint16_t>(sign | 0x7C00u);
    if (magnitude < 0x38800000u) {  // below 2^-14: the result is subnormal, one unit = 2^-24
        const float units = float_of(magnitude) * 0x1p24f;
        return static_cast<uint16_t>(sign | static_cast<uint32_t>(round_to_int(units)));
    }
    const uint32_t odd = (magnitude >> 13) & 1u;
    return static_cast<uint16_t>(sign | ((magnitude + 0xFFFu + odd - 0x38000000u) >> 13));
}

// 2^x, exact for integers; 0 below -126 so that no subnormal appears. Callers keep x <= 127.
// |error| < 2 ulp. NaN gives NaN.
CA1_FN float exp2c(float x) {
    const float t = x + ROUND_MAGIC;
    const float r = x - (t - ROUND_MAGIC);
    float p = 1.535336188e-4f;
    p = fma_rn(p, r, 1.339887440e-3f);
    p = fma_rn(p, r, 9.618437357e-3f);
    p = fma_rn(p, r, 5.550332471e-2f);
    p = fma_rn(p, r, 2.402264791e-1f);
    p = fma_rn(p, r, 6.931472028e-1f);
    p = fma_rn(p, r, 1.0f);
    const float y = float_of(bits_of(p) + ((bits_of(t) - ROUND_MAGIC_BITS) << 23));
    return x >= -126.0f ? y : (x < -126.0f ? 0.0f : x);
}

// e^x: 0 below -87, +infinity above 88, NaN gives NaN.
CA1_FN float expc(float x) {
    const float t = fma_rn(x, LOG2_E, ROUND_MAGIC);
    const float n = t - ROUND_MAGIC;
    float r = fma_rn(n, -0.693145752f, x);
    r = fma_rn(n, -1.42860677e-6f, r);
    float p = 1.9875691500e-4f;
    p = fma_rn(p, r, 1.3981999507e-3f);
    p = fma_rn(p, r, 8.3334519073e-3f);
    p = fma_rn(p, r, 4.1665795894e-2f);
    p = fma_rn(p, r, 1.6666665459e-1f);
    p = fma_rn(p, r, 5.0000001201e-1f);
    p = fma_rn(p, r * r, r);
    p = p + 1.0f;
    const float y = float_of(bits_of(p) + ((bits_of(t) - ROUND_MAGIC_BITS) << 23));
    if (x >= -87.0f) return x > 88.0f ? float_of(0x7F800000u) : y;
    return x < -87.0f ? 0.0f : x;
}

// ln x for finite normal x > 0: exponent split around sqrt(1/2), then one fixed polynomial.
CA1_FN float logc(float x) {
    const uint32_t shifted = bits_of(x) - 0x3F3504F3u;
    const float e = static_cast<float>(static_cast<int32_t>(shifted) >> 23);
    const float z = float_of((shifted & 0x007FFFFFu) + 0x3F3504F3u) - 1.0f;
    float p = 7.0376836292e-2f;
    p = fma_rn(p, z, -1.1514610310e-1f);
    p = fma_rn(p, z, 1.1676998740e-1f);
    p = fma_rn(p, z, -1.2420140846e-1f);
    p = fma_rn(p, z, 1.4249322787e-1f);
    p = fma_rn(p, z, -1.6668057665e-1f);
    p = fma_rn(p, z, 2.0000714765e-1f);
    p = fma_rn(p, z, -2.4999993993e-1f);
    p = fma_rn(p, z, 3.3333331174e-1f);
    const float z2 = z * z;
    float y = (p * z) * z2;
    y = fma_rn(e, -2.12194440e-4f, y);
    y = fma_rn(z2, -0.5f, y);
    return fma_rn(e, 0.693359375f, z + y);
}

CA1_FN float silu(float x) { return x / (1.0f + expc(-x)); }

}  // namespace ca1
