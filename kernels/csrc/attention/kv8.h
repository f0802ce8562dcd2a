// kv8: the memory layout of a page of 256 tokens, and the pages that a batch reads and writes.
//
// Per layer and KV head, one after the other, all of it 64-byte aligned:
//
//   K        int8  [16 tiles][head_dim/4][16 tokens][4]   lane = token, dword = 4 neighbouring dims
//   K scale  fp16  [16 tiles][head_dim/32][16 tokens]
//   V        int8  [64][head_dim][4 tokens]               lane = dim, dword = 4 neighbouring tokens
//   V scale  fp16  [256]
//
// A latent layer, whose v_first is above 0, has no V: it is K, times one scale of the token, that of the dims
// from v_first on. The dims before have K scales, [16 tiles][v_first/32][16 tokens], and only these.
//
// Heads in order inside a layer, layers in order inside a page. This file owns no page memory: a
// batch carries addresses, and the caller of Batch.set keeps the mappings alive.
#pragma once

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/ca.h"
#include "common/types.h"

namespace batchengine {

constexpr size_t PAGE_TOKENS = ca::PAGE_TOKENS;
#if defined(BATCHENGINE_FREE_ORDER)
constexpr size_t SUPERPAGE_PAGES = size_t{1} << 20;  // see free_order.h
#else
constexpr size_t SUPERPAGE_PAGES = ca::SUPERPAGE_PAGES;
#endif
constexpr size_t HEAD_DIM_MAX = 576;

// The KV heads of one layer, and where the layer begins in a page and in a token's row.
struct LayerShape {
    LayerShape(size_t n_kv_head_, size_t head_dim_, size_t v_first_, size_t page_offset_,
               size_t row_offset_)
        : n_kv_head(n_kv_head_), head_dim(head_dim_), v_first(v_first_), page_offset(page_offset_),
          row_offset(row_offset_) {
        if (n_kv_head == 0) throw std::invalid_argument("PageShape: n_kv_head must be positive");
        if (head_dim == 0 || head_dim % 32 != 0 || head_dim > HEAD_DIM_MAX)
            throw std::invalid_argument("PageShape: head_dim must be a multiple of 32 up to " +
                                        std::to_string(HEAD_DIM_MAX) + ", not " +
                                        std::to_string(head_dim));
        if (v_first % 32 != 0 || v_first >= head_dim)
            throw std::invalid_argument("PageShape: v_first must be a multiple of 32 below head_dim, not " +
                                        std::to_string(v_first));
    }
    bool is_latent() const { return v_first > 0; }
    size_t blocks() const { return head_dim / 32; }
    size_t k_scales() const { return (is_latent() ? v_first : head_dim) / 32; }  // of a token
    size_t v_dims() const { return is_latent() ? 0 : head_dim; }  // bytes of a token
    // The values that one transform of rule 4 covers.
    size_t transform_width() const {
        return static_cast<size_t>(
            ca::transform_width(static_cast<int>(head_dim), static_cast<int>(v_first)));
    }
    size_t k_scale_offset() const { return PAGE_TOKENS * head_dim; }
    size_t v_offset() const { return k_scale_offset() + PAGE_TOKENS * k_scales() * 2; }
    size_t v_scale_offset() const { return v_offset() + PAGE_TOKENS * v_dims(); }
    size_t head_bytes() const { return v_scale_offset() + PAGE_TOKENS * 2; }
    size_t page_bytes() const { return n_kv_head * head_bytes(); }
    // One token's K, K scale, V and V scale of one head, gathered; and of all heads.
    size_t head_row_bytes() const { return head_dim + 2 * k_scales() + v_dims() + 2; }
    size_t row_bytes() const { return n_kv_head * head_row_bytes(); }

    size_t n_kv_head;
    size_t head_dim;
    size_t v_first;  // of a latent layer; 0: V is stored
    size_t page_offset;
    size_t row_offset;
};

// The layers of a page, which may differ in their heads.
struct PageShape {
    using Heads = std::tuple<size_t, size_t, size_t>;  // n_kv_head, head_dim and v_first

    explicit PageShape(const std::vector<Heads>& heads) {
        if (heads.empty()) throw std::invalid_argument("PageShape: n_layer must be positive");
        size_t page_offset = 0, row_offset = 0;
        for (const auto& [n_kv_head, head_dim, v_first] : heads) {
            layers.emplace_back(n_kv_head, head_dim, v_first, page_offset, row_offset);
            page_offset += layers.back().page_bytes();
            row_offset += layers.back().row_bytes();
        }
    }
    PageShape(size_t n_layer, size_t n_kv_head, size_t head_dim, size_t v_first = 0)
        : PageShape(std::vector<Heads>(n_layer, {n_kv_head, head_dim, v_first})) {}
    size_t n_layer() const { return layers.size(); }
    size_t payload_bytes() const { return layers.back().page_offset + layers.back().page_bytes(); }
    // One token's bytes of all heads of all layers, gathered.
    size_t row_bytes() const { return layers.back().row_offset + layers.back().row_bytes(); }
    bool operator==(const PageShape& other) const {
        return std::equal(layers.begin(), layers.end(), other.layers.begin(), other.layers.end(),
                          [](const LayerShape& a, const LayerShape& b) {
                              return a.n_kv_head == b.n_kv_head && a.head_dim == b.head_dim &&
                                     a.v_first == b.v_first;
                          });
    }

