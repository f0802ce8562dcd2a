// Small whole-row operations that belong to no layer.
#pragma once

#include <vector>

#include "common/pool.h"
#include "common/types.h"

namespace batchengine {

// out row i = x row indices[i].
void take_rows(const Rows& x, const int32_t* indices, size_t count, Rows& out);

// Rows (of the first `tokens`) that hold a NaN or an infinity.
std::vector<int> nonfinite_rows(Pool& pool, const Rows& x, size_t tokens);

}  // namespace batchengine
