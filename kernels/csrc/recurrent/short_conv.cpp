// Gated short convolutions: see mixers.h.
#include "recurrent/layer_images.h"
#include "recurrent/mixers.h"

namespace batchengine {

void short_conv(Pool& pool, const Rows& projected, const Batch& batch, const StateShape& shape,
                size_t layer, const Vector& conv, Rows& out) {
    const size_t width = shape.value_width(), runs = div_up(width, CONV_RUN);
    for_each(pool, batch.n_entries * runs, batch.n_tokens * width <= VALUES_ALONE, [&](size_t i) {
        const BatchEntry& entry = batch.entries[i / runs];
        const LayerImages images(batch, i / runs, shape, layer);
        const size_t channel = i % runs * CONV_RUN;
        const float* const b = projected.row(entry.first_token) + channel;
        mixer_kernels().convolve_gated({.b = b,
                                        .c = b + width,
                                        .x = b + 2 * width,
                                        .stride = projected.stride,
                                        .before = images.before(channel),
                                        .before_stride = images.before_stride(),
                                        .weights = conv.data.data() + channel * shape.conv_kernel,
                                        .conv_kernel = shape.conv_kernel,
                                        .n = std::min(CONV_RUN, width - channel),
                                        .tokens = entry.n_tokens,
                                        .after = images.after(channel),
                                        .after_stride = width,
                                        .out = out.row(entry.first_token) + channel,
                                        .out_stride = out.stride});
    });
}

}  // namespace batchengine
