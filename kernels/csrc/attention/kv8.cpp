// place_kv, row_digests and step_digests: writing and hashing page rows. See attention.h.
#include <algorithm>
#include <vector>

#include "attention/attention.h"
#include "common/xxh3.h"
#include "rows/rowops.h"

namespace batchengine {
namespace {

// How far ahead rows of qkv are prefetched.
constexpr size_t TOKENS_AHEAD = 2;
constexpr size_t TILE_TOKENS = 16;

// K, K scale, V and V scale of one token and head, one after another.
struct TokenKv {
    TokenKv() = default;
    TokenKv(uint8_t* row, const LayerShape& layer)
        : k(reinterpret_cast<int8_t*>(row)),
          k_scale(reinterpret_cast<uint16_t*>(row + layer.head_dim)),
          v(k + layer.head_dim + 2 * layer.k_scales()),
          v_scale(reinterpret_cast<uint16_t*>(v + layer.v_dims())) {}
    int8_t* k;
    uint16_t* k_scale;
    int8_t* v;
    uint16_t* v_scale;
};
constexpr size_t TOKEN_KV_MAX = 2 * HEAD_DIM_MAX + HEAD_DIM_MAX / 16 + 2;

// K of `count` neighbouring tokens of a tile, from token t of the page on.
void store_k(const HeadPage& page, const LayerShape& layer, size_t t, const TokenKv* kv, size_t count) {
    const size_t head_dim = layer.head_dim;
    int8_t* const k = page.k + 4 * k_dword(head_dim, t, 0);
    uint16_t* const scale = page.k_scale + k_scale_index(layer.k_scales(), t, 0);
    for (size_t i = 0; i < count; i++) {
        for (size_t d4 = 0; d4 < head_dim / 4; d4++)
            std::memcpy(k + 64 * d4 + 4 * i, kv[i].k + 4 * d4, 4);
        for (size_t b = 0; b < layer.k_scales(); b++) scale[TILE_TOKENS * b + i] = kv[i].k_scale[b];
    }
}

// V of the same tokens. Four that share every dword are written together.
void store_v(const HeadPage& page, const LayerShape& layer, size_t t, const TokenKv* kv, size_t count) {
    const size_t head_dim = layer.head_dim;
    for (size_t i = 0; i < count; i++) page.v_scale[t + i] = *kv[i].v_scale;
    if (layer.is_latent()) return;
    for (size_t i = 0; i < count;) {
        int8_t* const v = page.v + v_byte(head_dim, t + i, 0);
        if ((t + i) % 4 == 0 && i + 4 <= count) {
            for (size_t d = 0; d < head_dim; d++)
                for (size_t j = 0; j < 4; j++) v[4 * d + j] = kv[i + j].v[d];
            i += 4;
        } else {
            for (size_t d = 0; d < head_dim; d++) v[4 * d] = kv[i].v[d];
            i += 1;
        }
    }
}

// How many tokens from `token` on, before `last`, are of its entry and its K tile.
size_t run_length(const Batch& batch, size_t token, size_t last) {
    const BatchEntry& entry = batch.entries[batch.entry_of[token]];
    const size_t end = std::min(last, entry.first_token + entry.n_tokens);
    return std::min(end - token, TILE_TOKENS - batch.position(token) % TILE_TOKENS);
}

// The page that holds a token of the batch.
uint8_t* page_of(const Batch& batch, size_t token) {
    return batch.page(batch.entries[batch.entry_of[token]], batch.position(token));
}

struct PlaceJob {
    const Rows& qkv;
    const Batch& batch;
    const LayerShape& shape;
    const PlaceParams& params;
    Queries& queries;
    KvRows* const rows;  // or null
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

    // A head of Q or K before it is quantised: norm and RoPE, if there are any, and the transform.
    void prepare(const float* x, const Vector* norm, size_t position, float* y) const {
        if (norm && params.norms_rotated) {
            alignas(64) float rotated[HEAD_DIM_MAX];
            std::copy_n(x, shape.head_dim, rotated);
            rotate(rotated, position);
            normalise(rotated, norm, y);
        } else {
            normalise(x, norm, y);
            rotate(y, position);
        }
        ops.hadamard(y, shape.head_dim, shape.transform_width());
    }

