// See rows.h.
#include "rows/rows.h"

#include <cstring>

#include "common/ca.h"

namespace batchengine {

void take_rows(const Rows& x, const int32_t* indices, size_t count, Rows& out) {
    for (size_t i = 0; i < count; ++i)
        std::memcpy(out.row(i), x.row(static_cast<size_t>(indices[i])), x.width * sizeof(float));
}

std::vector<int> nonfinite_rows(Pool& pool, const Rows& x, size_t tokens) {
    std::vector<uint8_t> bad(tokens);
    for_each(pool, tokens, false, [&](size_t token) {
        const float* row = x.row(token);
        // A count without early exit: the compiler turns it into vector compares.
        uint32_t found = 0;
        for (size_t i = 0; i < x.width; ++i)
            found |= (ca::bits_of(row[i]) & 0x7F800000u) == 0x7F800000u;
        bad[token] = found != 0;
    });
    std::vector<int> rows;
    for (size_t token = 0; token < tokens; ++token)
        if (bad[token]) rows.push_back(static_cast<int>(token));
    return rows;
}

}  // namespace batchengine
