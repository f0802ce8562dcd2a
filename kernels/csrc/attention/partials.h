// Attention before the last fold: the contribution of a span of super-pages to the rows of a step.
//
// CA-3 rule 7 folds the pages of a super-page from the left, then the super-pages from the left. So a
// span that starts at super-page 0 is one accumulator per row, and any other span keeps one
// accumulator per super-page until everything before it has been folded. That makes `fold`
// associative: spans in any division, folded in any grouping, finish to the bits of `attend`.
#pragma once

#include <string>
#include <vector>

#include "attention/kv8.h"
#include "common/pool.h"

namespace batchengine {

constexpr size_t SUPERPAGE_TOKENS = PAGE_TOKENS * SUPERPAGE_PAGES;

// Super-pages [first, first + count) of one entry of a batch.
struct Span {
    size_t entry;
    size_t first;
    size_t count;
};

// One entry of a step and the span of it that has been attended to. Empty: first = count = 0.
struct PartialEntry {
    size_t first_token;  // index of its first token in the step
    size_t n_tokens;
    size_t start_position;
    size_t first;
    size_t count;
    size_t start;  // index of its first accumulator

    size_t terms() const { return first == 0 && count > 0 ? 1 : count; }  // accumulators per row
    size_t end() const { return first + count; }
    // Super-pages that its token `token` sees without a window, counted from 0.
    size_t seen(size_t token) const { return (start_position + token) / SUPERPAGE_TOKENS + 1; }
};

// What every row of a layer has to its tokens: a logit per query head, as the partial that is folded last.
struct Sinks {
    // std::invalid_argument for one that is not finite, or not in base 2.
    Sinks(const float* logits, size_t n_head);
    const float* m() const { return values.data(); }
    const float* l() const { return values.data() + n_head; }

    const size_t n_head;
    Buffer<float> values;  // m of all heads, then l of all heads
};

// Accumulators of all entries, in order [entry][term][token][head]. One is m (base-2 maximum, an
// integer), l (denominator; NaN after a value that is not finite) and o (numerators, of the dims that V
// has: those from v_first on, of a latent layer). A token that
// sees nothing of a super-page has m = l = o = 0 there, and l > 0 everywhere else; with l = 0 an
// accumulator is empty, and a fold leaves the other one as it is.
struct Partials {
    Partials(size_t tokens_max_, size_t n_head_, size_t head_dim_, size_t v_first_ = 0)
        : tokens_max(tokens_max_), n_head(n_head_), head_dim(head_dim_), v_first(v_first_) {}

    size_t values() const { return head_dim - v_first; }  // numerators of an accumulator
    size_t rows(const PartialEntry& entry) const { return entry.n_tokens * n_head; }
    size_t index(const PartialEntry& entry, size_t term, size_t token, size_t head) const {
        return entry.start + (term * entry.n_tokens + token) * n_head + head;
    }

    const size_t tokens_max;
    const size_t n_head;
    const size_t head_dim;
    const size_t v_first;
    size_t n_tokens = 0;
    size_t n_accumulators = 0;
    std::vector<PartialEntry> entries;
    Accumulators at;
};

// Gives `partials` the entries of a batch with these spans, at most one per entry, and accumulators
// of which those that see no token are zero. std::invalid_argument for a span outside its entry.
void set_spans(Partials& partials, const Batch& batch, const std::vector<Span>& spans, size_t window);

// Folds in spans that begin where those of `into` end (or where either is empty).
// std::invalid_argument, `into` unchanged, when the steps differ or a span is not the next one.
void fold(Pool& pool, Partials& into, const Partials& next);

// out row = heads in order from `first_head`, head_dim values each, for every token, of which those before v_first
// become 0; `sinks`, or null, are those of all heads of `out`. The tokens of entry e have consecutive rows from rows[e].
// std::invalid_argument, `out` unchanged, when a super-page up to a token has not been folded.
void finish(Pool& pool, const Partials& partials, const std::vector<size_t>& rows,
            size_t first_head, Rows& out, const Sinks* sinks = nullptr);

// finish of one row of one head, of so many values.
void finish_head(float m, float l, const float* o, size_t n_values, const Sinks* sinks, size_t head,
                 float* out);

// Little-endian: u32 n_head, head_dim, n_entries, v_first; per entry u32 n_tokens, first, count, 0 and
// u64 start_position; then fp32 m[n], l[n], o[n][head_dim - v_first] of the n accumulators.
// 16 + 24 * n_entries + 4 * (head_dim - v_first + 2) * n bytes.
std::string partials_to_bytes(const Partials& partials);
// std::invalid_argument, `partials` unchanged, unless these are the bytes of such partials.
void partials_from_bytes(const uint8_t* bytes, size_t size, Partials& partials);

// A run of tokens of a step.
struct TokenRun {
    size_t first;
    size_t count;
};

// Heads [first, first + count) of the queries: all that read some KV heads, or some of those that read one.
struct QueryHeads {
    size_t first;
    size_t count;
};

// The queries of these tokens and heads, as rows [kv head][token][head that reads it]: int8 q[rows][head_dim],
// then fp32 scale[rows][head_dim / 32], little-endian.
std::string queries_to_bytes(const Queries& queries, size_t n_kv_head, QueryHeads heads,
                             const std::vector<TokenRun>& runs);
// `queries` becomes such bytes, with tokens from 0 and all its heads; returns how many tokens.
// std::invalid_argument, `queries` unchanged, unless they are of 0 to tokens_max whole tokens.
size_t queries_from_bytes(const uint8_t* bytes, size_t size, size_t n_kv_head, Queries& queries);

}  // namespace batchengine
