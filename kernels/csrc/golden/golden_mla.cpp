// Golden vectors of multi-head latent attention: products of heads, of each way in which weights are read, and
// pages of a latent layer.
#include "attention/attention.h"
#include "experts/heads.h"
#include "golden/golden.h"
#include "linear/pack.h"

namespace batchengine {
namespace {

constexpr size_t HEADS = 3, COLS = 256, ROWS = 64, GAP = 32;  // GAP: values of a head that no product reads
constexpr size_t TOKENS = 37;
constexpr Kind KINDS[] = {Kind::q4_0, Kind::q6_k, Kind::bf16};
constexpr size_t ROTATED = 32, RANK = 64;

void golden_products(Pool& pool, Golden& golden, GoldenSource& source) {
    Rows in(TOKENS, HEADS * (COLS + GAP)), out(TOKENS, GAP + HEADS * (ROWS + GAP));
    for (size_t t = 0; t < TOKENS; ++t)
        for (size_t i = 0; i < in.width; ++i) in.row(t)[i] = source.unit();
    in.row(17)[GAP + 7] = ca::canonical_nan();  // of the first head alone
    HeadActivations x(TOKENS, HEADS, COLS, true);
    quantise_heads(pool, in, GAP, TOKENS, x);
    for (const Kind kind : KINDS) {
        const std::vector<uint8_t> tensor = random_tensor(kind, HEADS * ROWS, COLS, source);
        Buffer<uint8_t> packed(packed_bytes(kind, HEADS * ROWS, COLS));
        pack(pool, kind, HEADS * ROWS, COLS, tensor.data(), packed.data());
        linear_heads(pool, x, {kind, HEADS * ROWS, COLS, packed.data()}, TOKENS, out, GAP, ROWS + GAP);
        golden.add(std::string("heads ") + kind_name(kind), out, TOKENS);
    }
}

void golden_pages(Pool& pool, Golden& golden, GoldenSource& source) {
    constexpr size_t DIM = ROTATED + RANK;
    const PageShape shape(1, 1, DIM, ROTATED);
    Buffer<uint8_t> memory(round_up(shape.payload_bytes(), CACHE_LINE));
    RopeTable rope(false, DIM, ROTATED, 1e4, nullptr, 1.0, 1.0);
    rope.cover(0, TOKENS);
    Rows qk(TOKENS, (HEADS + 1) * DIM), out(TOKENS, HEADS * DIM);
    for (size_t t = 0; t < TOKENS; ++t)
        for (size_t i = 0; i < qk.width; ++i) qk.row(t)[i] = 3.0f * source.unit();
    Queries queries(TOKENS, HEADS, DIM);
    Batch batch(TOKENS, 1, 1);
    batch.pages[0] = reinterpret_cast<uint64_t>(memory.data());
    batch.n_entries = batch.n_pages = 1;
    batch.n_tokens = TOKENS;
    batch.entries[0] = {0, TOKENS, 0, 0};
    const PlaceParams params{nullptr, nullptr, 1e-6f, &rope, 0.125};
    place_kv(pool, qk, batch, shape.layers[0], params, queries);
    attend(pool, queries, batch, shape.layers[0], out);
    transform_heads(pool, out, HEADS, ROTATED, shape.layers[0].transform_width(), TOKENS);
    golden.add("latent, attended", out, TOKENS);
    golden.add("latent, page", memory.data(), memory.size());
}

}  // namespace

void golden_heads(Pool& pool, Golden& golden) {
    GoldenSource source(0x31A);
    golden_products(pool, golden, source);
    golden_pages(pool, golden, source);
}

}  // namespace batchengine
