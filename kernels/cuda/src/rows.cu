// Kernels over rows: embedding, RMS norm, quantisation, gates, rows taken, rows that are not finite.
//
// fp32 rows are row-major with a stride in floats.
#include "formats/activations.h"
#include "formats/blocks.h"
#include "norm.h"

namespace {

constexpr int NORM_THREADS = 512;

// Quantises a span of the row of a token, whose value k is `value(k)`: a warp.
template <class Value>
GPU_FN void quantise_span(Value value, int width, int64_t token, int span,
                          const gpu::Quantised& to) {
    const int group = span * gpu::SPAN + gpu::lane() / 8;
    gpu::quantise_group(value, width, token, group, true, to);
}

// Whether all threads of the block say so; `shared` is free afterwards.
GPU_FN bool all_of_block(bool x, gpu::Shared<int32_t, 1>& shared) {
    if (gpu::thread() == 0) shared[0] = 0;
    gpu::barrier();
    if (!x) gpu::atomic_max(shared[0], int32_t{1});
    gpu::barrier();
    const int32_t found = shared[0];
    gpu::barrier();
    return found == 0;
}

}  // namespace

// out row i = row tokens[i] of a packed matrix of `cols` times `scale`, by rule 2 ("Embedding"). Grid: tokens.
KERNEL(embed, 256, gpu::In<uint8_t> matrix, int kind, int cols, gpu::In<int32_t> tokens,
       gpu::Out<float> out, int stride, float scale) {
    gpu::begin();
    const int token = tokens[gpu::block()], row = token % gpu::TILE;
    const auto of = static_cast<gpu::Kind>(kind);
    const gpu::In<uint8_t> tile =
        matrix + static_cast<int64_t>(token / gpu::TILE) * gpu::tile_bytes(of, cols);
    for (int k = gpu::thread(); k < cols; k += gpu::threads())
        out[static_cast<int64_t>(gpu::block()) * stride + k] =
            ca::mul_rn(gpu::value_at(of, tile, row, k), scale);
}

// The RMS norm of each row, quantised; the normed row itself into `values` unless its stride is 0.
// Grid: tokens, at least 64 threads.
KERNEL(norm_quantise, NORM_THREADS, gpu::In<float> x, int stride, gpu::In<float> w, float eps, int width,
       gpu::Out<uint32_t> q, gpu::Out<float> scale, gpu::Out<int32_t> sums, gpu::Out<float> values,
       int values_stride) {
    __shared__ gpu::Shared<float, gpu::NORM_VALUES> part;
    __shared__ gpu::Shared<float, 64> lanes;
    gpu::launch_dependents();
    gpu::prefetch(w, width / 4 * 16);
    gpu::dependency_wait();
    const int64_t token = gpu::block();
    const gpu::In<float> row = x + token * stride;
    const float factor =
        gpu::norm_factor([&](int k) { return float(row[k]); }, width, eps, part, lanes);
    const auto normed = [&](int k) { return ca::norm_value(row[k], factor, w[k]); };
    if (values_stride)
        for (int k = gpu::thread(); k < width; k += gpu::threads())
            values[token * values_stride + k] = normed(k);
    for (int span = gpu::warp(); span < gpu::spans_of(width); span += gpu::warps())
        quantise_span(normed, width, token, span, {q, scale, sums});
}

// out row += the RMS norm of the row of x, for each row. Grid: tokens, at least 64 threads.
KERNEL(norm_add, NORM_THREADS, gpu::In<float> x, int stride, gpu::In<float> w, float eps, int width,
       gpu::Out<float> out, int out_stride) {
    __shared__ gpu::Shared<float, gpu::NORM_VALUES> part;
    __shared__ gpu::Shared<float, 64> lanes;
    gpu::launch_dependents();
    gpu::prefetch(w, width / 4 * 16);
    gpu::dependency_wait();
    const int64_t token = gpu::block();
    const gpu::In<float> row = x + token * stride;
    const float factor =
        gpu::norm_factor([&](int k) { return float(row[k]); }, width, eps, part, lanes);
    for (int k = gpu::thread(); k < width; k += gpu::threads()) {
        const int64_t at = token * out_stride + k;
        out[at] = ca::add_rn(out[at], ca::norm_value(row[k], factor, w[k]));
    }
}

