// Python face of quantisation, packing and the linear kernels.
#include "bind_common.h"

namespace batchengine {
namespace {

void bind_activations(nb::module_& module) {
    nb::class_<Activations>(module, "Activations",
                            "Quantised activations of one step: int8 panels, fp32 scale per 32.")
        .def(nb::init<size_t, size_t, bool>(), nb::arg("tokens_max"), nb::arg("width"),
             nb::arg("keep_float") = false)
        .def_prop_ro("tokens_max", [](const Activations& self) { return self.tokens_max; })
        .def_prop_ro("width", [](const Activations& self) { return self.width; })
        .def_prop_ro("keep_float", [](const Activations& self) { return self.keep_float; });
}

}  // namespace
}  // namespace batchengine

void bind_linear(nanobind::module_& module) {
    batchengine::bind_activations(module);
}
