// place_kv and row_digests: writing and hashing page rows. See attention.h.
#include <algorithm>
#include <vector>

#include "attention/attention.h"
#include "common/xxh3.h"
#include "rows/rowops.h"

namespace batchengine {
namespace {

// How far ahead rows of qkv are prefetched.
constexpr size_t TOKENS_AHEAD = 2;
// Most tokens gathered together for digests: a K tile, so that its cache lines are read once.
constexpr size_t DIGEST_TOKENS = 16;

struct PlaceJob {
    const Rows& qkv;
    const Batch& batch;
    const PageShape& shape;
    const size_t layer;
    const PlaceParams& params;
    Queries& queries;
    const RowOps& ops;
    const float factor;  // of the queries

    void rotate(float* x, size_t position) const {
        if (!params.rope) return;
        const float* cosines = params.rope->cosines(position);
        ops.rope(x, cosines, cosines + params.rope->half, params.rope->half, params.rope->neox);
    }

    void normalise(const float* x, const Vector* norm, float* y) const {
        if (norm)
            ops.rmsnorm(x, norm->data.data(), shape.head_dim, params.eps, y);
        else
            std::copy_n(x, shape.head_dim, y);
    }

    void place_query(size_t token, size_t head, const float* x) const {
        alignas(64) float y[HEAD_DIM_MAX];
        normalise(x, params.q_norm, y);
        rotate(y, batch.position(token));
        const size_t group = queries.n_head / shape.n_kv_head;
        const size_t row = queries.row(shape.n_kv_head, head / group, token, head % group);
        const size_t blocks = shape.blocks();
        ops.quantise_query(y, blocks, factor, queries.q.data() + row * shape.head_dim,
                           queries.scale.data() + row * blocks,
                           queries.offset.data() + row * blocks);
    }

    HeadPage head_page(size_t token, size_t head) const {
        const BatchEntry& entry = batch.entries[batch.entry_of[token]];
        return HeadPage(batch.page(entry, batch.position(token)), shape, layer, head);
    }

    void place_k(size_t token, size_t head, const float* x) const {
        alignas(64) float y[HEAD_DIM_MAX];
        int8_t q[HEAD_DIM_MAX];
        uint16_t d[HEAD_DIM_MAX / 32];
        const size_t t = batch.position(token) % PAGE_TOKENS, head_dim = shape.head_dim;
        normalise(x, params.k_norm, y);
        rotate(y, batch.position(token));
        ops.quantise_kv8(y, shape.blocks(), 32, q, d);
        const HeadPage page = head_page(token, head);
        int8_t* k = page.k + 4 * k_dword(head_dim, t, 0);
        for (size_t d4 = 0; d4 < head_dim / 4; d4++) std::memcpy(k + 64 * d4, q + 4 * d4, 4);
        for (size_t b = 0; b < shape.blocks(); b++)
            page.k_scale[k_scale_index(head_dim, t, b)] = d[b];
    }

    void place_v(size_t token, size_t head, const float* x) const {
        int8_t q[HEAD_DIM_MAX];
        uint16_t d;
        const size_t t = batch.position(token) % PAGE_TOKENS, head_dim = shape.head_dim;
        ops.quantise_kv8(x, 1, head_dim, q, &d);
        const HeadPage page = head_page(token, head);
        int8_t* v = page.v + v_byte(head_dim, t, 0);
        for (size_t i = 0; i < head_dim; i++) v[4 * i] = q[i];
        page.v_scale[t] = d;
    }

    // Four neighbouring tokens share every dword of V: written together, one store instead of four.
    void place_v_quad(size_t token, size_t head, size_t column) const {
        int8_t q[4][HEAD_DIM_MAX];
        const size_t t = batch.position(token) % PAGE_TOKENS, head_dim = shape.head_dim;
        const HeadPage page = head_page(token, head);
        for (size_t i = 0; i < 4; i++)
            ops.quantise_kv8(qkv.row(token + i) + column, 1, head_dim, q[i], page.v_scale + t + i);
        int8_t* v = page.v + v_byte(head_dim, t, 0);
        for (size_t i = 0; i < head_dim; i++)
            for (size_t j = 0; j < 4; j++) v[4 * i + j] = q[j][i];
    }

    bool starts_quad(size_t token, size_t end) const {
        return token + 4 <= end && batch.position(token) % 4 == 0 &&
               batch.entry_of[token + 3] == batch.entry_of[token];
    }

    // Prefetches a token's page rows before its queries are computed: at decode, no cache holds them
    // any more, and K alone touches head_dim / 4 lines.
    void prefetch_row(size_t token, size_t head) const {
        const size_t t = batch.position(token) % PAGE_TOKENS, head_dim = shape.head_dim;
        const HeadPage page = head_page(token, head);
        const int8_t* k = page.k + 4 * k_dword(head_dim, t, 0);
        for (size_t d4 = 0; d4 < head_dim / 4; d4++) __builtin_prefetch(k + 64 * d4, 1);
        const int8_t* v = page.v + v_byte(head_dim, t, 0);
        for (size_t i = 0; i < 4 * head_dim; i += 64) __builtin_prefetch(v + i, 1);
        for (size_t b = 0; b < shape.blocks(); b++)
            __builtin_prefetch(page.k_scale + k_scale_index(head_dim, t, b), 1);
        __builtin_prefetch(page.v_scale + t, 1);
    }

