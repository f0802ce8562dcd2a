// The program `print_golden`: hashes of all golden vectors, and of the kernels on random shapes.
//
// Per level it prints "level NAME" and then lines "HASH NAME", which must agree between levels and
// between machines: tools/check_arm.py compares ARM with the host by them. It needs no Python, so it
// runs wherever a C++ compiler can build for.
#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "attention/attention.h"
#include "common/dispatch.h"
#include "common/xxh3.h"
#include "golden/golden.h"
#include "linear/linear.h"
#include "linear/pack.h"
#include "quant/norm.h"
#include "sample/sampling.h"

namespace batchengine {
namespace {

constexpr int ROUNDS = 6;  // random shapes per kind of matrix, and of attention
constexpr size_t WIDE_DIMS[] = {288, 384, 576};  // of heads whose attention takes the scalar level long
constexpr int WIDE_ROUNDS = 2;

class Shapes {
  public:
    Shapes(Pool& pool, Golden& golden) : pool_(pool), golden_(golden) {}

    void linear_of(Kind kind);
    void attention_of(size_t head_dim, int rounds);
    void sampling();

  private:
    size_t between(size_t low, size_t high) { return low + source_.next() % (high - low + 1); }
    // Values of many magnitudes, a hundredth of them zero.
    void fill(Rows& rows, int spread) {
        const int shift = static_cast<int>(source_.next() % static_cast<uint64_t>(2 * spread + 1));
        const float unit = ca::power_of_two(shift - spread);
        for (size_t t = 0; t < rows.tokens_max; ++t)
            for (size_t i = 0; i < rows.width; ++i)
                rows.row(t)[i] = source_.next() % 100 ? source_.unit() * unit : 0.0f;
    }
    void record(const std::string& name, const Rows& rows, size_t tokens) {
        golden_.add(name, rows, tokens);
    }

