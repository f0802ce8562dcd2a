// What the recurrent mixers of this folder share: images of one layer, and the convolution of its channels.
#pragma once

#include <algorithm>

#include "attention/kv8.h"
#include "common/types.h"
#include "recurrent/mixer_level.h"
#include "recurrent/state.h"

namespace batchengine {

// The row that an image at address 0 consists of.
alignas(CACHE_LINE) inline constexpr float ZEROS[STATE_HEAD_DIM_MAX] = {};

// One layer of an entry's images; `from` is null for an image of zeros.
struct LayerImages {
    LayerImages(const Batch& batch, size_t entry, const StateShape& shape_, size_t layer)
        : shape(shape_) {
        const uint64_t offset = layer * shape.layer_bytes();
        if (batch.state_reads[entry] != 0)
            from = reinterpret_cast<const float*>(batch.state_reads[entry] + offset);
        to = reinterpret_cast<float*>(batch.state_writes[entry] + offset);
    }
    // The oldest input of a channel's convolution before the step, the others being `before_stride` apart.
    const float* before(size_t channel) const {
        return from ? from + shape.conv_offset() + channel : ZEROS;
    }
    size_t before_stride() const { return from ? shape.channels() : 0; }
    float* after(size_t channel) const { return to + shape.conv_offset() + channel; }

    const StateShape& shape;
    const float* from = nullptr;
    float* to;
};

// Rows in the memory of a thread, which keeps them; of at least as many values as `width`.
struct Convolved {
    // A cache line more than a row: rows a page apart would share the same sets of the cache.
    Convolved(Buffer<float>& memory, size_t tokens_max, size_t width) : stride(width + 16) {
        if (memory.size() < tokens_max * stride) memory = Buffer<float>(tokens_max * stride);
        data = memory.data();
    }
    float* row(size_t token) const { return data + token * stride; }

    const size_t stride;
    float* data;
};

// Convolves n channels of one entry, from `channel` on, and leaves their last inputs in its image.
inline void convolve_channels(const Rows& projected, const BatchEntry& entry, const LayerImages& images,
                              size_t channel, size_t n, const Vector& conv, const Vector* bias,
                              bool is_normed, float eps, const Convolved& out) {
    const StateShape& shape = images.shape;
    const ConvRun run{projected.row(entry.first_token) + channel,
                      projected.stride,
                      images.before(channel),
                      images.before_stride(),
                      conv.data.data() + channel * shape.conv_kernel,
                      bias ? bias->data.data() + channel : nullptr,
                      shape.conv_kernel,
                      n,
                      entry.n_tokens,
                      is_normed,
                      eps,
                      out.row(entry.first_token) + channel,
                      out.stride};
    mixer_kernels().convolve(run);
    for (size_t j = 0; j + 1 < shape.conv_kernel; ++j)
        std::copy_n(conv_input(run, entry.n_tokens, j), n, images.after(channel) + j * shape.channels());
}

// Value head `head` of one entry, but for the parameters of its mixer. factors: 2 values per token, the decays
// and what is beside them.
inline StateHead state_head(const Rows& projected, const BatchEntry& entry, const LayerImages& images,
                            size_t head, const Convolved& in, const float* factors, Rows& out) {
    static thread_local Buffer<float> scratch;
    const StateShape& shape = images.shape;
    if (scratch.size() < shape.head_values()) scratch = Buffer<float>(shape.head_values());
    const size_t first = head * shape.head_values(), column = head * shape.head_dim;
    const float* const row = in.row(entry.first_token);
    return {.q = row + shape.query_channel(head),
            .k = row + shape.key_channel(head),
            .v = row + shape.value_channel(head),
            .stride = in.stride,
            .z = projected.row(entry.first_token) + shape.channels() + column,
            .z_stride = projected.stride,
            .from = images.from ? images.from + first : ZEROS,
            .from_stride = images.from ? shape.head_dim : 0,
            .to = images.to + first,
            .key_dim = shape.key_dim,
            .head_dim = shape.head_dim,
            .tokens = entry.n_tokens,
            .out = out.row(entry.first_token) + column,
            .out_stride = out.stride,
            .scratch = scratch.data(),
            .decay = factors,
            .factor = factors + entry.n_tokens,
            .norm = nullptr,
            .eps = 0.0f,
            .direct = 0.0f};
}

// Memory of a thread for `state_head`'s factors.
inline float* factors_of(size_t tokens) {
    static thread_local Buffer<float> factors;
    if (factors.size() < 2 * tokens) factors = Buffer<float>(2 * tokens);
    return factors.data();
}

}  // namespace batchengine
