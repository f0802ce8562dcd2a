// Golden vectors of norm and attention: two super-pages, a partial last page, an outlier
// in K, a zero V row, both rope pairings, a chunk that crosses a page border.
#include "attention/attention.h"
#include "common/ca.h"
#include "golden/golden.h"
#include "quant/norm.h"
#include "rows/rowops.h"

namespace batchengine {
namespace {

constexpr size_t HEADS = 6, KV_HEADS = 2, HEAD_DIM = 64, POSITIONS = 1100, CHUNK = 40;

void fill(GoldenSource& source, float* x, size_t n, float size) {
    for (size_t i = 0; i < n; i++) x[i] = source.unit() * size;
}

void golden_attend(Pool& pool, Golden& golden, GoldenSource& source, bool neox) {
    const PageShape shape(1, KV_HEADS, HEAD_DIM);
    const size_t page_bytes = round_up(shape.payload_bytes(), CACHE_LINE);
    const size_t n_pages = div_up(POSITIONS, PAGE_TOKENS);
    Buffer<uint8_t> memory(n_pages * page_bytes);
    RopeTable rope(neox, HEAD_DIM, HEAD_DIM, 1e6, nullptr, 1.0, 1.0);
    rope.cover(0, POSITIONS);
    float norm_values[HEAD_DIM];
    fill(source, norm_values, HEAD_DIM, 2.0f);
    const Vector norm(norm_values, HEAD_DIM);
    const PlaceParams params{&norm, &norm, 1e-6f, &rope, 0.125};

    Rows qkv(CHUNK, (HEADS + 2 * KV_HEADS) * HEAD_DIM), out(CHUNK, HEADS * HEAD_DIM);
    Queries queries(CHUNK, HEADS, HEAD_DIM);
    Batch batch(CHUNK, 1, n_pages);
    for (size_t p = 0; p < n_pages; p++)
        batch.pages[p] = reinterpret_cast<uint64_t>(memory.data() + p * page_bytes);
    for (size_t start = 0; start < POSITIONS; start += CHUNK) {
        batch.n_tokens = std::min(CHUNK, POSITIONS - start);
        batch.n_entries = 1;
        batch.n_pages = n_pages;
        batch.entries[0] = {0, batch.n_tokens, start, 0};
        fill(source, qkv.data.data(), qkv.data.size(), 4.0f);
        qkv.row(3)[HEADS * HEAD_DIM + 5] = 300.0f;
        std::fill_n(qkv.row(5) + (HEADS + KV_HEADS) * HEAD_DIM, HEAD_DIM, 0.0f);
        place_kv(pool, qkv, batch, shape, 0, params, queries);
    }
    golden.add("pages", memory.data(), memory.size());
    attend(pool, queries, batch, shape, 0, out);
    golden.add("attend", out.data.data(), batch.n_tokens * out.width * sizeof(float));
    std::vector<uint64_t> seeds(batch.n_tokens, 7), digests(batch.n_tokens);
    row_digests(nullptr, batch, shape, seeds.data(), digests.data());
    golden.add("row digests", digests.data(), digests.size() * sizeof(uint64_t));
}

}  // namespace

void golden_attention(Pool& pool, Golden& golden) {
    GoldenSource source(0xA77E);
    Rows rows(2, 1000), normed(2, 1000);
    fill(source, rows.data.data(), rows.data.size(), 3.0f);
    std::vector<float> weights(1000);
    fill(source, weights.data(), weights.size(), 1.0f);
    rmsnorm_rows(pool, rows, Vector(weights.data(), weights.size()), 1e-5f, 2, normed);
    golden.add("rmsnorm", normed.data.data(), 2000 * sizeof(float));
    golden_attend(pool, golden, source, false);
    golden_attend(pool, golden, source, true);
}

}  // namespace batchengine
