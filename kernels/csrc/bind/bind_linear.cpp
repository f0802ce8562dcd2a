// Bindings of activations, packed matrices and the linear kernels.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/bind_common.h"
#include "bind/held_matrix.h"
#include "linear/linear.h"
#include "linear/pack.h"

namespace batchengine {
namespace {

void bind_activations(nb::module_& module) {
    nb::class_<Activations>(module, "Activations",
                            "Quantised activations of one step: int8 panels, one scale per 32.")
        .def(nb::init<size_t, size_t, bool>(), nb::arg("tokens_max"), nb::arg("width"),
             nb::arg("keep_float") = false)
        .def_prop_ro("tokens_max", [](const Activations& self) { return self.tokens_max; })
        .def_prop_ro("width", [](const Activations& self) { return self.width; })
        .def_prop_ro("keep_float", [](const Activations& self) { return self.keep_float; })
        .def(
            "unpack",
            [](const Activations& self, size_t tokens) {
                require_tokens(tokens, self.tokens_max, "Activations.unpack");
                nb::list q, scales;
                for (size_t token = 0; token < tokens; ++token) {
                    std::string bytes;
                    std::vector<float> row;
                    for (size_t block = 0; block < self.blocks; ++block) {
                        const size_t cell = self.cell(token, block);
                        bytes.append(
                            reinterpret_cast<const char*>(self.q.data() + cell * BLOCK_WIDTH),
                            BLOCK_WIDTH);
                        row.push_back(self.scale[cell]);
                    }
                    q.append(nb::bytes(bytes.data(), bytes.size()));
                    scales.append(nb::bytes(row.data(), row.size() * sizeof(float)));
                }
                return nb::make_tuple(q, scales);
            },
            nb::arg("tokens"),
            nb::sig("def unpack(self, tokens: int) -> tuple[list[bytes], list[bytes]]"),
            "Per token the int8 values and the fp32 scales, for tests.");
}

void bind_matrix(nb::module_& module) {
    module.attr("PACK_VERSION") = PACK_VERSION;
    module.def(
        "packed_bytes",
        [](const std::string& name, size_t rows, size_t cols) {
            const Kind kind = kind_of(name);
            require_shape(kind, rows, cols);
            return packed_bytes(kind, rows, cols);
        },
        nb::arg("kind"), nb::arg("rows"), nb::arg("cols"),
        "Bytes of a packed matrix. ValueError when the kind cannot have that shape.");
    module.def(
        "pack",
        [](Pool& pool, const std::string& name, size_t rows, size_t cols, nb::object source,
           nb::object destination) {
            const Kind kind = kind_of(name);
            require_shape(kind, rows, cols);
            const HeldBuffer from(source, false), to(destination, true);
            require(from.size() == source_bytes(kind, rows, cols),
                    "pack: a " + name + " tensor of " + std::to_string(rows) + " x " +
                        std::to_string(cols) + " has " +
                        std::to_string(source_bytes(kind, rows, cols)) + " bytes, the source has " +
                        std::to_string(from.size()));
            require(to.size() >= packed_bytes(kind, rows, cols),
                    "pack: the destination is smaller than packed_bytes()");
            require(reinterpret_cast<uintptr_t>(to.data()) % CACHE_LINE == 0,
                    "pack: the destination must be 64-byte aligned");
            const nb::gil_scoped_release released;
            pack(pool, kind, rows, cols, from.data(), to.data());
        },
        nb::arg("pool"), nb::arg("kind"), nb::arg("rows"), nb::arg("cols"), nb::arg("source"),
        nb::arg("destination"),
        nb::sig("def pack(pool: Pool, kind: str, rows: int, cols: int, "
                "source: typing_extensions.Buffer, destination: typing_extensions.Buffer) -> None"),
        "Packs a GGUF tensor (rows of cols values) into a writable, 64-byte aligned buffer.\n\n"
        "ValueError names the row and block of the first scale that is NaN or infinite, "
        "or of mxfp4 above 2^32.");
    nb::class_<HeldMatrix>(module, "Matrix", "Packed weights; keeps their buffer alive.")
        .def(
            "__init__",
            [](HeldMatrix* self, const std::string& name, size_t rows, size_t cols,
               nb::object packed) {
                const Kind kind = kind_of(name);
                require_shape(kind, rows, cols);
                {
                    const HeldBuffer held(packed, false);
                    require(held.size() >= packed_bytes(kind, rows, cols),
                            "Matrix: the buffer is smaller than packed_bytes()");
                    require(reinterpret_cast<uintptr_t>(held.data()) % CACHE_LINE == 0,
                            "Matrix: the buffer must be 64-byte aligned");
                }
                new (self) HeldMatrix(kind, rows, cols, packed);
            },
            nb::arg("kind"), nb::arg("rows"), nb::arg("cols"), nb::arg("packed"),
            nb::sig("def __init__(self, kind: str, rows: int, cols: int, "
                    "packed: typing_extensions.Buffer) -> None"))
        .def_prop_ro("kind",
                     [](const HeldMatrix& self) { return std::string(kind_name(self.view.kind)); })
        .def_prop_ro("rows", [](const HeldMatrix& self) { return self.view.rows; })
        .def_prop_ro("cols", [](const HeldMatrix& self) { return self.view.cols; })
        .def_prop_ro("bytes",
                     [](const HeldMatrix& self) {
                         return packed_bytes(self.view.kind, self.view.rows, self.view.cols);
                     })
        .def(
            "view",
            [](nb::handle_t<HeldMatrix> handle) {
                const Matrix& self = nb::cast<const HeldMatrix&>(handle).view;
                return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(
                    self.data, {packed_bytes(self.kind, self.rows, self.cols)}, handle);
            },
            nb::sig("def view(self) -> numpy.typing.NDArray[numpy.uint8]"),
            "numpy alias of the packed bytes (tiles.h has the layout), read-only.");
}

LinearPart checked_part(const char* op, const Activations& x, const HeldMatrix& matrix,
                        const Vector* bias) {
    const Matrix& view = matrix.view;
    require(view.cols == x.width, std::string(op) + ": the activations are " +
                                      std::to_string(x.width) + " wide, the matrix has " +
                                      std::to_string(view.cols) + " cols");
    const bool floats = view.kind >= Kind::f16;
    require(!floats || x.keep_float, std::string(op) + ": " + kind_name(view.kind) +
                                         " weights need Activations(keep_float=True)");
    require(!bias || bias->size == view.rows,
            std::string(op) + ": a bias has one value per row of its matrix");
    return {&view, bias};
}

void require_call(const char* op, const Activations& x, size_t tokens, const Rows& out,
                  size_t rows) {
    require_tokens(tokens, x.tokens_max, op);
    require_tokens(tokens, out.tokens_max, op);
    require_width(out.width, rows, op);
}

void bind_products(nb::module_& module) {
    module.def(
        "linear",
        [](Pool& pool, const Activations& x, nb::list matrices, nb::list biases, size_t tokens,
           Rows& out) {
            require(matrices.size() == biases.size(), "linear: one bias (or None) per matrix");
            std::vector<LinearPart> parts;
            size_t rows = 0;
            for (size_t i = 0; i < matrices.size(); ++i) {
                const nb::object bias = biases[i];
                parts.push_back(checked_part("linear", x, nb::cast<const HeldMatrix&>(matrices[i]),
                                             bias.is_none() ? nullptr
                                                            : nb::cast<const Vector*>(bias)));
                rows += parts.back().matrix->rows;
            }
            require_call("linear", x, tokens, out, rows);
            const nb::gil_scoped_release released;
            linear(pool, x, parts, tokens, out);
        },
        nb::arg("pool"), nb::arg("x"), nb::arg("matrices"), nb::arg("biases"), nb::arg("tokens"),
        nb::arg("out"),
        nb::sig("def linear(pool: Pool, x: Activations, matrices: list[Matrix], "
                "biases: list[Vector | None], tokens: int, out: Rows) -> None"),
        "out = the products of every matrix, side by side; out.width is the sum of their rows.");
    module.def(
        "linear_add",
        [](Pool& pool, const Activations& x, const HeldMatrix& matrix, const Vector* bias,
           size_t tokens, Rows& out) {
            const LinearPart part = checked_part("linear_add", x, matrix, bias);
            require_call("linear_add", x, tokens, out, matrix.view.rows);
            const nb::gil_scoped_release released;
            linear_add(pool, x, part, tokens, out);
        },
        nb::arg("pool"), nb::arg("x"), nb::arg("matrix"), nb::arg("bias").none(),
        nb::arg("tokens"), nb::arg("out"), "out += matrix * x + bias: the residual stream.");
    module.def(
        "linear_gated",
        [](Pool& pool, const Activations& x, const HeldMatrix* gate, const HeldMatrix& up,
           const Vector* gate_bias, const Vector* up_bias, size_t tokens, Rows& out,
           const std::string& activation, float limit) {
            const bool is_plain = is_ungated("linear_gated", activation, limit, gate, gate_bias);
            const LinearPart ups = checked_part("linear_gated", x, up, up_bias);
            require_call("linear_gated", x, tokens, out, up.view.rows);
            if (is_plain) {
                const nb::gil_scoped_release released;
                linear_relu2(pool, x, ups, tokens, out);
                return;
            }
            const GateFunction made = gate_function_of("linear_gated", activation, limit);
            const LinearPart gates = checked_part("linear_gated", x, *gate, gate_bias);
            require(gate->view.rows == up.view.rows, "linear_gated: gate and up differ in rows");
            const nb::gil_scoped_release released;
            linear_gated(pool, x, gates, ups, made, tokens, out);
        },
        nb::arg("pool"), nb::arg("x"), nb::arg("gate").none(), nb::arg("up"),
        nb::arg("gate_bias").none(), nb::arg("up_bias").none(), nb::arg("tokens"), nb::arg("out"),
        nb::arg("activation") = "silu", nb::arg("limit") = 0.0f,
        "out = the activation of gate * x + gate_bias and up * x + up_bias, element by element.\n\n"
        "It is \"silu\", \"oai\" or \"gelu\", or without a gate \"relu2\": rule 5 of docs/numerics.md. "
        "limit: of \"silu\", 0 = there is none. ValueError for another activation or limit.");
}

void bind_embed(nb::module_& module) {
    module.def(
        "multiply_then_add",
        [](float a, float b, float c) {
            const FloatEnvironment canonical;
            return linear_kernels().multiply_then_add(a, b, c);
        },
        nb::arg("a"), nb::arg("b"), nb::arg("c"),
        "RN(RN(a*b)+c) in the code of the level in use: proves that nothing was contracted.");
    module.def(
        "embed",
        [](Pool& pool, const HeldMatrix& matrix, IndexArray tokens, Rows& out, float scale) {
            require(ca::is_finite(scale), "embed: the scale is not finite");
            require_tokens(tokens.size(), out.tokens_max, "embed");
            require_width(out.width, matrix.view.cols, "embed");
            for (size_t i = 0; i < tokens.size(); ++i)
                require(tokens.data()[i] >= 0 &&
                            static_cast<size_t>(tokens.data()[i]) < matrix.view.rows,
                        "embed: token " + std::to_string(tokens.data()[i]) + " is not in 0.." +
                            std::to_string(matrix.view.rows - 1));
            const nb::gil_scoped_release released;
            embed(pool, matrix.view, tokens.data(), tokens.size(), scale, out);
        },
        nb::arg("pool"), nb::arg("matrix"), nb::arg("tokens"), nb::arg("out"),
        nb::arg("scale") = 1.0f,
        "out row i = row tokens[i] of the matrix, as fp32, times `scale`.\n\n"
        "ValueError for an unknown token, and for a scale that is not finite in binary32.");
}

}  // namespace

void bind_linear(nb::module_& module) {
    bind_activations(module);
    bind_matrix(module);
    bind_products(module);
    bind_embed(module);
}

}  // namespace batchengine
