// Mamba-2: see mixers.h.
#include "recurrent/layer_images.h"
#include "recurrent/mixers.h"
#include "rows/rowops.h"

namespace batchengine {
namespace {

// Runs head `head` of one entry.
void recur_head(const Rows& projected, const BatchEntry& entry, const LayerImages& images,
                const Mamba2Params& params, size_t head, const Convolved& in, Rows& out) {
    const StateShape& shape = images.shape;
    const size_t steps = shape.channels() + shape.value_width();
    const float bias = params.dt_bias->data[head], a = params.a->data[head];
    float* const factors = factors_of(entry.n_tokens);
    for (size_t t = 0; t < entry.n_tokens; ++t) {
        const float dt = projected.row(entry.first_token + t)[steps + head];
        factors[t] = ca::state_decay(dt, bias, a);
        factors[entry.n_tokens + t] = ca::step_size(dt, bias);
    }
    StateHead job = state_head(projected, entry, images, head, in, factors, out);
    job.direct = params.d->data[head];
    mixer_kernels().recur_mamba2(job);
}

// The norms of the groups of each row.
void norm_groups(Pool& pool, const StateShape& shape, const Mamba2Params& params, size_t tokens,
                 Rows& out) {
    const size_t width = shape.value_width() / shape.n_k_head;
    const RowOps& ops = rowops();
    const bool is_alone = tokens * shape.value_width() <= VALUES_ALONE;
    for_each(pool, tokens * shape.n_k_head, is_alone, [&](size_t i) {
        const size_t first = i % shape.n_k_head * width;
        float* const group = out.row(i / shape.n_k_head) + first;
        ops.rmsnorm(group, params.norm->data.data() + first, width, params.eps, group);
    });
}

}  // namespace

void mamba2(Pool& pool, const Rows& projected, const Batch& batch, const StateShape& shape,
            size_t layer, const Mamba2Params& params, Rows& out) {
    static thread_local Buffer<float> memory;
    const size_t channels = shape.channels(), runs = div_up(channels, CONV_RUN);
    const Convolved rows(memory, batch.tokens_max, channels);
    for_each(pool, batch.n_entries * runs, false, [&](size_t i) {
        const LayerImages images(batch, i / runs, shape, layer);
        const size_t first = i % runs * CONV_RUN;
        convolve_channels(projected, batch.entries[i / runs], images, first,
                          std::min(CONV_RUN, channels - first), *params.conv, params.conv_bias, false, 0.0f,
                          rows);
    });
    for_each(pool, batch.n_entries * shape.n_v_head, false, [&](size_t i) {
        const size_t entry = i / shape.n_v_head;
        const LayerImages images(batch, entry, shape, layer);
        recur_head(projected, batch.entries[entry], images, params, i % shape.n_v_head, rows, out);
    });
    if (params.norm) norm_groups(pool, shape, params, batch.n_tokens, out);
}

}  // namespace batchengine
