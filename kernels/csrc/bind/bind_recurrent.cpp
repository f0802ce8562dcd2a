// Bindings of gated delta networks and of gates. Sizes are checked here; the GIL is released while a
// kernel runs.
#include "bind/bind_common.h"
#include "recurrent/delta_net.h"

namespace batchengine {
namespace {

void bind_state_shape(nb::module_& module) {
    nb::class_<StateShape>(module, "StateShape",
                           "Bytes of a state image: n_layer recurrent layers. head_dim must be a "
                           "multiple of 32 up to 256, conv_kernel 2 to 4, n_v_head a multiple of "
                           "n_k_head. Value head h uses q and k of head (h / key_run) mod n_k_head; "
                           "key_run divides n_v_head / n_k_head (ValueError otherwise).")
        .def(nb::init<size_t, size_t, size_t, size_t, size_t, size_t>(), nb::arg("n_layer"),
             nb::arg("n_k_head"), nb::arg("n_v_head"), nb::arg("head_dim"), nb::arg("conv_kernel"),
             nb::arg("key_run") = 1)
        .def_prop_ro("n_layer", [](const StateShape& self) { return self.n_layer; })
        .def_prop_ro("n_k_head", [](const StateShape& self) { return self.n_k_head; })
        .def_prop_ro("n_v_head", [](const StateShape& self) { return self.n_v_head; })
        .def_prop_ro("head_dim", [](const StateShape& self) { return self.head_dim; })
        .def_prop_ro("conv_kernel", [](const StateShape& self) { return self.conv_kernel; })
        .def_prop_ro("key_run", [](const StateShape& self) { return self.key_run; })
        .def_prop_ro("channels", &StateShape::channels)
        .def_prop_ro("value_width", &StateShape::value_width)
        .def_prop_ro("in_width", &StateShape::in_width)
        .def_prop_ro("layer_bytes", &StateShape::layer_bytes)
        .def_prop_ro("image_bytes", &StateShape::image_bytes);
}

void bind_delta_net(nb::module_& module) {
    module.def(
        "delta_net",
        [](Pool& pool, const Rows& projected, const Batch& batch, const StateShape& shape,
           size_t layer, const Vector& conv, const Vector& dt_bias, const Vector& a,
           const Vector& norm, float eps, Rows& out) {
            require_open(pool);
            require(layer < shape.n_layer, "delta_net: layer " + number(layer) + " of " +
                                               number(shape.n_layer));
            require(batch.n_states == batch.n_entries, "delta_net: the batch has no states");
            require_tokens(batch.n_tokens, projected.tokens_max, "delta_net");
            require_tokens(batch.n_tokens, out.tokens_max, "delta_net");
            require_width(projected.width, shape.in_width(), "delta_net: projected");
            require_width(out.width, shape.value_width(), "delta_net: out");
            require_width(conv.size, shape.channels() * shape.conv_kernel, "delta_net: conv");
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

void bind_gates(nb::module_& module) {
    module.def(
        "gate_rows",
        [](Pool& pool, const Rows& gate, size_t tokens, Rows& out) {
            require_open(pool);
            require_tokens(tokens, gate.tokens_max, "gate_rows");
            require_tokens(tokens, out.tokens_max, "gate_rows");
            require_width(gate.width, out.width, "gate_rows");
            const nb::gil_scoped_release release;
            gate_rows(pool, gate, tokens, out);
        },
        nb::arg("pool"), nb::arg("gate"), nb::arg("tokens"), nb::arg("out"),
        "out *= sigmoid(gate), value by value, for each of the first rows.");
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
    bind_gates(module);
}

}  // namespace batchengine
