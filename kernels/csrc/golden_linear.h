// Golden vectors of quantisation and the linear kernels; see golden.h.
#pragma once

#include "golden.h"

namespace batchengine {

void golden_linear(Pool& pool, Golden& golden);

}  // namespace batchengine
