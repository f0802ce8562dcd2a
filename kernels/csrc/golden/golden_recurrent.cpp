// Golden vectors of gated delta networks: every width of a head and of a convolution, steps of one and of
// several tokens, of an entry that begins and one that goes on, decays of 0 and 1, and a key of zeros; and
// gates whose exp is infinite.
#include "common/ca.h"
#include "golden/golden.h"
#include "recurrent/mixers.h"

namespace batchengine {
namespace {

struct Shape {
    size_t n_k_head, n_v_head, head_dim, conv_kernel;
};
constexpr Shape SHAPES[] = {{1, 3, 32, 2},  {2, 2, 64, 3},  {1, 2, 96, 4},  {2, 4, 128, 4},
                            {1, 1, 160, 4}, {1, 1, 192, 4}, {1, 1, 224, 4}, {1, 1, 256, 4}};
constexpr size_t LAYERS = 2;
constexpr size_t STEPS[] = {3, 1, 4, 1};  // tokens of the first entry; the second begins with the last two
constexpr size_t TOKENS_MAX = 4 + 2;

void fill(GoldenSource& source, float* x, size_t n, float size) {
    for (size_t i = 0; i < n; i++) x[i] = source.unit() * size;
}

Vector values(GoldenSource& source, size_t n, float middle, float size) {
    std::vector<float> x(n);
    for (float& value : x) value = middle + size * source.unit();
    return Vector(x.data(), n);
}

void golden_state(Pool& pool, Golden& golden, GoldenSource& source, const Shape& of) {
    const StateShape shape(LAYERS, of.n_k_head, of.n_v_head, of.head_dim, of.conv_kernel, 1);
    const Vector conv = values(source, shape.channels() * of.conv_kernel, 0.0f, 1.0f);
    const Vector dt_bias = values(source, of.n_v_head, 0.0f, 4.0f);
    const Vector a = values(source, of.n_v_head, -2.0f, 2.0f);
    const Vector norm = values(source, of.head_dim, 1.0f, 0.5f);
    const DeltaNetParams params{&conv, &dt_bias, &a, &norm, 1e-6f};
    Buffer<uint8_t> images[2] = {Buffer<uint8_t>(2 * shape.image_bytes()),
                                 Buffer<uint8_t>(2 * shape.image_bytes())};
    Rows projected(TOKENS_MAX, shape.in_width()), out(TOKENS_MAX, shape.value_width());
    Batch batch(TOKENS_MAX, 2, 1);
    const size_t alpha = shape.in_width() - of.n_v_head;
    const std::string name = "delta_net " + std::to_string(of.head_dim);
    for (size_t step = 0; step < std::size(STEPS); ++step) {
        const size_t second = step < 2 ? 0 : step - 1;
        batch.n_entries = batch.n_states = second ? 2 : 1;
        batch.entries[0] = {0, STEPS[step], 0, 0};
        batch.entries[1] = {STEPS[step], second, 0, 0};
        batch.n_tokens = STEPS[step] + second;
        for (size_t e = 0; e < 2; ++e) {
            const auto at = [&](size_t i) {
                return reinterpret_cast<uint64_t>(images[i % 2].data() + e * shape.image_bytes());
            };
            batch.state_reads[e] = step == 0 || (e == 1 && step == 2) ? 0 : at(step + 1);
            batch.state_writes[e] = at(step);
        }
        for (size_t layer = 0; layer < LAYERS; ++layer) {
            for (size_t t = 0; t < batch.n_tokens; ++t)
                fill(source, projected.row(t), shape.in_width(), 3.0f);
            if (step == 2) {
                std::fill_n(projected.row(1), 2 * of.n_k_head * of.head_dim, 0.0f);
                projected.row(2)[alpha] = 60.0f;
                projected.row(3)[alpha] = -90.0f;
            }
            delta_net(pool, projected, batch, shape, layer, params, out);
            golden.add(name + " step " + std::to_string(step) + " layer " + std::to_string(layer),
                       out, batch.n_tokens);
        }
    }
    golden.add("states " + std::to_string(of.head_dim), images[1].data(), images[1].size());
}

void golden_gates(Pool& pool, Golden& golden, GoldenSource& source) {
    constexpr size_t TOKENS = 19, WIDTH = 71;
    const float large[] = {-90.0f, 90.0f, -88.5f, 17.0f, -3e38f, 0.0f, -0.0f};
    Rows gate(TOKENS, WIDTH), x(TOKENS, WIDTH), out(TOKENS, WIDTH), share(TOKENS, 1);
    for (size_t t = 0; t < TOKENS; ++t) {
        fill(source, gate.row(t), WIDTH, 8.0f);
        fill(source, x.row(t), WIDTH, 4.0f);
        fill(source, out.row(t), WIDTH, 4.0f);
        share.row(t)[0] = t < std::size(large) ? large[t] : 6.0f * source.unit();
        gate.row(t)[t] = t < std::size(large) ? large[t] : 1.0f;
    }
    gate_rows(pool, gate, TOKENS, out);
    golden.add("gate_rows", out, TOKENS);
    gate_add(pool, x, share, TOKENS, out);
    golden.add("gate_add", out, TOKENS);
}

}  // namespace

void golden_recurrent(Pool& pool, Golden& golden) {
    GoldenSource source(0xDE17A);
    for (const Shape& shape : SHAPES) golden_state(pool, golden, source, shape);
    golden_gates(pool, golden, source);
}

}  // namespace batchengine
