// State images: what the recurrent layers of a session keep of all tokens before a position.
//
// Per layer, one after the other, each padded to whole cache lines:
//
//   S     fp32  [value head][head_dim of the key][head_dim of the value]
//   conv  fp32  [conv_kernel - 1][channels]    inputs of the convolution, the oldest first
//
// Channels are those of all q heads, of all k heads, then of all value heads. An image is not changed
// once it is written: a step reads one and writes another. This file owns no memory of images.
#pragma once

#include <stdexcept>
#include <string>

#include "common/types.h"

namespace batchengine {

constexpr size_t STATE_HEAD_DIM_MAX = 256;
constexpr size_t CONV_KERNEL_MAX = 4;

struct StateShape {
    StateShape(size_t n_layer_, size_t n_k_head_, size_t n_v_head_, size_t head_dim_,
               size_t conv_kernel_, size_t key_run_)
        : n_layer(n_layer_), n_k_head(n_k_head_), n_v_head(n_v_head_), head_dim(head_dim_),
          conv_kernel(conv_kernel_), key_run(key_run_) {
        if (n_layer == 0 || n_k_head == 0 || n_v_head == 0 || n_v_head % n_k_head != 0)
            throw std::invalid_argument("StateShape: n_layer and n_k_head must be positive, and "
                                        "n_v_head a multiple of n_k_head");
        if (key_run == 0 || n_v_head / n_k_head % key_run != 0)
            throw std::invalid_argument("StateShape: key_run must divide n_v_head / n_k_head");
        if (head_dim == 0 || head_dim % ca::CHAIN != 0 || head_dim > STATE_HEAD_DIM_MAX)
            throw std::invalid_argument("StateShape: head_dim must be a multiple of 32 up to 256, not " +
                                        std::to_string(head_dim));
        if (conv_kernel < 2 || conv_kernel > CONV_KERNEL_MAX)
            throw std::invalid_argument("StateShape: conv_kernel must be 2, 3 or 4, not " +
                                        std::to_string(conv_kernel));
    }
    size_t head_values() const { return head_dim * head_dim; }
    size_t value_width() const { return n_v_head * head_dim; }
    // The head of q and of k that a value head uses.
    size_t key_head(size_t head) const { return head / key_run % n_k_head; }
    size_t channels() const { return 2 * n_k_head * head_dim + value_width(); }
    // Values of a projected row: channels, gate z, beta, alpha.
    size_t in_width() const { return channels() + value_width() + 2 * n_v_head; }
    size_t conv_offset() const { return n_v_head * head_values(); }  // in values
    size_t layer_bytes() const {
        return round_up((conv_offset() + (conv_kernel - 1) * channels()) * sizeof(float), CACHE_LINE);
    }
    size_t image_bytes() const { return n_layer * layer_bytes(); }

    const size_t n_layer;
    const size_t n_k_head;
    const size_t n_v_head;
    const size_t head_dim;
    const size_t conv_kernel;
    const size_t key_run;  // value heads in a row that use the same q and k
};

}  // namespace batchengine
