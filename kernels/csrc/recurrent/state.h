// State images: what the recurrent layers of a session keep of all tokens before a position.
//
// Per layer, one after the other, each padded to whole cache lines:
//
//   S     fp32  [value head][key_dim][head_dim]
//   conv  fp32  [conv_kernel - 1][channels]    inputs of the convolution, the oldest first
//
// Channels are in a delta network those of all q heads, of all k heads, then of all value heads; in Mamba-2
// those of all value heads (x), then of all k heads (B) and of all q heads (C), one of each per group. A short
// convolution has channels only, and keeps the products that are its inputs. An image is not changed once it is
// written: a step reads one and writes another. This file owns no memory of images.
#pragma once

#include <stdexcept>
#include <string>

#include "common/types.h"

namespace batchengine {

constexpr size_t STATE_HEAD_DIM_MAX = 256;  // of keys and of values
constexpr size_t CONV_KERNEL_MAX = 4;

enum class Mixer { delta, mamba2, conv };

struct StateShape {
    // A gated delta network.
    StateShape(size_t n_layer_, size_t n_k_head_, size_t n_v_head_, size_t head_dim_,
               size_t conv_kernel_, size_t key_run_)
        : StateShape(Mixer::delta, n_layer_, n_k_head_, n_v_head_, head_dim_, head_dim_, conv_kernel_,
                     key_run_) {
        if (n_layer == 0 || n_k_head == 0 || n_v_head == 0 || n_v_head % n_k_head != 0)
            throw std::invalid_argument("StateShape: n_layer and n_k_head must be positive, and "
                                        "n_v_head a multiple of n_k_head");
        if (key_run == 0 || n_v_head / n_k_head % key_run != 0)
            throw std::invalid_argument("StateShape: key_run must divide n_v_head / n_k_head");
        require_dim("head_dim", head_dim, ca::CHAIN, STATE_HEAD_DIM_MAX);
        require_conv_kernel();
    }
    static StateShape mamba2(size_t n_layer, size_t n_group, size_t n_head, size_t head_dim,
                             size_t state_dim, size_t conv_kernel) {
        if (n_layer == 0 || n_group == 0 || n_head == 0 || n_head % n_group != 0)
            throw std::invalid_argument("StateShape: n_layer and n_group must be positive, and "
                                        "n_head a multiple of n_group");
        require_dim("head_dim", head_dim, 16, STATE_HEAD_DIM_MAX);
        require_dim("state_dim", state_dim, ca::CHAIN, STATE_HEAD_DIM_MAX);
        const StateShape shape(Mixer::mamba2, n_layer, n_group, n_head, state_dim, head_dim,
                               conv_kernel, n_head / n_group);
        shape.require_conv_kernel();
        return shape;
    }
    // One head of `width` values, without keys.
    static StateShape short_conv(size_t n_layer, size_t width, size_t conv_kernel) {
        if (n_layer == 0) throw std::invalid_argument("StateShape: n_layer must be positive");
        require_dim("width", width, 32, SIZE_MAX);
        const StateShape shape(Mixer::conv, n_layer, 0, 1, 0, width, conv_kernel, 1);
        shape.require_conv_kernel();
        return shape;
    }

    size_t head_values() const { return key_dim * head_dim; }
    size_t value_width() const { return n_v_head * head_dim; }
    // The head of q and of k that a value head uses.
    size_t key_head(size_t head) const { return head / key_run % n_k_head; }
    size_t channels() const { return 2 * n_k_head * key_dim + value_width(); }
    // The first channels of a value head, and of the k and the q that it uses.
    size_t value_channel(size_t head) const {
        return (kind == Mixer::delta ? 2 * n_k_head * key_dim : 0) + head * head_dim;
    }
    size_t key_channel(size_t head) const {
        return (kind == Mixer::delta ? n_k_head * key_dim : value_width()) + key_head(head) * key_dim;
    }
    size_t query_channel(size_t head) const {
        const size_t first = kind == Mixer::delta ? 0 : value_width() + n_k_head * key_dim;
        return first + key_head(head) * key_dim;
    }
    // Values of a projected row: channels and gate z, then beta and alpha of a delta network or dt of Mamba-2;
    // b, c and x of a short convolution.
    size_t in_width() const {
        if (kind == Mixer::conv) return 3 * value_width();
        return channels() + value_width() + (kind == Mixer::delta ? 2 : 1) * n_v_head;
    }
    size_t conv_offset() const { return n_v_head * head_values(); }  // in values
    size_t layer_bytes() const {
        return round_up((conv_offset() + (conv_kernel - 1) * channels()) * sizeof(float), CACHE_LINE);
    }
    size_t image_bytes() const { return n_layer * layer_bytes(); }

    const Mixer kind;
    const size_t n_layer;
    const size_t n_k_head;
    const size_t n_v_head;
    const size_t key_dim;
    const size_t head_dim;  // of the values
    const size_t conv_kernel;
    const size_t key_run;  // value heads in a row that use the same q and k

  private:
    StateShape(Mixer kind_, size_t n_layer_, size_t n_k_head_, size_t n_v_head_, size_t key_dim_,
               size_t head_dim_, size_t conv_kernel_, size_t key_run_)
        : kind(kind_), n_layer(n_layer_), n_k_head(n_k_head_), n_v_head(n_v_head_), key_dim(key_dim_),
          head_dim(head_dim_), conv_kernel(conv_kernel_), key_run(key_run_) {}
    static void require_dim(const char* name, size_t dim, size_t unit, size_t most) {
        if (dim == 0 || dim % unit != 0 || dim > most)
            throw std::invalid_argument(
                std::string("StateShape: ") + name + " must be a multiple of " + std::to_string(unit) +
                (most == SIZE_MAX ? "" : " up to " + std::to_string(most)) + ", not " +
                std::to_string(dim));
    }
    void require_conv_kernel() const {
        if (conv_kernel < 2 || conv_kernel > CONV_KERNEL_MAX)
            throw std::invalid_argument("StateShape: conv_kernel must be 2, 3 or 4, not " +
                                        std::to_string(conv_kernel));
    }
};

inline const char* mixer_name(Mixer kind) {
    const char* const names[] = {"delta", "mamba2", "conv"};
    return names[static_cast<int>(kind)];
}

}  // namespace batchengine
