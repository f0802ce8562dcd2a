// Quantisation of activations (CA-3 rule 1): fp32 rows into int8 panels.
#pragma once

#include "common/ca.h"
#include "common/types.h"

namespace batchengine {

// Tokens that one kernel pass takes side by side: their scales and sums are one 32-byte store.
constexpr size_t OCTET_TOKENS = 8;

// Quantises `count` fp32 rows of out.width values, `stride` floats apart, as tokens [token, token +
// count) of the panels (and keeps the rows when out.keep_float). Runs on the level in use; any
// thread may do any token, whole octets at once are fastest.
using QuantiseRows = void (*)(const float* rows, size_t stride, size_t token, size_t count,
                              Activations& out);
QuantiseRows quantise_rows();

void quantise_rows_scalar(const float* rows, size_t stride, size_t token, size_t count,
                          Activations& out);
#if defined(BATCHENGINE_X86)
void quantise_rows_avx2(const float* rows, size_t stride, size_t token, size_t count,
                        Activations& out);
void quantise_rows_avx512(const float* rows, size_t stride, size_t token, size_t count,
                          Activations& out);
#elif defined(BATCHENGINE_ARM)
void quantise_rows_neon(const float* rows, size_t stride, size_t token, size_t count,
                        Activations& out);
#endif

namespace {

// One row by BLOCK(x, out, cell, token), 32 values at a time; the last block is padded with zeros.
// BLOCK returns whether the values are finite.
template <bool (*BLOCK)(const float*, Activations&, size_t, size_t)>
void quantise_row(const float* row, size_t token, Activations& out) {
    if (out.keep_float)
        std::memcpy(out.values.data() + token * out.padded_width, row, out.width * sizeof(float));
    const size_t whole = out.width / BLOCK_WIDTH;
    bool finite = true;
    for (size_t block = 0; block < whole; ++block)
        finite &= BLOCK(row + block * BLOCK_WIDTH, out, out.cell(token, block), token);
    if (whole < out.blocks) {
        float tail[BLOCK_WIDTH] = {};
        std::memcpy(tail, row + whole * BLOCK_WIDTH, out.width % BLOCK_WIDTH * sizeof(float));
        finite &= BLOCK(tail, out, out.cell(token, whole), token);
    }
    out.nonfinite[token] = !finite;
}

// The scale of a block, and its sums: [group][block][2][token] has the two halves 16 tokens apart.
[[maybe_unused]] void put_sums(Activations& out, size_t cell, size_t token, float scale,
                               int32_t half0, int32_t half1) {
    out.scale[cell] = scale;
    out.offset[cell] = -8 * (half0 + half1);
    out.sum[cell] = ca::mul_rn(static_cast<float>(half0 + half1), scale);
    int32_t* halves = out.halves.data() + (2 * cell - token % GROUP_TOKENS);
    halves[0] = -32 * half0;
    halves[GROUP_TOKENS] = -32 * half1;
}

}  // namespace
}  // namespace batchengine
