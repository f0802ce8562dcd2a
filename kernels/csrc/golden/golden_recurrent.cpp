// Golden vectors of recurrent mixers: steps of one and of several tokens, of an entry that begins and one that
// goes on. Of gated delta networks every width of a head and of a convolution, decays of 0 and 1, and a key of
// zeros; of Mamba-2 every number of chains, widths that fill no block of columns, with and without a bias and
// norms; of short convolutions every size, and an input that is infinite. And gates whose exp is infinite.
#include <functional>

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

Vector values(GoldenSource& source, size_t n, float middle, float size) {
    std::vector<float> x(n);
    for (float& value : x) value = middle + size * source.unit();
    return Vector(x.data(), n);
}

using Change = std::function<void(size_t step, Rows& projected)>;
using Compute = std::function<void(const Rows& projected, const Batch& batch, size_t layer, Rows& out)>;

// Outputs of every step, and the images of the last one, by these names. change: of the projected rows.
void golden_steps(Golden& golden, GoldenSource& source, const std::string& name,
                  const std::string& states_name, const StateShape& shape, const Change& change,
                  const Compute& compute) {
    Buffer<uint8_t> images[2] = {Buffer<uint8_t>(2 * shape.image_bytes()),
                                 Buffer<uint8_t>(2 * shape.image_bytes())};
    for (Buffer<uint8_t>& image : images) std::fill_n(image.data(), image.size(), uint8_t{0});
    Rows projected(TOKENS_MAX, shape.in_width()), out(TOKENS_MAX, shape.value_width());
    Batch batch(TOKENS_MAX, 2, 1);
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
                for (size_t i = 0; i < shape.in_width(); ++i)
                    projected.row(t)[i] = 3.0f * source.unit();
            change(step, projected);
            compute(projected, batch, layer, out);
            golden.add(name + " step " + std::to_string(step) + " layer " + std::to_string(layer),
                       out, batch.n_tokens);
        }
    }
    golden.add(states_name, images[1].data(), images[1].size());
}

void fill(GoldenSource& source, float* x, size_t n, float size) {
    for (size_t i = 0; i < n; i++) x[i] = source.unit() * size;
}

void golden_state(Pool& pool, Golden& golden, GoldenSource& source, const Shape& of) {
    const StateShape shape(LAYERS, of.n_k_head, of.n_v_head, of.head_dim, of.conv_kernel, 1);
    const Vector conv = values(source, shape.channels() * of.conv_kernel, 0.0f, 1.0f);
    const Vector dt_bias = values(source, of.n_v_head, 0.0f, 4.0f);
    const Vector a = values(source, of.n_v_head, -2.0f, 2.0f);
    const Vector norm = values(source, of.head_dim, 1.0f, 0.5f);
    const DeltaNetParams params{&conv, &dt_bias, &a, &norm, 1e-6f};
    const size_t alpha = shape.in_width() - of.n_v_head;
    golden_steps(
        golden, source, "delta_net " + std::to_string(of.head_dim), "states " + std::to_string(of.head_dim),
        shape,
        [&](size_t step, Rows& projected) {
            if (step != 2) return;
            std::fill_n(projected.row(1), 2 * of.n_k_head * of.head_dim, 0.0f);
            projected.row(2)[alpha] = 60.0f;
            projected.row(3)[alpha] = -90.0f;
        },
        [&](const Rows& projected, const Batch& batch, size_t layer, Rows& out) {
            delta_net(pool, projected, batch, shape, layer, params, out);
        });
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

struct MambaShape {
    size_t n_group, n_head, head_dim, state_dim, conv_kernel;
    bool has_bias, is_normed;
};
constexpr MambaShape MAMBAS[] = {
    {1, 3, 16, 32, 2, true, true},  {2, 4, 64, 64, 3, true, false},  {1, 2, 80, 96, 4, false, true},
    {2, 2, 64, 128, 4, true, true}, {1, 1, 48, 160, 4, true, true},  {1, 2, 32, 192, 4, false, false},
    {1, 1, 112, 224, 4, true, true}, {1, 1, 256, 256, 4, true, true},
};

void golden_mamba2_of(Pool& pool, Golden& golden, GoldenSource& source, const MambaShape& of) {
    const StateShape shape = StateShape::mamba2(LAYERS, of.n_group, of.n_head, of.head_dim,
                                                of.state_dim, of.conv_kernel);
    const Vector conv = values(source, shape.channels() * of.conv_kernel, 0.0f, 1.0f);
    const Vector bias = values(source, shape.channels(), 0.0f, 0.5f);
    const Vector dt_bias = values(source, of.n_head, 0.0f, 4.0f);
    const Vector a = values(source, of.n_head, -2.0f, 2.0f);
    const Vector d = values(source, of.n_head, 0.0f, 2.0f);
    const Vector norm = values(source, shape.value_width(), 1.0f, 0.5f);
    const Mamba2Params params{&conv,  of.has_bias ? &bias : nullptr,   &dt_bias, &a, &d,
                              of.is_normed ? &norm : nullptr, 1e-6f};
    const std::string name = "mamba2 " + std::to_string(of.state_dim) + "x" + std::to_string(of.head_dim);
    const size_t dt = shape.in_width() - of.n_head;
    golden_steps(
        golden, source, name, "states of " + name, shape,
        [&](size_t step, Rows& projected) {
            if (step != 2) return;
            std::fill_n(projected.row(1), shape.channels(), 0.0f);
            projected.row(2)[dt] = 60.0f;
            projected.row(3)[dt] = -90.0f;
        },
        [&](const Rows& projected, const Batch& batch, size_t layer, Rows& out) {
            mamba2(pool, projected, batch, shape, layer, params, out);
        });
}

void golden_short_conv_of(Pool& pool, Golden& golden, GoldenSource& source, size_t width, size_t taps) {
    const StateShape shape = StateShape::short_conv(LAYERS, width, taps);
    const Vector conv = values(source, width * taps, 0.0f, 1.0f);
    const std::string name = "short_conv " + std::to_string(width) + " of " + std::to_string(taps);
    golden_steps(
        golden, source, name, "states of " + name, shape,
        [&](size_t step, Rows& projected) {
            if (step != 2) return;
            projected.row(1)[3] = 0x1p100f, projected.row(1)[2 * width + 3] = 0x1p100f;
            projected.row(2)[width + 5] = -0.0f;
        },
        [&](const Rows& projected, const Batch& batch, size_t layer, Rows& out) {
            short_conv(pool, projected, batch, shape, layer, conv, out);
        });
}

}  // namespace

void golden_recurrent(Pool& pool, Golden& golden) {
    GoldenSource source(0xDE17A);
    for (const Shape& shape : SHAPES) golden_state(pool, golden, source, shape);
    golden_gates(pool, golden, source);
}

void golden_mamba2(Pool& pool, Golden& golden) {
    GoldenSource source(0x3A3BA2);
    for (const MambaShape& shape : MAMBAS) golden_mamba2_of(pool, golden, source, shape);
}

void golden_short_conv(Pool& pool, Golden& golden) {
    GoldenSource source(0x1F32C);
    for (size_t taps = 2; taps <= CONV_KERNEL_MAX; ++taps)
        for (const size_t width : {size_t{32}, size_t{224}})
            golden_short_conv_of(pool, golden, source, width, taps);
}

}  // namespace batchengine
