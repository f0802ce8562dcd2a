// Golden vectors of the linear kernels: small shapes that reach every branch, with a ragged last row
// tile, a second segment of K, every tail of a token group, zero blocks, a denormal scale and a token
// with a NaN. Of the activation `gelu` and of scaled embeddings there is one kind. Kinds that came after
// arith_id was fixed have vectors of their own.
#include <algorithm>

#include "common/ca.h"
#include "golden/golden.h"
#include "linear/linear.h"
#include "linear/pack.h"
#include "quant/norm.h"

namespace batchengine {
namespace {

constexpr size_t COLS = 1280;  // five superblocks: one whole segment of 1024 and a part
constexpr size_t ROWS = 37;
constexpr size_t TOKENS = 19;

// Of a block of IQ1_M: the fp16 scale in its last two bytes goes into the upper four bits of its last four words.
void spread_scale(uint8_t* block) {
    uint16_t words[4], scale;
    std::memcpy(words, block + 48, 8);
    scale = words[3];
    for (unsigned i = 0; i < 4; ++i)
        words[i] = static_cast<uint16_t>((words[i] & 0x0FFFu) | (scale >> 4 * i & 15u) << 12);
    std::memcpy(block + 48, words, 8);
}

}  // namespace

std::vector<uint8_t> random_tensor(Kind kind, size_t rows, size_t cols, GoldenSource& source) {
    std::vector<uint8_t> bytes(source_bytes(kind, rows, cols));
    for (auto& byte : bytes) byte = static_cast<uint8_t>(source.next());
    const auto put_half = [&](size_t at, float value) {
        const uint16_t half = ca::float_to_half(value);
        std::memcpy(bytes.data() + at, &half, 2);
    };
    // Some blocks without a scale, and some rows whose products are all below the normal numbers.
    if (kind == Kind::mxfp4) {
        for (size_t block = 0, i = 0; block < bytes.size(); block += 17, ++i) {
            const bool is_tiny = i / (cols / 32) % 16 == 5;
            const uint8_t none = i % 2;  // e = 0 and e = 1 are the same
            const auto e = static_cast<uint8_t>(is_tiny ? 2 + bytes[block] % 8 : 112 + bytes[block] % 8);
            bytes[block] = i % 61 == 7 || i % 61 == 20 ? none : e;
        }
        return bytes;
    }
    // Bytes of a file block, and where its scales stand: d, then m or dmin.
    struct Scales {
        Kind kind;
        size_t stride;
        std::vector<size_t> at;
    };
    static const Scales SCALES[] = {
        {Kind::q4_0, 18, {0}},     {Kind::q4_1, 20, {0, 2}},  {Kind::q5_0, 22, {0}},
        {Kind::q5_1, 24, {0, 2}},  {Kind::q8_0, 34, {0}},     {Kind::iq4_nl, 18, {0}},
        {Kind::q4_k, 144, {0, 2}}, {Kind::q5_k, 176, {0, 2}}, {Kind::q6_k, 210, {208}},
        {Kind::iq4_xs, 136, {0}},  {Kind::q3_k, 110, {108}},
        {Kind::q2_k, 84, {80, 82}},
        {Kind::iq3_xxs, 98, {0}},  {Kind::iq3_s, 110, {0}},   {Kind::iq2_xxs, 66, {0}},
        {Kind::iq2_xs, 74, {0}},   {Kind::iq2_s, 82, {0}},    {Kind::iq1_s, 50, {0}},
        {Kind::iq1_m, 56, {54}},
    };
    for (const Scales& scales : SCALES) {
        if (kind != scales.kind) continue;
        for (size_t block = 0, i = 0; block < bytes.size(); block += scales.stride, ++i)
            for (const size_t at : scales.at) {
                const float tiny = i % 61 == 7 ? 0x1p-23f : 0.0f;
                const bool special = i % 61 == 7 || i % 61 == 19;
                put_half(block + at, special ? tiny : source.unit() * 0x1p-5f);
                if (kind == Kind::iq1_m) spread_scale(bytes.data() + block);
            }
        return bytes;
    }
    for (size_t i = 0; i < rows * cols; ++i) {
        const float value = source.unit();
        const auto bf16 = static_cast<uint16_t>(ca::bits_of(value) >> 16);
        if (kind == Kind::f16) put_half(2 * i, value);
        if (kind == Kind::bf16) std::memcpy(bytes.data() + 2 * i, &bf16, 2);
        if (kind == Kind::f32) std::memcpy(bytes.data() + 4 * i, &value, 4);
    }
    return bytes;
}

namespace {

// Activations and biases that every kind is multiplied with.
struct Inputs {
    GoldenSource source{0xBA7C4};
    Rows in{TOKENS, COLS};
    Activations x{TOKENS, COLS, true};
    std::vector<float> bias = std::vector<float>(ROWS);

