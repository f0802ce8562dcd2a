// Single operations for the self-test of a lane that loads: what the C library computes for kernels
// that no instruction set level replaces.
#pragma once

namespace batchengine {

float fused_binary32(float a, float b, float c);     // fmaf, as every formula of ca.h takes it
double fused_binary64(double a, double b, double c);  // fma, as the table of RoPE takes it

}  // namespace batchengine
