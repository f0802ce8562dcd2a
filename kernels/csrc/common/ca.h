// The canonical arithmetic CA-3: the scalar definition of every float formula of the engine.
//
// docs/numerics.md states the rules; this header spells them. Every function is a fixed expression
// tree of correctly rounded binary32 operations, written with the wrappers *_rn, which neither a C++
// compiler (-ffp-contract=off, never -ffast-math) nor nvcc may merge. The vector code of the levels
// repeats these trees lane by lane. Nothing here allocates or throws. Compiles as C++ and CUDA C++.
#pragma once

#if defined(__CUDACC_RTC__)
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
#else
#include <cmath>
#include <cstdint>
#include <cstring>
#endif

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define CA_FN __host__ __device__ __forceinline__
#else
// Internal linkage: each ISA unit must keep its own copy, or the linker could hand AVX-512 code to
// the scalar level.
#define CA_FN [[maybe_unused]] static inline
#endif

namespace ca {

// ---------------------------------------------------------------------------------- constants

// A page holds 256 tokens: 255·127·256 and 256·2²² stay inside int32, and a page is one store unit.
constexpr int PAGE_TOKENS = 256;
// Pages fold inside groups of four (1024 tokens, absolute alignment) before the groups fold.
constexpr int SUPERPAGE_PAGES = 4;
// Width of every quantisation group: activations, queries, K.
constexpr int BLOCK = 32;
// Products of so many k are summed before they join the running total of an output.
constexpr int SEGMENT = 1024;
// A group below this maximum counts as zero; a group that reaches LARGE is nonfinite. In between, the
// product of its scale and any fp16 scale is a normal number, so it is exact.
constexpr float TINY = 0x1p-90f;
constexpr float LARGE = 0x1p96f;
// Adding and subtracting 1.5·2²³ rounds to the nearest integer, ties to even.
constexpr float ROUND_MAGIC = 12582912.0f;
constexpr uint32_t ROUND_MAGIC_BITS = 0x4B400000u;
constexpr float LOG2_E = 1.44269504f;
// The only NaN that a nonfinite result carries, so that failures have one bit pattern too.
constexpr uint32_t NAN_BITS = 0x7FC00000u;
constexpr uint32_t INFINITY_BITS = 0x7F800000u;
constexpr uint16_t POISON_HALF = 0x7E00u;
constexpr uint16_t INFINITY_HALF = 0x7C00u;

// --------------------------------------------------------------------------------- primitives

CA_FN uint32_t bits_of(float x) {
#if defined(__CUDA_ARCH__)
    return __float_as_uint(x);
#else
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
#endif
}

CA_FN float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
#endif
}

#if defined(__CUDA_ARCH__)
CA_FN float add_rn(float a, float b) { return __fadd_rn(a, b); }
CA_FN float sub_rn(float a, float b) { return __fsub_rn(a, b); }
CA_FN float mul_rn(float a, float b) { return __fmul_rn(a, b); }
CA_FN float div_rn(float a, float b) { return __fdiv_rn(a, b); }
CA_FN float sqrt_rn(float a) { return __fsqrt_rn(a); }
CA_FN float fma_rn(float a, float b, float c) { return __fmaf_rn(a, b, c); }
CA_FN float float_rn(int64_t n) { return __ll2float_rn(n); }
CA_FN float ceil_exact(float a) { return ceilf(a); }
#elif defined(BATCHENGINE_SIMT)
// As a GPU: every operation whose result is NaN gives the same one, whatever its operands are.
[[maybe_unused]] static inline float made(float x) { return x == x ? x : float_of(0x7FFFFFFFu); }
CA_FN float add_rn(float a, float b) { return made(a + b); }
CA_FN float sub_rn(float a, float b) { return made(a - b); }
CA_FN float mul_rn(float a, float b) { return made(a * b); }
CA_FN float div_rn(float a, float b) { return made(a / b); }
CA_FN float sqrt_rn(float a) { return made(__builtin_sqrtf(a)); }
CA_FN float fma_rn(float a, float b, float c) { return made(std::fmaf(a, b, c)); }
CA_FN float float_rn(int64_t n) { return static_cast<float>(n); }
CA_FN float ceil_exact(float a) { return made(__builtin_ceilf(a)); }
#else
CA_FN float add_rn(float a, float b) { return a + b; }
CA_FN float sub_rn(float a, float b) { return a - b; }
CA_FN float mul_rn(float a, float b) { return a * b; }
CA_FN float div_rn(float a, float b) { return a / b; }
CA_FN float sqrt_rn(float a) { return __builtin_sqrtf(a); }
CA_FN float fma_rn(float a, float b, float c) { return std::fmaf(a, b, c); }
CA_FN float float_rn(int64_t n) { return static_cast<float>(n); }
CA_FN float ceil_exact(float a) { return __builtin_ceilf(a); }
#endif

