// Pairs of tokens and experts: their choice, their order, and their activations; see experts.h.
#include <algorithm>

#include "common/ca.h"
#include "experts/experts.h"
#include "quant/quant.h"

namespace batchengine {
namespace {

// Below this many values to copy, waking the pool costs more than copying alone.
constexpr size_t COPIED_ALONE = 4 * VALUES_ALONE;

// The keys of a token's experts, which may be the logits themselves.
const float* keys_of(const ExpertChoice& choice, const float* logit, const ca::SoftmaxOfAll& all,
                     size_t n) {
    if (ca::has_logit_keys(choice.gating)) return logit;
    static thread_local Buffer<float> keys;
    if (keys.size() < n) keys = Buffer<float>(n);
    for (size_t i = 0; i < n; ++i)
        keys[i] = ca::choice_key(choice.gating, logit[i], choice.bias ? choice.bias->data[i] : 0.0f, all);
    return keys.data();
}

// Sorts the pairs by counting: experts ascending, then tokens, as they come.
void sort_pairs(ExpertPairs& to) {
    static thread_local Buffer<uint32_t> next;  // row of an expert's next pair
    if (next.size() < to.n_expert) next = Buffer<uint32_t>(to.n_expert);
    std::fill_n(next.data(), to.n_expert, 0u);
    for (size_t i = 0; i < to.pairs(); ++i) ++next[static_cast<size_t>(to.id[i])];
    to.n_runs = to.groups = 0;
    for (size_t expert = 0; expert < to.n_expert; ++expert) {
        const size_t count = next[expert], groups = div_up(count, GROUP_TOKENS), group = to.groups;
        next[expert] = static_cast<uint32_t>(group * GROUP_TOKENS);
        if (count == 0) continue;
        to.runs[to.n_runs++] = {static_cast<uint32_t>(expert), static_cast<uint32_t>(group),
                                static_cast<uint32_t>(groups)};
        for (size_t i = 0; i < groups; ++i)
            to.group_pairs[group + i] =
                static_cast<int32_t>(std::min(GROUP_TOKENS, count - i * GROUP_TOKENS));
        to.groups += groups;
    }
    for (size_t i = 0; i < to.pairs(); ++i) {
        const size_t row = next[static_cast<size_t>(to.id[i])]++;
        to.row_token[row] = static_cast<int32_t>(i / to.n_used);
        to.row_weight[row] = to.weight[i];
    }
}

// Copies the activations of one token to another one of `to`.
void copy_token(const Activations& from, size_t token, Activations& to, size_t row) {
    for (size_t block = 0; block < from.blocks; ++block) {
        const size_t source = from.cell(token, block), cell = to.cell(row, block);
        std::memcpy(to.q.data() + cell * BLOCK_WIDTH, from.q.data() + source * BLOCK_WIDTH,
                    BLOCK_WIDTH);
        to.scale[cell] = from.scale[source];
        to.offset[cell] = from.offset[source];
        to.sum[cell] = from.sum[source];
        const int32_t* halves = from.halves.data() + (2 * source - token % GROUP_TOKENS);
        int32_t* copied = to.halves.data() + (2 * cell - row % GROUP_TOKENS);
        copied[0] = halves[0];
        copied[GROUP_TOKENS] = halves[GROUP_TOKENS];
    }
    to.nonfinite[row] = from.nonfinite[token];
    if (to.keep_float)
        std::memcpy(to.values.data() + row * to.padded_width,
                    from.values.data() + token * from.padded_width,
                    from.padded_width * sizeof(float));
}

}  // namespace

void select_experts(Pool& pool, const Rows& logits, size_t tokens, const ExpertChoice& choice,
                    ExpertPairs& pairs) {
    pairs.tokens = tokens;
    const bool alone = tokens * pairs.n_expert * pairs.n_used <= VALUES_ALONE;
    for_each(pool, tokens, alone, [&](size_t token) {
        const size_t at = token * pairs.n_used;
        const float* logit = logits.row(token);
        const int n = static_cast<int>(pairs.n_expert);
        ca::SoftmaxOfAll all;
        if (choice.gating == ca::Gating::biased_softmax) all = ca::softmax_of_all(logit, n);
        ca::select_experts(choice.gating, logit, keys_of(choice, logit, all, pairs.n_expert), all, n,
                           static_cast<int>(pairs.n_used), choice.groups, choice.scale,
                           choice.scales ? choice.scales->data.data() : nullptr, pairs.id.data() + at,
                           pairs.weight.data() + at);
    });
    sort_pairs(pairs);
}

void gather_pairs(Pool& pool, const Activations& x, const ExpertPairs& pairs, Activations& out) {
    for_each(pool, pairs.groups, pairs.pairs() * x.width <= COPIED_ALONE, [&](size_t group) {
        const size_t first = group * GROUP_TOKENS;
        for (size_t row = first; row < first + static_cast<size_t>(pairs.group_pairs[group]); ++row)
            copy_token(x, static_cast<size_t>(pairs.row_token[row]), out, row);
    });
}

void quantise_pairs(Pool& pool, const Rows& x, const ExpertPairs& pairs, Activations& out) {
    const QuantiseRows quantise = quantise_rows();
    for_each(pool, pairs.groups, pairs.pairs() * x.width <= VALUES_ALONE, [&](size_t group) {
        const size_t row = group * GROUP_TOKENS;
        quantise(x.row(row), x.stride, row, static_cast<size_t>(pairs.group_pairs[group]), out);
    });
}

}  // namespace batchengine
