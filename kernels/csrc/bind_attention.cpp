// Python face of norm, rope, kv8, attention and sampling. Every size, address and token id is checked
// here, before a kernel trusts it; the GIL is released while a kernel runs.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <optional>
#include <tuple>

#include "attention.h"
#include "bind_common.h"
#include "golden.h"
#include "golden_attention.h"
#include "norm.h"
#include "sampling.h"
#include "xxh3.h"

namespace batchengine {
namespace {

using EntryArray = nb::ndarray<const int32_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
using AddressArray = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutAddressArray = nb::ndarray<nb::numpy, uint64_t, nb::ndim<1>>;

std::string number(size_t n) { return std::to_string(n); }

void require_open(const Pool& pool) { require(!pool.closed(), "the pool is closed"); }

void norm_checks(Pool& pool, const Rows& x, const Vector& w, size_t tokens, size_t out_tokens,
                 size_t out_width, const char* name) {
    require_open(pool);
    require_tokens(tokens, x.tokens_max, name);
    require_tokens(tokens, out_tokens, name);
    require_width(w.size, x.width, name);
    require_width(out_width, x.width, name);
}

void bind_norm(nb::module_& module) {
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
        "norm_quantise",
        [](Pool& pool, const Rows& x, const Vector& w, float eps, size_t tokens, Activations& out) {
            norm_checks(pool, x, w, tokens, out.tokens_max, out.width, "norm_quantise");
            const nb::gil_scoped_release release;
            norm_quantise(pool, x, w, eps, tokens, out);
        },
        nb::arg("pool"), nb::arg("x"), nb::arg("w"), nb::arg("eps"), nb::arg("tokens"),
        nb::arg("out"), "rmsnorm, then quantise; the normalised row is kept only if out keeps floats.");
}

void bind_rope(nb::module_& module) {
    nb::class_<RopeTable>(module, "RopeTable",
                          "Cosines and sines per position; style 'norm' pairs (2i, 2i+1), 'neox' "
                          "pairs (i, i + n_rot/2). Dimensions past n_rot pass through.")
        .def(
            "__init__",
            [](RopeTable* self, const std::string& style, size_t head_dim, size_t n_rot, double base,
               const Vector* factors, double position_scale, double attn_factor) {
                require(style == "norm" || style == "neox",
                        "RopeTable: style is '" + style + "', expected 'norm' or 'neox'");
                new (self) RopeTable(style == "neox", head_dim, n_rot, base, factors, position_scale,
                                     attn_factor);
            },
            nb::arg("style"), nb::arg("head_dim"), nb::arg("n_rot"), nb::arg("base"),
            nb::arg("factors").none() = nb::none(), nb::arg("position_scale") = 1.0,
            nb::arg("attn_factor") = 1.0)
        .def("digest", &RopeTable::digest,
             "Hex hash of the parameters and of the first 256 positions.")
        .def(
            "row",
            [](RopeTable& self, size_t position) {
                self.cover(position, position + 1);
                const float* row = self.cosines(position);
                return std::vector<float>(row, row + 2 * self.half);
            },
            nb::arg("position"), "The n_rot/2 cosines, then the n_rot/2 sines of a position.")
        .def_prop_ro("head_dim", [](const RopeTable& self) { return self.head_dim; })
        .def_prop_ro("n_rot", [](const RopeTable& self) { return 2 * self.half; })
        .def("__repr__", [](const RopeTable& self) {
            return std::string("<RopeTable ") + (self.neox ? "neox" : "norm") +
                   " head_dim=" + number(self.head_dim) + " n_rot=" + number(2 * self.half) + ">";
        });
}

void bind_shape(nb::module_& module) {
    nb::class_<PageShape>(module, "PageShape",
                          "Bytes of a KV page: 256 tokens of n_layer layers of n_kv_head heads. "
                          "head_dim must be a multiple of 32 up to 256 (ValueError otherwise).")
        .def(nb::init<size_t, size_t, size_t>(), nb::arg("n_layer"), nb::arg("n_kv_head"),
             nb::arg("head_dim"))
        .def_prop_ro("n_layer", [](const PageShape& self) { return self.n_layer; })
        .def_prop_ro("n_kv_head", [](const PageShape& self) { return self.n_kv_head; })
        .def_prop_ro("head_dim", [](const PageShape& self) { return self.head_dim; })
        .def_prop_ro("head_bytes", &PageShape::head_bytes)
        .def_prop_ro("layer_bytes", &PageShape::layer_bytes)
        .def_prop_ro("payload_bytes", &PageShape::payload_bytes)
        .def_prop_ro("row_bytes", &PageShape::row_bytes)
        .def("__repr__", [](const PageShape& self) {
            return "<PageShape layers=" + number(self.n_layer) + " kv_heads=" +
                   number(self.n_kv_head) + " head_dim=" + number(self.head_dim) +
                   " payload_bytes=" + number(self.payload_bytes()) + ">";
        });
}

// Fills a batch, or leaves it empty and throws.
void set_batch(Batch& batch, const IndexArray& tokens, const EntryArray& entries,
               const AddressArray& pages) {
    batch.n_tokens = batch.n_entries = batch.n_pages = 0;
    require(tokens.shape(0) <= batch.tokens_max, "Batch.set: " + number(tokens.shape(0)) +
                                                     " tokens, at most " + number(batch.tokens_max));
    require(entries.shape(0) <= batch.entries_max, "Batch.set: " + number(entries.shape(0)) +
                                                       " entries, at most " +
                                                       number(batch.entries_max));
    require(pages.shape(0) <= batch.pages_max, "Batch.set: " + number(pages.shape(0)) +
                                                   " pages, at most " + number(batch.pages_max));
    size_t token = 0, page = 0;
    for (size_t e = 0; e < entries.shape(0); e++) {
        const int64_t n = entries(e, 0), start = entries(e, 1), n_pages = entries(e, 2);
        const std::string where = "Batch.set: entry " + number(e);
        require(n >= 1 && start >= 0 && n_pages >= 1,
                where + " needs n_tokens >= 1, start_position >= 0 and n_pages >= 1");
        require(start + n <= n_pages * static_cast<int64_t>(PAGE_TOKENS),
                where + " ends at position " + std::to_string(start + n) + " but has only " +
                    std::to_string(n_pages) + " pages");
        BatchEntry& entry = batch.entries[e];
        entry = {token, static_cast<size_t>(n), static_cast<size_t>(start), page,
                 static_cast<size_t>(n_pages)};
        require(token + entry.n_tokens <= tokens.shape(0), where + " reaches past the tokens");
        require(page + entry.n_pages <= pages.shape(0), where + " reaches past the page addresses");
        for (size_t i = 0; i < entry.n_tokens; i++)
            batch.entry_of[token + i] = static_cast<uint32_t>(e);
        token += entry.n_tokens;
        page += entry.n_pages;
    }
    require(token == tokens.shape(0), "Batch.set: the entries do not cover all tokens");
    require(page == pages.shape(0), "Batch.set: the entries do not cover all page addresses");
    for (size_t p = 0; p < page; p++)
        require(pages(p) != 0 && pages(p) % CACHE_LINE == 0,
                "Batch.set: page address " + number(p) + " is null or not 64-byte aligned");
    std::copy_n(tokens.data(), token, batch.tokens.data());
    std::copy_n(pages.data(), page, batch.pages.data());
    batch.n_tokens = token;
    batch.n_entries = entries.shape(0);
    batch.n_pages = page;
}

void bind_batch(nb::module_& module) {
    nb::class_<Batch>(module, "Batch", "The tokens of one step and the pages they read and write.")
        .def(nb::init<size_t, size_t, size_t>(), nb::arg("tokens_max"), nb::arg("entries_max"),
             nb::arg("pages_max"))
        .def("set", &set_batch, nb::arg("tokens"), nb::arg("entries"), nb::arg("page_addresses"),
             "tokens int32; entries int32 (n, 3) = n_tokens, start_position, n_pages; addresses "
             "uint64 of all entries' pages in order. Page p of an entry holds positions "
             "[256p, 256p + 256). The caller keeps the pages mapped. ValueError leaves it empty.")
        .def_prop_ro("n_tokens", [](const Batch& self) { return self.n_tokens; })
        .def_prop_ro("n_entries", [](const Batch& self) { return self.n_entries; })
        .def_prop_ro("n_pages", [](const Batch& self) { return self.n_pages; })
        .def("__repr__", [](const Batch& self) {
            return "<Batch tokens=" + number(self.n_tokens) + "/" + number(self.tokens_max) +
                   " entries=" + number(self.n_entries) + "/" + number(self.entries_max) +
                   " pages=" + number(self.n_pages) + "/" + number(self.pages_max) + ">";
        });
    nb::class_<Queries>(module, "Queries", "Quantised queries of one step.")
        .def(
            "__init__",
            [](Queries* self, size_t tokens_max, size_t n_head, size_t head_dim) {
                require(n_head > 0, "Queries: n_head must be positive");
                PageShape(1, 1, head_dim);
                new (self) Queries(tokens_max, n_head, head_dim);
            },
            nb::arg("tokens_max"), nb::arg("n_head"), nb::arg("head_dim"))
        .def_prop_ro("tokens_max", [](const Queries& self) { return self.tokens_max; })
        .def_prop_ro("n_head", [](const Queries& self) { return self.n_head; })
        .def_prop_ro("head_dim", [](const Queries& self) { return self.head_dim; });
}

void attention_checks(const Pool& pool, const Queries& queries, const Batch& batch,
                      const PageShape& shape, size_t layer, const char* name) {
    const std::string where = name;
    require_open(pool);
    require(layer < shape.n_layer, where + ": layer " + number(layer) + " of " + number(shape.n_layer));
    require_tokens(batch.n_tokens, queries.tokens_max, name);
    require(queries.head_dim == shape.head_dim, where + ": queries have head_dim " +
                                                    number(queries.head_dim) + ", pages " +
                                                    number(shape.head_dim));
    require(queries.n_head % shape.n_kv_head == 0,
            where + ": " + number(queries.n_head) + " heads do not divide among " +
                number(shape.n_kv_head) + " KV heads");
}

void bind_place(nb::module_& module) {
    module.def(
        "place_kv",
        [](Pool& pool, const Rows& qkv, const Batch& batch, const PageShape& shape, size_t layer,
           size_t n_head, const Vector* q_norm, const Vector* k_norm, float eps, RopeTable* rope,
           double scale, Queries& queries) {
            attention_checks(pool, queries, batch, shape, layer, "place_kv");
            require(n_head == queries.n_head, "place_kv: n_head is not that of the queries");
            require_tokens(batch.n_tokens, qkv.tokens_max, "place_kv");
            require_width(qkv.width, (n_head + 2 * shape.n_kv_head) * shape.head_dim, "place_kv");
            if (q_norm) require_width(q_norm->size, shape.head_dim, "place_kv: q_norm");
            if (k_norm) require_width(k_norm->size, shape.head_dim, "place_kv: k_norm");
            require(std::isfinite(scale) && scale > 0, "place_kv: scale must be positive");
            if (rope) require(rope->head_dim == shape.head_dim, "place_kv: rope head_dim differs");
            const nb::gil_scoped_release release;
            if (rope)
                for (size_t e = 0; e < batch.n_entries; e++) {
                    const BatchEntry& entry = batch.entries[e];
                    rope->cover(entry.start_position, entry.start_position + entry.n_tokens);
                }
            place_kv(pool, qkv, batch, shape, layer, {q_norm, k_norm, eps, rope, scale}, queries);
        },
        nb::arg("pool"), nb::arg("qkv"), nb::arg("batch"), nb::arg("shape"), nb::arg("layer"),
        nb::arg("n_head"), nb::arg("q_norm").none(), nb::arg("k_norm").none(), nb::arg("eps"),
        nb::arg("rope").none(), nb::arg("scale"), nb::arg("queries"),
        "Rows of q heads, k heads, v heads (biases applied): per-head norm and rope for q and k, "
        "K and V appended to the batch's pages as kv8, q quantised into queries.");
    module.def(
        "attend",
        [](Pool& pool, Queries& queries, const Batch& batch, const PageShape& shape, size_t layer,
           Rows& out) {
            attention_checks(pool, queries, batch, shape, layer, "attend");
            require_tokens(batch.n_tokens, out.tokens_max, "attend");
            require_width(out.width, queries.n_head * shape.head_dim, "attend");
            const nb::gil_scoped_release release;
            attend(pool, queries, batch, shape, layer, out);
        },
        nb::arg("pool"), nb::arg("queries"), nb::arg("batch"), nb::arg("shape"), nb::arg("layer"),
        nb::arg("out"),
        "Causal attention of the batch's tokens over their pages; out is (tokens, n_head * "
        "head_dim). A head that met a NaN or infinity comes out as NaN.");
    module.def(
        "row_digests",
        [](const Batch& batch, const PageShape& shape, const AddressArray& seeds, Pool* pool) {
            require(seeds.shape(0) == batch.n_tokens, "row_digests: one seed per token is needed");
            if (pool) require_open(*pool);
            uint64_t* digests = new uint64_t[batch.n_tokens + 1];
            const nb::capsule owner(digests, [](void* p) noexcept { delete[] static_cast<uint64_t*>(p); });
            {
                const nb::gil_scoped_release release;
                row_digests(pool, batch, shape, seeds.data(), digests);
            }
            return OutAddressArray(digests, {batch.n_tokens}, owner);
        },
        nb::arg("batch"), nb::arg("shape"), nb::arg("seeds"), nb::arg("pool").none() = nb::none(),
        nb::sig("def row_digests(batch: Batch, shape: PageShape, seeds: numpy.typing.ArrayLike, "
                "pool: Pool | None = None) -> numpy.typing.NDArray[numpy.uint64]"),
        "uint64 per token: seeded XXH3-64 of its K, K scale, V, V scale over all layers and heads.");
    module.def(
        "xxh3_64",
        [](nb::object data, uint64_t seed) {
            const HeldBuffer held(data, false);
            return xxh3_64(held.data(), held.size(), seed);
        },
        nb::arg("data"), nb::arg("seed") = 0,
        nb::sig("def xxh3_64(data: typing_extensions.Buffer, seed: int = 0) -> int"));
}

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

void bind_sample_types(nb::module_& module) {
    nb::class_<SampleSpec>(module, "SampleSpec",
                           "How to draw one token; sampling.h gives the order of the steps. "
                           "temperature 0 is greedy; history is the window that penalties see.")
        .def(
            "__init__",
            [](SampleSpec* self, float temperature, int32_t top_k, float top_p, float min_p,
               float repetition_penalty, float presence_penalty, float frequency_penalty,
               uint64_t seed, uint64_t position, uint32_t draw, std::optional<IndexArray> history,
               std::vector<std::pair<int32_t, float>> bias, int32_t logprobs) {
                SampleSpec spec{temperature, top_k, top_p, min_p, repetition_penalty,
                                presence_penalty, frequency_penalty, seed, position, draw, {},
                                std::move(bias), logprobs};
                if (history)
                    spec.history.assign(history->data(), history->data() + history->shape(0));
                check_spec(spec);
                new (self) SampleSpec(std::move(spec));
            },
            nb::kw_only(), nb::arg("temperature") = 0.0f, nb::arg("top_k") = 0,
            nb::arg("top_p") = 1.0f, nb::arg("min_p") = 0.0f, nb::arg("repetition_penalty") = 1.0f,
            nb::arg("presence_penalty") = 0.0f, nb::arg("frequency_penalty") = 0.0f,
            nb::arg("seed") = 0, nb::arg("position") = 0, nb::arg("draw") = 0,
            nb::arg("history").none() = nb::none(),
            nb::arg("bias") = std::vector<std::pair<int32_t, float>>{}, nb::arg("logprobs") = -1);
    nb::class_<Sampled>(module, "Sampled", "A drawn token; token is -1 when the row was poisoned.")
        .def_ro("token", &Sampled::token)
        .def_ro("poisoned", &Sampled::poisoned)
        .def_ro("logprob", &Sampled::logprob)
        .def_ro("top", &Sampled::top, "(token, log-probability), best first.")
        .def("__repr__", [](const Sampled& self) {
            return self.poisoned ? std::string("<Sampled poisoned>")
                                 : "<Sampled token=" + std::to_string(self.token) +
                                       " logprob=" + std::to_string(self.logprob) + ">";
        });
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
            philox(seed, position, draw, out);
            return std::make_tuple(out[0], out[1], out[2], out[3]);
        },
        nb::arg("seed"), nb::arg("position"), nb::arg("draw"),
        "The four words of Philox4x32-10 with key seed and counter (position, draw, 0).");
}

}  // namespace
}  // namespace batchengine

void bind_attention(nanobind::module_& module) {
    using namespace batchengine;
    module.attr("PAGE_TOKENS") = PAGE_TOKENS;
    bind_norm(module);
    bind_rope(module);
    bind_shape(module);
    bind_batch(module);
    bind_place(module);
    bind_sample_types(module);
    bind_sample(module);
    golden_register("attention", golden_attention);
}
