// Golden vectors of feed-forward parts without a gate, and with silu within a limit, dense and of experts; of gates of
// whole heads; and of branches that are added times a factor. Of each way in which weights are read there is one kind.
#include "common/ca.h"
#include "experts/experts.h"
#include "golden/golden.h"
#include "linear/pack.h"
#include "quant/norm.h"
#include "recurrent/mixers.h"
#include "rows/rows.h"

namespace batchengine {
namespace {

constexpr size_t COLS = 256, TOKENS = 19, EXPERTS = 5, USED = 2;
constexpr size_t ROWS = 37, N_FF = 48;  // of a dense part with a ragged last tile, of an expert
constexpr Kind KINDS[] = {Kind::q4_0, Kind::q6_k, Kind::bf16};

// The bits of a NaN are not defined.
void add_record(Golden& golden, const std::string& name, Rows& rows, size_t tokens) {
    for (size_t t = 0; t < tokens; ++t)
        for (size_t i = 0; i < rows.width; ++i)
            if (!(rows.row(t)[i] == rows.row(t)[i])) rows.row(t)[i] = ca::canonical_nan();
    golden.add(name, rows, tokens);
}

Vector some_bias(GoldenSource& source, size_t n) {
    std::vector<float> values(n);
    for (size_t i = 0; i < n; ++i) values[i] = 3.0f * source.unit();
    const float special[] = {-0.0f,  0x1p-80f, -0x1p-80f, 0x1p70f, -0x1p70f, ca::float_of(ca::INFINITY_BITS),
                             -ca::float_of(ca::INFINITY_BITS), ca::canonical_nan()};
    std::copy(std::begin(special), std::end(special), values.begin() + 3);
    return Vector(values.data(), n);
}

// The tokens of a step, and their pairs with experts. One token is no number.
struct Step {
    Step(Pool& pool, GoldenSource& source)
        : in(TOKENS, COLS),
          pairs(TOKENS, EXPERTS, USED),
          x(TOKENS, COLS, true),
          gathered(pairs.rows_max, COLS, true),
          out(TOKENS, ROWS),
          of_pairs(pairs.rows_max, N_FF),
          taken(TOKENS * USED, N_FF) {
        Rows logits(TOKENS, EXPERTS);
        for (size_t t = 0; t < TOKENS; ++t) {
            for (size_t i = 0; i < COLS; ++i) in.row(t)[i] = source.unit();
            for (size_t i = 0; i < EXPERTS; ++i) logits.row(t)[i] = i == 1 ? 3.0f : 4.0f * source.unit();
        }
        in.row(17)[200] = ca::canonical_nan();
        select_experts(pool, logits, TOKENS, {ca::Gating::softmax, 1.0f, nullptr}, pairs);
        quantise(pool, in, TOKENS, x);
        gather_pairs(pool, x, pairs, gathered);
    }

    // `of_pairs`, without the rows that fill groups.
    void add_pairs_record(Golden& golden, const std::string& name) {
        size_t n = 0;
        for (size_t group = 0; group < pairs.groups; ++group)
            for (int32_t i = 0; i < pairs.group_pairs[group]; ++i)
                std::memcpy(taken.row(n++), of_pairs.row(group * GROUP_TOKENS + static_cast<size_t>(i)),
                            N_FF * sizeof(float));
        add_record(golden, name, taken, n);
    }

