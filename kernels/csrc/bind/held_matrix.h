// A packed matrix as Python holds it.
#pragma once

#include "bind/bind_common.h"

namespace batchengine {

// A packed matrix and the Python buffer that holds it.
struct HeldMatrix {
    HeldMatrix(Kind kind, size_t rows, size_t cols, nb::handle packed)
        : buffer(packed, false), view{kind, rows, cols, buffer.data()} {}
    HeldBuffer buffer;
    Matrix view;
};

}  // namespace batchengine
