// Golden vectors of rule 13: rows value by value, inputs of layers, outputs of experts with scales, and V that
// is normed. Widths are no multiples of 16, so that each level's vectors and its rest are used.
#include "attention/attention.h"
#include "common/ca.h"
#include "experts/experts.h"
#include "golden/golden.h"
#include "rows/rows.h"

namespace batchengine {
namespace {

constexpr size_t TOKENS = 5, GROUP = 100, WIDTH = 3 * GROUP;

// Values of some size, zeros, one that is huge and one that is not finite.
void fill(GoldenSource& source, Rows& rows, float size) {
    for (size_t t = 0; t < rows.tokens_max; ++t)
        for (size_t i = 0; i < rows.width; ++i) rows.row(t)[i] = size * source.unit();
    rows.row(1)[3] = -0.0f;
    rows.row(2)[17] = 0x1p100f;
    rows.row(3)[WIDTH - 1] = -ca::float_of(ca::INFINITY_BITS);
}

void golden_normed_v(Pool& pool, Golden& golden, GoldenSource& source) {
    constexpr size_t HEAD_DIM = 64;
    const PageShape shape({{2, 32, 0}, {1, HEAD_DIM, 0}});
    const size_t page_bytes = round_up(shape.payload_bytes(), CACHE_LINE);
    Buffer<uint8_t> memory(page_bytes);
    std::memset(memory.data(), 0, page_bytes);
    Rows qkv(TOKENS, 4 * HEAD_DIM), out(TOKENS, 2 * HEAD_DIM);
    for (size_t t = 0; t < TOKENS; ++t)
        for (size_t i = 0; i < qkv.width; ++i) qkv.row(t)[i] = 2.0f * source.unit();
    const std::vector<float> ones(HEAD_DIM, 1.0f);
    const Vector norm(ones.data(), HEAD_DIM);
    Batch batch(TOKENS, 1, 1);
    batch.n_tokens = TOKENS, batch.n_entries = batch.n_pages = 1;
    batch.entries[0] = {0, TOKENS, 0, 0};
    for (size_t t = 0; t < TOKENS; ++t) batch.entry_of[t] = 0;
    batch.pages[0] = reinterpret_cast<uint64_t>(memory.data());
    Queries queries(TOKENS, 2, HEAD_DIM);
    place_kv(pool, qkv, batch, shape.layers[1], {&norm, &norm, 1e-6f, nullptr, 1.0, &norm}, queries);
    attend(pool, queries, batch, shape.layers[1], out);
    golden.add("page of normed V", memory.data(), page_bytes);
    golden.add("attention with normed V", out, TOKENS);
}

}  // namespace

void golden_values(Pool& pool, Golden& golden) {
    GoldenSource source(0x6E44A);
    Rows rows(TOKENS, WIDTH), others(TOKENS, WIDTH + 7);
    const auto record = [&](const char* name) {
        for (size_t t = 0; t < TOKENS; ++t)  // the bits of a NaN are not defined
            for (size_t i = 0; i < WIDTH; ++i)
                if (!(rows.row(t)[i] == rows.row(t)[i])) rows.row(t)[i] = ca::canonical_nan();
        golden.add(name, rows, TOKENS);
    };
    fill(source, rows, 3.0f);
    scale_rows(pool, 0.7f, TOKENS, rows);
    record("scale_rows");
    for (const float size : {0.5f, 40.0f}) {
        fill(source, rows, size);
        cap_rows(pool, 30.0f, TOKENS, rows);
        record("cap_rows");
    }
    fill(source, rows, 6.0f);
    fill(source, others, 2.0f);
    gelu_rows(pool, others, 7, TOKENS, rows);
    record("gelu_rows");
    Rows x(TOKENS, WIDTH);
    fill(source, rows, 1.0f);
    fill(source, x, 50.0f);
    std::vector<float> weights(GROUP);
    for (float& weight : weights) weight = 1.0f + source.unit();
    mix_inputs(pool, x, 0.02f, Vector(weights.data(), GROUP), 1e-6f, TOKENS, rows);
    record("mix_inputs");
    constexpr size_t EXPERTS = 9, USED = 3;
    Rows logits(TOKENS, EXPERTS);
    for (size_t t = 0; t < TOKENS; ++t)
        for (size_t i = 0; i < EXPERTS; ++i) logits.row(t)[i] = 4.0f * source.unit();
    const Vector scales(weights.data(), EXPERTS);
    ExpertPairs pairs(TOKENS, EXPERTS, USED);
    select_experts(pool, logits, TOKENS, {ca::Gating::softmax, 1.0f, nullptr, &scales}, pairs);
    golden.add("weights of scaled experts", pairs.weight.data(), pairs.pairs() * sizeof(float));
    golden_normed_v(pool, golden, source);
}

}  // namespace batchengine