    // Prefetches one KV head's parts of a row of qkv, which the hardware prefetcher does not detect.
    void prefetch_inputs(size_t token, size_t head) const {
        const size_t group = queries.n_head / shape.n_kv_head, head_dim = shape.head_dim;
        const float* q = qkv.row(token) + head * group * head_dim;
        const float* k = qkv.row(token) + (queries.n_head + head) * head_dim;
        const float* v = k + shape.n_kv_head * head_dim;
        constexpr size_t line = CACHE_LINE / sizeof(float);
        for (size_t i = 0; i < group * head_dim; i += line) __builtin_prefetch(q + i);
        for (size_t i = 0; i < head_dim; i += line) {
            __builtin_prefetch(k + i);
            __builtin_prefetch(v + i);
        }
    }

    // One KV head and the query heads of its group, for tokens [first, last).
    void place(size_t head, size_t first, size_t last) const {
        const size_t group = queries.n_head / shape.n_kv_head, head_dim = shape.head_dim;
        const size_t k_column = (queries.n_head + head) * head_dim;
        const size_t v_column = k_column + shape.n_kv_head * head_dim;
        size_t v_done = first;
        for (size_t token = first; token < last; token++) {
            const float* x = qkv.row(token);
            const bool starts = token == batch.entries[batch.entry_of[token]].first_token;
            if (starts || batch.position(token) % 16 == 0) prefetch_row(token, head);
            if (token + TOKENS_AHEAD < last) prefetch_inputs(token + TOKENS_AHEAD, head);
            for (size_t g = head * group; g < (head + 1) * group; g++)
                place_query(token, g, x + g * head_dim);
            place_k(token, head, x + k_column);
            if (token < v_done) continue;
            const bool quad = starts_quad(token, last);
            if (quad)
                place_v_quad(token, head, v_column);
            else
                place_v(token, head, x + v_column);
            v_done = token + (quad ? 4 : 1);
        }
    }
};

// Appends one token's bytes of one head to a digest row.
uint8_t* gather_head(const HeadPage& page, size_t head_dim, size_t t, uint8_t* out) {
    const int8_t* k = page.k + 4 * k_dword(head_dim, t, 0);
    for (size_t d4 = 0; d4 < head_dim / 4; d4++) std::memcpy(out + 4 * d4, k + 64 * d4, 4);
    out += head_dim;
    for (size_t b = 0; b < head_dim / 32; b++, out += 2)
        std::memcpy(out, page.k_scale + k_scale_index(head_dim, t, b), 2);
    const int8_t* v = page.v + v_byte(head_dim, t, 0);
    for (size_t i = 0; i < head_dim; i++) out[i] = static_cast<uint8_t>(v[4 * i]);
    out += head_dim;
    std::memcpy(out, page.v_scale + t, 2);
    return out + 2;
}

void digest_group(const Batch& batch, const PageShape& shape, size_t first, size_t last,
                  const uint64_t* seeds, uint64_t* digests) {
    static thread_local std::vector<uint8_t> gathered;
    gathered.resize(DIGEST_TOKENS * shape.row_bytes());
    size_t filled = 0;
    for (size_t layer = 0; layer < shape.n_layer; layer++)
        for (size_t head = 0; head < shape.n_kv_head; head++) {
            for (size_t token = first; token < last; token++) {
                const size_t position = batch.position(token);
                const BatchEntry& entry = batch.entries[batch.entry_of[token]];
                gather_head(HeadPage(batch.page(entry, position), shape, layer, head),
                            shape.head_dim, position % PAGE_TOKENS,
                            gathered.data() + (token - first) * shape.row_bytes() + filled);
            }
            filled += shape.row_bytes() / (shape.n_layer * shape.n_kv_head);
        }
    for (size_t token = first; token < last; token++)
        digests[token] = xxh3_64(gathered.data() + (token - first) * shape.row_bytes(),
                                 shape.row_bytes(), seeds[token]);
}

// RN32(log2(e) * scale), the product in binary64, in any floating-point environment of the caller.
float query_factor(double scale) {
    const FloatEnvironment environment;
    return static_cast<float>(1.4426950408889634 * scale);
}

}  // namespace

void place_kv(Pool& pool, const Rows& qkv, const Batch& batch, const PageShape& shape, size_t layer,
              const PlaceParams& params, Queries& queries) {
    const PlaceJob job{qkv, batch, shape, layer, params, queries, rowops(), query_factor(params.scale)};
    const size_t items = shape.n_kv_head * batch.n_tokens;
    // Head-major, so that a thread writes runs of neighbouring tokens and shares few cache lines.
    const auto run = [&](size_t first, size_t last) {
        while (first < last) {
            const size_t head = first / batch.n_tokens, token = first % batch.n_tokens;
            const size_t end = std::min(batch.n_tokens, token + (last - first));
            job.place(head, token, end);
            first += end - token;
        }
    };
    if (pool.threads() == 1 || batch.n_tokens * qkv.width <= VALUES_ALONE) {
        const FloatEnvironment environment;
        run(0, items);
        return;
    }
    pool.run([&](int ith, int nth) {
        run(items * static_cast<size_t>(ith) / static_cast<size_t>(nth),
            items * static_cast<size_t>(ith + 1) / static_cast<size_t>(nth));
    });
}

void row_digests(Pool* pool, const Batch& batch, const PageShape& shape, const uint64_t* seeds,
                 uint64_t* digests) {
    // At least two groups per thread, even of a few tokens.
    const size_t threads = pool ? static_cast<size_t>(pool->threads()) : 1;
    const size_t tokens =
        std::clamp(batch.n_tokens / (2 * threads), size_t{1}, DIGEST_TOKENS);
    const auto digest = [&](size_t group) {
        const size_t first = group * tokens;
        digest_group(batch, shape, first, std::min(first + tokens, batch.n_tokens), seeds, digests);
    };
    const size_t groups = div_up(batch.n_tokens, tokens);
    if (pool)
        for_each(*pool, groups, batch.n_tokens == 1, digest);
    else
        for (size_t group = 0; group < groups; group++) digest(group);
}

}  // namespace batchengine