// Each row quantised. Grid: tokens, blocks that share the spans of a row.
KERNEL(quantise, NORM_THREADS, gpu::In<float> x, int stride, int width, gpu::Out<uint32_t> q,
       gpu::Out<float> scale, gpu::Out<int32_t> sums) {
    gpu::begin();
    const int64_t token = gpu::block();
    const gpu::In<float> row = x + token * stride;
    const int span = gpu::block_y() * gpu::warps() + gpu::warp();
    if (span < gpu::spans_of(width))
        quantise_span([&](int k) { return float(row[k]); }, width, token, span, {q, scale, sums});
}

// out = out * sigmoid(gate), of which `each` neighbours have one. Grid: tokens, blocks that share a row.
KERNEL(gate_rows, 256, gpu::In<float> gate, int stride, int width, gpu::Out<float> out, int out_stride,
       int each) {
    gpu::begin();
    const int64_t token = gpu::block();
    const int k = gpu::block_y() * gpu::threads() + gpu::thread();
    if (k >= width) return;
    const int64_t at = token * out_stride + k;
    out[at] = ca::gate_value(out[at], gate[token * stride + k / each]);
}

// out row += sigmoid of the token's gate times the row of x. Grid: tokens, blocks that share a row.
KERNEL(gate_add, 256, gpu::In<float> x, int stride, gpu::In<float> gate, int gate_stride, int width,
       gpu::Out<float> out, int out_stride) {
    gpu::begin();
    const int64_t token = gpu::block();
    const int k = gpu::block_y() * gpu::threads() + gpu::thread();
    if (k >= width) return;
    const int64_t at = token * out_stride + k;
    out[at] = ca::add_share(out[at], ca::sigmoid(gate[token * gate_stride]), x[token * stride + k]);
}

// out = 0. Grid: tokens, blocks that share a row.
KERNEL(zero_rows, 256, gpu::Out<float> out, int stride, int width) {
    gpu::begin();
    const int k = gpu::block_y() * gpu::threads() + gpu::thread();
    if (k < width) out[static_cast<int64_t>(gpu::block()) * stride + k] = 0.0f;
}

// out value head * out_run + i = value i of the head's run of x; x: n_head runs of `run` values a token. Grid:
// tokens, blocks that share a row.
KERNEL(copy_heads, 256, gpu::In<float> x, int run, int n_head, gpu::Out<float> out, int out_stride,
       int out_run) {
    gpu::begin();
    const int64_t token = gpu::block();
    const int i = gpu::block_y() * gpu::threads() + gpu::thread();
    if (i >= n_head * run) return;
    out[token * out_stride + i / run * out_run + i % run] = x[token * n_head * run + i];
}

// out = out * factor, value by value. Grid: tokens, blocks that share a row.
KERNEL(scale_rows, 256, float factor, gpu::Out<float> out, int stride, int width) {
    gpu::begin();
    const int k = gpu::block_y() * gpu::threads() + gpu::thread();
    if (k >= width) return;
    const int64_t at = static_cast<int64_t>(gpu::block()) * stride + k;
    out[at] = ca::mul_rn(out[at], factor);
}

// out = fma(x, factor, out), value by value. Grid: tokens, blocks that share a row.
KERNEL(scaled_add, 256, gpu::In<float> x, int stride, int width, gpu::Out<float> out, int out_stride,
       float factor) {
    gpu::begin();
    const int64_t token = gpu::block();
    const int k = gpu::block_y() * gpu::threads() + gpu::thread();
    if (k >= width) return;
    const int64_t at = token * out_stride + k;
    out[at] = ca::fma_rn(x[token * stride + k], factor, out[at]);
}

// out = capped(out), value by value. Grid: tokens, blocks that share a row.
KERNEL(cap_rows, 256, float cap, gpu::Out<float> out, int stride, int width) {
    gpu::begin();
    const int k = gpu::block_y() * gpu::threads() + gpu::thread();
    if (k >= width) return;
    const int64_t at = static_cast<int64_t>(gpu::block()) * stride + k;
    out[at] = ca::capped(out[at], ca::div_rn(1.0f, cap), cap);
}

