// Bindings of the operations on rows: normalisation, quantisation, selection. Sizes are checked here;
// the GIL is released while a kernel runs.
#include <nanobind/stl/vector.h>

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
