// Bindings of rope, KV pages and attention. Every size and address is checked here, before a kernel
// reads it; the GIL is released while a kernel runs.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>

#include "attention/attention.h"
#include "bind/bind_common.h"
#include "common/xxh3.h"

namespace batchengine {
namespace {

using EntryArray = nb::ndarray<const int32_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
using AddressArray = nb::ndarray<const uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using OutAddressArray = nb::ndarray<nb::numpy, uint64_t, nb::ndim<1>>;

void bind_rope(nb::module_& module) {
    nb::class_<RopeTable>(module, "RopeTable",
                          "Cosines and sines per position; style 'norm' pairs (2i, 2i+1), 'neox' "
                          "pairs (i, i + n_rot/2). Dimensions past n_rot pass through.")
        .def(
            "__init__",
            [](RopeTable* self, const std::string& style, size_t head_dim, size_t n_rot, double base,
               const Vector* factors, double position_scale, double attn_factor, double query_log,
               size_t query_span) {
                require(style == "norm" || style == "neox",
                        "RopeTable: style is '" + style + "', expected 'norm' or 'neox'");
                new (self) RopeTable(style == "neox", head_dim, n_rot, base, factors, position_scale,
                                     attn_factor, query_log, query_span);
            },
            nb::arg("style"), nb::arg("head_dim"), nb::arg("n_rot"), nb::arg("base"),
            nb::arg("factors").none() = nb::none(), nb::arg("position_scale") = 1.0,
            nb::arg("attn_factor") = 1.0, nb::arg("query_log") = 0.0, nb::arg("query_span") = 1)
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
        .def(
            "query_scale",
            [](RopeTable& self, size_t position) {
                self.cover(position, position + 1);
                return self.query_scale(position);
            },
            nb::arg("position"), "The scale of queries at a position.")
        .def_prop_ro("scales_queries", &RopeTable::scales_queries,
                     "Whether any query has another scale than 1.")
        .def_prop_ro("head_dim", [](const RopeTable& self) { return self.head_dim; })
        .def_prop_ro("n_rot", [](const RopeTable& self) { return 2 * self.half; })
        .def_prop_ro("style", [](const RopeTable& self) { return self.neox ? "neox" : "norm"; });
}

void bind_shape(nb::module_& module) {
    nb::class_<LayerShape>(module, "LayerShape",
                           "The KV heads of one layer, and where the layer begins in a page and in "
                           "a token's row, in bytes.")
        .def_prop_ro("n_kv_head", [](const LayerShape& self) { return self.n_kv_head; })
        .def_prop_ro("head_dim", [](const LayerShape& self) { return self.head_dim; })
        .def_prop_ro("v_first", [](const LayerShape& self) { return self.v_first; })
        .def_prop_ro("transform_width", &LayerShape::transform_width,
                     "The values of a head that one transform of K covers.")
        .def_prop_ro("page_offset", [](const LayerShape& self) { return self.page_offset; })
        .def_prop_ro("row_offset", [](const LayerShape& self) { return self.row_offset; })
        .def_prop_ro("head_bytes", &LayerShape::head_bytes)
        .def_prop_ro("page_bytes", &LayerShape::page_bytes)
        .def_prop_ro("row_bytes", &LayerShape::row_bytes);
    nb::class_<PageShape>(module, "PageShape",
                          "Bytes of a KV page: 256 tokens of layers of KV heads, all alike or "
                          "(n_kv_head, head_dim, v_first) each. head_dim must be a multiple of 32 up to "
                          "576, v_first one below head_dim (ValueError otherwise). With v_first > 0 a layer "
                          "is latent: V is K, with one scale for all dims from v_first on.")
        .def(nb::init<size_t, size_t, size_t, size_t>(), nb::arg("n_layer"), nb::arg("n_kv_head"),
             nb::arg("head_dim"), nb::arg("v_first") = 0)
        .def(
            "__init__",
            [](PageShape* self, const std::vector<std::pair<size_t, size_t>>& heads) {
                std::vector<PageShape::Heads> layers;
                for (const auto& [n_kv_head, head_dim] : heads)
                    layers.emplace_back(n_kv_head, head_dim, size_t{0});
                new (self) PageShape(layers);
            },
            nb::arg("heads"))
        .def(nb::init<const std::vector<PageShape::Heads>&>(), nb::arg("heads"))
        .def_prop_ro("n_layer", &PageShape::n_layer)
        .def(
            "layer",
            [](const PageShape& self, size_t index) {
                require(index < self.n_layer(), "PageShape.layer: layer " + number(index) + " of " +
                                                    number(self.n_layer()));
                return self.layers[index];
            },
            nb::arg("index"))
        .def_prop_ro("payload_bytes", &PageShape::payload_bytes)
        .def_prop_ro("row_bytes", &PageShape::row_bytes);
}

// Fills a batch, or leaves it empty and throws.
void set_batch(Batch& batch, const IndexArray& tokens, const EntryArray& entries,
               const AddressArray& pages, bool absent_pages) {
    batch.n_tokens = batch.n_entries = batch.n_pages = batch.n_absent = batch.n_states = 0;
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
        entry = {token, static_cast<size_t>(n), static_cast<size_t>(start), page};
        require(token + entry.n_tokens <= tokens.shape(0), where + " reaches past the tokens");
        page += static_cast<size_t>(n_pages);
        require(page <= pages.shape(0), where + " reaches past the page addresses");
        for (size_t i = 0; i < entry.n_tokens; i++)
            batch.entry_of[token + i] = static_cast<uint32_t>(e);
        token += entry.n_tokens;
    }
    require(token == tokens.shape(0), "Batch.set: the entries do not cover all tokens");
    require(page == pages.shape(0), "Batch.set: the entries do not cover all page addresses");
    size_t n_absent = 0;
    for (size_t p = 0; p < page; p++) {
        const bool absent = absent_pages && pages(p) == 0;
        require(absent || (pages(p) != 0 && pages(p) % CACHE_LINE == 0),
                "Batch.set: page address " + number(p) + " is null or not 64-byte aligned");
        n_absent += absent;
    }
    std::copy_n(pages.data(), page, batch.pages.data());
    batch.n_tokens = token;
    batch.n_entries = entries.shape(0);
    batch.n_pages = page;
    batch.n_absent = n_absent;
}

// Gives a batch the states of its entries, or leaves it without and throws.
void set_states(Batch& batch, const AddressArray& reads, const AddressArray& writes) {
    batch.n_states = 0;
    const size_t n = batch.n_entries;
    require(reads.shape(0) == n && writes.shape(0) == n,
            "Batch.set_states: " + number(reads.shape(0)) + " and " + number(writes.shape(0)) +
                " addresses of " + number(n) + " entries");
    std::vector<uint64_t> written(writes.data(), writes.data() + n);
    std::sort(written.begin(), written.end());
    require(std::adjacent_find(written.begin(), written.end()) == written.end(),
            "Batch.set_states: two entries write one address");
    for (size_t e = 0; e < n; e++) {
        const std::string where = "Batch.set_states: entry " + number(e);
        require(writes(e) != 0, where + " has no address to write");
        require(reads(e) % CACHE_LINE == 0 && writes(e) % CACHE_LINE == 0,
                where + " has an address that is not 64-byte aligned");
        require(reads(e) == 0 || !std::binary_search(written.begin(), written.end(), reads(e)),
                where + " reads an address that is written");
    }
    std::copy_n(reads.data(), n, batch.state_reads.data());
    std::copy_n(writes.data(), n, batch.state_writes.data());
    batch.n_states = n;
}

// KV heads (first, count) of n_kv_head.
KvHeads checked_heads(std::pair<size_t, size_t> heads, size_t n_kv_head, const char* name) {
    require(heads.first < n_kv_head && heads.second > 0 && heads.second <= n_kv_head - heads.first,
            std::string(name) + ": no such heads");
    return {heads.first, heads.second};
}

// Heads (first, count) of queries: all that read some KV heads, or some of those that read one.
QueryHeads checked_query_heads(std::pair<size_t, size_t> heads, size_t n_head, size_t group,
                               const char* name) {
    const auto [first, count] = heads;
    const std::string where = name;
    require(first < n_head && count > 0 && count <= n_head - first, where + ": no such heads");
    require((first % group == 0 && count % group == 0) || first % group + count <= group,
            where + ": the heads are neither those of whole KV heads nor of one");
    return {first, count};
}

void bind_batch(nb::module_& module) {
    nb::class_<Batch>(module, "Batch", "The tokens of one step and the pages they read and write.")
        .def(nb::init<size_t, size_t, size_t>(), nb::arg("tokens_max"), nb::arg("entries_max"),
             nb::arg("pages_max"))
        .def("set", &set_batch, nb::arg("tokens"), nb::arg("entries"), nb::arg("page_addresses"),
             nb::kw_only(), nb::arg("absent_pages") = false,
             "tokens int32; entries int32 (n, 3) = n_tokens, start_position, n_pages; addresses "
             "uint64 of all entries' pages in order. Page p of an entry holds positions "
             "[256p, 256p + 256). The caller keeps the pages mapped. With absent_pages, address 0 "
             "is a page that lies elsewhere: a call that would read or write it raises ValueError. "
             "ValueError leaves the batch empty.")
        .def("set_states", &set_states, nb::arg("reads"), nb::arg("writes"),
             "uint64 addresses of one state image per entry (StateShape.image_bytes, 64-byte "
             "aligned): what a step reads, 0 for all zeros, and what it writes, which none reads. "
             "set() forgets them, and so does a ValueError. The caller keeps the images mapped.")
        .def_prop_ro("n_tokens", [](const Batch& self) { return self.n_tokens; })
        .def_prop_ro("n_entries", [](const Batch& self) { return self.n_entries; })
        .def_prop_ro("n_pages", [](const Batch& self) { return self.n_pages; });
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
        .def_prop_ro("head_dim", [](const Queries& self) { return self.head_dim; })
        .def(
            "to_bytes",
            [](const Queries& self, size_t n_kv_head, std::pair<size_t, size_t> heads,
               const std::vector<std::pair<size_t, size_t>>& runs) {
                require(n_kv_head > 0 && self.n_head % n_kv_head == 0,
                        "Queries.to_bytes: the heads do not divide among the KV heads");
                const QueryHeads some = checked_query_heads(heads, self.n_head, self.n_head / n_kv_head,
                                                            "Queries.to_bytes");
                std::vector<TokenRun> checked;
                for (const auto& [first, count] : runs) {
                    require(first <= self.tokens_max && count <= self.tokens_max - first,
                            "Queries.to_bytes: no such tokens");
                    checked.push_back({first, count});
                }
                const std::string bytes = queries_to_bytes(self, n_kv_head, some, checked);
                return nb::bytes(bytes.data(), bytes.size());
            },
            nb::arg("n_kv_head"), nb::arg("heads"), nb::arg("runs"),
            "The queries of runs (first token, count) and of `heads` (first, count), which are all that "
            "read some of the n_kv_head KV heads, or some of those that read one: the same bytes on every "
            "machine (partials.h has the layout).")
        .def(
            "load_bytes",
            [](Queries& self, nb::object data, size_t n_kv_head) {
                require(n_kv_head > 0 && self.n_head % n_kv_head == 0,
                        "Queries.load_bytes: the heads do not divide among the KV heads");
                const HeldBuffer held(data, false);
                return queries_from_bytes(held.data(), held.size(), n_kv_head, self);
            },
            nb::arg("data"), nb::arg("n_kv_head"),
            nb::sig("def load_bytes(self, data: typing_extensions.Buffer, n_kv_head: int) -> int"),
            "Becomes the queries that to_bytes() took, for n_kv_head KV heads, with tokens from 0; "
            "returns their count. ValueError, and no change, for another length; no value is "
            "checked.");
    nb::class_<KvRows>(module, "KvRows",
                       "The page rows of one step, gathered while place_kv has them: tokens_max * "
                       "row_bytes of the shape.")
        .def(nb::init<size_t, const PageShape&>(), nb::arg("tokens_max"), nb::arg("shape"))
        .def_prop_ro("tokens_max", [](const KvRows& self) { return self.tokens_max; })
        .def(
            "view",
            [](nb::handle_t<KvRows> handle, size_t tokens) {
                KvRows& self = nb::cast<KvRows&>(handle);
                require_tokens(tokens, self.tokens_max, "KvRows.view");
                return nb::ndarray<nb::numpy, uint8_t, nb::ndim<2>>(
                    self.bytes.data(), {tokens, self.shape.row_bytes()}, handle);
            },
            nb::arg("tokens"),
            nb::sig("def view(self, tokens: int) -> numpy.typing.NDArray[numpy.uint8]"),
            "numpy alias (tokens, row_bytes) of the first rows; writing to it writes the rows.");
}

const LayerShape& checked_layer(const PageShape& shape, size_t layer, const char* name) {
    require(layer < shape.n_layer(), std::string(name) + ": layer " + number(layer) + " of " +
                                         number(shape.n_layer()));
    return shape.layers[layer];
}

void attention_checks(const Pool& pool, const Queries& queries, const Batch& batch,
                      const LayerShape& shape, size_t n_kv_head, const char* name) {
    const std::string where = name;
    require_open(pool);
    require_tokens(batch.n_tokens, queries.tokens_max, name);
    require(queries.head_dim == shape.head_dim, where + ": queries have head_dim " +
                                                    number(queries.head_dim) + ", pages " +
                                                    number(shape.head_dim));
    require(queries.n_head % n_kv_head == 0, where + ": " + number(queries.n_head) +
                                                 " heads do not divide among " +
                                                 number(n_kv_head) + " KV heads");
}

// The sinks are those of all heads of a row.
void require_sinks(const Sinks* sinks, size_t n_head, const char* name) {
    if (sinks)
        require(sinks->n_head == n_head, std::string(name) + ": sinks of " + number(sinks->n_head) +
                                             " heads, expected " + number(n_head));
}

// The pages of positions [start, end) of an entry have addresses.
void require_pages(const Batch& batch, size_t e, size_t start, size_t end, const char* name) {
    if (batch.n_absent == 0) return;
    const BatchEntry& entry = batch.entries[e];
    for (size_t p = start / PAGE_TOKENS; p < div_up(end, PAGE_TOKENS); p++)
        require(batch.pages[entry.first_page + p] != 0,
                std::string(name) + ": page " + number(p) + " of entry " + number(e) + " is absent");
}

void require_written_pages(const Batch& batch, const char* name) {
    for (size_t e = 0; e < batch.n_entries; e++) {
        const BatchEntry& entry = batch.entries[e];
        require_pages(batch, e, entry.start_position, entry.start_position + entry.n_tokens, name);
    }
}

// A new array that `fill` fills without the GIL.
template <class Fill>
OutAddressArray digest_array(size_t count, Fill&& fill) {
    uint64_t* digests = new uint64_t[count + 1];
    const nb::capsule owner(digests, [](void* p) noexcept { delete[] static_cast<uint64_t*>(p); });
    {
        const nb::gil_scoped_release release;
        fill(digests);
    }
    return OutAddressArray(digests, {count}, owner);
}

void bind_place(nb::module_& module) {
    module.def(
        "place_kv",
        [](Pool& pool, const Rows& qkv, const Batch& batch, const PageShape& pages, size_t layer,
           size_t n_head, const Vector* q_norm, const Vector* k_norm, float eps, RopeTable* rope,
           double scale, Queries& queries, KvRows* rows, const Vector* v_norm, bool has_kv,
           bool norms_rotated) {
            const LayerShape& shape = checked_layer(pages, layer, "place_kv");
            attention_checks(pool, queries, batch, shape, shape.n_kv_head, "place_kv");
            require(n_head == queries.n_head, "place_kv: n_head is not that of the queries");
            require_tokens(batch.n_tokens, qkv.tokens_max, "place_kv");
            require_written_pages(batch, "place_kv");
            require(!shape.is_latent() || !v_norm, "place_kv: V of a latent layer has no norm");
            const size_t n_kv = (shape.is_latent() ? 1 : 2) * shape.n_kv_head;
            const size_t n_heads = n_head + (has_kv ? n_kv : 0);
            require_width(qkv.width, n_heads * shape.head_dim, "place_kv");
            if (q_norm) require_width(q_norm->size, shape.head_dim, "place_kv: q_norm");
            if (k_norm) require_width(k_norm->size, shape.head_dim, "place_kv: k_norm");
            if (v_norm) require_width(v_norm->size, shape.head_dim, "place_kv: v_norm");
            require(std::isfinite(scale) && scale > 0, "place_kv: scale must be positive");
            if (rope) require(rope->head_dim == shape.head_dim, "place_kv: rope head_dim differs");
            if (rows) {
                require_tokens(batch.n_tokens, rows->tokens_max, "place_kv: rows");
                require(rows->shape == pages, "place_kv: rows are of pages of another shape");
            }
            const nb::gil_scoped_release release;
            if (rope)
                for (size_t e = 0; e < batch.n_entries; e++) {
                    const BatchEntry& entry = batch.entries[e];
                    rope->cover(entry.start_position, entry.start_position + entry.n_tokens);
                }
            const PlaceParams params = {q_norm, k_norm, eps,     rope,         scale,
                                        v_norm, has_kv, norms_rotated};
            place_kv(pool, qkv, batch, shape, params, queries, rows);
        },
        nb::arg("pool"), nb::arg("qkv"), nb::arg("batch"), nb::arg("shape"), nb::arg("layer"),
        nb::arg("n_head"), nb::arg("q_norm").none(), nb::arg("k_norm").none(), nb::arg("eps"),
        nb::arg("rope").none(), nb::arg("scale"), nb::arg("queries"),
        nb::arg("rows").none() = nb::none(), nb::arg("v_norm").none() = nb::none(),
        nb::arg("has_kv") = true, nb::arg("norms_rotated") = false,
        "Rows of q heads, k heads, v heads (biases applied): per-head norm, and rope for q and k, which come "
        "in the other order with norms_rotated; "
        "K and V appended to the batch's pages as kv8 and copied to rows, q quantised into queries. "
        "Without has_kv the rows are q heads, and another layer has put K and V there. Those of a latent "
        "layer have no v heads.");
    module.def(
        "attend",
        [](Pool& pool, Queries& queries, const Batch& batch, const PageShape& pages, size_t layer,
           Rows& out, size_t window, const Sinks* sinks) {
            const LayerShape& shape = checked_layer(pages, layer, "attend");
            attention_checks(pool, queries, batch, shape, shape.n_kv_head, "attend");
            require_sinks(sinks, queries.n_head, "attend");
            require(batch.n_absent == 0, "attend: pages of the batch are absent");
            require_tokens(batch.n_tokens, out.tokens_max, "attend");
            require_width(out.width, queries.n_head * shape.head_dim, "attend");
            const nb::gil_scoped_release release;
            attend(pool, queries, batch, shape, out, window, sinks);
        },
        nb::arg("pool"), nb::arg("queries"), nb::arg("batch"), nb::arg("shape"), nb::arg("layer"),
        nb::arg("out"), nb::kw_only(), nb::arg("window") = 0, nb::arg("sinks").none() = nb::none(),
        "Causal attention of the batch's tokens over their pages; out is (tokens, n_head * "
        "head_dim). A head that met a NaN or infinity comes out as NaN. With a window of n > 0, a "
        "token sees itself and the n - 1 before it. Values of a latent layer are those of transformed K "
        "(transform_heads); those before v_first mean nothing.");
    module.def(
        "row_digests",
        [](const Batch& batch, const PageShape& shape, const AddressArray& seeds) {
            require(seeds.shape(0) == batch.n_tokens, "row_digests: one seed per token is needed");
            require_written_pages(batch, "row_digests");
            return digest_array(batch.n_tokens, [&](uint64_t* digests) {
                row_digests(batch, shape, seeds.data(), digests);
            });
        },
        nb::arg("batch"), nb::arg("shape"), nb::arg("seeds"),
        nb::sig("def row_digests(batch: Batch, shape: PageShape, seeds: numpy.typing.ArrayLike) -> "
                "numpy.typing.NDArray[numpy.uint64]"),
        "uint64 per token: seeded XXH3-64 of its K, K scale, V, V scale over all layers and heads.");
    module.def(
        "step_digests",
        [](Pool& pool, const KvRows& rows, const AddressArray& seeds) {
            require_open(pool);
            require_tokens(seeds.shape(0), rows.tokens_max, "step_digests");
            return digest_array(seeds.shape(0), [&](uint64_t* digests) {
                step_digests(pool, rows, seeds.shape(0), seeds.data(), digests);
            });
        },
        nb::arg("pool"), nb::arg("rows"), nb::arg("seeds"),
        nb::sig("def step_digests(pool: Pool, rows: KvRows, seeds: numpy.typing.ArrayLike) -> "
                "numpy.typing.NDArray[numpy.uint64]"),
        "As row_digests, of the first tokens of a step that place_kv has copied for every layer.");
    module.def(
        "store_rows",
        [](Pool& pool, KvRows& rows, const Batch& batch, size_t first) {
            require_open(pool);
            require_tokens(first, rows.tokens_max, "store_rows");
            require_tokens(first + batch.n_tokens, rows.tokens_max, "store_rows");
            require_written_pages(batch, "store_rows");
            const nb::gil_scoped_release release;
            store_rows(pool, rows, batch, first);
        },
        nb::arg("pool"), nb::arg("rows"), nb::arg("batch"), nb::arg("first") = 0,
        "Writes rows of a step, which another device has computed, to the pages of the batch, whose "
        "first token has row `first`.");
    module.def(
        "xxh3_64",
        [](nb::object data, uint64_t seed) {
            const HeldBuffer held(data, false);
            return xxh3_64(held.data(), held.size(), seed);
        },
        nb::arg("data"), nb::arg("seed") = 0,
        nb::sig("def xxh3_64(data: typing_extensions.Buffer, seed: int = 0) -> int"));
}

void bind_partials_type(nb::module_& module) {
    nb::class_<Partials>(
        module, "Partials",
        "Attention of a step over spans of super-pages (1024 tokens each), before the last fold.\n\n"
        "Per token and head one accumulator m, l, o[head_dim - v_first] in fp32 for a span that starts at "
        "super-page 0, else one per super-page: super-pages are folded in their order only, so the "
        "spans may be divided and folded in any grouping and finish() gives the bits of attend(). v_first "
        "is that of the layer. to_bytes() takes 16 + 24 * entries + 4 * (head_dim - v_first + 2) * "
        "accumulators bytes.")
        .def(
            "__init__",
            [](Partials* self, size_t tokens_max, size_t n_head, size_t head_dim, size_t v_first) {
                require(n_head > 0, "Partials: n_head must be positive");
                PageShape(1, 1, head_dim, v_first);
                new (self) Partials(tokens_max, n_head, head_dim, v_first);
            },
            nb::arg("tokens_max"), nb::arg("n_head"), nb::arg("head_dim"), nb::arg("v_first") = 0)
        .def_prop_ro("tokens_max", [](const Partials& self) { return self.tokens_max; })
        .def_prop_ro("n_head", [](const Partials& self) { return self.n_head; })
        .def_prop_ro("head_dim", [](const Partials& self) { return self.head_dim; })
        .def_prop_ro("v_first", [](const Partials& self) { return self.v_first; })
        .def_prop_ro("n_tokens", [](const Partials& self) { return self.n_tokens; })
        .def_prop_ro("n_accumulators", [](const Partials& self) { return self.n_accumulators; })
        .def_prop_ro(
            "spans",
            [](const Partials& self) {
                std::vector<std::pair<size_t, size_t>> spans;
                for (const PartialEntry& entry : self.entries)
                    spans.emplace_back(entry.first, entry.count);
                return spans;
            },
            "(first super-page, count) of every entry; (0, 0) is empty.")
        .def(
            "to_bytes",
            [](const Partials& self) {
                const std::string bytes = partials_to_bytes(self);
                return nb::bytes(bytes.data(), bytes.size());
            },
            "Spans and accumulators as bytes, the same on every machine (partials.h has the layout).")
        .def(
            "load_bytes",
            [](Partials& self, nb::object data) {
                const HeldBuffer held(data, false);
                partials_from_bytes(held.data(), held.size(), self);
            },
            nb::arg("data"),
            nb::sig("def load_bytes(self, data: typing_extensions.Buffer) -> None"),
            "Becomes what to_bytes() was called on. ValueError, and no change, for bytes of another "
            "n_head, head_dim or v_first, of more than tokens_max tokens, or that are malformed; the values of "
            "accumulators are not checked.");
}

std::vector<Span> checked_spans(const Batch& batch, const EntryArray& spans, size_t window) {
    std::vector<Span> checked;
    for (size_t i = 0; i < spans.shape(0); i++) {
        require(spans(i, 0) >= 0 && spans(i, 1) >= 0 && spans(i, 2) >= 0,
                "attend_partials: span " + number(i) + " has a negative number");
        checked.push_back({static_cast<size_t>(spans(i, 0)), static_cast<size_t>(spans(i, 1)),
                           static_cast<size_t>(spans(i, 2))});
        const Span& span = checked.back();
        if (span.count == 0 || span.entry >= batch.n_entries) continue;
        const BatchEntry& entry = batch.entries[span.entry];
        const size_t frontier = entry.start_position + entry.n_tokens;
        require_pages(batch, span.entry,
                      std::max(span.first * SUPERPAGE_TOKENS, first_seen(entry.start_position, window)),
                      std::min((span.first + span.count) * SUPERPAGE_TOKENS, frontier),
                      "attend_partials");
    }
    return checked;
}

void bind_sinks(nb::module_& module) {
    nb::class_<Sinks>(module, "Sinks",
                      "The sinks of one layer: per query head a logit that takes part in the softmax of "
                      "every row and has no V.")
        .def(
            "__init__",
            [](Sinks* self, nb::object values) {
                const HeldBuffer held(values, false);
                require(held.size() > 0 && held.size() % sizeof(float) == 0,
                        "Sinks: " + number(held.size()) + " bytes are not fp32 values");
                std::vector<float> logits(held.size() / sizeof(float));
                std::memcpy(logits.data(), held.data(), held.size());
                new (self) Sinks(logits.data(), logits.size());
            },
            nb::arg("values"),
            nb::sig("def __init__(self, values: typing_extensions.Buffer) -> None"),
            "From the fp32 bytes of n_head logits. ValueError for one that is not finite, also after its "
            "product with log2 e.")
        .def_prop_ro("n_head", [](const Sinks& self) { return self.n_head; })
        .def(
            "view",
            [](nb::handle_t<Sinks> handle) {
                Sinks& self = nb::cast<Sinks&>(handle);
                return nb::ndarray<nb::numpy, const float, nb::ndim<2>>(self.values.data(),
                                                                        {2, self.n_head}, handle);
            },
            nb::sig("def view(self) -> numpy.typing.NDArray[numpy.float32]"),
            "Read-only numpy alias (2, n_head): m, then l, of the partial that each sink is.");
}

void bind_partials(nb::module_& module) {
    module.attr("SUPERPAGE_TOKENS") = SUPERPAGE_TOKENS;
    bind_sinks(module);
    bind_partials_type(module);
    module.def(
        "attend_partials",
        [](Pool& pool, Queries& queries, const Batch& batch, const PageShape& pages, size_t layer,
           const EntryArray& spans, Partials& out, std::optional<std::pair<size_t, size_t>> some,
           size_t window) {
            const LayerShape& shape = checked_layer(pages, layer, "attend_partials");
            const KvHeads heads = checked_heads(some.value_or(std::pair{size_t{0}, shape.n_kv_head}),
                                                shape.n_kv_head, "attend_partials");
            attention_checks(pool, queries, batch, shape, heads.count, "attend_partials");
            require_tokens(batch.n_tokens, out.tokens_max, "attend_partials");
            require(out.n_head == queries.n_head && out.head_dim == shape.head_dim,
                    "attend_partials: the partials have " + number(out.n_head) + " heads of " +
                        number(out.head_dim) + ", expected " + number(queries.n_head) + " of " +
                        number(shape.head_dim));
            require(out.v_first == shape.v_first, "attend_partials: the partials have v_first " +
                                                      number(out.v_first) + ", pages " +
                                                      number(shape.v_first));
            const std::vector<Span> checked = checked_spans(batch, spans, window);
            const nb::gil_scoped_release release;
            attend_partials(pool, queries, batch, shape, checked, heads, out, window);
        },
        nb::arg("pool"), nb::arg("queries"), nb::arg("batch"), nb::arg("shape"), nb::arg("layer"),
        nb::arg("spans"), nb::arg("out"), nb::kw_only(), nb::arg("heads") = nb::none(),
        nb::arg("window") = 0,
        "Attention to parts of the KV: spans int32 (n, 3) = entry, first super-page, count, at most "
        "one per entry. Reads no page outside them, and none that the window, as of attend(), hides "
        "from all tokens of its entry. Overwrites out, where an entry without a span is empty. queries "
        "and out are of the heads that read the KV heads `heads` (first, count), all by default, or of some "
        "of those that read the only one. "
        "ValueError for a span that its entry does not have.");
    module.def(
        "fold",
        [](Pool& pool, Partials& into, const Partials& next) {
            require_open(pool);
            require(&into != &next, "fold: into and next must differ");
            const nb::gil_scoped_release release;
            fold(pool, into, next);
        },
        nb::arg("pool"), nb::arg("into"), nb::arg("next"),
        "Takes in the spans that follow those of `into`, entry by entry; either may be empty. "
        "ValueError, and no change, when the steps differ or a span does not start where the other "
        "one ends.");
    module.def(
        "finish",
        [](Pool& pool, const Partials& partials, Rows& out,
           const std::optional<std::vector<size_t>>& rows, size_t first_head, const Sinks* sinks) {
            require_open(pool);
            const size_t heads = out.width / partials.head_dim;
            require_sinks(sinks, heads, "finish");
            if (!rows) require_width(out.width, partials.n_head * partials.head_dim, "finish");
            require(partials.n_head <= heads && first_head <= heads - partials.n_head,
                    "finish: the rows have no such heads");
            std::vector<size_t> first;
            for (const PartialEntry& entry : partials.entries) first.push_back(entry.first_token);
            if (rows) {
                require(rows->size() == first.size(), "finish: one row per entry is needed");
                first = *rows;
            }
            for (size_t e = 0; e < first.size(); e++) {
                require(first[e] <= out.tokens_max, "finish: no such row");
                require_tokens(first[e] + partials.entries[e].n_tokens, out.tokens_max, "finish");
            }
            const nb::gil_scoped_release release;
            finish(pool, partials, first, first_head, out, sinks);
        },
        nb::arg("pool"), nb::arg("partials"), nb::arg("out"), nb::kw_only(),
        nb::arg("rows") = nb::none(), nb::arg("first_head") = 0,
        nb::arg("sinks").none() = nb::none(),
        "The rows that attend() would give: (n_tokens, n_head * head_dim). With `rows`, the tokens "
        "of entry e go to consecutive rows from rows[e], and the heads to those from first_head. Values of "
        "a latent layer before v_first are 0. The sinks are those of all heads of a row of out. "
        "ValueError when the partials of an entry lack a super-page.");
}

}  // namespace

void bind_attention(nb::module_& module) {
    module.attr("PAGE_TOKENS") = PAGE_TOKENS;
    bind_rope(module);
    bind_shape(module);
    bind_batch(module);
    bind_place(module);
    bind_partials(module);
}

}  // namespace batchengine