    Pool& pool_;
    Golden& golden_;
    GoldenSource source_{0x5A9E5};
};

void Shapes::linear_of(Kind kind) {
    for (int round = 0; round < ROUNDS; ++round) {
        const bool floats = kind == Kind::f16 || kind == Kind::bf16 || kind == Kind::f32;
        const size_t rows = between(1, 70), tokens = between(1, round < 4 ? 35 : 200);
        const size_t cols = floats ? between(1, 1500) : 256 * between(1, 9);
        Rows in(tokens, cols), out(tokens, rows);
        Rows rotated(tokens, rows);
        fill(in, 60);
        // One token in three shapes of six holds values that are no numbers, or too large.
        if (round % 2) in.row(between(0, tokens - 1))[between(0, cols - 1)] = round == 3 ? 0x1p100f : NAN;
        Activations x(tokens, cols, true);
        quantise(pool_, in, tokens, x);
        const std::vector<uint8_t> tensor = random_tensor(kind, rows, cols, source_);
        Buffer<uint8_t> packed(packed_bytes(kind, rows, cols));
        pack(pool_, kind, rows, cols, tensor.data(), packed.data());
        const Matrix matrix{kind, rows, cols, packed.data()};
        const LinearPart part{&matrix, nullptr};
        const std::string shape = std::string(" ") + kind_name(kind) + " " + std::to_string(rows) + "x" +
                                  std::to_string(cols) + " " + std::to_string(tokens);
        linear(pool_, x, {part}, tokens, out);
        record("linear" + shape, out, tokens);
        linear_add(pool_, x, part, tokens, out);
        record("linear_add" + shape, out, tokens);
    }
}

void Shapes::attention_of(size_t head_dim, int rounds) {
    for (int round = 0; round < rounds; ++round) {
        const size_t kv_heads = between(1, 2), heads = kv_heads * between(1, 7);
        const size_t chunk = between(1, 40), positions = between(1, 560);
        const PageShape shape(1, kv_heads, head_dim);
        const size_t bytes = round_up(shape.payload_bytes(), CACHE_LINE);
        const size_t pages = div_up(positions, PAGE_TOKENS);
        Buffer<uint8_t> memory(pages * bytes);
        RopeTable rope(round % 2 == 0, head_dim, head_dim, 1e4, nullptr, 1.0, 1.0);
        rope.cover(0, positions);
        const PlaceParams params{nullptr, nullptr, 1e-6f, &rope, 0.11};
        Rows qkv(chunk, (heads + 2 * kv_heads) * head_dim), out(chunk, heads * head_dim);
        Queries queries(chunk, heads, head_dim);
        std::vector<float> logits(heads);
        for (float& logit : logits) logit = 6.0f * source_.unit();
        const Sinks sinks(logits.data(), heads);
        Batch batch(chunk, 1, pages);
        for (size_t p = 0; p < pages; ++p)
            batch.pages[p] = reinterpret_cast<uint64_t>(memory.data() + p * bytes);
        for (size_t start = 0; start < positions; start += chunk) {
            batch.n_tokens = std::min(chunk, positions - start);
            batch.n_entries = 1;
            batch.n_pages = pages;
            batch.entries[0] = {0, batch.n_tokens, start, 0};
            fill(qkv, 4);
            if (round == 5 && start + chunk >= positions) qkv.data[between(0, qkv.width - 1)] = NAN;
            place_kv(pool_, qkv, batch, shape.layers[0], params, queries);
            // The definition takes its time: attention is computed for each fourth chunk, and the last.
            if (start / chunk % 4 != 0 && start + chunk < positions) continue;
            attend(pool_, queries, batch, shape.layers[0], out);
            const std::string at = " D=" + std::to_string(head_dim) + " heads=" +
                                   std::to_string(heads) + "/" + std::to_string(kv_heads) +
                                   " at " + std::to_string(start);
            record("attend" + at, out, batch.n_tokens);
            const size_t window = between(1, 300);
            attend(pool_, queries, batch, shape.layers[0], out, window, &sinks);
            record("attend window " + std::to_string(window) + at, out, batch.n_tokens);
        }
        golden_.add("pages D=" + std::to_string(head_dim), memory.data(), memory.size());
    }
}

void Shapes::sampling() {
    for (int round = 0; round < ROUNDS; ++round) {
        Rows logits(5, between(1, 3000));
        fill(logits, 5);
        std::vector<SampleSpec> specs(5);
        for (auto& spec : specs) {
            spec.temperature = 0.25f * static_cast<float>(between(0, 6));
            spec.top_p = 1.0f - 0.1f * static_cast<float>(between(0, 3));
            spec.top_k = static_cast<int32_t>(between(0, 2) * between(0, 400));
            spec.min_p = 0.01f * static_cast<float>(between(0, 2));
            spec.seed = source_.next();
            spec.position = between(0, 100000);
            spec.logprobs = 3;
        }
        for (const Sampled& one : sample(pool_, logits, specs)) {
            golden_.add("sampled token", &one.token, sizeof one.token);
            golden_.add("its logprob", &one.logprob, sizeof one.logprob);
        }
    }
}

void print_level(Pool& pool) {
    Golden golden;
    golden_attention(pool, golden);
    golden_linear(pool, golden);
    golden_sample(pool, golden);
    golden_experts(pool, golden);
    golden_recurrent(pool, golden);
    for (const Kind kind : LATER_KINDS) golden_later_kind(pool, kind, golden);
    golden_codebooks(pool, golden);
    golden_gating(pool, golden);
    golden_choices(pool, golden);
    golden_biased_softmax(pool, golden);
    golden_heads(pool, golden);
    golden_many_tokens(golden);
    golden_wide_heads(pool, golden);
    golden_values(pool, golden);
    golden_limits(pool, golden);
    golden_branches(pool, golden);
    golden_mamba2(pool, golden);
    golden_short_conv(pool, golden);
    Shapes shapes(pool, golden);
    for (int kind = 0; kind < KIND_COUNT; ++kind) shapes.linear_of(static_cast<Kind>(kind));
    for (size_t head_dim = 32; head_dim <= 256; head_dim += 32) shapes.attention_of(head_dim, ROUNDS);
    for (const size_t head_dim : WIDE_DIMS) shapes.attention_of(head_dim, WIDE_ROUNDS);
    shapes.sampling();
    std::printf("level %s\n", level_name(level()));
    for (const auto& [name, bytes] : golden.records)
        std::printf("%016" PRIx64 " %s\n", xxh3_64(bytes.data(), bytes.size(), 0), name.c_str());
}

}  // namespace
}  // namespace batchengine

// Arguments: levels. Without any, the names of those that the processor supports are printed.
int main(int argc, char** argv) {
    using namespace batchengine;
    if (argc == 1)
        for (const Level found : levels_supported()) std::puts(level_name(found));
    Pool pool(2, {}, 0);
    for (int i = 1; i < argc; ++i) {
        set_level(argv[i]);
        print_level(pool);
    }
    return 0;
}
