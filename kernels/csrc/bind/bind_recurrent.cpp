// Bindings of recurrent mixers and of gates. Sizes are checked here; the GIL is released while a
// kernel runs.
#include <nanobind/stl/string.h>

#include "bind/bind_common.h"
#include "recurrent/mixers.h"

namespace batchengine {
namespace {

void bind_state_shape(nb::module_& module) {
    nb::class_<StateShape>(
        module, "StateShape",
        "Bytes of a state image: n_layer recurrent layers of one kind. The constructor is that of gated delta "
        "networks: head_dim must be a multiple of 32 up to 256, conv_kernel 2 to 4, n_v_head a multiple of "
        "n_k_head. Value head h uses q and k of head (h / key_run) mod n_k_head; key_run divides n_v_head / "
        "n_k_head (ValueError otherwise).")
        .def(nb::init<size_t, size_t, size_t, size_t, size_t, size_t>(), nb::arg("n_layer"),
             nb::arg("n_k_head"), nb::arg("n_v_head"), nb::arg("head_dim"), nb::arg("conv_kernel"),
             nb::arg("key_run") = 1)
        .def_static("mamba2", &StateShape::mamba2, nb::arg("n_layer"), nb::arg("n_group"),
                    nb::arg("n_head"), nb::arg("head_dim"), nb::arg("state_dim"),
                    nb::arg("conv_kernel"),
                    "Mamba-2: B and C of n_group groups are the k and q heads. head_dim must be a multiple of "
                    "16 and state_dim one of 32, both up to 256, n_head a multiple of n_group, conv_kernel 2 "
                    "to 4 (ValueError otherwise).")
        .def_static("short_conv", &StateShape::short_conv, nb::arg("n_layer"), nb::arg("width"),
                    nb::arg("conv_kernel"),
                    "Gated short convolutions: width must be a multiple of 32, conv_kernel 2 to 4 "
                    "(ValueError otherwise).")
        .def_prop_ro("kind", [](const StateShape& self) { return std::string(mixer_name(self.kind)); },
                     "\"delta\", \"mamba2\" or \"conv\".")
        .def_prop_ro("n_layer", [](const StateShape& self) { return self.n_layer; })
        .def_prop_ro("n_k_head", [](const StateShape& self) { return self.n_k_head; },
                     "Heads of q and of k; groups of Mamba-2; 0 of a short convolution.")
        .def_prop_ro("n_v_head", [](const StateShape& self) { return self.n_v_head; },
                     "Heads with a state of their own; 1 of a short convolution.")
        .def_prop_ro("head_dim", [](const StateShape& self) { return self.head_dim; },
                     "Values of a head; the width of a short convolution.")
        .def_prop_ro("state_dim", [](const StateShape& self) { return self.key_dim; },
                     "Keys of a state: head_dim of a delta network; 0 of a short convolution.")
        .def_prop_ro("conv_kernel", [](const StateShape& self) { return self.conv_kernel; })
        .def_prop_ro("key_run", [](const StateShape& self) { return self.key_run; })
        .def_prop_ro("channels", &StateShape::channels)
        .def_prop_ro("value_width", &StateShape::value_width)
        .def_prop_ro("in_width", &StateShape::in_width)
        .def_prop_ro("layer_bytes", &StateShape::layer_bytes)
        .def_prop_ro("image_bytes", &StateShape::image_bytes);
}

// The checks that all mixers have in common.
void require_step(const std::string& name, Mixer kind, const Pool& pool, const Rows& projected,
                  const Batch& batch, const StateShape& shape, size_t layer, const Vector& conv,
                  const Rows& out) {
    require_open(pool);
    require(shape.kind == kind, name + ": the shape is one of " + mixer_name(shape.kind));
    require(layer < shape.n_layer, name + ": layer " + number(layer) + " of " + number(shape.n_layer));
    require(batch.n_states == batch.n_entries, name + ": the batch has no states");
    require_tokens(batch.n_tokens, projected.tokens_max, name.c_str());
    require_tokens(batch.n_tokens, out.tokens_max, name.c_str());
    require_width(projected.width, shape.in_width(), (name + ": projected").c_str());
    require_width(out.width, shape.value_width(), (name + ": out").c_str());
    require_width(conv.size, shape.channels() * shape.conv_kernel, (name + ": conv").c_str());
}

void bind_delta_net(nb::module_& module) {
    module.def(
        "delta_net",
        [](Pool& pool, const Rows& projected, const Batch& batch, const StateShape& shape,
           size_t layer, const Vector& conv, const Vector& dt_bias, const Vector& a,
           const Vector& norm, float eps, Rows& out) {
            require_step("delta_net", Mixer::delta, pool, projected, batch, shape, layer, conv, out);
            require_width(dt_bias.size, shape.n_v_head, "delta_net: dt_bias");
            require_width(a.size, shape.n_v_head, "delta_net: a");
            require_width(norm.size, shape.head_dim, "delta_net: norm");
            const nb::gil_scoped_release release;
            delta_net(pool, projected, batch, shape, layer, {&conv, &dt_bias, &a, &norm, eps}, out);
        },
        nb::arg("pool"), nb::arg("projected"), nb::arg("batch"), nb::arg("shape"),
        nb::arg("layer"), nb::arg("conv"), nb::arg("dt_bias"), nb::arg("a"), nb::arg("norm"),
        nb::arg("eps"), nb::arg("out"),
        "The gated delta rule of one layer for the batch's tokens, from the states of its entries to "
        "the next ones. Rows of q heads, k heads and value heads (inputs of the convolution), z, "
        "beta and alpha; conv is (channels, conv_kernel); out is (tokens, value_width).");
}

void bind_mamba2(nb::module_& module) {
    module.def(
        "mamba2",
        [](Pool& pool, const Rows& projected, const Batch& batch, const StateShape& shape,
           size_t layer, const Vector& conv, const Vector* conv_bias, const Vector& dt_bias,
           const Vector& a, const Vector& d, const Vector* norm, float eps, Rows& out) {
            require_step("mamba2", Mixer::mamba2, pool, projected, batch, shape, layer, conv, out);
            if (conv_bias) require_width(conv_bias->size, shape.channels(), "mamba2: conv_bias");
            require_width(dt_bias.size, shape.n_v_head, "mamba2: dt_bias");
            require_width(a.size, shape.n_v_head, "mamba2: a");
            require_width(d.size, shape.n_v_head, "mamba2: d");
            if (norm) require_width(norm->size, shape.value_width(), "mamba2: norm");
            const nb::gil_scoped_release release;
            mamba2(pool, projected, batch, shape, layer,
                   {&conv, conv_bias, &dt_bias, &a, &d, norm, eps}, out);
        },
        nb::arg("pool"), nb::arg("projected"), nb::arg("batch"), nb::arg("shape"),
        nb::arg("layer"), nb::arg("conv"), nb::arg("conv_bias").none(), nb::arg("dt_bias"),
        nb::arg("a"), nb::arg("d"), nb::arg("norm").none(), nb::arg("eps"), nb::arg("out"),
        "Mamba-2 of one layer for the batch's tokens, from the states of its entries to the next ones. "
        "Rows of x, B and C (inputs of the convolution), z and dt; conv is (channels, conv_kernel); "
        "out is (tokens, value_width), normed per group unless norm is None.");
}

void bind_short_conv(nb::module_& module) {
    module.def(
        "short_conv",
        [](Pool& pool, const Rows& projected, const Batch& batch, const StateShape& shape,
           size_t layer, const Vector& conv, Rows& out) {
            require_step("short_conv", Mixer::conv, pool, projected, batch, shape, layer, conv, out);
            const nb::gil_scoped_release release;
            short_conv(pool, projected, batch, shape, layer, conv, out);
        },
        nb::arg("pool"), nb::arg("projected"), nb::arg("batch"), nb::arg("shape"),
        nb::arg("layer"), nb::arg("conv"), nb::arg("out"),
        "The gated short convolution of one layer for the batch's tokens, from the states of its entries "
        "to the next ones. Rows of b, c and x; conv is (width, conv_kernel); out is (tokens, width).");
}

void bind_gates(nb::module_& module) {
    module.def(
        "gate_rows",
        [](Pool& pool, const Rows& gate, size_t tokens, Rows& out) {
            require_open(pool);
            require_tokens(tokens, gate.tokens_max, "gate_rows");
            require_tokens(tokens, out.tokens_max, "gate_rows");
            require(gate.width > 0 && out.width % gate.width == 0,
                    "gate_rows: " + number(out.width) + " values for " + number(gate.width) + " gates");
            const nb::gil_scoped_release release;
            gate_rows(pool, gate, tokens, out);
        },
        nb::arg("pool"), nb::arg("gate"), nb::arg("tokens"), nb::arg("out"),
        "out *= sigmoid(gate) for each of the first rows. gate has a value for each of out, or one for each "
        "run of so many neighbours as it has fewer values.");
    module.def(
        "gate_add",
        [](Pool& pool, const Rows& x, const Rows& gate, size_t tokens, Rows& out) {
            require_open(pool);
            require_tokens(tokens, x.tokens_max, "gate_add");
            require_tokens(tokens, gate.tokens_max, "gate_add");
            require_tokens(tokens, out.tokens_max, "gate_add");
            require_width(x.width, out.width, "gate_add");
            require_width(gate.width, 1, "gate_add: gate");
            const nb::gil_scoped_release release;
            gate_add(pool, x, gate, tokens, out);
        },
        nb::arg("pool"), nb::arg("x"), nb::arg("gate"), nb::arg("tokens"), nb::arg("out"),
        "out += sigmoid(gate) * x for each of the first rows; gate has one value per row.");
}

}  // namespace

void bind_recurrent(nb::module_& module) {
    bind_state_shape(module);
    bind_delta_net(module);
    bind_mamba2(module);
    bind_short_conv(module);
    bind_gates(module);
}

}  // namespace batchengine
