// Quantisation of activations (CA-1 rule 1): fp32 rows into int8 panels.
#pragma once

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
#endif

}  // namespace batchengine
