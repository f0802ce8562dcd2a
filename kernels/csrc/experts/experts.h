// Mixtures of experts (CA-3 rule 11): which experts compute a token, and their products.
//
// A *pair* is a token and one of the experts that are chosen for it. Buffers of pairs have one row for
// each, experts ascending, then tokens; those of an expert begin at a whole group of 16 rows, so that
// a group of activations has one expert. A bank of matrices is one packed matrix: those of all experts,
// one below the other, each of whole row tiles. Every pair is a product of its own, so it does not matter
// which other tokens chose the same expert.
#pragma once

#include "common/pool.h"
#include "common/types.h"
#include "experts/choice.h"
#include "linear/linear.h"

namespace batchengine {

// What is chosen for the tokens of a step, by token and by expert.
struct ExpertPairs {
    // Groups [group, group + groups) of one expert that is chosen.
    struct Run {
        uint32_t expert;
        uint32_t group;
        uint32_t groups;
    };

    ExpertPairs(size_t tokens_max_, size_t n_expert_, size_t n_used_)
        : tokens_max(tokens_max_), n_expert(n_expert_), n_used(n_used_),
          rows_max(GROUP_TOKENS * groups_of(tokens_max_ * n_used_, n_expert_)),
          id(tokens_max_ * n_used_), weight(tokens_max_ * n_used_), row_token(rows_max),
          row_weight(rows_max), group_pairs(rows_max / GROUP_TOKENS), runs(n_expert_) {}

    // The most groups of so many pairs: each expert has at most one that is not full.
    static size_t groups_of(size_t pairs, size_t n_expert) {
        const size_t open = pairs < n_expert ? pairs : n_expert;
        return (pairs + (GROUP_TOKENS - 1) * open) / GROUP_TOKENS;
    }
    size_t pairs() const { return tokens * n_used; }

    const size_t tokens_max;
    const size_t n_expert;
    const size_t n_used;
    const size_t rows_max;
    size_t tokens = 0;
    size_t groups = 0;
    size_t n_runs = 0;
    Buffer<int32_t> id;           // [token][n_used], ascending
    Buffer<float> weight;         // [token][n_used]
    Buffer<int32_t> row_token;    // of a row of pairs
    Buffer<float> row_weight;     // of a row of pairs
    Buffer<int32_t> group_pairs;  // rows of a group that are pairs, from its first on
    Buffer<Run> runs;             // experts ascending
};

// How experts are chosen by the selector's logits. bias: of the keys of a gating that is no softmax, a value
// for each expert, or null; weights are times `scale`, and times the one of `scales` of their expert, unless
// it is null. groups: not of a softmax.
struct ExpertChoice {
    ca::Gating gating;
    float scale;
    const Vector* bias;
    const Vector* scales = nullptr;
    ca::ExpertGroups groups = {};
};

// Chooses the experts of each token, and sorts the pairs.
void select_experts(Pool& pool, const Rows& logits, size_t tokens, const ExpertChoice& choice,
                    ExpertPairs& pairs);

// The activations of each pair: those of its token.
void gather_pairs(Pool& pool, const Activations& x, const ExpertPairs& pairs, Activations& out);

// Per pair: out = ca::gated(function, gate * x, up * x) of its expert. Each matrix is a bank, and
// its bias has a value for each row of it.
void pairs_gated(Pool& pool, const Activations& x, const LinearPart& gate, const LinearPart& up,
                 const GateFunction& function, const ExpertPairs& pairs, Rows& out);

// The same without a gate: out = ca::relu2(up * x).
void pairs_relu2(Pool& pool, const Activations& x, const LinearPart& up, const ExpertPairs& pairs, Rows& out);

void quantise_pairs(Pool& pool, const Rows& x, const ExpertPairs& pairs, Activations& out);

// Per token: out += the sum of its pairs' weight * (down * x + bias), experts ascending.
void pairs_add(Pool& pool, const Activations& x, const LinearPart& down, const ExpertPairs& pairs,
               Rows& out);

}  // namespace batchengine
