// Bindings of the operations on rows: normalisation, quantisation, selection. Sizes are checked here;
// the GIL is released while a kernel runs.
#include <nanobind/stl/vector.h>

#include <cmath>

#include "bind/bind_common.h"
#include "quant/norm.h"
#include "rows/rows.h"

namespace batchengine {
namespace {

void norm_checks(Pool& pool, const Rows& x, const Vector& w, size_t tokens, size_t out_tokens,
                 size_t out_width, const char* name) {
    require_open(pool);
    require_tokens(tokens, x.tokens_max, name);
    require_tokens(tokens, out_tokens, name);
    require_width(w.size, x.width, name);
    require_width(out_width, x.width, name);
}

void bind_elementwise(nb::module_& module) {
    module.def(
        "zero_rows",
        [](Pool& pool, size_t tokens, Rows& out) {
            require_open(pool);
            require_tokens(tokens, out.tokens_max, "zero_rows");
            const nb::gil_scoped_release release;
            zero_rows(pool, tokens, out);
        },
        nb::arg("pool"), nb::arg("tokens"), nb::arg("out"), "out = 0, for each of the first rows.");
    module.def(
        "scale_rows",
        [](Pool& pool, float factor, size_t tokens, Rows& out) {
            require_open(pool);
            require_tokens(tokens, out.tokens_max, "scale_rows");
            const nb::gil_scoped_release release;
            scale_rows(pool, factor, tokens, out);
        },
        nb::arg("pool"), nb::arg("factor"), nb::arg("tokens"), nb::arg("out"),
        "out *= factor, for each of the first rows.");
    module.def(
        "scaled_add",
        [](Pool& pool, const Rows& x, float factor, size_t tokens, Rows& out) {
            require_open(pool);
            require_tokens(tokens, x.tokens_max, "scaled_add");
            require_tokens(tokens, out.tokens_max, "scaled_add");
            require_width(x.width, out.width, "scaled_add");
            require(std::isfinite(factor), "scaled_add: the factor is not finite");
            const nb::gil_scoped_release release;
            scaled_add(pool, x, factor, tokens, out);
        },
        nb::arg("pool"), nb::arg("x"), nb::arg("factor"), nb::arg("tokens"), nb::arg("out"),
        "out = fma(x, factor, out), for each of the first rows: the residual stream.");
    module.def(
        "cap_rows",
        [](Pool& pool, float cap, size_t tokens, Rows& out) {
            require_open(pool);
            require_tokens(tokens, out.tokens_max, "cap_rows");
            require(std::isfinite(cap) && cap > 0, "cap_rows: cap must be positive");
            const nb::gil_scoped_release release;
            cap_rows(pool, cap, tokens, out);
        },
        nb::arg("pool"), nb::arg("cap"), nb::arg("tokens"), nb::arg("out"),
        "out = cap * tanh(out / cap), for each of the first rows; NaN where it was not finite.");
    module.def(
        "gelu_rows",
        [](Pool& pool, const Rows& factors, size_t column, size_t tokens, Rows& out) {
            require_open(pool);
            require_tokens(tokens, factors.tokens_max, "gelu_rows");
            require_tokens(tokens, out.tokens_max, "gelu_rows");
            require(column <= factors.width && out.width <= factors.width - column,
                    "gelu_rows: the factors have no columns " + std::to_string(column) + " to " +
                        std::to_string(column + out.width));
            const nb::gil_scoped_release release;
            gelu_rows(pool, factors, column, tokens, out);
        },
        nb::arg("pool"), nb::arg("factors"), nb::arg("column"), nb::arg("tokens"), nb::arg("out"),
        "out = gelu(out) * the columns of factors from `column` on, for each of the first rows.");
    module.def(
        "mix_inputs",
        [](Pool& pool, const Rows& x, float scale, const Vector& norm, float eps, size_t tokens,
           Rows& out) {
            require_open(pool);
            require_tokens(tokens, x.tokens_max, "mix_inputs");
            require_tokens(tokens, out.tokens_max, "mix_inputs");
            require_width(x.width, out.width, "mix_inputs");
            require(norm.size > 0 && out.width % norm.size == 0,
                    "mix_inputs: rows are no whole groups of " + std::to_string(norm.size));
            const nb::gil_scoped_release release;
            mix_inputs(pool, x, scale, norm, eps, tokens, out);
        },
        nb::arg("pool"), nb::arg("x"), nb::arg("scale"), nb::arg("norm"), nb::arg("eps"),
        nb::arg("tokens"), nb::arg("out"),
        "out = (out + rmsnorm of (x * scale)) * sqrt(1/2), for each group of norm.size values of the "
        "first rows.");
    module.def(
        "norm_columns",
        [](Pool& pool, size_t column, const Vector& norm, float eps, size_t tokens, Rows& out) {
            require_open(pool);
            require_tokens(tokens, out.tokens_max, "norm_columns");
            require(norm.size > 0, "norm_columns: the norm is empty");
            require(column <= out.width && norm.size <= out.width - column,
                    "norm_columns: rows have no columns " + std::to_string(column) + " to " +
                        std::to_string(column + norm.size));
            const nb::gil_scoped_release release;
            norm_columns(pool, column, norm, eps, tokens, out);
        },
        nb::arg("pool"), nb::arg("column"), nb::arg("norm"), nb::arg("eps"), nb::arg("tokens"),
        nb::arg("out"),
        "The norm.size columns from `column` on of each of the first rows: their rmsnorm, in place.");
}

}  // namespace

void bind_row_operations(nb::module_& module) {
    module.def(
        "rmsnorm",
        [](Pool& pool, const Rows& x, const Vector& w, float eps, size_t tokens, Rows& out) {
            norm_checks(pool, x, w, tokens, out.tokens_max, out.width, "rmsnorm");
            const nb::gil_scoped_release release;
            rmsnorm_rows(pool, x, w, eps, tokens, out);
        },
        nb::arg("pool"), nb::arg("x"), nb::arg("w"), nb::arg("eps"), nb::arg("tokens"),
        nb::arg("out"), "out = x / sqrt(mean(x^2) + eps) * w for each of the first rows.");
    module.def(
        "norm_add",
        [](Pool& pool, const Rows& x, const Vector& w, float eps, size_t tokens, Rows& out) {
            norm_checks(pool, x, w, tokens, out.tokens_max, out.width, "norm_add");
            const nb::gil_scoped_release release;
            norm_add(pool, x, w, eps, tokens, out);
        },
        nb::arg("pool"), nb::arg("x"), nb::arg("w"), nb::arg("eps"), nb::arg("tokens"),
        nb::arg("out"), "out += rmsnorm of x, for each of the first rows: the residual stream.");
    module.def(
        "norm_quantise",
        [](Pool& pool, const Rows& x, const Vector& w, float eps, size_t tokens, Activations& out) {
            norm_checks(pool, x, w, tokens, out.tokens_max, out.width, "norm_quantise");
            const nb::gil_scoped_release release;
            norm_quantise(pool, x, w, eps, tokens, out);
        },
        nb::arg("pool"), nb::arg("x"), nb::arg("w"), nb::arg("eps"), nb::arg("tokens"),
        nb::arg("out"), "rmsnorm, then quantise; the normalised row is kept only if out keeps floats.");
    module.def(
        "quantise",
        [](Pool& pool, const Rows& x, size_t tokens, Activations& out) {
            require_tokens(tokens, x.tokens_max, "quantise");
            require_tokens(tokens, out.tokens_max, "quantise");
            require_width(x.width, out.width, "quantise");
            const nb::gil_scoped_release released;
            quantise(pool, x, tokens, out);
        },
        nb::arg("pool"), nb::arg("x"), nb::arg("tokens"), nb::arg("out"),
        "Quantises the first rows to int8 with one scale per 32 values.");
    bind_elementwise(module);
    module.def(
        "take_rows",
        [](const Rows& x, IndexArray indices, Rows& out) {
            require_tokens(indices.size(), out.tokens_max, "take_rows");
            require_width(out.width, x.width, "take_rows");
            require(&x != &out, "take_rows: x and out must differ");
            for (size_t i = 0; i < indices.size(); ++i)
                require(indices.data()[i] >= 0 &&
                            static_cast<size_t>(indices.data()[i]) < x.tokens_max,
                        "take_rows: no row " + std::to_string(indices.data()[i]));
            const nb::gil_scoped_release released;
            take_rows(x, indices.data(), indices.size(), out);
        },
        nb::arg("x"), nb::arg("indices"), nb::arg("out"), "out row i = x row indices[i].");
    module.def(
        "nonfinite_rows",
        [](Pool& pool, const Rows& x, size_t tokens) {
            require_tokens(tokens, x.tokens_max, "nonfinite_rows");
            const nb::gil_scoped_release released;
            return nonfinite_rows(pool, x, tokens);
        },
        nb::arg("pool"), nb::arg("x"), nb::arg("tokens"),
        "Indices of the rows that hold a NaN or an infinity, rising.");
}

}  // namespace batchengine
