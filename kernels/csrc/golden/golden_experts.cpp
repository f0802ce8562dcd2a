// Golden vectors of mixtures of experts: selections with ties and with a NaN, of every gating, and the experts
// of a step in which some have many tokens and some none, without biases, and with biases and the activation
// `oai`. Of each way in which weights are read there is one kind: every worker computes all of this at its
// start, and golden_linear has the products of all kinds.
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
    select_experts(pool, logits, TOKENS, {ca::Gating::softmax, 1.25f, nullptr}, pairs);
    golden.add("experts", pairs.id.data(), pairs.pairs() * sizeof(int32_t));
    golden.add("weights of experts", pairs.weight.data(), pairs.pairs() * sizeof(float));

    Activations x(TOKENS, COLS, true), gathered(pairs.rows_max, COLS, true);
    Activations gated_q8(pairs.rows_max, N_FF, true);
    Rows gated(pairs.rows_max, N_FF);
    quantise(pool, in, TOKENS, x);
    gather_pairs(pool, x, pairs, gathered);
    // Gates and ups past both bounds of `oai`, and gates whose exp is infinite.
    GoldenSource bias_source(0xB1A5);
    const auto biases = [&](size_t rows, float size, float each_61st) {
        std::vector<float> values(EXPERTS * rows);
        for (size_t i = 0; i < values.size(); ++i)
            values[i] = i % 61 == 7 ? each_61st : size * bias_source.unit();
        return Vector(values.data(), values.size());
    };
    const Vector gate_bias = biases(N_FF, 12.0f, -60.0f), up_bias = biases(N_FF, 12.0f, 20.0f);
    const Vector down_bias = biases(COLS, 1.0f, 0.0f);
    for (const Kind kind : KINDS) {
        const auto bank = [&](size_t rows, size_t cols) {
            const std::vector<uint8_t> tensor = random_tensor(kind, rows, cols, source);
            Buffer<uint8_t> packed(packed_bytes(kind, rows, cols));
            pack(pool, kind, rows, cols, tensor.data(), packed.data());
            return packed;
        };
        const Buffer<uint8_t> gates = bank(EXPERTS * N_FF, COLS), ups = bank(EXPERTS * N_FF, COLS);
        const Buffer<uint8_t> downs = bank(EXPERTS * COLS, N_FF);
        const Matrix gate{kind, EXPERTS * N_FF, COLS, gates.data()};
        const Matrix up{kind, EXPERTS * N_FF, COLS, ups.data()};
        const Matrix down{kind, EXPERTS * COLS, N_FF, downs.data()};
        const auto record = [&](const std::string& name, ca::Activation activation,
                                const Vector* gate_bias, const Vector* up_bias,
                                const Vector* down_bias) {
            pairs_gated(pool, gathered, {&gate, gate_bias}, {&up, up_bias}, {activation}, pairs, gated);
            quantise_pairs(pool, gated, pairs, gated_q8);
            for (size_t t = 0; t < TOKENS; ++t)
                std::memcpy(out.row(t), in.row(t), COLS * sizeof(float));
            pairs_add(pool, gated_q8, {&down, down_bias}, pairs, out);
            // The bits of a NaN in a sum are not defined.
            for (const size_t t : {11, 17}) std::memset(out.row(t), 0, COLS * sizeof(float));
            golden.add(name + " " + kind_name(kind), out, TOKENS);
        };
        record("experts", ca::Activation::silu, nullptr, nullptr, nullptr);
        record("experts of oai", ca::Activation::oai, &gate_bias, &up_bias, &down_bias);
    }
}

