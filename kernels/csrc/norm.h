// RMSNorm over the rows of a step (CA-1 rule 3), alone or followed by quantisation.
#pragma once

#include "pool.h"
#include "types.h"

namespace batchengine {

// out.row(t) = rmsnorm(x.row(t)); out may be x.
void rmsnorm_rows(Pool& pool, const Rows& x, const Vector& w, float eps, size_t tokens, Rows& out);
// The normalised row is quantised at once and kept only if `out` keeps floats.
void norm_quantise(Pool& pool, const Rows& x, const Vector& w, float eps, size_t tokens,
                   Activations& out);

}  // namespace batchengine
