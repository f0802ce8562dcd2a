// Sums of segments of matrix products, which several blocks computed (linear.cu).
#include "products.h"

namespace {

constexpr int THREADS = 256;

}  // namespace

// out: the sums of `segments` segments, added in order. partials: [segment][token][row]; bias: or null; then,
// limit: see Then. Grid (tokens, blocks that share the rows).
KERNEL(add_segments, THREADS, gpu::In<float> partials, int segments, int rows, int tokens,
       gpu::In<float> bias, int then, gpu::Out<float> out, int stride, float limit) {
    gpu::begin();
    const int token = gpu::block(), row = gpu::block_y() * gpu::threads() + gpu::thread();
    if (row >= rows) return;
    const auto at = [&](int segment) {
        return partials[(int64_t{segment} * tokens + token) * rows + row];
    };
    float y = at(0);
    GPU_UNROLL_4
    for (int segment = 1; segment < segments; segment++) y = ca::add_rn(y, at(segment));
    gpu::put({bias, out, stride, limit, rows, tokens, static_cast<gpu::Then>(then)}, 0, token, row, y);
}
