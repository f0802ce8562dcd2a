// Golden vectors of mixtures of experts: selections with ties and with a NaN, and the experts of a step in
// which some have many tokens and some none. Of each way in which weights are read there is one kind: every
// worker computes all of this at its start, and golden_linear has the products of all kinds.
#include "common/ca.h"
#include "experts/experts.h"
#include "golden/golden.h"
#include "linear/pack.h"
#include "quant/norm.h"

namespace batchengine {
namespace {

constexpr size_t COLS = 256, N_FF = 256;  // whole superblocks
constexpr size_t EXPERTS = 9, USED = 3;
constexpr Kind KINDS[] = {Kind::q4_0, Kind::q6_k, Kind::bf16};
constexpr size_t TOKENS = 37;

}  // namespace

void golden_experts(Pool& pool, Golden& golden) {
    GoldenSource source(0xE4BE2);
    Rows in(TOKENS, COLS), logits(TOKENS, EXPERTS), out(TOKENS, COLS);
    for (size_t t = 0; t < TOKENS; ++t) {
        for (size_t i = 0; i < COLS; ++i) in.row(t)[i] = source.unit();
        for (size_t i = 0; i < EXPERTS; ++i)
            logits.row(t)[i] = i == 1 ? 3.0f : i == 7 ? -50.0f : 4.0f * source.unit();
    }
    for (size_t i = 0; i < EXPERTS; ++i) logits.row(5)[i] = i % 2 ? 0.0f : -0.0f;
    logits.row(6)[4] = logits.row(6)[2];
    logits.row(11)[8] = ca::canonical_nan();
    in.row(17)[200] = ca::float_of(ca::INFINITY_BITS);
    ExpertPairs pairs(TOKENS, EXPERTS, USED);
    select_experts(pool, logits, TOKENS, 1.25f, pairs);
    golden.add("experts", pairs.id.data(), pairs.pairs() * sizeof(int32_t));
    golden.add("weights of experts", pairs.weight.data(), pairs.pairs() * sizeof(float));

    Activations x(TOKENS, COLS, true), gathered(pairs.rows_max, COLS, true);
    Activations gated_q8(pairs.rows_max, N_FF, true);
    Rows gated(pairs.rows_max, N_FF);
    quantise(pool, in, TOKENS, x);
    gather_pairs(pool, x, pairs, gathered);
    for (const Kind kind : KINDS) {
        const auto bank = [&](size_t rows, size_t cols) {
            const std::vector<uint8_t> tensor = random_tensor(kind, rows, cols, source);
            Buffer<uint8_t> packed(packed_bytes(kind, rows, cols));
            pack(pool, kind, rows, cols, tensor.data(), packed.data());
            return packed;
        };
        const Buffer<uint8_t> gate = bank(EXPERTS * N_FF, COLS), up = bank(EXPERTS * N_FF, COLS);
        const Buffer<uint8_t> down = bank(EXPERTS * COLS, N_FF);
        pairs_gated(pool, gathered, {kind, EXPERTS * N_FF, COLS, gate.data()},
                    {kind, EXPERTS * N_FF, COLS, up.data()}, pairs, gated);
        quantise_pairs(pool, gated, pairs, gated_q8);
        for (size_t t = 0; t < TOKENS; ++t) std::memcpy(out.row(t), in.row(t), COLS * sizeof(float));
        pairs_add(pool, gated_q8, {kind, EXPERTS * COLS, N_FF, down.data()}, pairs, out);
        // The bits of a NaN in a sum are not defined.
        for (const size_t t : {11, 17}) std::memset(out.row(t), 0, COLS * sizeof(float));
        golden.add(std::string("experts ") + kind_name(kind), out, TOKENS);
    }
}

}  // namespace batchengine