    std::vector<LayerShape> layers;
};

// The four parts of one KV head of one layer of one page; `v` of a latent layer is empty.
struct HeadPage {
    HeadPage(uint8_t* page, const LayerShape& layer, size_t head) {
        uint8_t* const start = page + layer.page_offset + head * layer.head_bytes();
        k = reinterpret_cast<int8_t*>(start);
        k_scale = reinterpret_cast<uint16_t*>(start + layer.k_scale_offset());
        v = reinterpret_cast<int8_t*>(start + layer.v_offset());
        v_scale = reinterpret_cast<uint16_t*>(start + layer.v_scale_offset());
    }
    int8_t* k;
    uint16_t* k_scale;
    int8_t* v;
    uint16_t* v_scale;
};

// Index arithmetic of the layout, t = token inside the page.
inline size_t k_dword(size_t head_dim, size_t t, size_t d4) {
    return ((t / 16) * (head_dim / 4) + d4) * 16 + t % 16;
}
inline size_t k_scale_index(size_t k_scales, size_t t, size_t block) {
    return ((t / 16) * k_scales + block) * 16 + t % 16;
}
inline size_t v_byte(size_t head_dim, size_t t, size_t d) {
    return ((t / 4) * head_dim + d) * 4 + t % 4;
}

// The first position that a row at `position` sees: a window of n shows it n tokens, its own the last of
// them, and a window of 0 all.
inline size_t first_seen(size_t position, size_t window) {
    return window != 0 && position >= window ? position - window + 1 : 0;
}

// The tokens of one step: entries are independent sequences, one after the other.
struct BatchEntry {
    size_t first_token;     // index of its first token in the step
    size_t n_tokens;
    size_t start_position;  // absolute position of its first token
    size_t first_page;      // index into Batch::pages; its page p holds positions [256p, 256p + 256)
};

struct Batch {
    Batch(size_t tokens_max_, size_t entries_max_, size_t pages_max_)
        : tokens_max(tokens_max_), entries_max(entries_max_), pages_max(pages_max_),
          entry_of(tokens_max_), entries(entries_max_), pages(pages_max_),
          state_reads(entries_max_), state_writes(entries_max_) {}

    uint8_t* page(const BatchEntry& entry, size_t position) const {
        return reinterpret_cast<uint8_t*>(pages[entry.first_page + position / PAGE_TOKENS]);
    }
    size_t position(size_t token) const {
        const BatchEntry& entry = entries[entry_of[token]];
        return entry.start_position + (token - entry.first_token);
    }

    const size_t tokens_max, entries_max, pages_max;
    size_t n_tokens = 0, n_entries = 0, n_pages = 0;
    size_t n_absent = 0;  // pages without an address, which lie elsewhere
    size_t n_states = 0;  // 0 or n_entries
    Buffer<uint32_t> entry_of;  // entry of each token
    Buffer<BatchEntry> entries;
    Buffer<uint64_t> pages;
    Buffer<uint64_t> state_reads;   // of each entry's recurrent state before the step; 0: all zeros
    Buffer<uint64_t> state_writes;  // and after it
};

// States of the fold of rule 7, by index: m and l, and o of head_dim values.
struct Accumulators {
    // Makes room for `count` states; their values are undefined afterwards.
    void reserve(size_t count, size_t head_dim) {
        if (m.size() < count) m = Buffer<float>(count), l = Buffer<float>(count);
        if (o.size() < count * head_dim) o = Buffer<float>(count * head_dim);
    }
    Buffer<float> m, l, o;
};

// The page rows of one step, a copy in the order in which they are hashed: per token, for each layer
// and KV head, K, K scale, V and V scale. A token's bytes in a page lie on head_dim / 4 + 10 cache lines
// or so per head, here on one or two after another.
struct KvRows {
    KvRows(size_t tokens_max_, const PageShape& shape_)
        : tokens_max(tokens_max_), shape(shape_), bytes(tokens_max_ * shape_.row_bytes()) {}
    const uint8_t* row(size_t token) const { return bytes.data() + token * shape.row_bytes(); }
    uint8_t* head(size_t token, const LayerShape& layer, size_t head) {
        return bytes.data() + token * shape.row_bytes() + layer.row_offset +
               head * layer.head_row_bytes();
    }

    const size_t tokens_max;
    const PageShape shape;
    Buffer<uint8_t> bytes;
};

// KV heads [first, first + count) of every page.
struct KvHeads {
    size_t first;
    size_t count;
};

// q8 queries of one step: rows [kv head][token][head of the group], so that all heads that read the
// same KV lie together and any range of rows is contiguous.
struct Queries {
    Queries(size_t tokens_max_, size_t n_head_, size_t head_dim_)
        : tokens_max(tokens_max_), n_head(n_head_), head_dim(head_dim_),
          q(tokens_max_ * n_head_ * head_dim_), scale(tokens_max_ * n_head_ * (head_dim_ / 32)),
          offset(tokens_max_ * n_head_ * (head_dim_ / 32)) {}
    size_t row(size_t n_kv_head, size_t kv_head, size_t token, size_t head_of_group) const {
        const size_t group = n_head / n_kv_head;
        return (kv_head * tokens_max + token) * group + head_of_group;
    }

    const size_t tokens_max;
    const size_t n_head;
    const size_t head_dim;
    Buffer<int8_t> q;
    Buffer<float> scale;     // per 32 dims
    Buffer<int32_t> offset;  // -128 * sum of the 32 q: where a u8 dot with K^0x80 starts
    Accumulators split;      // super-page results of sequences that are too long for one thread
};

}  // namespace batchengine
