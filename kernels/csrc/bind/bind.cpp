// The module `_native`: instruction set, thread pool and buffers; the other bind_*.cpp add the rest.
// Bindings check every size before a kernel sees it and release the GIL while a kernel runs.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/bind_common.h"
#include "common/dispatch.h"
#include "common/peak.h"
#include "golden/golden.h"
#include "golden/self_test.h"
#include "linear/pack.h"

namespace batchengine {
namespace {

using ReleaseGil = nb::call_guard<nb::gil_scoped_release>;

nb::list list_of(const Golden& golden) {
    nb::list out;
    for (const auto& [name, bytes] : golden.records)
        out.append(nb::make_tuple(name, nb::bytes(bytes.data(), bytes.size())));
    return out;
}

void bind_isa(nb::module_& module) {
    module.def("isa", [] { return std::string(level_name(level())); },
               "Instruction set in use: scalar, avx2, avx512-vnni, neon-dotprod or neon-i8mm.");
    module.def(
        "isa_levels",
        [] {
            std::vector<std::string> names;
            for (const Level found : levels_supported()) names.emplace_back(level_name(found));
            return names;
        },
        "Instruction sets this processor supports, slowest first.");
    module.def("set_isa", &set_level, nb::arg("level"),
               "Use another instruction set (tests and benches). ValueError names the choices.");
    module.def(
        "golden_records",
        [](Pool& pool) {
            Golden golden;
            golden_attention(pool, golden);
            golden_linear(pool, golden);
            golden_sample(pool, golden);
            golden_experts(pool, golden);
            golden_recurrent(pool, golden);
            return list_of(golden);
        },
        nb::arg("pool"), nb::sig("def golden_records(pool: Pool) -> list[tuple[str, bytes]]"),
        "(name, output bytes) of every golden vector of arith_id on the level in use.");
    module.def(
        "golden_records_of",
        [](Pool& pool, const std::string& part) {
            Golden golden;
            if (part == "codebooks")
                golden_codebooks(pool, golden);
            else if (part == "gating")
                golden_gating(pool, golden);
            else if (part == "choices")
                golden_choices(pool, golden);
            else if (part == "biased_softmax")
                golden_biased_softmax(pool, golden);
            else if (part == "heads")
                golden_heads(pool, golden);
            else if (part == "many_tokens")
                golden_many_tokens(golden);
            else if (part == "wide_heads")
                golden_wide_heads(pool, golden);
            else if (part == "values")
                golden_values(pool, golden);
            else if (part == "limits")
                golden_limits(pool, golden);
            else if (part == "branches")
                golden_branches(pool, golden);
            else if (part == "mamba2")
                golden_mamba2(pool, golden);
            else if (part == "short_conv")
                golden_short_conv(pool, golden);
            else
                golden_later_kind(pool, kind_of(part), golden);
            return list_of(golden);
        },
        nb::arg("pool"), nb::arg("part"),
        nb::sig("def golden_records_of(pool: Pool, part: str) -> list[tuple[str, bytes]]"),
        "The same of a part that arith_id does not cover: a kind of weights, \"codebooks\", "
        "\"gating\", \"choices\", \"biased_softmax\", \"heads\", \"many_tokens\", \"wide_heads\", "
        "\"values\", \"limits\", \"branches\", \"mamba2\" or \"short_conv\".");
    module.def("fused_binary32", &fused_binary32, nb::arg("a"), nb::arg("b"), nb::arg("c"),
               "RN(a*b + c) in binary32, by the fmaf of the C library.");
    module.def("fused_binary64", &fused_binary64, nb::arg("a"), nb::arg("b"), nb::arg("c"),
               "RN(a*b + c) in binary64, by the fma of the C library.");
    module.def("peak_int8_gops", &peak_int8_gops, nb::arg("threads"), nb::arg("seconds") = 0.3,
               ReleaseGil(), "Measured int8 dot peak, giga-operations per second.");
    module.def("peak_float_gops", &peak_float_gops, nb::arg("threads"), nb::arg("seconds") = 0.3,
               ReleaseGil(), "Measured fp32 fma peak, giga-operations per second.");
    module.def("peak_read_gbps", &peak_read_gbps, nb::arg("threads"),
               nb::arg("bytes") = 0, nb::arg("repeats") = 3, ReleaseGil(),
               "Measured sequential read bandwidth, GB/s; each thread reads its own buffer. bytes = 0: "
               "far beyond the last cache.");
}

void bind_pool(nb::module_& module) {
    nb::class_<Pool>(module, "Pool", "Pinned threads that run a kernel together; the caller is thread 0.")
        .def(
            "__init__",
            [](Pool* self, int threads, std::vector<int> cores, int spin_us) {
                new (self) Pool(threads, std::move(cores), spin_us);
            },
            nb::arg("threads"), nb::arg("cores") = std::vector<int>{}, nb::arg("spin_us") = 60,
            nb::sig("def __init__(self, threads: int, cores: collections.abc.Sequence[int] = (), "
                    "spin_us: int = 60) -> None"))
        .def_prop_ro("threads", &Pool::threads)
        .def_prop_ro("closed", &Pool::closed)
        .def("close", &Pool::close, ReleaseGil(), "Ends the threads. Idempotent.")
        .def(
            "run_empty", [](Pool& self) { self.run([](int, int) {}); }, ReleaseGil(),
            "Starts and joins all threads without work: the dispatch latency, for benches.")
        .def(
            "environments",
            [](Pool& self) {
                std::vector<int> seen(static_cast<size_t>(self.threads()));
                self.run([&](int ith, int) {
                    seen[static_cast<size_t>(ith)] = FloatEnvironment::canonical();
                });
                return seen;
            },
            ReleaseGil(), "1 per thread that computes in the canonical float environment.");
}

void bind_rows(nb::module_& module) {
    nb::class_<Rows>(module, "Rows", "fp32 scratch rows (tokens_max, width), 64-byte aligned.")
        .def(nb::init<size_t, size_t>(), nb::arg("tokens_max"), nb::arg("width"))
        .def_prop_ro("tokens_max", [](const Rows& self) { return self.tokens_max; })
        .def_prop_ro("width", [](const Rows& self) { return self.width; })
        .def(
            "view",
            [](nb::handle_t<Rows> handle, size_t tokens) {
                Rows& self = nb::cast<Rows&>(handle);
                require_tokens(tokens, self.tokens_max, "Rows.view");
                return nb::ndarray<nb::numpy, float, nb::ndim<2>>(
                    self.data.data(), {tokens, self.width}, handle,
                    {static_cast<int64_t>(self.stride), 1});
            },
            nb::arg("tokens"),
            nb::sig("def view(self, tokens: int) -> numpy.typing.NDArray[numpy.float32]"),
            "numpy alias (tokens, width) of the first rows; writing to it writes the rows.");
}

void bind_vector(nb::module_& module) {
    nb::class_<Vector>(module, "Vector", "A private fp32 copy: norm weights, biases, rope factors.")
        .def(
            "__init__",
            [](Vector* self, nb::object source) {
                const HeldBuffer held(source, false);
                require(held.size() % sizeof(float) == 0,
                        "Vector: the buffer is not a whole number of fp32 values");
                new (self) Vector(reinterpret_cast<const float*>(held.data()),
                                  held.size() / sizeof(float));
            },
            nb::arg("source"),
            nb::sig("def __init__(self, source: typing_extensions.Buffer) -> None"))
        .def_prop_ro("size", [](const Vector& self) { return self.size; })
        .def("__len__", [](const Vector& self) { return self.size; })
        .def(
            "view",
            [](nb::handle_t<Vector> handle) {
                const Vector& self = nb::cast<const Vector&>(handle);
                return nb::ndarray<nb::numpy, const float, nb::ndim<1>>(self.data.data(),
                                                                        {self.size}, handle);
            },
            nb::sig("def view(self) -> numpy.typing.NDArray[numpy.float32]"),
            "numpy alias of the values, read-only.");
}

}  // namespace
}  // namespace batchengine

NB_MODULE(_native, module) {
    using namespace batchengine;
    module.doc() = "Canonical CPU kernels; import them through the package `kernels`.";
    choose_level_from_environment();
    bind_isa(module);
    bind_pool(module);
    bind_rows(module);
    bind_vector(module);
    module.def(
        "address_of",
        [](nb::object buffer) {
            const HeldBuffer held(buffer, false);
            return reinterpret_cast<uintptr_t>(held.data());
        },
        nb::arg("buffer"), nb::sig("def address_of(buffer: typing_extensions.Buffer) -> int"),
        "Address of the first byte; the caller keeps the buffer alive.");
    bind_linear(module);
    bind_experts(module);
    bind_row_operations(module);
    bind_attention(module);
    bind_recurrent(module);
    bind_sampling(module);
}
