// Golden vectors of feed-forward parts without a gate, dense and of experts, and of branches that are added times a
// factor. Of each way in which weights are read there is one kind.
#include "common/ca.h"
#include "experts/experts.h"
#include "golden/golden.h"
#include "linear/pack.h"
#include "quant/norm.h"
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

}  // namespace

void golden_branches(Pool& pool, Golden& golden) {
    GoldenSource source(0x2E1F);
    Rows in(TOKENS, COLS), logits(TOKENS, EXPERTS), out(TOKENS, ROWS);
    for (size_t t = 0; t < TOKENS; ++t) {
        for (size_t i = 0; i < COLS; ++i) in.row(t)[i] = source.unit();
        for (size_t i = 0; i < EXPERTS; ++i) logits.row(t)[i] = i == 1 ? 3.0f : 4.0f * source.unit();
    }
    in.row(17)[200] = ca::canonical_nan();
    ExpertPairs pairs(TOKENS, EXPERTS, USED);
    select_experts(pool, logits, TOKENS, {ca::Gating::softmax, 1.0f, nullptr}, pairs);
    Activations x(TOKENS, COLS, true), gathered(pairs.rows_max, COLS, true);
    Rows of_pairs(pairs.rows_max, N_FF), taken(TOKENS * USED, N_FF);
    quantise(pool, in, TOKENS, x);
    gather_pairs(pool, x, pairs, gathered);
    const Vector bias = some_bias(source, ROWS), bank_bias = some_bias(source, EXPERTS * N_FF);
    for (const Kind kind : KINDS) {
        const auto packed = [&](size_t rows) {
            const std::vector<uint8_t> tensor = random_tensor(kind, rows, COLS, source);
            Buffer<uint8_t> bytes(packed_bytes(kind, rows, COLS));
            pack(pool, kind, rows, COLS, tensor.data(), bytes.data());
            return bytes;
        };
        const Buffer<uint8_t> dense = packed(ROWS), bank = packed(EXPERTS * N_FF);
        const Matrix matrix{kind, ROWS, COLS, dense.data()}, experts{kind, EXPERTS * N_FF, COLS, bank.data()};
        linear_relu2(pool, x, {&matrix, &bias}, TOKENS, out);
        add_record(golden, std::string("relu2 ") + kind_name(kind), out, TOKENS);
        pairs_relu2(pool, gathered, {&experts, &bank_bias}, pairs, of_pairs);
        size_t n = 0;  // without the rows that fill groups
        for (size_t group = 0; group < pairs.groups; ++group)
            for (int32_t i = 0; i < pairs.group_pairs[group]; ++i)
                std::memcpy(taken.row(n++), of_pairs.row(group * GROUP_TOKENS + static_cast<size_t>(i)),
                            N_FF * sizeof(float));
        add_record(golden, std::string("relu2 of experts ") + kind_name(kind), taken, n);
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
