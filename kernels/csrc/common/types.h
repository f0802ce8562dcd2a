// The types of every kernel: aligned buffers, fp32 rows, quantised activations, packed matrices.
//
// They own memory and its shape and compute nothing, independent of requests and sessions. Sizes are
// checked once, in the bindings (bind/), and kernels rely on that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "common/ca.h"

namespace batchengine {

constexpr size_t BLOCK_WIDTH = ca::BLOCK;  // quantisation group of activations and Q4_0 weights
constexpr size_t GROUP_TOKENS = 16;    // tokens that sit together in an activation panel
#if defined(BATCHENGINE_FREE_ORDER)
constexpr size_t SEGMENT_BLOCKS = size_t{1} << 20;  // never: see free_order.h
#else
constexpr size_t SEGMENT_BLOCKS = 32;  // blocks summed before they join the running total (1024 k)
#endif
constexpr size_t CACHE_LINE = 64;

constexpr size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }
constexpr size_t div_up(size_t n, size_t unit) { return (n + unit - 1) / unit; }

// 64-byte aligned, zero-filled memory. Movable, not copyable.
template <class T>
class Buffer {
  public:
    Buffer() = default;
    explicit Buffer(size_t count) : size_(count) {
        if (count == 0) return;
        // One spare cache line: vector kernels may read (never write) past the last element.
        const size_t bytes = round_up(count * sizeof(T), CACHE_LINE) + CACHE_LINE;
        data_ = static_cast<T*>(std::aligned_alloc(CACHE_LINE, bytes));
        if (!data_) throw std::bad_alloc();
        std::memset(static_cast<void*>(data_), 0, bytes);
    }
    Buffer(Buffer&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    ~Buffer() { std::free(data_); }

    T* data() { return data_; }
    const T* data() const { return data_; }
    size_t size() const { return size_; }
    T& operator[](size_t i) { return data_[i]; }
    const T& operator[](size_t i) const { return data_[i]; }

  private:
    T* data_ = nullptr;
    size_t size_ = 0;
};

// fp32 scratch, row-major, one row per token of a step. Rows are 64-byte aligned. Between two of them
// lies at least a cache line, because rows a power of two apart would share a few sets of the caches.
struct Rows {
    Rows(size_t tokens_max_, size_t width_)
        : tokens_max(tokens_max_), width(width_), stride(round_up(width_, 16) + 16),
          data(tokens_max_ * stride) {}
    float* row(size_t token) { return data.data() + token * stride; }
    const float* row(size_t token) const { return data.data() + token * stride; }

    const size_t tokens_max;
    const size_t width;
    const size_t stride;
    Buffer<float> data;
};

// Norm weights, biases, rope factors: a private fp32 copy, padded with zeros to whole cache lines.
struct Vector {
    Vector(const float* source, size_t size_) : size(size_), data(round_up(size_, 64)) {
        if (size) std::memcpy(data.data(), source, size * sizeof(float));
    }
    const size_t size;
    Buffer<float> data;
};

// Quantised activations of one step (CA-3 rule 1), as panels of 16 tokens:
//
//   q         int8  [group][block][token 16][32]   one block of one token = 32 contiguous bytes
//   scale     fp32  [group][block][token 16]
//   offset    int32 [group][block][token 16]       -8 * S, S = sum of the 32 q
//   sum       fp32  [group][block][token 16]       S * scale
//   halves    int32 [group][block][2][token 16]    -32 * sum of q[0..15], of q[16..31]
//   nonfinite uint8 [group][token 16]              1: every product of this token is NaN
//
// Packed weights are unsigned (weight + 8, + 128, + 32); the offsets negate what that adds to a dot,
// so a kernel starts its integer sum from them. A row tile reads a panel from front to
// back. Tokens past the count of a call are stale: kernels must not let them reach an output. k past
// width is zero.
struct Activations {
    Activations(size_t tokens_max_, size_t width_, bool keep_float_)
        : tokens_max(tokens_max_), width(width_), blocks(div_up(width_, BLOCK_WIDTH)),
          padded_width(blocks * BLOCK_WIDTH), keep_float(keep_float_) {
        const size_t tokens = round_up(tokens_max, GROUP_TOKENS), cells = tokens * blocks;
        q = Buffer<int8_t>(cells * BLOCK_WIDTH);
        scale = Buffer<float>(cells);
        offset = Buffer<int32_t>(cells);
        sum = Buffer<float>(cells);
        halves = Buffer<int32_t>(cells * 2);
        nonfinite = Buffer<uint8_t>(tokens);
        if (keep_float) values = Buffer<float>(tokens_max * padded_width);
    }
    // Index of (group of token, block, token in group), in units of one block of one token.
    size_t cell(size_t token, size_t block) const {
        return ((token / GROUP_TOKENS) * blocks + block) * GROUP_TOKENS + token % GROUP_TOKENS;
    }

    const size_t tokens_max;
    const size_t width;
    const size_t blocks;
    const size_t padded_width;
    const bool keep_float;
    Buffer<int8_t> q;
    Buffer<float> scale;
    Buffer<int32_t> offset;
    Buffer<float> sum;
    Buffer<int32_t> halves;
    Buffer<uint8_t> nonfinite;
    Buffer<float> values;  // [token][padded_width], only with keep_float
};

// The float kinds come last: they read the activations themselves, not their int8 form.
enum class Kind : int {
    q4_0, q4_1, q5_0, q5_1, q8_0, iq4_nl, q4_k, q5_k, q6_k, mxfp4, iq4_xs, q3_k, q2_k, iq3_xxs, iq3_s, iq2_xxs,
    iq2_xs, iq2_s, iq1_s, iq1_m, f16, bf16, f32
};
constexpr int KIND_COUNT = 23;

// A view of packed weights (pack.h has the layout); the buffer belongs to the caller.
struct Matrix {
    Kind kind;
    size_t rows;
    size_t cols;
    const uint8_t* data;
};

}  // namespace batchengine