    void place_query(size_t token, size_t head, const float* x) const {
        alignas(64) float y[HEAD_DIM_MAX];
        prepare(x, params.q_norm, batch.position(token), y);
        const size_t group = queries.n_head / shape.n_kv_head;
        const size_t row = queries.row(shape.n_kv_head, head / group, token, head % group);
        const size_t blocks = shape.blocks();
        const RopeTable* rope = params.rope;
        const float scale = rope ? rope->query_scale(batch.position(token)) : 1.0f;
        ops.quantise_query(y, blocks, ca::mul_rn(factor, scale), queries.q.data() + row * shape.head_dim,
                           queries.scale.data() + row * blocks,
                           queries.offset.data() + row * blocks);
    }

    HeadPage head_page(size_t token, size_t head) const {
        return HeadPage(page_of(batch, token), shape, head);
    }

    void quantise_kv(size_t token, const float* k, const float* v, const TokenKv& out) const {
        alignas(64) float y[HEAD_DIM_MAX];
        prepare(k, params.k_norm, batch.position(token), y);
        ops.quantise_kv8(y, shape.k_scales(), 32, out.k, out.k_scale);
        if (shape.is_latent()) {
            const size_t first = shape.v_first;
            ops.quantise_kv8(y + first, 1, shape.head_dim - first, out.k + first, out.v_scale);
            return;
        }
        if (params.v_norm) {
            normalise(v, params.v_norm, y);
            v = y;
        }
        ops.quantise_kv8(v, 1, shape.head_dim, out.v, out.v_scale);
    }

    // Prefetches a token's page rows while the tokens before it are computed: at decode, no cache holds
    // them any more, and K alone touches head_dim / 4 lines.
    void prefetch_row(size_t token, size_t head) const {
        const size_t t = batch.position(token) % PAGE_TOKENS, head_dim = shape.head_dim;
        const HeadPage page = head_page(token, head);
        const int8_t* k = page.k + 4 * k_dword(head_dim, t, 0);
        for (size_t d4 = 0; d4 < head_dim / 4; d4++) __builtin_prefetch(k + 64 * d4, 1);
        const int8_t* v = page.v + v_byte(head_dim, t, 0);
        for (size_t i = 0; i < 4 * shape.v_dims(); i += 64) __builtin_prefetch(v + i, 1);
        for (size_t b = 0; b < shape.k_scales(); b++)
            __builtin_prefetch(page.k_scale + k_scale_index(shape.k_scales(), t, b), 1);
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
            if (!shape.is_latent()) __builtin_prefetch(v + i);
        }
    }

    // The query heads of the group of a KV head, for tokens [first, last).
    void place_queries(size_t head, size_t first, size_t last) const {
        const size_t group = queries.n_head / shape.n_kv_head;
        for (size_t token = first; token < last; token++)
            for (size_t g = head * group; g < (head + 1) * group; g++)
                place_query(token, g, qkv.row(token) + g * shape.head_dim);
    }

