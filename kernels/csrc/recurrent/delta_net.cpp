// Gated delta networks: see mixers.h.
#include "recurrent/layer_images.h"
#include "recurrent/mixers.h"

namespace batchengine {
namespace {

// Runs value head `head` of one entry.
void recur_head(const Rows& projected, const BatchEntry& entry, const LayerImages& images,
                const DeltaNetParams& params, size_t head, const Convolved& in, Rows& out) {
    const StateShape& shape = images.shape;
    const size_t betas = shape.channels() + shape.value_width(), alphas = betas + shape.n_v_head;
    float* const factors = factors_of(entry.n_tokens);
    for (size_t t = 0; t < entry.n_tokens; ++t) {
        const float* const row = projected.row(entry.first_token + t);
        factors[t] = ca::state_decay(row[alphas + head], params.dt_bias->data[head],
                                     params.a->data[head]);
        factors[entry.n_tokens + t] = ca::sigmoid(row[betas + head]);
    }
    StateHead job = state_head(projected, entry, images, head, in, factors, out);
    job.norm = params.norm->data.data();
    job.eps = params.eps;
    mixer_kernels().recur_delta(job);
}

}  // namespace

void delta_net(Pool& pool, const Rows& projected, const Batch& batch, const StateShape& shape,
               size_t layer, const DeltaNetParams& params, Rows& out) {
    static thread_local Buffer<float> memory;
    const Convolved rows(memory, batch.tokens_max, shape.channels());
    const size_t heads = 2 * shape.n_k_head + shape.n_v_head;
    for_each(pool, batch.n_entries * heads, false, [&](size_t i) {
        const LayerImages images(batch, i / heads, shape, layer);
        const size_t head = i % heads;
        convolve_channels(projected, batch.entries[i / heads], images, head * shape.head_dim,
                          shape.head_dim, *params.conv, nullptr, head < 2 * shape.n_k_head, params.eps,
                          rows);
    });
    for_each(pool, batch.n_entries * shape.n_v_head, false, [&](size_t i) {
        const size_t entry = i / shape.n_v_head;
        const LayerImages images(batch, entry, shape, layer);
        recur_head(projected, batch.entries[entry], images, params, i % shape.n_v_head, rows, out);
    });
}

}  // namespace batchengine