CA_FN float canonical_nan() { return float_of(NAN_BITS); }
CA_FN bool is_finite(float x) { return (bits_of(x) & INFINITY_BITS) != INFINITY_BITS; }
CA_FN uint32_t magnitude_bits(float x) { return bits_of(x) & 0x7FFFFFFFu; }

// 2^e for -126 <= e <= 127.
CA_FN float power_of_two(int32_t e) { return float_of(static_cast<uint32_t>(e + 127) << 23); }

// rint under round-to-nearest-even for |x| <= 2²²: by the magic number, as every unit can.
CA_FN int32_t round_to_int(float x) {
    return static_cast<int32_t>(bits_of(add_rn(x, ROUND_MAGIC)) - ROUND_MAGIC_BITS);
}

// rint of 0 <= x < 2³¹, ties to even: from 2²² on, halves at most are left, then nothing.
CA_FN int32_t round_large(float x) {
    if (x < 0x1p22f) return round_to_int(x);
    if (x >= 0x1p23f) return static_cast<int32_t>(x);
    return static_cast<int32_t>(bits_of(add_rn(x, 0x1p23f)) - bits_of(0x1p23f));
}

// binary16 -> binary32, exact; subnormals, infinities and NaN included.
CA_FN float half_to_float(uint16_t half) {
#if defined(__CUDACC_RTC__)
    float x;  // without a branch, so that loads of several scales are under way at once
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(half));
    return x;
#else
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
    const uint32_t exponent = (half >> 10) & 31u;
    const uint32_t mantissa = half & 1023u;
    if (exponent == 31u) {
#if defined(BATCHENGINE_SIMT)
        if (mantissa) return made(float_of(NAN_BITS));
#endif
        // A signalling NaN turns quiet, as the hardware conversion does.
        const uint32_t quiet = mantissa ? 0x400000u : 0u;
        return float_of(sign | INFINITY_BITS | quiet | (mantissa << 13));
    }
    if (exponent == 0u) {
        const float magnitude = mul_rn(static_cast<float>(mantissa), 0x1p-24f);
        return float_of(sign | bits_of(magnitude));
    }
    return float_of(sign | ((exponent + 112u) << 23) | (mantissa << 13));
#endif
}

