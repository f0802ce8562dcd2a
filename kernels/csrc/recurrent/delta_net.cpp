// See delta_net.h.
#include "recurrent/delta_net.h"

#include <algorithm>

#include "recurrent/delta_head.h"

namespace batchengine {
namespace {

// The row that an image at address 0 consists of.
alignas(CACHE_LINE) constexpr float ZEROS[STATE_HEAD_DIM_MAX] = {};

// One layer of an entry's images; `from` is null for an image of zeros.
struct LayerImages {
    LayerImages(const Batch& batch, size_t entry, const StateShape& shape, size_t layer) {
        const uint64_t skip = layer * shape.layer_bytes();
        if (batch.state_reads[entry] != 0)
            from = reinterpret_cast<const float*>(batch.state_reads[entry] + skip);
        to = reinterpret_cast<float*>(batch.state_writes[entry] + skip);
    }
    const float* from = nullptr;
    float* to;
};

// What the heads of a step share: the convolved rows, which take the place of the channels of `projected`.
struct Convolved {
    float* row(size_t token) const { return data + token * stride; }
    float* data;
    size_t stride;
};

// Convolves the channels of head `head`, of all q, k and value heads, of one entry.
void convolve_head(const Rows& projected, const BatchEntry& entry, const LayerImages& images,
                   const StateShape& shape, const DeltaNetParams& params, size_t head,
                   const Convolved& out) {
    const size_t channel = head * shape.head_dim, n = shape.conv_kernel - 1;
    const size_t channels = shape.channels();
    const float* const before = images.from ? images.from + shape.conv_offset() + channel : ZEROS;
    const ConvHead job{projected.row(entry.first_token) + channel,
                       projected.stride,
                       before,
                       images.from ? channels : 0,
                       params.conv->data.data() + channel * shape.conv_kernel,
                       shape.conv_kernel,
                       shape.head_dim,
                       entry.n_tokens,
                       head < 2 * shape.n_k_head,
                       params.eps,
                       out.row(entry.first_token) + channel,
                       out.stride};
    delta_kernels().convolve(job);
    for (size_t j = 0; j < n; ++j)
        std::copy_n(conv_input(job, entry.n_tokens, j), shape.head_dim,
                    images.to + shape.conv_offset() + j * channels + channel);
}

// Runs value head `head` of one entry.
void recur_head(const Rows& projected, const BatchEntry& entry, const LayerImages& images,
                const StateShape& shape, const DeltaNetParams& params, size_t head,
                const Convolved& in, Rows& out) {
    static thread_local Buffer<float> scratch, factors;
    if (scratch.size() < shape.head_values()) scratch = Buffer<float>(shape.head_values());
    if (factors.size() < 2 * entry.n_tokens) factors = Buffer<float>(2 * entry.n_tokens);
    float *const decay = factors.data(), *const beta = decay + entry.n_tokens;
    const size_t z = shape.channels(), betas = z + shape.value_width(), first = entry.first_token;
    const size_t alphas = betas + shape.n_v_head;
    for (size_t t = 0; t < entry.n_tokens; ++t) {
        const float* const row = projected.row(first + t);
        decay[t] = ca::state_decay(row[alphas + head], params.dt_bias->data[head],
                                   params.a->data[head]);
        beta[t] = ca::sigmoid(row[betas + head]);
    }
    const float* const q = in.row(first) + shape.key_head(head) * shape.head_dim;
    const size_t skip = head * shape.head_values(), column = head * shape.head_dim;
    delta_kernels().recur({q,
                           q + shape.n_k_head * shape.head_dim,
                           in.row(first) + 2 * shape.n_k_head * shape.head_dim + column,
                           in.stride,
                           projected.row(first) + z + column,
                           projected.stride,
                           decay,
                           beta,
                           images.from ? images.from + skip : ZEROS,
                           images.from ? shape.head_dim : 0,
                           images.to + skip,
                           params.norm->data.data(),
                           params.eps,
                           shape.head_dim,
                           entry.n_tokens,
                           out.row(first) + column,
                           out.stride,
                           scratch.data()});
}

}  // namespace

void delta_net(Pool& pool, const Rows& projected, const Batch& batch, const StateShape& shape,
               size_t layer, const DeltaNetParams& params, Rows& out) {
    static thread_local Buffer<float> convolved;
    // A cache line more than a row: rows a page apart would share the same sets of the cache.
    const size_t stride = shape.channels() + 16;
    if (convolved.size() < batch.tokens_max * stride)
        convolved = Buffer<float>(batch.tokens_max * stride);
    const Convolved rows{convolved.data(), stride};
    const size_t groups = 2 * shape.n_k_head + shape.n_v_head;
    for_each(pool, batch.n_entries * groups, false, [&](size_t i) {
        const LayerImages images(batch, i / groups, shape, layer);
        convolve_head(projected, batch.entries[i / groups], images, shape, params, i % groups, rows);
    });
    for_each(pool, batch.n_entries * shape.n_v_head, false, [&](size_t i) {
        const size_t entry = i / shape.n_v_head;
        const LayerImages images(batch, entry, shape, layer);
        recur_head(projected, batch.entries[entry], images, shape, params, i % shape.n_v_head, rows,
                   out);
    });
}

}  // namespace batchengine
