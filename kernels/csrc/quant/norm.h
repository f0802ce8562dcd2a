// RMSNorm (CA-3 rule 3) and quantisation (rule 1) over the rows of a step, alone or in one pass.
#pragma once

#include "common/pool.h"
#include "common/types.h"

namespace batchengine {

// out.row(t) = rmsnorm(x.row(t)); out may be x.
void rmsnorm_rows(Pool& pool, const Rows& x, const Vector& w, float eps, size_t tokens, Rows& out);
// out.row(t) = out.row(t) + rmsnorm(x.row(t)): what a branch adds to the residual stream.
void norm_add(Pool& pool, const Rows& x, const Vector& w, float eps, size_t tokens, Rows& out);
// The first rows as int8 with one scale per 32 values.
void quantise(Pool& pool, const Rows& x, size_t tokens, Activations& out);
// The normalised row is quantised at once and kept only if `out` keeps floats.
void norm_quantise(Pool& pool, const Rows& x, const Vector& w, float eps, size_t tokens,
                   Activations& out);

}  // namespace batchengine
