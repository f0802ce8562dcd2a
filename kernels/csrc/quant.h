// Quantisation of activations (CA-1 rule 1): fp32 rows into int8 panels.
#pragma once

#include "types.h"

namespace batchengine {

// Quantises one fp32 row of out.width values as token `token` of the panels (and keeps the row
// when out.keep_float). Runs on the level in use; any thread may do any token.
using QuantiseRow = void (*)(const float* row, size_t token, Activations& out);
QuantiseRow quantise_row();

void quantise_row_scalar(const float* row, size_t token, Activations& out);
#if defined(BATCHENGINE_X86)
void quantise_row_avx2(const float* row, size_t token, Activations& out);
void quantise_row_avx512(const float* row, size_t token, Activations& out);
#endif

}  // namespace batchengine
