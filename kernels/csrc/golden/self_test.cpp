// See self_test.h.
#include "golden/self_test.h"

#include <cmath>

#include "common/ca.h"

namespace batchengine {

float fused_binary32(float a, float b, float c) { return ca::fma_rn(a, b, c); }
double fused_binary64(double a, double b, double c) { return std::fma(a, b, c); }

}  // namespace batchengine
