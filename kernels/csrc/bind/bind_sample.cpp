// Bindings of sampling. Every parameter and token id is checked here; the GIL is released while a
// kernel runs.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>

#include "bind/bind_common.h"
#include "common/ca.h"
#include "sample/sample_row.h"
#include "sample/sampling.h"

namespace batchengine {
namespace {

void check_spec(const SampleSpec& spec) {
    require(std::isfinite(spec.temperature) && spec.temperature >= 0.0f,
            "SampleSpec: temperature must be finite and not negative");
    require(spec.top_k >= 0, "SampleSpec: top_k must not be negative");
    require(spec.top_p >= 0.0f && spec.top_p <= 1.0f, "SampleSpec: top_p must lie in 0..1");
    require(spec.min_p >= 0.0f && spec.min_p <= 1.0f, "SampleSpec: min_p must lie in 0..1");
    require(std::isfinite(spec.repetition_penalty) && spec.repetition_penalty > 0.0f,
            "SampleSpec: repetition_penalty must be positive");
    require(std::isfinite(spec.presence_penalty) && std::isfinite(spec.frequency_penalty),
            "SampleSpec: penalties must be finite");
    require(spec.logprobs >= -1 && spec.logprobs <= 20, "SampleSpec: logprobs must lie in -1..20");
    for (const auto& [token, bias] : spec.bias)
        require(!std::isnan(bias) && bias < HUGE_VALF, "SampleSpec: a bias is NaN or +infinity");
}

bool fits(const std::vector<uint32_t>& mask, size_t vocab) {
    if (mask.empty()) return true;
    if (mask.size() != (vocab + 31) / 32) return false;
    const uint32_t last = vocab % 32 == 0 ? ~0u : (1u << vocab % 32) - 1;
    return std::any_of(mask.begin(), mask.end() - 1, [](uint32_t word) { return word != 0; }) ||
           (mask.back() & last) != 0;
}

// Its history and biases are counted; where they begin is the caller's.
SampleRow row_of(const SampleSpec& spec) {
    return {.temperature = spec.temperature,
            .top_p = spec.top_p,
            .min_p = spec.min_p,
            .repetition = spec.repetition_penalty,
            .frequency = spec.frequency_penalty,
            .presence = spec.presence_penalty,
            .top_k = spec.top_k,
            .logprobs = spec.logprobs,
            .seed = spec.seed,
            .position = spec.position,
            .draw = spec.draw,
            .first_history = 0,
            .n_history = static_cast<int32_t>(spec.history.size()),
            .first_bias = 0,
            .n_bias = static_cast<int32_t>(spec.bias.size()),
            .first_mask = -1};
}

void bind_sample_types(nb::module_& module) {
    nb::class_<SampleSpec>(module, "SampleSpec",
                           "How to draw one token; sampling.h gives the order of the steps. "
                           "temperature 0 is greedy; history is the window that penalties see; mask "
                           "has a bit per token, the lowest first: 0 excludes the token.")
        .def(
            "__init__",
            [](SampleSpec* self, float temperature, int32_t top_k, float top_p, float min_p,
               float repetition_penalty, float presence_penalty, float frequency_penalty,
               uint64_t seed, uint64_t position, uint32_t draw, std::optional<IndexArray> history,
               std::vector<std::pair<int32_t, float>> bias, int32_t logprobs,
               std::optional<WordArray> mask) {
                SampleSpec spec{temperature, top_k, top_p, min_p, repetition_penalty,
                                presence_penalty, frequency_penalty, seed, position, draw, {},
                                std::move(bias), logprobs, {}};
                if (history)
                    spec.history.assign(history->data(), history->data() + history->shape(0));
                if (mask) spec.mask.assign(mask->data(), mask->data() + mask->shape(0));
                check_spec(spec);
                new (self) SampleSpec(std::move(spec));
            },
            nb::kw_only(), nb::arg("temperature") = 0.0f, nb::arg("top_k") = 0,
            nb::arg("top_p") = 1.0f, nb::arg("min_p") = 0.0f, nb::arg("repetition_penalty") = 1.0f,
            nb::arg("presence_penalty") = 0.0f, nb::arg("frequency_penalty") = 0.0f,
            nb::arg("seed") = 0, nb::arg("position") = 0, nb::arg("draw") = 0,
            nb::arg("history").none() = nb::none(),
            nb::arg("bias") = std::vector<std::pair<int32_t, float>>{}, nb::arg("logprobs") = -1,
            nb::arg("mask").none() = nb::none())
        .def_prop_ro(
            "row",
            [](const SampleSpec& spec) {
                const SampleRow row = row_of(spec);
                return nb::bytes(&row, sizeof row);
            },
            "The bytes of a SampleRow (sample_row.h) whose history and biases begin at 0, without mask.")
        .def_prop_ro(
            "history",
            [](SampleSpec& spec) {
                return nb::ndarray<nb::numpy, const int32_t, nb::ndim<1>>(spec.history.data(),
                                                                          {spec.history.size()});
            },
            nb::rv_policy::reference_internal, "numpy alias of the tokens that penalties see.")
        .def_prop_ro(
            "mask",
            [](SampleSpec& spec) {
                return nb::ndarray<nb::numpy, const uint32_t, nb::ndim<1>>(spec.mask.data(),
                                                                           {spec.mask.size()});
            },
            nb::rv_policy::reference_internal, "numpy alias of the mask; empty: all tokens.")
        .def_ro("bias", &SampleSpec::bias, "(token, bias), in order.");
    nb::class_<Sampled>(module, "Sampled", "A drawn token; token is -1 when the row had a NaN or an infinity.")
        .def(
            "__init__",
            [](Sampled* self, int32_t token, float logprob,
               std::vector<std::pair<int32_t, float>> top) {
                new (self) Sampled{token, token < 0, logprob, std::move(top)};
            },
            nb::arg("token"), nb::arg("logprob"), nb::arg("top"))
        .def_ro("token", &Sampled::token)
        .def_ro("nonfinite", &Sampled::nonfinite)
        .def_ro("logprob", &Sampled::logprob)
        .def_ro("top", &Sampled::top, "(token, log-probability), best first.");
}

void bind_sample(nb::module_& module) {
    module.def(
        "sample",
        [](Pool& pool, const Rows& logits, const std::vector<SampleSpec>& rows) {
            require_open(pool);
            require_tokens(rows.size(), logits.tokens_max, "sample");
            const auto vocab = static_cast<int64_t>(logits.width);
            for (const SampleSpec& spec : rows) {
                for (const int32_t token : spec.history)
                    require(token >= 0 && token < vocab,
                            "sample: history token " + std::to_string(token) + " is not in the vocabulary");
                for (const auto& [token, bias] : spec.bias)
                    require(token >= 0 && token < vocab,
                            "sample: bias token " + std::to_string(token) + " is not in the vocabulary");
                require(fits(spec.mask, logits.width), "sample: the mask allows no token, or has another size");
            }
            const nb::gil_scoped_release release;
            return sample(pool, logits, rows);
        },
        nb::arg("pool"), nb::arg("logits"), nb::arg("rows"),
        "One Sampled per spec; row i of logits goes with rows[i].");
    module.def(
        "philox",
        [](uint64_t seed, uint64_t position, uint32_t draw) {
            uint32_t out[4];
            ca::philox(seed, position, draw, out);
            return std::make_tuple(out[0], out[1], out[2], out[3]);
        },
        nb::arg("seed"), nb::arg("position"), nb::arg("draw"),
        "The four words of Philox4x32-10 with key seed and counter (position, draw, 0).");
}

}  // namespace

void bind_sampling(nb::module_& module) {
    bind_sample_types(module);
    bind_sample(module);
}

}  // namespace batchengine
