// See rows.h.
#include "rows/rows.h"

#include <cstring>

#include "common/ca.h"
#include "quant/token_runs.h"
#include "rows/rowops.h"

namespace batchengine {

void take_rows(const Rows& x, const int32_t* indices, size_t count, Rows& out) {
    for (size_t i = 0; i < count; ++i)
        std::memcpy(out.row(i), x.row(static_cast<size_t>(indices[i])), x.width * sizeof(float));
}

namespace {

// body(row, token) for each of the first rows of `out`.
template <class Body>
void for_each_row(Pool& pool, size_t tokens, Rows& out, Body&& body) {
    for_each_run(pool, tokens, out.width, [&](size_t token, size_t count) {
        for (size_t t = token; t < token + count; t++) body(out.row(t), t);
    });
}

}  // namespace

void zero_rows(Pool& pool, size_t tokens, Rows& out) {
    for_each_row(pool, tokens, out, [&](float* row, size_t) { std::fill_n(row, out.width, 0.0f); });
}

void scale_rows(Pool& pool, float factor, size_t tokens, Rows& out) {
    const RowOps& ops = rowops();
    for_each_row(pool, tokens, out, [&](float* row, size_t) { ops.scale(row, out.width, factor, row); });
}

void scaled_add(Pool& pool, const Rows& x, float factor, size_t tokens, Rows& out) {
    const RowOps& ops = rowops();
    for_each_row(pool, tokens, out, [&](float* row, size_t token) {
        ops.scaled_add(x.row(token), out.width, factor, row);
    });
}

void cap_rows(Pool& pool, float cap, size_t tokens, Rows& out) {
    const RowOps& ops = rowops();
    for_each_row(pool, tokens, out, [&](float* row, size_t) { ops.cap(row, out.width, cap); });
}

void gelu_rows(Pool& pool, const Rows& factors, size_t column, size_t tokens, Rows& out) {
    const RowOps& ops = rowops();
    for_each_row(pool, tokens, out, [&](float* row, size_t token) {
        ops.gelu(factors.row(token) + column, out.width, row);
    });
}

void mix_inputs(Pool& pool, const Rows& x, float scale, const Vector& norm, float eps, size_t tokens,
                Rows& out) {
    const RowOps& ops = rowops();
    const size_t width = norm.size;
    for_each_row(pool, tokens, out, [&](float* row, size_t token) {
        static thread_local Buffer<float> scaled;
        if (scaled.size() < width) scaled = Buffer<float>(width);
        for (size_t at = 0; at < out.width; at += width) {
            ops.scale(x.row(token) + at, width, scale, scaled.data());
            ops.norm_add(scaled.data(), norm.data.data(), width, eps, row + at);
            ops.scale(row + at, width, ca::SQRT_HALF, row + at);
        }
    });
}

void norm_columns(Pool& pool, size_t first, const Vector& norm, float eps, size_t tokens, Rows& out) {
    const RowOps& ops = rowops();
    for_each_row(pool, tokens, out, [&](float* row, size_t) {
        ops.rmsnorm(row + first, norm.data.data(), norm.size, eps, row + first);
    });
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