// out = gelu(out) * factors, value by value. Grid: tokens, blocks that share a row.
KERNEL(gelu_rows, 256, gpu::In<float> factors, int stride, int width, gpu::Out<float> out, int out_stride) {
    gpu::begin();
    const int64_t token = gpu::block();
    const int k = gpu::block_y() * gpu::threads() + gpu::thread();
    if (k >= width) return;
    const int64_t at = token * out_stride + k;
    out[at] = ca::gated(ca::Activation::gelu, out[at], factors[token * stride + k]);
}

// A group of `width` values: out = (out + RMS norm of (x * scale)) * sqrt(1/2). Grid: tokens, groups of a
// row; at least 64 threads.
KERNEL(mix_inputs, NORM_THREADS, gpu::In<float> x, int stride, float scale, gpu::In<float> w, float eps,
       int width, gpu::Out<float> out, int out_stride) {
    __shared__ gpu::Shared<float, gpu::NORM_VALUES> part;
    __shared__ gpu::Shared<float, 64> lanes;
    gpu::begin();
    const int64_t token = gpu::block(), first = static_cast<int64_t>(gpu::block_y()) * width;
    const gpu::In<float> row = x + token * stride + first;
    const auto scaled = [&](int k) { return ca::mul_rn(row[k], scale); };
    const float factor = gpu::norm_factor(scaled, width, eps, part, lanes);
    for (int k = gpu::thread(); k < width; k += gpu::threads()) {
        const int64_t at = token * out_stride + first + k;
        const float sum = ca::add_rn(out[at], ca::norm_value(scaled(k), factor, w[k]));
        out[at] = ca::mul_rn(sum, ca::SQRT_HALF);
    }
}

// `width` columns of out from `first` on: their RMS norm, in place. Grid: tokens, at least 64 threads.
KERNEL(norm_columns, NORM_THREADS, int first, gpu::In<float> w, float eps, int width, gpu::Out<float> out,
       int out_stride) {
    __shared__ gpu::Shared<float, gpu::NORM_VALUES> part;
    __shared__ gpu::Shared<float, 64> lanes;
    gpu::begin();
    const gpu::Out<float> row = out + (static_cast<int64_t>(gpu::block()) * out_stride + first);
    const float factor =
        gpu::norm_factor([&](int k) { return float(row[k]); }, width, eps, part, lanes);
    for (int k = gpu::thread(); k < width; k += gpu::threads())
        row[k] = ca::norm_value(row[k], factor, w[k]);
}

// out row i = x row indices[i]. Grid: rows.
KERNEL(take_rows, 256, gpu::In<float> x, int stride, gpu::In<int32_t> indices, int width,
       gpu::Out<float> out, int out_stride) {
    gpu::begin();
    const int64_t from = indices[gpu::block()], to = gpu::block();
    for (int k = gpu::thread(); k < width; k += gpu::threads())
        out[to * out_stride + k] = x[from * stride + k];
}

// out[places[i]] = the token sampled[sources[i]], 0 where there is none, for n of them.
KERNEL(take_samples, 256, gpu::In<int32_t> sampled, gpu::In<int32_t> sources, gpu::In<int32_t> places,
       int n, gpu::Out<int32_t> out) {
    gpu::begin();
    const int i = gpu::block() * gpu::threads() + gpu::thread();
    if (i >= n) return;
    const int32_t token = sampled[sources[i]];
    out[places[i]] = token < 0 ? 0 : token;
}

// bad[i] becomes 1 if row i holds a NaN or an infinity, else 0. Grid: rows.
KERNEL(nonfinite_rows, 256, gpu::In<float> x, int stride, int width, gpu::Out<uint8_t> bad) {
    gpu::begin();
    __shared__ gpu::Shared<int32_t, 1> found;
    const int64_t row = gpu::block();
    bool finite = true;
    for (int k = gpu::thread(); k < width; k += gpu::threads())
        finite = finite && ca::is_finite(x[row * stride + k]);
    const bool all = all_of_block(finite, found);
    if (gpu::thread() == 0) bad[row] = !all;
}
