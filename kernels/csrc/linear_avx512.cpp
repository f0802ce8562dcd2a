// placeholder
#include "linear_epilogue.h"
namespace batchengine {
namespace {
void multiply(const Matrix& matrix, const Activations& x, size_t tile0, size_t tiles, size_t group,
              size_t tokens, TileResult* results) {
    LINEAR_SCALAR.multiply(matrix, x, tile0, tiles, group, tokens, results);
}
}
const LinearKernels LINEAR_AVX512 = {multiply, store_tile, add_tile, gate_tile};
}