    explicit Inputs(Pool& pool) {
        for (size_t i = 0; i < TOKENS * COLS; ++i)
            in.row(i / COLS)[i % COLS] = source.unit() * (i % 97 ? 1.0f : 40.0f);
        std::memset(in.row(3) + 64, 0, 32 * sizeof(float));
        in.row(17)[500] = ca::canonical_nan();
        quantise(pool, in, TOKENS, x);
        for (auto& value : bias) value = source.unit();
    }
};

void golden_kind(Pool& pool, Kind kind, Inputs& inputs, Golden& golden) {
    GoldenSource& source = inputs.source;
    const Activations& x = inputs.x;
    Rows out(TOKENS, ROWS), rows(TOKENS, COLS);
    const Vector bias(inputs.bias.data(), ROWS);
    const std::vector<uint8_t> tensor = random_tensor(kind, ROWS, COLS, source);
    Buffer<uint8_t> packed(packed_bytes(kind, ROWS, COLS));
    pack(pool, kind, ROWS, COLS, tensor.data(), packed.data());
    const Matrix matrix{kind, ROWS, COLS, packed.data()};
    const LinearPart part{&matrix, &bias};
    const auto record = [&](const std::string& op, const Rows& result, size_t tokens = TOKENS) {
        golden.add(op + " " + kind_name(kind), result, tokens);
    };
    linear(pool, x, {part}, TOKENS, out);
    record("linear", out);
    for (const size_t tokens : {1, 2, 3, 4, 5, 16}) {
        linear(pool, x, {part}, tokens, out);
        record("linear of " + std::to_string(tokens), out, tokens);
    }
    linear_add(pool, x, part, TOKENS, out);
    record("linear_add", out);
    linear_gated(pool, x, part, {&matrix, nullptr}, {ca::Activation::silu}, TOKENS, out);
    record("linear_gated", out);
    std::vector<int32_t> ids(TOKENS);
    for (size_t t = 0; t < TOKENS; ++t) ids[t] = static_cast<int32_t>(source.next() % ROWS);
    embed(pool, matrix, ids.data(), TOKENS, 1.0f, rows);
    record("embed", rows);
    if (kind != Kind::q4_0) return;
    embed(pool, matrix, ids.data(), TOKENS, 33.941125f, rows);
    record("embed, scaled,", rows);
    // Gates whose exp, whose argument and whose square are infinite.
    std::vector<float> gates(inputs.bias);
    const float large[] = {-12.0f, -60.0f, 60.0f, -1e15f, 1e15f, -3e38f, 3e38f};
    std::copy(std::begin(large), std::end(large), gates.begin() + 7);
    const Vector gate_bias(gates.data(), ROWS);
    linear_gated(pool, x, {&matrix, &gate_bias}, part, {ca::Activation::gelu}, TOKENS, out);
    record("linear_gated by gelu", out);
}

}  // namespace

void golden_linear(Pool& pool, Golden& golden) {
    Inputs inputs(pool);
    golden.add("quantise q", inputs.x.q.data(), inputs.x.q.size());
    golden.add("quantise scale", inputs.x.scale.data(), inputs.x.scale.size() * sizeof(float));
    for (int i = 0; i < KIND_COUNT; ++i)
        if (std::ranges::count(LATER_KINDS, static_cast<Kind>(i)) == 0 &&
            std::ranges::count(CODEBOOKS, static_cast<Kind>(i)) == 0)
            golden_kind(pool, static_cast<Kind>(i), inputs, golden);
}

void golden_later_kind(Pool& pool, Kind kind, Golden& golden) {
    Inputs inputs(pool);
    golden_kind(pool, kind, inputs, golden);
}

namespace {

// More token groups than one call of a level's kernel takes, the last one ragged. One thread has all of them: pieces
// of many threads may have too few.
void golden_many(const std::vector<Kind>& kinds, Golden& golden) {
    Pool pool(1, {}, 0);
    constexpr size_t tokens = (RUN_GROUPS_MAX + 4) * GROUP_TOKENS + 5, rows = 20;
    GoldenSource source{0x3A2E};
    Rows in(tokens, COLS), out(tokens, rows);
    for (size_t t = 0; t < tokens; ++t)
        for (size_t i = 0; i < COLS; ++i) in.row(t)[i] = source.unit() * (i % 97 ? 1.0f : 40.0f);
    in.row(tokens - 2)[500] = ca::canonical_nan();
    Activations x(tokens, COLS, false);
    quantise(pool, in, tokens, x);
    for (const Kind kind : kinds) {
        const std::vector<uint8_t> tensor = random_tensor(kind, rows, COLS, source);
        Buffer<uint8_t> packed(packed_bytes(kind, rows, COLS));
        pack(pool, kind, rows, COLS, tensor.data(), packed.data());
        const Matrix matrix{kind, rows, COLS, packed.data()};
        linear(pool, x, {{&matrix, nullptr}}, tokens, out);
        golden.add(std::string("linear of many ") + kind_name(kind), out, tokens);
    }
}

}  // namespace

void golden_many_tokens(Golden& golden) {
    std::vector<Kind> kinds;
    for (int i = 0; i <= static_cast<int>(Kind::q2_k); ++i) kinds.push_back(static_cast<Kind>(i));
    golden_many(kinds, golden);
}

// Each way to pack, and each product with few and with many tokens.
void golden_codebooks(Pool& pool, Golden& golden) {
    Inputs inputs(pool);
    for (const Kind kind : CODEBOOKS) golden_kind(pool, kind, inputs, golden);
    golden_many({Kind::iq3_xxs, Kind::iq3_s, Kind::iq2_xxs, Kind::iq2_s, Kind::iq1_s, Kind::iq1_m}, golden);
}

}  // namespace batchengine
