// Bindings of mixtures of experts, and of products of heads.
#include <nanobind/stl/string.h>

#include "bind/bind_common.h"
#include "bind/held_matrix.h"
#include "experts/experts.h"
#include "experts/heads.h"
#include "linear/tiles.h"

namespace batchengine {
namespace {

constexpr size_t EXPERTS_MAX = 1024, HEADS_MAX = 1024;

// A bank has whole row tiles of each expert, and the activations have what its kind reads.
LinearPart checked_bank(const char* op, const Activations& x, const HeldMatrix& held,
                        const Vector* bias, const ExpertPairs& pairs, size_t rows) {
    const std::string name(op);
    const Matrix& bank = held.view;
    require(bank.cols == x.width, name + ": the activations are " + number(x.width) +
                                      " wide, the bank has " + number(bank.cols) + " cols");
    require(bank.rows == pairs.n_expert * rows, name + ": the bank has " + number(bank.rows) +
                                                    " rows, " + number(pairs.n_expert) +
                                                    " experts of " + number(rows) + " have others");
    require(rows % TILE_ROWS == 0, name + ": the rows of an expert are no multiple of 16");
    require(bank.kind < Kind::f16 || x.keep_float,
            name + ": float weights need Activations(keep_float=True)");
    require(!bias || bias->size == bank.rows,
            name + ": a bias has one value per row of each expert");
    return {&bank, bias};
}

void require_rows(const char* op, size_t tokens_max, const ExpertPairs& pairs) {
    require(tokens_max >= pairs.rows_max, std::string(op) + ": " + number(tokens_max) +
                                              " rows are fewer than rows_max of the pairs");
}

void bind_pairs(nb::module_& module) {
    nb::class_<ExpertPairs>(module, "ExpertPairs",
                            "The experts that are chosen for the tokens of a step.")
        .def(
            "__init__",
            [](ExpertPairs* self, size_t tokens_max, size_t n_expert, size_t n_used) {
                require(n_expert >= 1 && n_expert <= EXPERTS_MAX,
                        "ExpertPairs: " + number(n_expert) + " experts are not in 1..1024");
                require(n_used >= 1 && n_used <= n_expert,
                        "ExpertPairs: n_used is not in 1..n_expert");
                new (self) ExpertPairs(tokens_max, n_expert, n_used);
            },
            nb::arg("tokens_max"), nb::arg("n_expert"), nb::arg("n_used"))
        .def_prop_ro("tokens_max", [](const ExpertPairs& self) { return self.tokens_max; })
        .def_prop_ro("n_expert", [](const ExpertPairs& self) { return self.n_expert; })
        .def_prop_ro("n_used", [](const ExpertPairs& self) { return self.n_used; })
        .def_prop_ro("rows_max", [](const ExpertPairs& self) { return self.rows_max; },
                     "Rows of buffers of pairs.")
        .def(
            "unpack",
            [](nb::handle_t<ExpertPairs> handle) {
                const ExpertPairs& self = nb::cast<const ExpertPairs&>(handle);
                const size_t shape[2] = {self.tokens, self.n_used};
                return nb::make_tuple(
                    nb::ndarray<nb::numpy, const int32_t, nb::ndim<2>>(self.id.data(), 2, shape,
                                                                       handle),
                    nb::ndarray<nb::numpy, const float, nb::ndim<2>>(self.weight.data(), 2, shape,
                                                                     handle));
            },
            nb::sig("def unpack(self) -> tuple[numpy.typing.NDArray[numpy.int32], "
                    "numpy.typing.NDArray[numpy.float32]]"),
            "Ids and weights (tokens, n_used) of the last selection, as aliases, for tests.");
}

// Groups are of equal size, of two experts at least, and those that are kept have enough.
void require_groups(const ExpertChoice& choice, const ExpertPairs& pairs) {
    const ca::ExpertGroups& groups = choice.groups;
    if (groups.n == 1 && groups.kept == 1) return;
    const size_t n = static_cast<size_t>(groups.n), kept = static_cast<size_t>(groups.kept);
    require(groups.n >= 1 && groups.n <= ca::EXPERT_GROUPS_MAX && groups.kept >= 1 && groups.kept <= groups.n,
            "select_experts: 1 to 32 groups, of which some are kept");
    require(pairs.n_expert % n == 0 && pairs.n_expert / n >= 2 && pairs.n_expert / n * kept >= pairs.n_used,
            "select_experts: the groups that are kept have not enough experts, or they are no groups");
    require(!ca::is_softmax(choice.gating), "select_experts: experts of a softmax have no groups");
}

void bind_operations(nb::module_& module) {
    module.def(
        "select_experts",
        [](Pool& pool, const Rows& logits, size_t tokens, float scale, ExpertPairs& pairs,
           const std::string& gating, const Vector* bias, const Vector* scales, int n_group,
           int n_group_used) {
            const ExpertChoice choice{gating_of("select_experts", gating), scale, bias, scales,
                                      {n_group, n_group_used}};
            require_tokens(tokens, logits.tokens_max, "select_experts");
            require_tokens(tokens, pairs.tokens_max, "select_experts");
            require_width(logits.width, pairs.n_expert, "select_experts");
            require_groups(choice, pairs);
            require(!bias || !ca::has_logit_keys(choice.gating),
                    "select_experts: a choice by logits has no bias");
            require(!bias || bias->size == pairs.n_expert,
                    "select_experts: the bias has one value per expert");
            require(!scales || scales->size == pairs.n_expert,
                    "select_experts: the scales have one value per expert");
            const nb::gil_scoped_release released;
            select_experts(pool, logits, tokens, choice, pairs);
        },
        nb::arg("pool"), nb::arg("logits"), nb::arg("tokens"), nb::arg("scale"), nb::arg("pairs"),
        nb::arg("gating") = "softmax", nb::arg("bias") = nb::none(),
        nb::arg("scales") = nb::none(), nb::arg("n_group") = 1, nb::arg("n_group_used") = 1,
        "Chooses the experts of each token by the selector's logits; weights are times `scale`.\n\n"
        "The gating is \"softmax\", \"sigmoid\", \"normed_sigmoid\", \"softmax_all\" or \"biased_softmax\": "
        "rule 11 of docs/numerics.md. "
        "The bias, of a sigmoid or the last one, is added to what experts are chosen by; `scales` are what "
        "weights are multiplied by, one for each expert. Of n_group groups of experts, of a sigmoid, those of "
        "n_group_used can be chosen. ValueError if they do not fit.");
    module.def(
        "gather_pairs",
        [](Pool& pool, const Activations& x, const ExpertPairs& pairs, Activations& out) {
            require_tokens(pairs.tokens, x.tokens_max, "gather_pairs");
            require_width(out.width, x.width, "gather_pairs");
            require_rows("gather_pairs", out.tokens_max, pairs);
            require(x.keep_float || !out.keep_float, "gather_pairs: the activations keep no floats");
            const nb::gil_scoped_release released;
            gather_pairs(pool, x, pairs, out);
        },
        nb::arg("pool"), nb::arg("x"), nb::arg("pairs"), nb::arg("out"),
        "out row of a pair = the activations of its token.");
    module.def(
        "pairs_gated",
        [](Pool& pool, const Activations& x, const HeldMatrix* gate, const HeldMatrix& up,
           const ExpertPairs& pairs, Rows& out, const Vector* gate_bias, const Vector* up_bias,
           const std::string& activation, float limit) {
            const bool is_plain = is_ungated("pairs_gated", activation, limit, gate, gate_bias);
            require_rows("pairs_gated", x.tokens_max, pairs);
            require_rows("pairs_gated", out.tokens_max, pairs);
            const LinearPart ups = checked_bank("pairs_gated", x, up, up_bias, pairs, out.width);
            if (is_plain) {
                const nb::gil_scoped_release released;
                pairs_relu2(pool, x, ups, pairs, out);
                return;
            }
            const GateFunction made = gate_function_of("pairs_gated", activation, limit);
            const LinearPart gates =
                checked_bank("pairs_gated", x, *gate, gate_bias, pairs, out.width);
            const nb::gil_scoped_release released;
            pairs_gated(pool, x, gates, ups, made, pairs, out);
        },
        nb::arg("pool"), nb::arg("x"), nb::arg("gate").none(), nb::arg("up"), nb::arg("pairs"),
        nb::arg("out"), nb::arg("gate_bias") = nb::none(), nb::arg("up_bias") = nb::none(),
        nb::arg("activation") = "silu", nb::arg("limit") = 0.0f,
        "out row of a pair = the activation of gate * x + gate_bias and up * x + up_bias of its "
        "expert.\n\nA bias has n_expert * out.width values, those of expert 0 first. The activation "
        "is \"silu\", \"oai\" or \"gelu\", or without a gate \"relu2\": rule 5 of docs/numerics.md. "
        "limit: of \"silu\", 0 = there is none. ValueError for another activation or limit.");
    module.def(
        "quantise_pairs",
        [](Pool& pool, const Rows& x, const ExpertPairs& pairs, Activations& out) {
            require_rows("quantise_pairs", x.tokens_max, pairs);
            require_rows("quantise_pairs", out.tokens_max, pairs);
            require_width(out.width, x.width, "quantise_pairs");
            const nb::gil_scoped_release released;
            quantise_pairs(pool, x, pairs, out);
        },
        nb::arg("pool"), nb::arg("x"), nb::arg("pairs"), nb::arg("out"),
        "Quantises the rows of pairs.");
    module.def(
        "pairs_add",
        [](Pool& pool, const Activations& x, const HeldMatrix& down, const ExpertPairs& pairs,
           Rows& out, const Vector* bias) {
            require_rows("pairs_add", x.tokens_max, pairs);
            require_tokens(pairs.tokens, out.tokens_max, "pairs_add");
            const LinearPart part = checked_bank("pairs_add", x, down, bias, pairs, out.width);
            const nb::gil_scoped_release released;
            pairs_add(pool, x, part, pairs, out);
        },
        nb::arg("pool"), nb::arg("x"), nb::arg("down"), nb::arg("pairs"), nb::arg("out"),
        nb::arg("bias") = nb::none(),
        "out row of a token += the sum of its pairs' weight * (down * x + bias), experts "
        "ascending.\n\nThe bias has n_expert * out.width values, those of expert 0 first.");
}

// Columns from `column` on, `count` of each head's, `stride` apart.
void require_columns(const Rows& rows, size_t n_head, size_t column, size_t stride, size_t count,
                     const char* name) {
    require(count <= stride && column <= rows.width && (n_head - 1) * stride + count <= rows.width - column,
            std::string(name) + ": rows of " + number(rows.width) + " have no " + number(n_head) +
                " heads of " + number(count) + " values, " + number(stride) + " apart, from " +
                number(column) + " on");
}

void bind_heads(nb::module_& module) {
    nb::class_<HeadActivations>(module, "HeadActivations",
                                "Quantised parts of rows, `width` values of each head.")
        .def(
            "__init__",
            [](HeadActivations* self, size_t tokens_max, size_t n_head, size_t width, bool keep_float) {
                require(n_head >= 1 && n_head <= HEADS_MAX,
                        "HeadActivations: " + number(n_head) + " heads are not in 1..1024");
                new (self) HeadActivations(tokens_max, n_head, width, keep_float);
            },
            nb::arg("tokens_max"), nb::arg("n_head"), nb::arg("width"), nb::arg("keep_float"))
        .def_prop_ro("tokens_max", [](const HeadActivations& self) { return self.tokens_max; })
        .def_prop_ro("n_head", [](const HeadActivations& self) { return self.n_head; })
        .def_prop_ro("width", [](const HeadActivations& self) { return self.panels.width; });
    module.def(
        "quantise_heads",
        [](Pool& pool, const Rows& x, size_t column, size_t tokens, HeadActivations& out) {
            require_open(pool);
            require_tokens(tokens, x.tokens_max, "quantise_heads");
            require_tokens(tokens, out.tokens_max, "quantise_heads");
            require(x.width % out.n_head == 0, "quantise_heads: the rows are no whole heads");
            require(column <= x.width / out.n_head && out.panels.width <= x.width / out.n_head - column,
                    "quantise_heads: heads of " + number(x.width / out.n_head) + " values have no " +
                        number(out.panels.width) + " from " + number(column) + " on");
            const nb::gil_scoped_release released;
            quantise_heads(pool, x, column, tokens, out);
        },
        nb::arg("pool"), nb::arg("x"), nb::arg("column"), nb::arg("tokens"), nb::arg("out"),
        "Quantises, of each head of the first rows, out.width values from `column` on.");
    module.def(
        "transform_heads",
        [](Pool& pool, Rows& x, size_t n_head, size_t column, size_t width, size_t tokens) {
            require_open(pool);
            require_tokens(tokens, x.tokens_max, "transform_heads");
            require(n_head >= 1 && x.width % n_head == 0, "transform_heads: the rows are no whole heads");
            const size_t run = x.width / n_head;
            require(width >= 32 && width <= 512 && (width & (width - 1)) == 0,
                    "transform_heads: no transform has " + number(width) + " values");
            require(column < run && (run - column) % width == 0,
                    "transform_heads: heads of " + number(run) + " values have no transforms of " +
                        number(width) + " from " + number(column) + " on");
            const nb::gil_scoped_release released;
            transform_heads(pool, x, n_head, column, width, tokens);
        },
        nb::arg("pool"), nb::arg("x"), nb::arg("n_head"), nb::arg("column"), nb::arg("width"),
        nb::arg("tokens"),
        "Undoes the transform of K and V of latent layers in each head of the first rows, from value `column` "
        "on: 1/width times the Hadamard transform of each `width` values.");
    module.def(
        "linear_heads",
        [](Pool& pool, const HeadActivations& x, const HeldMatrix& held, size_t tokens, Rows& out,
           size_t column, size_t stride) {
            const Matrix& bank = held.view;
            require_open(pool);
            require_tokens(tokens, x.tokens_max, "linear_heads");
            require_tokens(tokens, out.tokens_max, "linear_heads");
            require(bank.cols == x.panels.width, "linear_heads: the activations are " +
                                                     number(x.panels.width) + " wide, the bank has " +
                                                     number(bank.cols) + " cols");
            require(bank.rows % (x.n_head * TILE_ROWS) == 0,
                    "linear_heads: " + number(bank.rows) + " rows are not " + number(x.n_head) +
                        " heads of a multiple of 16");
            require(bank.kind < Kind::f16 || x.panels.keep_float,
                    "linear_heads: float weights need HeadActivations(keep_float=True)");
            require_columns(out, x.n_head, column, stride, bank.rows / x.n_head, "linear_heads");
            const nb::gil_scoped_release released;
            linear_heads(pool, x, bank, tokens, out, column, stride);
        },
        nb::arg("pool"), nb::arg("x"), nb::arg("bank"), nb::arg("tokens"), nb::arg("out"),
        nb::arg("column"), nb::arg("stride"),
        "out values from column + head * stride on = the head's matrix of the bank times its activations.");
    module.def(
        "copy_heads",
        [](Pool& pool, const Rows& x, size_t n_head, size_t tokens, Rows& out, size_t column,
           size_t stride) {
            require_open(pool);
            require_tokens(tokens, x.tokens_max, "copy_heads");
            require_tokens(tokens, out.tokens_max, "copy_heads");
            require(&x != &out, "copy_heads: x and out must differ");
            require(n_head >= 1 && x.width % n_head == 0, "copy_heads: the rows are no whole heads");
            require_columns(out, n_head, column, stride, x.width / n_head, "copy_heads");
            const nb::gil_scoped_release released;
            copy_heads(pool, x, n_head, tokens, out, column, stride);
        },
        nb::arg("pool"), nb::arg("x"), nb::arg("n_head"), nb::arg("tokens"), nb::arg("out"),
        nb::arg("column"), nb::arg("stride"),
        "out values from column + head * stride on = those of the head in x.");
}

}  // namespace

void bind_experts(nb::module_& module) {
    bind_pairs(module);
    bind_operations(module);
    bind_heads(module);
}

}  // namespace batchengine