void golden_gating(Pool& pool, Golden& golden) {
    GoldenSource source(0x516301D);
    Rows logits(TOKENS, EXPERTS);
    for (size_t t = 0; t < TOKENS; ++t)
        for (size_t i = 0; i < EXPERTS; ++i) logits.row(t)[i] = 6.0f * source.unit();
    for (size_t i = 0; i < EXPERTS; ++i) {
        logits.row(5)[i] = i % 2 ? 0.0f : -0.0f;
        logits.row(7)[i] = 20.0f + static_cast<float>(i);  // all of the same logistic function
        logits.row(9)[i] = -30.0f - static_cast<float>(i);  // of a sum below the least one
        logits.row(10)[i] = -200.0f;                        // of no sum
    }
    logits.row(11)[8] = ca::canonical_nan();
    logits.row(12)[0] = ca::float_of(ca::INFINITY_BITS);
    std::vector<float> values(EXPERTS);
    for (float& value : values) value = 0.5f * source.unit();
    values[3] = values[4] = 0.25f;
    const Vector bias(values.data(), values.size());
    ExpertPairs pairs(TOKENS, EXPERTS, USED);
    const auto record = [&](const std::string& name, const ExpertChoice& choice) {
        select_experts(pool, logits, TOKENS, choice, pairs);
        golden.add("experts " + name, pairs.id.data(), pairs.pairs() * sizeof(int32_t));
        golden.add("weights of experts " + name, pairs.weight.data(),
                   pairs.pairs() * sizeof(float));
    };
    record("by sigmoid", {ca::Gating::sigmoid, 1.25f, nullptr});
    record("by sigmoid and bias", {ca::Gating::sigmoid, 1.0f, &bias});
    record("by normed sigmoid", {ca::Gating::normed_sigmoid, 1.0f, nullptr});
    record("by normed sigmoid and bias", {ca::Gating::normed_sigmoid, 2.5f, &bias});
}

namespace {

// Logits of many experts, and a bias, for choices that are recorded.
struct ManyExperts {
    static constexpr size_t MANY = 24;

    explicit ManyExperts(uint64_t seed) : logits(TOKENS, MANY), bias_values(MANY) {
        GoldenSource source(seed);
        for (size_t t = 0; t < TOKENS; ++t)
            for (size_t i = 0; i < MANY; ++i) logits.row(t)[i] = 6.0f * source.unit();
        for (size_t i = 0; i < MANY; ++i) {
            logits.row(5)[i] = i % 2 ? 0.0f : -0.0f;
            logits.row(7)[i] = 20.0f + static_cast<float>(i);  // all of the same logistic function
            logits.row(9)[i] = -30.0f - static_cast<float>(i);
        }
        logits.row(11)[8] = ca::canonical_nan();
        logits.row(12)[0] = ca::float_of(ca::INFINITY_BITS);
        for (float& value : bias_values) value = 0.5f * source.unit();
        bias_values[3] = bias_values[4] = 0.25f;
    }
    Vector bias() const { return Vector(bias_values.data(), bias_values.size()); }
    void record(Pool& pool, Golden& golden, const std::string& name, const ExpertChoice& choice) const {
        ExpertPairs pairs(TOKENS, MANY, USED);
        select_experts(pool, logits, TOKENS, choice, pairs);
        golden.add("experts " + name, pairs.id.data(), pairs.pairs() * sizeof(int32_t));
        golden.add("weights of experts " + name, pairs.weight.data(),
                   pairs.pairs() * sizeof(float));
    }

    Rows logits;
    std::vector<float> bias_values;
};

}  // namespace

void golden_choices(Pool& pool, Golden& golden) {
    const ManyExperts experts(0x6207);
    const Vector bias = experts.bias();
    const auto record = [&](const std::string& name, const ExpertChoice& choice) {
        experts.record(pool, golden, name, choice);
    };
    record("by softmax of all", {ca::Gating::softmax_all, 1.25f, nullptr});
    record("of groups by sigmoid", {ca::Gating::sigmoid, 1.0f, nullptr, nullptr, {6, 2}});
    record("of groups by sigmoid and bias", {ca::Gating::normed_sigmoid, 2.5f, &bias, nullptr, {8, 4}});
}

void golden_biased_softmax(Pool& pool, Golden& golden) {
    ManyExperts experts(0x6208);
    for (size_t i = 0; i < ManyExperts::MANY; ++i)  // those that the bias prefers have next to nothing
        experts.logits.row(10)[i] = experts.bias_values[i] > 0.0f ? -40.0f : 10.0f;
    const Vector bias = experts.bias();
    experts.record(pool, golden, "by softmax", {ca::Gating::biased_softmax, 1.25f, nullptr});
    experts.record(pool, golden, "by softmax and bias", {ca::Gating::biased_softmax, 2.5f, &bias});
    for (float& value : experts.bias_values) value *= 64.0f;
    const Vector large = experts.bias();
    experts.record(pool, golden, "by bias", {ca::Gating::biased_softmax, 1.0f, &large});
}

}  // namespace batchengine
