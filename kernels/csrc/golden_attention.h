// Golden vectors of norm, rope, kv8, attention and sampling; see golden.h.
#pragma once

#include "golden.h"

namespace batchengine {

void golden_attention(Pool& pool, Golden& golden);

}  // namespace batchengine
