// Rows of q, k and v become queries of the step and rows of KV pages (rules 3, 4, 6 and 7); what latent layers give
// is transformed back (rule 16).
#include "formats/kv8.h"

namespace {

constexpr int THREADS = 64;  // the lanes of rule 3

// The norm of `x` (head_dim values), by rule 3.
GPU_FN void normalise(gpu::Shared<float, gpu::HEAD_DIM_MAX>& x, gpu::Shared<float, THREADS>& lanes,
                      gpu::In<float> w, int head_dim, float eps) {
    float lane = 0.0f;
    for (int i = gpu::thread(); i < head_dim; i += THREADS) {
        const float value = x[i];
        lane = ca::fma_rn(value, value, lane);
    }
    lanes[gpu::thread()] = lane;
    for (int width = 32; width >= 1; width /= 2) {
        gpu::barrier();
        if (gpu::thread() < width)
            lanes[gpu::thread()] = ca::add_rn(lanes[gpu::thread()], lanes[gpu::thread() + width]);
    }
    gpu::barrier();
    const float factor = ca::norm_factor(lanes[0], head_dim, eps);
    for (int i = gpu::thread(); i < head_dim; i += THREADS)
        x[i] = ca::norm_value(x[i], factor, w[i]);
    gpu::barrier();
}

// cosines: n_rot / 2 of them, then as many sines.
GPU_FN void rotate(gpu::Shared<float, gpu::HEAD_DIM_MAX>& x, gpu::In<float> cosines, int n_rot,
                   bool is_neox) {
    const int half = n_rot / 2;
    for (int i = gpu::thread(); i < half; i += THREADS) {
        const int first = is_neox ? i : 2 * i, second = is_neox ? i + half : 2 * i + 1;
        float x0 = x[first], x1 = x[second];
        ca::rotate(x0, x1, cosines[i], cosines[half + i]);
        x[first] = x0;
        x[second] = x1;
    }
    gpu::barrier();
}

// The Hadamard transform of rule 4. A thread has the values d = thread + 64 j, so those of a warp are 32
// neighbours, which are pairs of the first five steps.
GPU_FN void transform(gpu::Shared<float, gpu::HEAD_DIM_MAX>& x, int head_dim, int width) {
    for (int d = gpu::thread(); d < head_dim; d += THREADS) {
        float value = x[d];
        for (int step = 1; step < gpu::WARP; step *= 2) {
            const float other = gpu::shuffle_xor(value, step);
            value = gpu::lane() & step ? ca::sub_rn(other, value) : ca::add_rn(value, other);
        }
        x[d] = value;
    }
    for (int step = gpu::WARP; step < width; step *= 2) {
        gpu::barrier();
        for (int i = gpu::thread(); i < head_dim / 2; i += THREADS) {
            const int first = 2 * i - (i & (step - 1)), second = first + step;
            const float x0 = x[first], x1 = x[second];
            x[first] = ca::add_rn(x0, x1);
            x[second] = ca::sub_rn(x0, x1);
        }
    }
    gpu::barrier();
}

// The largest magnitude of the lanes of a warp.
GPU_FN uint32_t largest_of_warp(float x) {
    uint32_t largest = ca::magnitude_bits(x);
    for (int mask = 16; mask >= 1; mask /= 2) {
        const uint32_t other = gpu::shuffle_xor(largest, mask);
        largest = other > largest ? other : largest;
    }
    return largest;
}

GPU_FN void put_query(gpu::Shared<float, gpu::HEAD_DIM_MAX>& x, int head_dim, float factor,
                      gpu::Out<int8_t> q, gpu::Out<float> scale) {
    for (int group = gpu::warp(); group < head_dim / ca::BLOCK; group += THREADS / gpu::WARP) {
        const int d = group * ca::BLOCK + gpu::lane();
        const float scaled = ca::mul_rn(x[d], factor);
        const uint32_t largest = largest_of_warp(scaled);
        const ca::Group kind = ca::group_kind(largest);
        const float t = kind == ca::Group::used ? ca::group_scale(largest) : 1.0f;
        const float inverse = kind == ca::Group::used ? ca::div_rn(1.0f, t) : 0.0f;
        q[d] = kind == ca::Group::nonfinite
                   ? int8_t{0}
                   : static_cast<int8_t>(ca::round_to_int(ca::mul_rn(scaled, inverse)));
        if (gpu::lane() == 0)
            scale[group] = kind == ca::Group::nonfinite ? ca::canonical_nan() : t;
    }
}

GPU_FN int8_t kv8(float x, uint16_t d) {
    const bool is_empty = d == 0 || d == ca::POISON_HALF;
    return is_empty ? int8_t{0} : ca::kv8_value(x, ca::kv8_inverse(d));
}

// The scale of the values from `first` on; the same in all threads.
GPU_FN uint16_t scale_of_block(gpu::Shared<float, gpu::HEAD_DIM_MAX>& x,
                               gpu::Shared<uint32_t, 2>& largest, int first, int head_dim) {
    uint32_t mine = 0;
    for (int d = first + gpu::thread(); d < head_dim; d += THREADS) {
        const uint32_t bits = ca::magnitude_bits(x[d]);
        mine = bits > mine ? bits : mine;
    }
    mine = largest_of_warp(ca::float_of(mine));
    if (gpu::lane() == 0) largest[gpu::warp()] = mine;
    gpu::barrier();
    const uint32_t other = largest[1 - gpu::warp()];
    return ca::kv8_scale(other > mine ? other : mine);
}

// K into token t of its head of a page, and into the token's row.
GPU_FN void put_k(gpu::Shared<float, gpu::HEAD_DIM_MAX>& x, gpu::Shared<uint32_t, 2>& largest,
                  const gpu::HeadLayout& at, int t, gpu::Out<uint8_t> head, gpu::Out<uint8_t> row) {
    const int own = at.own_scales();
    const uint16_t of_rest = own < at.groups() ? scale_of_block(x, largest, at.v_first, at.head_dim) : 0;
    if (own < at.groups() && gpu::thread() == 0) {
        gpu::out_as<uint16_t>(head + at.v_scales())[t] = of_rest;
        gpu::out_as<uint16_t>(row + at.head_dim)[own] = of_rest;
    }
    for (int group = gpu::warp(); group < at.groups(); group += THREADS / gpu::WARP) {
        const int d = group * ca::BLOCK + gpu::lane();
        const float value = x[d];
        const uint16_t scale = group < own ? ca::kv8_scale(largest_of_warp(value)) : of_rest;
        const auto q = static_cast<uint8_t>(kv8(value, scale));
        head[at.k_dword(t, d / 4) * 4 + d % 4] = q;
        row[d] = q;
        if (gpu::lane() == 0 && group < own) {
            gpu::out_as<uint16_t>(head + at.k_scales())[at.k_scale(t, group)] = scale;
            gpu::out_as<uint16_t>(row + at.head_dim)[group] = scale;
        }
    }
}

GPU_FN void put_v(gpu::Shared<float, gpu::HEAD_DIM_MAX>& x, gpu::Shared<uint32_t, 2>& largest,
                  const gpu::HeadLayout& at, int t, gpu::Out<uint8_t> head, gpu::Out<uint8_t> row) {
    const uint16_t scale = scale_of_block(x, largest, 0, at.head_dim);
    const gpu::Out<uint8_t> v = head + at.v(), v_row = row + (at.head_dim + 2 * at.groups());
    for (int d = gpu::thread(); d < at.head_dim; d += THREADS) {
        const auto q = static_cast<uint8_t>(kv8(x[d], scale));
        v[at.v_dword(t / 4, d) * 4 + t % 4] = q;
        v_row[d] = q;
    }
    if (gpu::thread() == 0) {
        gpu::out_as<uint16_t>(head + at.v_scales())[t] = scale;
        gpu::out_as<uint16_t>(v_row + at.head_dim)[0] = scale;
    }
}

}  // namespace

