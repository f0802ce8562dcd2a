// Products of heads (CA-3 rule 16): each head's part of a row with the head's own matrix of a bank.
//
// A bank has the matrices of all heads, one below the other, each of whole row tiles. A row of heads is a run of
// values for each, one after the other. Every head is a product of its own (rule 2).
#pragma once

#include "common/pool.h"
#include "common/types.h"

namespace batchengine {

// Quantised parts of rows: those of a head begin at a whole group, so that a group of activations has one head.
struct HeadActivations {
    HeadActivations(size_t tokens_max_, size_t n_head_, size_t width, bool keep_float)
        : tokens_max(tokens_max_), n_head(n_head_), groups(div_up(tokens_max_, GROUP_TOKENS)),
          panels(n_head_ * groups * GROUP_TOKENS, width, keep_float) {}

    const size_t tokens_max;
    const size_t n_head;
    const size_t groups;  // of one head
    Activations panels;
};

// Quantises the values of each head's run from `column` on, as many as `out` is wide.
void quantise_heads(Pool& pool, const Rows& x, size_t column, size_t tokens, HeadActivations& out);

// out values from column + head * stride on = bank matrix of the head * its activations.
void linear_heads(Pool& pool, const HeadActivations& x, const Matrix& bank, size_t tokens, Rows& out,
                  size_t column, size_t stride);

// Undoes the transform of rule 4, in place, on each head's run from `column` on: RN(1/width) of the transform of
// each `width` values, which are 32, 64, 128, 256 or 512.
void transform_heads(Pool& pool, Rows& x, size_t n_head, size_t column, size_t width, size_t tokens);

// out values from column + head * stride on = the head's run of x, which has runs of n_head heads.
void copy_heads(Pool& pool, const Rows& x, size_t n_head, size_t tokens, Rows& out, size_t column,
                size_t stride);

}  // namespace batchengine
