// Kernels over rows: embedding, RMS norm, quantisation, rows taken, rows that are not finite.
//
// fp32 rows are row-major with a stride in floats.
#include "activations.h"
#include "blocks.h"

namespace {

constexpr int NORM_THREADS = 256;

// Quantises the groups of a row that `value(k)` gives, a warp a group; false if one is not finite.
template <class Value>
GPU_FN bool quantise_row(Value value, int width, int blocks, gpu::Out<int8_t> q,
                         gpu::Out<float> scale, gpu::Out<uint32_t> sums) {
    bool finite = true;
    for (int block = gpu::warp(); block < blocks; block += gpu::warps()) {
        const int k = block * ca::BLOCK + gpu::lane();
        const float x = k < width ? value(k) : 0.0f;
        uint32_t largest = ca::magnitude_bits(x);
        for (int mask = 16; mask >= 1; mask /= 2) {
            const uint32_t other = gpu::shuffle_xor(largest, mask);
            largest = other > largest ? other : largest;
        }
        const ca::Group kind = ca::group_kind(largest);
        const float t = kind == ca::Group::used ? ca::group_scale(largest) : 1.0f;
        const float inverse = kind == ca::Group::used ? ca::div_rn(1.0f, t) : 0.0f;
        const int32_t n =
            kind == ca::Group::nonfinite ? 0 : ca::round_to_int(ca::mul_rn(x, inverse));
        q[k] = static_cast<int8_t>(n);
        int32_t sum = n;
        for (int mask = 8; mask >= 1; mask /= 2) sum += gpu::shuffle_xor(sum, mask);
        const int32_t second = gpu::shuffle(sum, 16);
        if (gpu::lane() == 0) {
            scale[block] = t;
            sums[block] = gpu::packed_sums(sum, second);
        }
        finite = finite && kind != ca::Group::nonfinite;
    }
    return finite;
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

// out row i = row tokens[i] of a packed matrix of `cols`, by rule 2 ("Embedding"). Grid: tokens.
KERNEL(embed, 256, gpu::In<uint8_t> matrix, int kind, int cols, gpu::In<int32_t> tokens,
       gpu::Out<float> out, int stride) {
    const int token = tokens[gpu::block()], row = token % gpu::TILE;
    const auto of = static_cast<gpu::Kind>(kind);
    const gpu::In<uint8_t> tile =
        matrix + static_cast<int64_t>(token / gpu::TILE) * gpu::tile_bytes(of, cols);
    for (int k = gpu::thread(); k < cols; k += gpu::threads())
        out[static_cast<int64_t>(gpu::block()) * stride + k] = gpu::value_at(of, tile, row, k);
}

// The RMS norm of each row, quantised; the normed row itself into `values` unless its stride is 0.
// Grid: tokens. Lane i mod 64 of rule 3 is thread i mod 64.
KERNEL(norm_quantise, NORM_THREADS, gpu::In<float> x, int stride, gpu::In<float> w, float eps, int width,
       gpu::Out<int8_t> q, gpu::Out<float> scale, gpu::Out<uint32_t> sums,
       gpu::Out<uint8_t> nonfinite, gpu::Out<float> values, int values_stride) {
    __shared__ gpu::Shared<float, 64> lanes;
    __shared__ gpu::Shared<int32_t, 1> found;
    const int64_t token = gpu::block();
    const int blocks = (width + ca::BLOCK - 1) / ca::BLOCK;
    const gpu::In<float> row = x + token * stride;
    if (gpu::thread() < 64) {
        float lane = 0.0f;
        for (int i = gpu::thread(); i < width; i += 64) {
            const float value = row[i];
            lane = ca::fma_rn(value, value, lane);
        }
        lanes[gpu::thread()] = lane;
    }
    for (int width_now = 32; width_now >= 1; width_now /= 2) {
        gpu::barrier();
        if (gpu::thread() < width_now)
            lanes[gpu::thread()] =
                ca::add_rn(lanes[gpu::thread()], lanes[gpu::thread() + width_now]);
    }
    gpu::barrier();
    const float factor = ca::norm_factor(lanes[0], width, eps);
    const auto normed = [&](int k) { return ca::norm_value(row[k], factor, w[k]); };
    if (values_stride)
        for (int k = gpu::thread(); k < width; k += gpu::threads())
            values[token * values_stride + k] = normed(k);
    const bool finite = quantise_row(normed, width, blocks, q + token * blocks * ca::BLOCK,
                                     scale + token * blocks, sums + token * blocks);
    const bool all = all_of_block(finite, found);
    if (gpu::thread() == 0) nonfinite[token] = !all;
}

// Each row quantised. Grid: tokens.
KERNEL(quantise, NORM_THREADS, gpu::In<float> x, int stride, int width, gpu::Out<int8_t> q,
       gpu::Out<float> scale, gpu::Out<uint32_t> sums, gpu::Out<uint8_t> nonfinite) {
    __shared__ gpu::Shared<int32_t, 1> found;
    const int64_t token = gpu::block();
    const int blocks = (width + ca::BLOCK - 1) / ca::BLOCK;
    const gpu::In<float> row = x + token * stride;
    const bool finite = quantise_row([&](int k) { return float(row[k]); }, width, blocks,
                                     q + token * blocks * ca::BLOCK, scale + token * blocks,
                                     sums + token * blocks);
    const bool all = all_of_block(finite, found);
    if (gpu::thread() == 0) nonfinite[token] = !all;
}

// out row i = x row indices[i]. Grid: rows.
KERNEL(take_rows, 256, gpu::In<float> x, int stride, gpu::In<int32_t> indices, int width,
       gpu::Out<float> out, int out_stride) {
    const int64_t from = indices[gpu::block()], to = gpu::block();
    for (int k = gpu::thread(); k < width; k += gpu::threads())
        out[to * out_stride + k] = x[from * stride + k];
}

// bad[i] becomes 1 if row i holds a NaN or an infinity, else 0. Grid: rows.
KERNEL(nonfinite_rows, 256, gpu::In<float> x, int stride, int width, gpu::Out<uint8_t> bad) {
    __shared__ gpu::Shared<int32_t, 1> found;
    const int64_t row = gpu::block();
    bool finite = true;
    for (int k = gpu::thread(); k < width; k += gpu::threads())
        finite = finite && ca::is_finite(x[row * stride + k]);
    const bool all = all_of_block(finite, found);
    if (gpu::thread() == 0) bad[row] = !all;
}
