// Golden vectors of norm and attention: two super-pages, a partial last page, both rope pairings,
// chunks that cross page borders, outliers, zeros and values that are not finite; windows and sinks. Heads
// of more than 256 dims came after arith_id was fixed, so they have vectors of their own.
#include "attention/attention.h"
#include "common/ca.h"
#include "golden/golden.h"
#include "quant/norm.h"
#include "rows/rowops.h"

namespace batchengine {
namespace {

constexpr size_t TOKENS_MAX = 50;
// Positions [0, HISTORY) only fill pages; the steps after them also attend: every shape of a tile.
constexpr size_t HISTORY = 1050;
constexpr size_t STEPS[] = {1, 2, 3, 4, 5, 16, 19};
constexpr size_t WINDOWS[] = {0, 1, 16, 70, 128, 257, 1024};  // of the last step, with sinks

struct Shape {
    size_t n_head, n_kv_head, head_dim;
    bool neox, normed;
    double scale = 0.125;
};
constexpr Shape SHAPES[] = {
    {6, 2, 64, false, true}, {3, 3, 96, true, false}, {4, 1, 128, true, true}, {4, 2, 256, false, false}};
// A transform of 512 values, and of 32: an odd number of blocks of 32 dims; and the widest heads.
constexpr Shape WIDE_SHAPES[] = {
    {3, 1, 512, true, true, 1.0}, {2, 1, 288, false, false}, {2, 1, 576, false, false}};

void fill(GoldenSource& source, float* x, size_t n, float size) {
    for (size_t i = 0; i < n; i++) x[i] = source.unit() * size;
}

// Rows of q, k and v: an outlier in K, a V of zeros, queries too small and too large for a scale, and
// towards the end a query, a K and a V that are not finite.
void fill_rows(GoldenSource& source, const Shape& shape, Rows& qkv, size_t tokens) {
    const size_t d = shape.head_dim;
    const size_t k = shape.n_head * d, v = k + shape.n_kv_head * d;
    for (size_t t = 0; t < tokens; t++) fill(source, qkv.row(t), qkv.width, 4.0f);
    if (tokens > 3) qkv.row(3)[k + 5] = 300.0f;
    if (tokens < STEPS[6]) return;
    std::fill_n(qkv.row(5) + v, d, 0.0f);
    for (size_t i = 0; i < d; i++) qkv.row(6)[i] *= 0x1p-100f;
    qkv.row(7)[d] = 0x1p110f;
    if (tokens != STEPS[6]) return;
    qkv.row(10)[3] = ca::canonical_nan();
    qkv.row(14)[k + 1] = ca::float_of(ca::INFINITY_BITS);
    qkv.row(16)[v + shape.n_kv_head * d - 1] = ca::canonical_nan();
}

void golden_attend(Pool& pool, Golden& golden, GoldenSource& source, const Shape& of) {
    const PageShape shape(1, of.n_kv_head, of.head_dim);
    const size_t n_pages = div_up(HISTORY + TOKENS_MAX, PAGE_TOKENS);
    const size_t page_bytes = round_up(shape.payload_bytes(), CACHE_LINE);
    Buffer<uint8_t> memory(n_pages * page_bytes);
    RopeTable rope(of.neox, of.head_dim, of.head_dim, 1e6, nullptr, 1.0, 1.0);
    rope.cover(0, HISTORY + TOKENS_MAX);
    float norm_values[HEAD_DIM_MAX];
    fill(source, norm_values, of.head_dim, 2.0f);
    const Vector norm_weights(norm_values, of.head_dim);
    const Vector* const norm = of.normed ? &norm_weights : nullptr;
    const PlaceParams params{norm, norm, 1e-6f, &rope, of.scale};

    Rows qkv(TOKENS_MAX, (of.n_head + 2 * of.n_kv_head) * of.head_dim);
    Rows out(TOKENS_MAX, of.n_head * of.head_dim);
    Queries queries(TOKENS_MAX, of.n_head, of.head_dim);
    Batch batch(TOKENS_MAX, 1, n_pages);
    for (size_t p = 0; p < n_pages; p++)
        batch.pages[p] = reinterpret_cast<uint64_t>(memory.data() + p * page_bytes);
    batch.n_entries = 1;
    batch.n_pages = n_pages;
    size_t start = 0;
    const auto place = [&](size_t tokens) {
        batch.n_tokens = tokens;
        batch.entries[0] = {0, tokens, start, 0};
        fill_rows(source, of, qkv, tokens);
        place_kv(pool, qkv, batch, shape.layers[0], params, queries);
        start += tokens;
    };
    const std::string name = std::to_string(of.head_dim);
    while (start < HISTORY) place(TOKENS_MAX);
    for (const size_t tokens : STEPS) {
        place(tokens);
        attend(pool, queries, batch, shape.layers[0], out);
        golden.add("attend " + name + " x " + std::to_string(tokens), out, tokens);
    }
    std::vector<float> logits(of.n_head);
    fill(source, logits.data(), of.n_head, 9.0f);
    const Sinks sinks(logits.data(), of.n_head);
    golden.add("sinks " + name, sinks.values.data(), sinks.values.size() * sizeof(float));
    for (const size_t window : WINDOWS) {
        attend(pool, queries, batch, shape.layers[0], out, window, &sinks);
        golden.add("attend " + name + " window " + std::to_string(window), out, batch.n_tokens);
    }
    golden.add("pages " + name, memory.data(), memory.size());
    std::vector<uint64_t> seeds(batch.n_tokens, 7), digests(batch.n_tokens);
    row_digests(batch, shape, seeds.data(), digests.data());
    golden.add("row digests " + name, digests.data(), digests.size() * sizeof(uint64_t));
}

}  // namespace

void golden_attention(Pool& pool, Golden& golden) {
    GoldenSource source(0xA77E);
    Rows rows(2, 1000), normed(2, 1000);
    for (size_t t = 0; t < rows.tokens_max; t++) fill(source, rows.row(t), rows.width, 3.0f);
    std::vector<float> weights(1000);
    fill(source, weights.data(), weights.size(), 1.0f);
    rmsnorm_rows(pool, rows, Vector(weights.data(), weights.size()), 1e-5f, 2, normed);
    golden.add("rmsnorm", normed, 2);
    norm_add(pool, rows, Vector(weights.data(), weights.size()), 1e-5f, 2, normed);
    golden.add("norm_add", normed, 2);
    for (const Shape& shape : SHAPES) golden_attend(pool, golden, source, shape);
}

void golden_wide_heads(Pool& pool, Golden& golden) {
    GoldenSource source(0x51DE);
    for (const Shape& shape : WIDE_SHAPES) golden_attend(pool, golden, source, shape);
}

}  // namespace batchengine
