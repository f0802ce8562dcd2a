// The layout of KV pages (kernels/csrc/attention/kv8.h) and of the queries of a step, on a GPU.
#pragma once

#include "gpu.h"

namespace gpu {

constexpr int HEAD_DIM_MAX = 576;
constexpr int PAGE_TOKENS = ca::PAGE_TOKENS;

// Offsets inside one KV head of one layer of a page: K, K scales, V, V scales. A latent layer, with v_first above
// 0, has no V, which is K there: dims from v_first on have the scale of V, and there are K scales of those before.
struct HeadLayout {
    int head_dim;
    int v_first;

    GPU_FN int groups() const { return head_dim / ca::BLOCK; }
    GPU_FN int own_scales() const { return (v_first ? v_first : head_dim) / ca::BLOCK; }
    GPU_FN int v_dims() const { return v_first ? 0 : head_dim; }
    GPU_FN int k_scales() const { return PAGE_TOKENS * head_dim; }
    GPU_FN int v() const { return k_scales() + PAGE_TOKENS * own_scales() * 2; }
    GPU_FN int v_scales() const { return v() + PAGE_TOKENS * v_dims(); }
    GPU_FN int bytes() const { return v_scales() + PAGE_TOKENS * 2; }
    // Of token t of the page: dword of K, scale of K, dword of V; as an index of their part.
    GPU_FN int k_dword(int t, int d4) const { return ((t / 16) * (head_dim / 4) + d4) * 16 + t % 16; }
    GPU_FN int k_scale(int t, int group) const {
        const int own = own_scales();  // V scales of a latent layer are behind them
        return group < own ? ((t / 16) * own + group) * 16 + t % 16 : PAGE_TOKENS * own + t;
    }
    GPU_FN int v_dword(int t4, int d) const { return t4 * head_dim + d; }
    // One token of a head in a row of KvRows: K, K scales, V, V scale.
    GPU_FN int row_bytes() const { return head_dim + 2 * own_scales() + v_dims() + 2; }
};

// Where a head of a layer begins in a page; the layer begins at `layer_lines` lines of LINE_BYTES.
constexpr int LINE_BYTES = 64;
GPU_FN int64_t head_offset(const HeadLayout& at, int layer_lines, int head) {
    return static_cast<int64_t>(layer_lines) * LINE_BYTES + static_cast<int64_t>(head) * at.bytes();
}

// Queries of a step: int8 [token][head][head_dim], fp32 scales [token][head][head_dim / 32], NaN in a
// group that is not finite.

}  // namespace gpu
