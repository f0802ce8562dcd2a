// Helpers of all bindings: held Python buffers, and argument checks with readable errors.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>

#include "common/pool.h"
#include "common/types.h"
#include "experts/choice.h"
#include "linear/linear.h"

namespace batchengine {

namespace nb = nanobind;

using IndexArray = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WordArray = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Holds an exported Python buffer, whose exporter (bytes, mmap, numpy) can then not close or resize.
class HeldBuffer {
  public:
    HeldBuffer(nb::handle object, bool writable) {
        const int flags = writable ? PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS : PyBUF_C_CONTIGUOUS;
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) nb::raise_python_error();
    }
    HeldBuffer(const HeldBuffer&) = delete;
    HeldBuffer& operator=(const HeldBuffer&) = delete;
    ~HeldBuffer() { PyBuffer_Release(&view_); }
    uint8_t* data() const { return static_cast<uint8_t*>(view_.buf); }
    size_t size() const { return static_cast<size_t>(view_.len); }

  private:
    Py_buffer view_{};
};

inline void require(bool condition, const std::string& what) {
    if (!condition) throw std::invalid_argument(what);
}

inline std::string number(size_t n) { return std::to_string(n); }

inline void require_open(const Pool& pool) { require(!pool.closed(), "the pool is closed"); }

inline void require_tokens(size_t tokens, size_t tokens_max, const char* name) {
    require(tokens <= tokens_max, std::string(name) + ": " + std::to_string(tokens) +
                                      " tokens do not fit " + std::to_string(tokens_max));
}

inline void require_width(size_t width, size_t expected, const char* name) {
    require(width == expected, std::string(name) + ": width is " + std::to_string(width) +
                                   ", expected " + std::to_string(expected));
}

// limit: of silu, 0 = there is none.
inline GateFunction gate_function_of(const char* op, const std::string& name, float limit) {
    require(limit >= 0.0f && ca::is_finite(limit), std::string(op) + ": the limit is no positive number");
    require(limit == 0.0f || name == "silu", std::string(op) + ": " + name + " has no limit");
    if (limit > 0.0f) return {ca::Activation::limited, limit};
    const char* const names[] = {"silu", "oai", "gelu"};
    for (int i = 0; i < 3; ++i)
        if (name == names[i]) return {static_cast<ca::Activation>(i)};
    throw std::invalid_argument(std::string(op) + ": no activation is named " + name);
}

// Whether the activation is the one without a gate. Refuses it with one, and the others without.
inline bool is_ungated(const char* op, const std::string& activation, float limit, bool has_gate,
                       bool has_gate_bias) {
    const bool is_relu2 = activation == "relu2";
    if (!is_relu2 || limit != 0.0f) gate_function_of(op, activation, limit);
    require(is_relu2 ? !has_gate && !has_gate_bias : has_gate,
            std::string(op) + ": " + activation + (is_relu2 ? " has no gate" : " needs a gate"));
    return is_relu2;
}

inline ca::Gating gating_of(const char* op, const std::string& name) {
    const char* const names[ca::GATINGS] = {"softmax", "sigmoid", "normed_sigmoid", "softmax_all",
                                            "biased_softmax"};
    for (int i = 0; i < ca::GATINGS; ++i)
        if (name == names[i]) return static_cast<ca::Gating>(i);
    throw std::invalid_argument(std::string(op) + ": no gating is named " + name);
}

void bind_linear(nb::module_& module);
void bind_experts(nb::module_& module);
void bind_row_operations(nb::module_& module);
void bind_attention(nb::module_& module);
void bind_recurrent(nb::module_& module);
void bind_sampling(nb::module_& module);

}  // namespace batchengine