// binary32 -> binary16, round to nearest even; overflow gives infinity, subnormals are kept.
CA_FN uint16_t float_to_half(float x) {
    const uint32_t bits = bits_of(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    if (magnitude > INFINITY_BITS)  // NaN: keep the top payload bits, quiet
        return static_cast<uint16_t>(sign | 0x7E00u | ((magnitude >> 13) & 0x3FFu));
    if (magnitude >= 0x477FF000u)  // 65520 and above round to infinity
        return static_cast<uint16_t>(sign | INFINITY_HALF);
    if (magnitude < 0x38800000u) {  // below 2^-14: the result is subnormal, one unit = 2^-24
        const float units = mul_rn(float_of(magnitude), 0x1p24f);
        return static_cast<uint16_t>(sign | static_cast<uint32_t>(round_to_int(units)));
    }
    const uint32_t odd = (magnitude >> 13) & 1u;
    return static_cast<uint16_t>(sign | ((magnitude + 0xFFFu + odd - 0x38000000u) >> 13));
}

CA_FN float bf16_to_float(uint16_t half) { return float_of(static_cast<uint32_t>(half) << 16); }

// ------------------------------------------------------------------ rule 5: exp, ln, activations

// p times 2^n, t = n + ROUND_MAGIC: n is added to the exponent field of p.
CA_FN float scale_by_magic(float p, float t) {
    return float_of(bits_of(p) + ((bits_of(t) - ROUND_MAGIC_BITS) << 23));
}

// 2^x, exact for integers; 0 below -126 so that no subnormal appears. Callers keep x <= 127.
// |error| < 2 ulp. NaN gives NaN.
CA_FN float exp2c(float x) {
    const float t = add_rn(x, ROUND_MAGIC);
    const float r = sub_rn(x, sub_rn(t, ROUND_MAGIC));
    float p = 1.535336188e-4f;
    p = fma_rn(p, r, 1.339887440e-3f);
    p = fma_rn(p, r, 9.618437357e-3f);
    p = fma_rn(p, r, 5.550332471e-2f);
    p = fma_rn(p, r, 2.402264791e-1f);
    p = fma_rn(p, r, 6.931472028e-1f);
    p = fma_rn(p, r, 1.0f);
    const float y = scale_by_magic(p, t);
    return x >= -126.0f ? y : (x < -126.0f ? 0.0f : x);
}

// e^x: 0 below -87, +infinity above 88, NaN gives NaN.
CA_FN float expc(float x) {
    const float t = fma_rn(x, LOG2_E, ROUND_MAGIC);
    const float n = sub_rn(t, ROUND_MAGIC);
    float r = fma_rn(n, -0.693145752f, x);
    r = fma_rn(n, -1.42860677e-6f, r);
    float p = 1.9875691500e-4f;
    p = fma_rn(p, r, 1.3981999507e-3f);
    p = fma_rn(p, r, 8.3334519073e-3f);
    p = fma_rn(p, r, 4.1665795894e-2f);
    p = fma_rn(p, r, 1.6666665459e-1f);
    p = fma_rn(p, r, 5.0000001201e-1f);
    p = fma_rn(p, mul_rn(r, r), r);
    p = add_rn(p, 1.0f);
    const float y = scale_by_magic(p, t);
    if (x >= -87.0f) return x > 88.0f ? float_of(INFINITY_BITS) : y;
    return x < -87.0f ? 0.0f : x;
}

// ln x for finite normal x > 0: exponent split around sqrt(1/2), then one fixed polynomial.
// |error| < 0.9 ulp, measured against binary64 on each 101st number.
CA_FN float logc(float x) {
    const uint32_t shifted = bits_of(x) - 0x3F3504F3u;
    const float e = static_cast<float>(static_cast<int32_t>(shifted) >> 23);
    const float z = sub_rn(float_of((shifted & 0x007FFFFFu) + 0x3F3504F3u), 1.0f);
    float p = 7.0376836292e-2f;
    p = fma_rn(p, z, -1.1514610310e-1f);
    p = fma_rn(p, z, 1.1676998740e-1f);
    p = fma_rn(p, z, -1.2420140846e-1f);
    p = fma_rn(p, z, 1.4249322787e-1f);
    p = fma_rn(p, z, -1.6668057665e-1f);
    p = fma_rn(p, z, 2.0000714765e-1f);
    p = fma_rn(p, z, -2.4999993993e-1f);
    p = fma_rn(p, z, 3.3333331174e-1f);
    const float z2 = mul_rn(z, z);
    float y = mul_rn(mul_rn(p, z), z2);
    y = fma_rn(e, -2.12194440e-4f, y);
    y = fma_rn(z2, -0.5f, y);
    return fma_rn(e, 0.693359375f, add_rn(z, y));
}

// x times the logistic function of w.
CA_FN float sigmoid_times(float x, float w) { return div_rn(x, add_rn(1.0f, expc(-w))); }

// The logistic function; NaN where x is not finite.
CA_FN float sigmoid(float x) { return div_rn(fma_rn(x, 0.0f, 1.0f), add_rn(1.0f, expc(-x))); }

// The hyperbolic tangent: a polynomial below TANH_SMALL in magnitude, else by the exponential function.
// |error| < 2.5·2^-24 · |result|, measured against binary64 on each 101st number. NaN gives NaN.
constexpr float TANH_SMALL = 0.625f;
CA_FN float tanhc(float x) {
    const float a = float_of(bits_of(x) & 0x7FFFFFFFu), z = mul_rn(x, x);
    float p = -5.70498872745e-3f;
    p = fma_rn(p, z, 2.06390887954e-2f);
    p = fma_rn(p, z, -5.37397155531e-2f);
    p = fma_rn(p, z, 1.33314422036e-1f);
    p = fma_rn(p, z, -3.33332819422e-1f);
    const float small = fma_rn(mul_rn(p, z), x, x);
    const float t = expc(mul_rn(a, -2.0f));
    const float large = div_rn(sub_rn(1.0f, t), add_rn(1.0f, t));
    return a >= TANH_SMALL ? (x >= 0.0f ? large : -large) : small;
}

constexpr float SQRT_HALF = 0.707106769f;

// A value with a soft bound: RN(cap · tanh(RN(x · inverse))), inverse = RN(1 / cap). NaN where x is not
// finite, since the bound would hide an infinity.
CA_FN float capped(float x, float inverse, float cap) {
    return fma_rn(x, 0.0f, mul_rn(cap, tanhc(mul_rn(x, inverse))));
}

// ln(1 + e^x), and x itself above 20. |error| < 2.4·2^-24 · max(1, result), measured against binary64;
// below -16.7, where 1 + e^x is 1, it is 0. NaN gives NaN, -infinity gives 0.
CA_FN float softplus(float x) { return x <= 20.0f ? logc(add_rn(1.0f, expc(x))) : x; }

// What a feed-forward part makes of the products of its gate and up matrices.
enum class Activation : int { silu, oai, gelu, limited };
constexpr int ACTIVATIONS = 4;

// gelu with tanh: x/2 (1 + tanh u) is x times the logistic function of 2u, u = sqrt(2/pi) (x + 0.044715 x³).
constexpr float GELU_LINEAR = 1.5957691216f;
constexpr float GELU_CUBIC = 0.0713548163f;

// 2u. Where x² or the product exceeds the numbers it is an infinity of the sign of x, which is right.
CA_FN float gelu_argument(float x) {
    return mul_rn(x, fma_rn(mul_rn(x, x), GELU_CUBIC, GELU_LINEAR));
}

// The activation of gpt-oss holds both products in bounds, and takes the gate times a slope.
constexpr float OAI_LIMIT = 7.0f;
constexpr float OAI_SLOPE = 1.702f;

// 1, or NaN when a value is not finite: the bounds of `oai` and `limited` would hide an infinity.
CA_FN float one_if_finite(float gate, float up) {
    return fma_rn(gate, 0.0f, fma_rn(up, 0.0f, 1.0f));
}

// The value, or the bound of the same sign where it is beyond; bound > 0.
CA_FN float within(float bound, float x) {
    const float above = x > -bound ? x : -bound;
    return above < bound ? above : bound;
}

// RN(sg(x, w) · factor) in each activation, sg being sigmoid_times. `limited` is silu with a bound of both: limit > 0.
CA_FN float gated(Activation activation, float gate, float up, float limit = 0.0f) {
    float x = gate, w = gate, factor = up, most = float_of(INFINITY_BITS);
    if (activation == Activation::oai) {
        x = gate < OAI_LIMIT ? gate : OAI_LIMIT;
        w = mul_rn(x, OAI_SLOPE);
        factor = add_rn(within(OAI_LIMIT, up), one_if_finite(gate, up));
    } else if (activation == Activation::gelu) {
        w = gelu_argument(gate);
    } else if (activation == Activation::limited) {
        factor = mul_rn(within(limit, up), one_if_finite(gate, up));
        most = limit;
    }
    const float share = sigmoid_times(x, w);
    return mul_rn(share > most ? most : share, factor);
}

// The activation of a feed-forward part without a gate: max(x, 0)². NaN where x is minus infinity or NaN.
CA_FN float relu2(float x) {
    const float r = x >= 0.0f ? x : mul_rn(x, 0.0f);
    return mul_rn(r, r);
}

// ------------------------------------------------- rule 1: activations as int8 and a short scale

enum class Group { used, zero, nonfinite };

// Kind of a group whose largest magnitude has these bits; NaN and infinities are the largest of all.
CA_FN Group group_kind(uint32_t largest) {
    if (largest >= bits_of(LARGE)) return Group::nonfinite;
    return largest < bits_of(TINY) ? Group::zero : Group::used;
}

// The scale of a used group: the largest magnitude / 127, rounded up to seven significant bits, so that
// its product with an fp16 scale, with a sum of 32 q, and with an fp16 scale times a six-bit integer is
// exact. The quotient is a product with 3C010204, the binary32 number next to 1/127.
CA_FN float group_scale(uint32_t largest) {
    const float quotient = mul_rn(float_of(largest), float_of(0x3C010204u));
    return float_of((bits_of(quotient) + 0x1FFFFu) & 0xFFFE0000u);
}

CA_FN uint32_t largest_of(const float* x, int n) {
    uint32_t largest = 0;
    for (int i = 0; i < n; i++)
        if (magnitude_bits(x[i]) > largest) largest = magnitude_bits(x[i]);
    return largest;
}

// 32 values -> q in -127..127 and their scale; a zero group has q = 0 and scale 1. False, with the
// values of a zero group, when a value is NaN, infinite or too large: then the whole row is nonfinite.
CA_FN bool quantise_group(const float* x, int8_t* q, float* scale) {
    const uint32_t largest = largest_of(x, BLOCK);
    const Group kind = group_kind(largest);
    *scale = kind == Group::used ? group_scale(largest) : 1.0f;
    const float inverse = kind == Group::used ? div_rn(1.0f, *scale) : 0.0f;
    for (int i = 0; i < BLOCK; i++)
        q[i] = kind == Group::nonfinite
                   ? int8_t{0}
                   : static_cast<int8_t>(round_to_int(mul_rn(x[i], inverse)));
    return kind != Group::nonfinite;
}

// ------------------------------------------------------------------------ rule 2: matrix products

// One step of an output's chain; the product of the scales is exact.
CA_FN float step(float acc, int32_t integer, float weight_scale, float scale) {
    return fma_rn(static_cast<float>(integer), mul_rn(weight_scale, scale), acc);
}

// The same where the weight's scale is any power of two: its product with a small `scale` would be no
// normal number. That of an integer below 2^17 and `scale` is, and it is exact.
CA_FN float step_of_power(float acc, int32_t integer, float power, float scale) {
    return fma_rn(mul_rn(static_cast<float>(integer), scale), power, acc);
}

// 2^(exponent - 127) of an exponent field of binary32; +0 of field 0.
CA_FN float power_of_field(uint32_t field) { return float_of(field << 23); }

// ------------------------------------------------------------------------------- rule 3: RMS norm

// Sum of x[i]²: lane i mod 64 is a chain of fma, then the tree 32, 16, 8, 4, 2, 1.
CA_FN float sum_of_squares(const float* x, int n) {
    float lane[64];
    for (int i = 0; i < 64; i++) lane[i] = 0.0f;
    for (int i = 0; i < n; i++) lane[i % 64] = fma_rn(x[i], x[i], lane[i % 64]);
    for (int width = 32; width >= 1; width /= 2)
        for (int i = 0; i < width; i++) lane[i] = add_rn(lane[i], lane[i + width]);
    return lane[0];
}

// The factor of a row of n values: RN(1 / RN(sqrt(RN(RN(sum / n) + eps)))).
CA_FN float norm_factor(float sum, int n, float eps) {
    return div_rn(1.0f, sqrt_rn(add_rn(div_rn(sum, static_cast<float>(n)), eps)));
}

CA_FN float norm_value(float x, float factor, float w) { return mul_rn(mul_rn(x, factor), w); }

// ------------------------------------------------------- rule 4: RoPE and the transform of heads

CA_FN void rotate(float& x0, float& x1, float cosine, float sine) {
    const float y0 = fma_rn(x0, cosine, -mul_rn(x1, sine));
    x1 = fma_rn(x0, sine, mul_rn(x1, cosine));
    x0 = y0;
}

// The values that one Hadamard transform of a head covers: the largest power of two in head_dim.
CA_FN int hadamard_width(int head_dim) { return head_dim & -head_dim; }

// The same of a head of which the dims from v_first on are V, too: none covers dims of both parts.
CA_FN int transform_width(int head_dim, int v_first) { return hadamard_width(head_dim | v_first); }

// The transform of `width` values, a power of two: pairs (i, i + step) of steps 1, 2, 4 ... width / 2.
CA_FN void hadamard(float* x, int width) {
    for (int step = 1; step < width; step *= 2)
        for (int i = 0; i < width; i++) {
            if (i & step) continue;
            const float sum = add_rn(x[i], x[i + step]);
            x[i + step] = sub_rn(x[i], x[i + step]);
            x[i] = sum;
        }
}

// ------------------------------------------------------------------------ rule 6: K and V as int8

// The fp16 scale of a group of K or V: RN16(RN(a/127)). 0: all q are 0. POISON_HALF: a value is NaN,
// infinite, or too large for fp16; all q are 0.
CA_FN uint16_t kv8_scale(uint32_t largest) {
    if (largest >= INFINITY_BITS) return POISON_HALF;
    const uint16_t d = float_to_half(div_rn(float_of(largest), 127.0f));
    return d == INFINITY_HALF ? POISON_HALF : d;
}

CA_FN float kv8_inverse(uint16_t d) { return div_rn(1.0f, half_to_float(d)); }

CA_FN int8_t kv8_value(float x, float inverse) {
    const float scaled = mul_rn(x, inverse);
    const float low = scaled > -127.0f ? scaled : -127.0f;
    return static_cast<int8_t>(round_to_int(low < 127.0f ? low : 127.0f));
}

CA_FN void kv8_group(const float* x, int n, int8_t* q, uint16_t* d) {
    *d = kv8_scale(largest_of(x, n));
    const bool empty = *d == 0 || *d == POISON_HALF;
    const float inverse = empty ? 0.0f : kv8_inverse(*d);
    for (int i = 0; i < n; i++) q[i] = empty ? int8_t{0} : kv8_value(x[i], inverse);
}

// ------------------------------------------------------------------------------ rule 7: attention

// A query's head: 32-wide groups of RN(x * factor), quantised by rule 1; `factor` is the attention
// scale in base 2. False, with zeros, when any group is nonfinite.
CA_FN bool quantise_query(const float* x, int head_dim, float factor, int8_t* q, float* scale) {
    bool finite = true;
    for (int b = 0; b < head_dim / BLOCK; b++) {
        float scaled[BLOCK];
        for (int i = 0; i < BLOCK; i++) scaled[i] = mul_rn(x[b * BLOCK + i], factor);
        finite = quantise_group(scaled, q + b * BLOCK, scale + b) && finite;
    }
    return finite;
}

// A score is the chain of `step` over the groups of a head, from +0: integer = K·q of the group,
// scale = the group's fp16 scale of K.

// Exponent of the scale of a page row's weights: the largest / 2^e rounds to 8192..16383.
CA_FN int32_t weight_exponent(uint32_t largest) {
    return static_cast<int32_t>((largest + 0x200u) >> 23) - 140;
}

struct WeightUnit {
    float unit;     // a power of two, or 0 when all weights count as 0
    float inverse;  // 1/unit, or 0
};

// The unit of weights whose largest has these bits.
CA_FN WeightUnit weight_unit(uint32_t largest) {
    if (largest < bits_of(TINY)) return {0.0f, 0.0f};
    const int32_t e = weight_exponent(largest);
    return {power_of_two(e), power_of_two(-e)};
}

struct PageSoftmax {
    float m;    // base-2 maximum, an integer
    float l;    // denominator
    float unit; // of the weights: a power of two, or 0 when all are 0
};

// Scores and V scales of the n visible tokens of a page -> weights in 0..16383. `p` has room for n
// values. False when a score or a weight is not finite.
CA_FN bool page_softmax(const float* score, const uint16_t* v_scale, int n, float* p, int32_t* weight,
                        PageSoftmax& row) {
    float top = score[0];
    for (int t = 0; t < n; t++) {
        if (!is_finite(score[t])) return false;
        if (score[t] > top) top = score[t];
    }
    row.m = add_rn(ceil_exact(top), 0.0f);
    int32_t sum = 0;
    uint32_t largest = 0;
    for (int t = 0; t < n; t++) {
        const float e = exp2c(sub_rn(score[t], row.m));
        sum += round_to_int(mul_rn(e, 0x1p22f));
        p[t] = mul_rn(e, half_to_float(v_scale[t]));
        if (!is_finite(p[t])) return false;
        if (magnitude_bits(p[t]) > largest) largest = magnitude_bits(p[t]);
    }
    row.l = mul_rn(float_rn(sum), 0x1p-22f);
    // A page whose unit is 0 adds nothing to the numerator, but its tokens keep their share of l.
    const WeightUnit weights = weight_unit(largest);
    row.unit = weights.unit;
    for (int t = 0; t < n; t++) weight[t] = round_to_int(mul_rn(p[t], weights.inverse));
    return true;
}

// One value of a page's numerator: `sum` of weight * v over its tokens, exact in int32.
CA_FN float numerator(int32_t sum, float unit) { return mul_rn(float_rn(sum), unit); }

// Adds the partial that follows an accumulator (m, l, o) to it. The side with the smaller m shrinks
// by an exact power of two; the other one is added as it is. One with l = 0 has no token: such a partial
// changes nothing, and such an accumulator becomes the partial.
CA_FN void fold(float& m, float& l, float* o, float m_next, float l_next, const float* o_next,
                int head_dim) {
    const bool is_kept = l_next == 0.0f, is_taken = !is_kept && l == 0.0f;
    const bool is_larger = m_next > m;
    const float shrink = exp2c(is_larger ? sub_rn(m, m_next) : sub_rn(m_next, m));
    for (int i = 0; i < head_dim; i++) {
        const float sum = is_larger ? fma_rn(o[i], shrink, o_next[i]) : fma_rn(o_next[i], shrink, o[i]);
        o[i] = is_kept ? o[i] : is_taken ? o_next[i] : sum;
    }
    const float both = is_larger ? fma_rn(l, shrink, l_next) : fma_rn(l_next, shrink, l);
    l = is_kept ? l : is_taken ? l_next : both;
    m = !is_kept && (is_taken || is_larger) ? m_next : m;
}

// A sink as the last partial of its head; its o is 0.
struct Sink {
    float m;
    float l;
};

// A logit that takes part in the softmax of every row, and has no V.
CA_FN Sink sink_of(float logit) {
    const float z = mul_rn(logit, LOG2_E);
    const float m = add_rn(ceil_exact(z), 0.0f);
    const int32_t share = round_to_int(mul_rn(exp2c(sub_rn(z, m)), 0x1p22f));
    return {m, mul_rn(float_rn(share), 0x1p-22f)};
}

// The output row of an accumulator: RN(o * RN(1/l)); an l that is not finite gives NaN.
CA_FN void finish(float l, const float* o, int head_dim, float* out) {
    const float r = is_finite(l) ? div_rn(1.0f, l) : canonical_nan();
    for (int i = 0; i < head_dim; i++) out[i] = is_finite(l) ? mul_rn(o[i], r) : canonical_nan();
}

// ------------------------------------------------------------------------------ rule 10: sampling

// A logit after the penalties of a token that occurs `count` times in the history.
CA_FN float penalised(float x, int32_t count, float repetition, float frequency, float presence) {
    const float y = x > 0.0f ? div_rn(x, repetition) : mul_rn(x, repetition);
    return sub_rn(sub_rn(y, mul_rn(static_cast<float>(count), frequency)), presence);
}

// The lowest logit after penalties, so that none is minus infinity.
constexpr float LOGIT_LOWEST = -0x1.fffffep127f;

// An unsigned integer that rises as the logit falls; equal for both zeros.
CA_FN uint32_t falling_key(float x) {
    const uint32_t bits = bits_of(add_rn(x, 0.0f));
    return bits & 0x80000000u ? bits : ~bits & 0x7FFFFFFFu;
}

// The weight of a candidate, 1 for the largest logit.
CA_FN float weight_of(float x, float largest, float temperature) {
    return expc(div_rn(sub_rn(x, largest), temperature));
}

// A weight in 0..1 as an integer, so that sums have no order: rint(w * 2^30).
CA_FN int32_t integer_weight(float w) { return round_large(mul_rn(w, 0x1p30f)); }

// floor(total * fraction / 2^32) for total < 2^62.
CA_FN int64_t share_of(int64_t total, uint32_t fraction) {
    const uint64_t high = static_cast<uint64_t>(total) >> 32, low = static_cast<uint32_t>(total);
    return static_cast<int64_t>(high * fraction + ((low * fraction) >> 32));
}

// top_p in [0, 1) as a fraction of 2^32, rounded down.
CA_FN uint32_t fraction_of(float p) { return static_cast<uint32_t>(mul_rn(p, 0x1p32f)); }

// Philox4x32-10, key = seed, counter = (position, draw, 0).
CA_FN void philox(uint64_t seed, uint64_t position, uint32_t draw, uint32_t out[4]) {
    uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    out[0] = static_cast<uint32_t>(position);
    out[1] = static_cast<uint32_t>(position >> 32);
    out[2] = draw;
    out[3] = 0;
    for (int round = 0; round < 10; round++) {
        const uint64_t a = uint64_t{0xD2511F53u} * out[0], b = uint64_t{0xCD9E8D57u} * out[2];
        out[0] = static_cast<uint32_t>(b >> 32) ^ out[1] ^ key[0];
        out[1] = static_cast<uint32_t>(b);
        out[2] = static_cast<uint32_t>(a >> 32) ^ out[3] ^ key[1];
        out[3] = static_cast<uint32_t>(a);
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
}

// ln of the sum of expc(x - largest) over a row, from the sum of their integer weights.
CA_FN float log_of_sum(int64_t sum) { return logc(mul_rn(float_rn(sum), 0x1p-30f)); }

CA_FN float log_probability(float x, float largest, float log_sum) {
    return sub_rn(sub_rn(x, largest), log_sum);
}

// ------------------------------------------------------- rule 11: experts; experts/choice.h has their choice

// The sum of a token's experts is the chain of add_expert over them, by ascending id, from +0.
CA_FN float add_expert(float sum, float weight, float y) { return fma_rn(weight, y, sum); }

// ------------------------------------------------------------------- rule 12: gated delta networks

// Width of a chain: the products over a head's keys are summed in chains of so many.
constexpr int CHAIN = 32;

// One channel of the causal convolution: n inputs, the oldest first, `stride` apart.
CA_FN float convolved(const float* x, int stride, const float* w, int n) {
    float sum = mul_rn(x[0], w[0]);
    for (int j = 1; j < n; j++) sum = fma_rn(x[j * stride], w[j], sum);
    return sum;
}

// The factor that makes a head of q or k a unit vector, from its sum_of_squares.
CA_FN float unit_factor(float sum, float eps) { return div_rn(1.0f, sqrt_rn(add_rn(sum, eps))); }

// What a token leaves of the state: e^(a · softplus(alpha + dt_bias)); NaN where the sum is not finite.
CA_FN float state_decay(float alpha, float dt_bias, float a) {
    const float x = add_rn(alpha, dt_bias);
    return fma_rn(x, 0.0f, expc(mul_rn(a, softplus(x))));
}

// One number of n chains: neighbours are added, and their sums; an odd one joins the next round.
CA_FN float fold_chains(float* chain, int n) {
    for (; n > 1; n = (n + 1) / 2) {
        for (int c = 0; c < n / 2; c++) chain[c] = add_rn(chain[2 * c], chain[2 * c + 1]);
        if (n % 2) chain[n / 2] = chain[n - 1];
    }
    return chain[0];
}

// The product of one column of a state, whose values are `stride` apart, and a key or query.
CA_FN float column_product(const float* s, int stride, const float* x, int key_dim) {
    float chain[256 / CHAIN];
    for (int c = 0; c < key_dim / CHAIN; c++) {
        chain[c] = 0.0f;
        for (int i = c * CHAIN; i < (c + 1) * CHAIN; i++)
            chain[c] = fma_rn(x[i], s[i * stride], chain[c]);
    }
    return fold_chains(chain, key_dim / CHAIN);
}

// What a column of the state learns, u being its product with the key before the token.
CA_FN float state_delta(float v, float u, float decay, float beta) {
    return mul_rn(sub_rn(v, mul_rn(decay, u)), beta);
}

CA_FN float state_value(float s, float decay, float k, float delta) {
    return fma_rn(k, delta, mul_rn(decay, s));
}

// The factor of the products with the query.
CA_FN float state_scale(int key_dim) {
    return div_rn(1.0f, sqrt_rn(static_cast<float>(key_dim)));
}

// One output: the norm of a head's outputs (rule 3), then the gate.
CA_FN float gated_norm(float o, float factor, float w, float z) {
    return mul_rn(norm_value(o, factor, w), sigmoid_times(z, z));
}

// The output gate of attention.
CA_FN float gate_value(float y, float gate) { return mul_rn(y, sigmoid(gate)); }

// A residual stream and a branch, of which the token takes the share sigmoid(gate).
CA_FN float add_share(float h, float share, float x) { return add_rn(h, mul_rn(share, x)); }

// ------------------------------------------------------------------------------ rule 14: Mamba-2

// The step size of a token, softplus(dt + dt_bias). state_decay of the same values is NaN where this would
// hide an infinity.
CA_FN float step_size(float dt, float dt_bias) { return softplus(add_rn(dt, dt_bias)); }

// One output before the norm: the product of a column of the state with the query, and the input x times
// `direct`, which is D of the head; then the gate.
CA_FN float gated_state(float o, float direct, float x, float z) {
    return mul_rn(fma_rn(direct, x, o), sigmoid_times(z, z));
}

}  // namespace ca
