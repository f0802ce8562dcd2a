// The words of CUDA C++ that ca.h uses, for a C++ compiler. NVRTC has no standard headers.
#pragma once

#if defined(__CUDACC_RTC__)
extern "C" float ceilf(float);
#else
#include <cmath>
#endif

#define __host__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))

inline unsigned int __float_as_uint(float x) { return __builtin_bit_cast(unsigned int, x); }
inline float __uint_as_float(unsigned int bits) { return __builtin_bit_cast(float, bits); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __ll2float_rn(long long n) { return static_cast<float>(n); }