    Rows in;
    ExpertPairs pairs;
    Activations x, gathered;
    Rows out, of_pairs, taken;  // of the dense part, and of pairs
};

// A random matrix of `rows` rows.
Buffer<uint8_t> packed(Pool& pool, Kind kind, size_t rows, GoldenSource& source) {
    const std::vector<uint8_t> tensor = random_tensor(kind, rows, COLS, source);
    Buffer<uint8_t> bytes(packed_bytes(kind, rows, COLS));
    pack(pool, kind, rows, COLS, tensor.data(), bytes.data());
    return bytes;
}

}  // namespace

void golden_limits(Pool& pool, Golden& golden) {
    GoldenSource source(0x7C1A);
    Step step(pool, source);
    // Gates and ups past both bounds, and gates whose exp is infinite.
    const auto some = [&](size_t n, float each_61st) {
        std::vector<float> values(n);
        for (size_t i = 0; i < n; ++i) values[i] = i % 61 == 9 ? each_61st : 12.0f * source.unit();
        return Vector(values.data(), n);
    };
    const Vector gate_bias = some(ROWS, -90.0f), bank_gate_bias = some(EXPERTS * N_FF, -90.0f);
    const Vector bias = some_bias(source, ROWS), bank_bias = some_bias(source, EXPERTS * N_FF);
    for (const Kind kind : KINDS) {
        const Buffer<uint8_t> gates = packed(pool, kind, ROWS, source), ups = packed(pool, kind, ROWS, source);
        const Buffer<uint8_t> gate_bank = packed(pool, kind, EXPERTS * N_FF, source);
        const Buffer<uint8_t> up_bank = packed(pool, kind, EXPERTS * N_FF, source);
        const Matrix gate{kind, ROWS, COLS, gates.data()}, up{kind, ROWS, COLS, ups.data()};
        const Matrix gates_of{kind, EXPERTS * N_FF, COLS, gate_bank.data()};
        const Matrix ups_of{kind, EXPERTS * N_FF, COLS, up_bank.data()};
        linear_gated(pool, step.x, {&gate, &gate_bias}, {&up, &bias}, {ca::Activation::limited, 7.0f}, TOKENS,
                     step.out);
        add_record(golden, std::string("limited ") + kind_name(kind), step.out, TOKENS);
        pairs_gated(pool, step.gathered, {&gates_of, &bank_gate_bias}, {&ups_of, &bank_bias},
                    {ca::Activation::limited, 1.25f}, step.pairs, step.of_pairs);
        step.add_pairs_record(golden, std::string("limited, of experts ") + kind_name(kind));
    }
    constexpr size_t HEADS = 3, HEAD_DIM = 35;  // whole vectors of each level, and a rest
    Rows gate(TOKENS, HEADS), heads(TOKENS, HEADS * HEAD_DIM);
    for (size_t t = 0; t < TOKENS; ++t) {
        for (size_t i = 0; i < HEADS; ++i) gate.row(t)[i] = 20.0f * source.unit();
        for (size_t i = 0; i < heads.width; ++i) heads.row(t)[i] = source.unit();
    }
    gate.row(4)[1] = ca::float_of(ca::INFINITY_BITS);
    gate.row(5)[2] = -200.0f;
    gate_rows(pool, gate, TOKENS, heads);
    add_record(golden, "gate_rows of heads", heads, TOKENS);
}

void golden_branches(Pool& pool, Golden& golden) {
    GoldenSource source(0x2E1F);
    Step step(pool, source);
    const Vector bias = some_bias(source, ROWS), bank_bias = some_bias(source, EXPERTS * N_FF);
    for (const Kind kind : KINDS) {
        const Buffer<uint8_t> dense = packed(pool, kind, ROWS, source);
        const Buffer<uint8_t> bank = packed(pool, kind, EXPERTS * N_FF, source);
        const Matrix matrix{kind, ROWS, COLS, dense.data()}, experts{kind, EXPERTS * N_FF, COLS, bank.data()};
        linear_relu2(pool, step.x, {&matrix, &bias}, TOKENS, step.out);
        add_record(golden, std::string("relu2 ") + kind_name(kind), step.out, TOKENS);
        pairs_relu2(pool, step.gathered, {&experts, &bank_bias}, step.pairs, step.of_pairs);
        step.add_pairs_record(golden, std::string("relu2 of experts ") + kind_name(kind));
    }
    constexpr size_t WIDTH = 101;  // whole vectors of each level, and a rest
    Rows branch(TOKENS, WIDTH), stream(TOKENS, WIDTH);
    for (Rows* rows : {&branch, &stream})
        for (size_t t = 0; t < TOKENS; ++t)
            for (size_t i = 0; i < WIDTH; ++i) rows->row(t)[i] = (i % 9 ? 1.0f : 90.0f) * source.unit();
    branch.row(1)[3] = -ca::float_of(ca::INFINITY_BITS);
    branch.row(2)[WIDTH - 1] = stream.row(2)[WIDTH - 1] = -0.0f;
    stream.row(3)[40] = ca::canonical_nan();
    scaled_add(pool, branch, 0.22f, TOKENS, stream);
    add_record(golden, "scaled_add", stream, TOKENS);
}

}  // namespace batchengine
