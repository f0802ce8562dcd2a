// Attention of one layer for one step: append K and V to the open pages, then attend to all pages.
//
// Page memory belongs to the caller. place_kv writes only the rows of the batch's own tokens; attend
// reads only rows at or before each token's position. No result depends on how work is split.
#pragma once

#include "attention/kv8.h"
#include "attention/partials.h"
#include "attention/rope.h"
#include "common/pool.h"

namespace batchengine {

struct PlaceParams {
    const Vector* q_norm;  // null: no norm
    const Vector* k_norm;
    float eps;
    const RopeTable* rope;  // null: no rotation
    double scale;           // 1/sqrt(head_dim) or the model's own
    const Vector* v_norm = nullptr;
    bool has_kv = true;  // false: another layer has put K and V there
    bool norms_rotated = false;  // heads of Q and K are normed after the rotation, not before
};

// qkv rows are q heads, then k heads, then v heads, head_dim values each, biases applied; those of a latent layer
// have no v heads, without K and V they are q heads. What goes to the pages is copied to `rows` too, if there are any.
void place_kv(Pool& pool, const Rows& qkv, const Batch& batch, const LayerShape& shape,
              const PlaceParams& params, Queries& queries, KvRows* rows = nullptr);

// Attention to the super-pages of `spans` (at most one span per entry); reads no page outside them.
// Entries without a span are empty in `out`. The order of rule 7: see partials.h. The heads of
// `queries` and `out` are those that read the KV heads `heads`, or some of those that read the only one. No page
// is read that `window` hides from all rows of its entry.
void attend_partials(Pool& pool, Queries& queries, const Batch& batch, const LayerShape& shape,
                     const std::vector<Span>& spans, KvHeads heads, Partials& out,
                     size_t window = 0);

// attend_partials of all super-pages and finish, in one pass that stores no accumulators.
// out row = heads in order, head_dim values each. A row that met a NaN or infinity is all NaN. Of a latent layer
// the values are transformed as K is (see transform_heads), and those before v_first mean nothing.
void attend(Pool& pool, Queries& queries, const Batch& batch, const LayerShape& shape, Rows& out,
            size_t window = 0, const Sinks* sinks = nullptr);

// XXH3-64, seeded, of each token's K, K scale, V, V scale over all heads and layers in page order.
void row_digests(const Batch& batch, const PageShape& shape, const uint64_t* seeds,
                 uint64_t* digests);

// The same digests of the first tokens of a step of which place_kv has run for every layer.
void step_digests(Pool& pool, const KvRows& rows, size_t tokens, const uint64_t* seeds,
                  uint64_t* digests);

// Writes rows of a step, which another device has computed, to the pages of the batch, whose first token
// has row `first`.
void store_rows(Pool& pool, KvRows& rows, const Batch& batch, size_t first);

}  // namespace batchengine
