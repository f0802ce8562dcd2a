// Small whole-row operations that belong to no layer.
#pragma once

#include <vector>

#include "common/pool.h"
#include "common/types.h"

namespace batchengine {

// out row i = x row indices[i].
void take_rows(const Rows& x, const int32_t* indices, size_t count, Rows& out);

// out = 0.
void zero_rows(Pool& pool, size_t tokens, Rows& out);

// out = out * factor, value by value.
void scale_rows(Pool& pool, float factor, size_t tokens, Rows& out);

// out = fma(x, factor, out), value by value: the residual stream of a model that scales its branches.
void scaled_add(Pool& pool, const Rows& x, float factor, size_t tokens, Rows& out);

// out = ca::capped(out), value by value: a soft bound.
void cap_rows(Pool& pool, float cap, size_t tokens, Rows& out);

// out = gelu(out) * the values of `factors` from `column` on.
void gelu_rows(Pool& pool, const Rows& factors, size_t column, size_t tokens, Rows& out);

// Groups of norm.size values: out = (out + RMS norm of (x * scale)) * sqrt(1/2).
void mix_inputs(Pool& pool, const Rows& x, float scale, const Vector& norm, float eps, size_t tokens,
                Rows& out);

// Columns [first, first + norm.size) of each row: their RMS norm, in place.
void norm_columns(Pool& pool, size_t first, const Vector& norm, float eps, size_t tokens, Rows& out);

// Rows (of the first `tokens`) that hold a NaN or an infinity.
std::vector<int> nonfinite_rows(Pool& pool, const Rows& x, size_t tokens);

}  // namespace batchengine
