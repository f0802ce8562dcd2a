// Recurrent mixers over the rows of a step: gated delta networks (CA-3 rule 12), Mamba-2 (rule 14) and gated
// short convolutions (rule 15); and the gates of attention and experts.
//
// The state of a head is a matrix, which each token of an entry changes in order. An entry's image is
// read at one address and written at another one. No result depends on how a prompt is cut into steps.
#pragma once

#include "attention/kv8.h"
#include "common/pool.h"
#include "common/types.h"
#include "recurrent/state.h"

namespace batchengine {

struct DeltaNetParams {
    const Vector* conv;     // [channels][conv_kernel], the weight of the oldest input first
    const Vector* dt_bias;  // [n_v_head]
    const Vector* a;        // [n_v_head]
    const Vector* norm;     // [head_dim]
    float eps;
};

struct Mamba2Params {
    const Vector* conv;       // [channels][conv_kernel], the weight of the oldest input first
    const Vector* conv_bias;  // [channels], or null
    const Vector* dt_bias;    // [n_v_head]
    const Vector* a;          // [n_v_head]
    const Vector* d;          // [n_v_head]
    const Vector* norm;       // [value_width], or null: outputs are not normed
    float eps;
};

// `projected` rows are the products of a layer's matrices, in the order of StateShape::in_width; `out`
// rows are the gated heads. `layer` counts the layers of the images.
void delta_net(Pool& pool, const Rows& projected, const Batch& batch, const StateShape& shape,
               size_t layer, const DeltaNetParams& params, Rows& out);
void mamba2(Pool& pool, const Rows& projected, const Batch& batch, const StateShape& shape,
            size_t layer, const Mamba2Params& params, Rows& out);
// conv: [channels][conv_kernel], the weight of the oldest input first.
void short_conv(Pool& pool, const Rows& projected, const Batch& batch, const StateShape& shape,
                size_t layer, const Vector& conv, Rows& out);

// out = out * sigmoid(gate). The rows of `gate` have a value for each of out's, or for each run of neighbours.
void gate_rows(Pool& pool, const Rows& gate, size_t tokens, Rows& out);
// out = out + sigmoid(gate) * x; the rows of `gate` have one value.
void gate_add(Pool& pool, const Rows& x, const Rows& gate, size_t tokens, Rows& out);

}  // namespace batchengine