    // One KV head and the query heads of its group, for tokens [first, last).
    void place(size_t head, size_t first, size_t last) const {
        const size_t group = queries.n_head / shape.n_kv_head, head_dim = shape.head_dim;
        const size_t k_column = (queries.n_head + head) * head_dim;
        const size_t v_column = k_column + shape.n_kv_head * head_dim;
        if (!params.has_kv) return place_queries(head, first, last);
        alignas(2) uint8_t unkept[TILE_TOKENS][TOKEN_KV_MAX];
        TokenKv kv[TILE_TOKENS];
        prefetch_row(first, head);
        for (size_t token = first, count; token < last; token += count) {
            count = run_length(batch, token, last);
            if (token + count < last) prefetch_row(token + count, head);
            for (size_t i = 0; i < count; i++) {
                const float* x = qkv.row(token + i);
                if (token + i + TOKENS_AHEAD < last) prefetch_inputs(token + i + TOKENS_AHEAD, head);
                for (size_t g = head * group; g < (head + 1) * group; g++)
                    place_query(token + i, g, x + g * head_dim);
                kv[i] = TokenKv(rows ? rows->head(token + i, shape, head) : unkept[i], shape);
                quantise_kv(token + i, x + k_column, x + v_column, kv[i]);
            }
            const HeadPage page = head_page(token, head);
            const size_t t = batch.position(token) % PAGE_TOKENS;
            store_k(page, shape, t, kv, count);
            store_v(page, shape, t, kv, count);
        }
    }
};

// Appends one token's bytes of one head to a digest row.
void gather_head(const HeadPage& page, const LayerShape& layer, size_t t, uint8_t* out) {
    const size_t head_dim = layer.head_dim;
    const int8_t* k = page.k + 4 * k_dword(head_dim, t, 0);
    for (size_t d4 = 0; d4 < head_dim / 4; d4++) std::memcpy(out + 4 * d4, k + 64 * d4, 4);
    out += head_dim;
    for (size_t b = 0; b < layer.k_scales(); b++, out += 2)
        std::memcpy(out, page.k_scale + k_scale_index(layer.k_scales(), t, b), 2);
    const int8_t* v = page.v + v_byte(head_dim, t, 0);
    for (size_t i = 0; i < layer.v_dims(); i++) out[i] = static_cast<uint8_t>(v[4 * i]);
    out += layer.v_dims();
    std::memcpy(out, page.v_scale + t, 2);
}

void digest_group(const Batch& batch, const PageShape& shape, size_t first, size_t last,
                  const uint64_t* seeds, uint64_t* digests) {
    static thread_local std::vector<uint8_t> gathered;
    gathered.resize(TILE_TOKENS * shape.row_bytes());
    for (const LayerShape& layer : shape.layers)
        for (size_t head = 0; head < layer.n_kv_head; head++)
            for (size_t token = first; token < last; token++) {
                const size_t position = batch.position(token);
                const BatchEntry& entry = batch.entries[batch.entry_of[token]];
                gather_head(HeadPage(batch.page(entry, position), layer, head), layer,
                            position % PAGE_TOKENS,
                            gathered.data() + (token - first) * shape.row_bytes() +
                                layer.row_offset + head * layer.head_row_bytes());
            }
    for (size_t token = first; token < last; token++)
        digests[token] = xxh3_64(gathered.data() + (token - first) * shape.row_bytes(),
                                 shape.row_bytes(), seeds[token]);
}

// RN32(log2(e) * scale / width), the quotient in binary64, in any floating-point environment of the caller.
// The transform of Q and K multiplies their products by `width`.
float query_factor(double scale, size_t width) {
    const FloatEnvironment environment;
    return static_cast<float>(1.4426950408889634 * scale / static_cast<double>(width));
}

}  // namespace

void place_kv(Pool& pool, const Rows& qkv, const Batch& batch, const LayerShape& shape,
              const PlaceParams& params, Queries& queries, KvRows* rows) {
    const PlaceJob job{qkv,  batch,    shape, params, queries,
                       rows, rowops(), query_factor(params.scale, shape.transform_width())};
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

void row_digests(const Batch& batch, const PageShape& shape, const uint64_t* seeds,
                 uint64_t* digests) {
    for (size_t first = 0; first < batch.n_tokens; first += TILE_TOKENS)
        digest_group(batch, shape, first, std::min(first + TILE_TOKENS, batch.n_tokens), seeds,
                     digests);
}

void store_rows(Pool& pool, KvRows& rows, const Batch& batch, size_t first) {
    const PageShape& shape = rows.shape;
    std::vector<std::pair<const LayerShape*, size_t>> heads;
    for (const LayerShape& layer : shape.layers)
        for (size_t head = 0; head < layer.n_kv_head; head++) heads.emplace_back(&layer, head);
    for_each(pool, heads.size(), batch.n_tokens == 1, [&](size_t item) {
        const LayerShape& layer = *heads[item].first;
        const size_t head = heads[item].second;
        TokenKv kv[TILE_TOKENS];
        for (size_t token = 0, count; token < batch.n_tokens; token += count) {
            count = run_length(batch, token, batch.n_tokens);
            for (size_t i = 0; i < count; i++)
                kv[i] = TokenKv(rows.head(first + token + i, layer, head), layer);
            const HeadPage page(page_of(batch, token), layer, head);
            const size_t t = batch.position(token) % PAGE_TOKENS;
            store_k(page, layer, t, kv, count);
            store_v(page, layer, t, kv, count);
        }
    });
}

void step_digests(Pool& pool, const KvRows& rows, size_t tokens, const uint64_t* seeds,
                  uint64_t* digests) {
    for_each(pool, tokens, tokens == 1, [&](size_t token) {
        digests[token] = xxh3_64(rows.row(token), rows.shape.row_bytes(), seeds[token]);
    });
}

}  // namespace batchengine
