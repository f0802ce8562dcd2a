// Matrix products, unit of the level neon-i8mm: see linear_neon.h.
#include "arm/linear_neon.h"

namespace batchengine {
const LinearKernels LINEAR_I8MM = {1, multiply, store_tile, add_tile, relu2_tile,
                                   GATES, add_pairs, multiply_then_add};
}