// qkv: rows of q heads, k heads, v heads. pages: per token the address of the page of its position.
// rope: per position n_rot / 2 cosines and as many sines, or null. query_scales: per position the scale of
// queries, or null. With v_first > 0 the layer is latent, and qkv has no v heads. norms_rotated: heads of Q and K
// are normed after the rotation, not before. rows: as KvRows, of row_bytes a token; the layer begins at row_offset
// in them, and at layer_lines in a page. q_norm, k_norm, v_norm: or null. Grid: a block for each token and each of
// its heads, of which there are n_head where another layer has put K and V there; 64 threads.
KERNEL(place_kv, THREADS, gpu::In<float> qkv, int stride, gpu::In<int32_t> positions,
       gpu::In<uint64_t> pages, int layer_lines, int64_t row_bytes, int64_t row_offset,
       int n_head, int n_kv_head, int head_dim, gpu::In<float> q_norm, gpu::In<float> k_norm,
       gpu::In<float> v_norm, float eps, gpu::In<float> rope, int n_rot,
       int is_neox, float factor, gpu::In<float> query_scales, gpu::Out<int8_t> q, gpu::Out<float> q_scale,
       gpu::Out<uint8_t> rows, int v_first, int norms_rotated) {
    gpu::begin();
    __shared__ gpu::Shared<float, gpu::HEAD_DIM_MAX> x;
    __shared__ gpu::Shared<float, THREADS> lanes;
    __shared__ gpu::Shared<uint32_t, 2> largest;
    const int64_t token = gpu::block();
    const int index = gpu::block_y(), position = positions[gpu::block()];
    const bool is_query = index < n_head, is_v = index >= n_head + n_kv_head;
    const gpu::In<float> from = qkv + token * stride + static_cast<int64_t>(index) * head_dim;
    for (int d = gpu::thread(); d < head_dim; d += THREADS) x[d] = from[d];
    gpu::barrier();
    const gpu::In<float> norm = is_query ? q_norm : is_v ? v_norm : k_norm;
    const bool is_last = norms_rotated && !is_v;
    if (norm && !is_last) normalise(x, lanes, norm, head_dim, eps);
    if (!is_v && rope) rotate(x, rope + static_cast<int64_t>(position) * n_rot, n_rot, is_neox);
    if (norm && is_last) normalise(x, lanes, norm, head_dim, eps);
    if (!is_v) transform(x, head_dim, ca::transform_width(head_dim, v_first));
    if (is_query) {
        const int64_t row = token * n_head + index;
        if (query_scales) factor = ca::mul_rn(factor, query_scales[position]);
        put_query(x, head_dim, factor, q + row * head_dim, q_scale + row * (head_dim / ca::BLOCK));
        return;
    }
    const gpu::HeadLayout at = {head_dim, v_first};
    const int head = (index - n_head) % n_kv_head, t = position % gpu::PAGE_TOKENS;
    const gpu::Out<uint8_t> page =
        gpu::out_at<uint8_t>(pages[gpu::block()]) + gpu::head_offset(at, layer_lines, head);
    const gpu::Out<uint8_t> row =
        rows + token * row_bytes + row_offset + static_cast<int64_t>(head) * at.row_bytes();
    if (is_v)
        put_v(x, largest, at, t, page, row);
    else
        put_k(x, largest, at, t, page, row);
}

// Undoes the transform in place: heads of `run` values of each row, from `column` on. Grid: (rows, heads).
KERNEL(transform_heads, THREADS, gpu::Out<float> rows, int stride, int run, int column, int width) {
    gpu::begin();
    __shared__ gpu::Shared<float, gpu::HEAD_DIM_MAX> x;
    const gpu::Out<float> values = rows + (static_cast<int64_t>(gpu::block()) * stride +
                                           static_cast<int64_t>(gpu::block_y()) * run + column);
    const int n = run - column;
    for (int d = gpu::thread(); d < n; d += THREADS) x[d] = values[d];
    gpu::barrier();
    transform(x, n, width);
    const float inverse = ca::div_rn(1.0f, ca::float_rn(width));  // exact
    for (int d = gpu::thread(); d < n; d += THREADS) values[d] = ca::mul_rn(x[d], inverse);
}
