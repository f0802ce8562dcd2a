// Which experts compute a token, and their weights: the scalar definition of rule 11. A part of ca.h, as which
// it is written.
#pragma once

#include "common/ca.h"

namespace ca {

// How the weights of a token's experts come from the selector's logits: softmax over the chosen ones; the
// logistic function of each, as it is or divided by the sum over the chosen ones; softmax over all. Those of
// biased_softmax are softmax over the chosen ones, too, which a bias beside the softmax over all decides.
enum class Gating : int { softmax, sigmoid, normed_sigmoid, softmax_all, biased_softmax };
constexpr int GATINGS = 5;
// Sums of logistic functions, or of parts of a softmax, below this one divide by it.
constexpr float WEIGHT_SUM_MIN = 0x1p-14f;
// Groups of experts, of which so many are kept, are bits of a number.
constexpr int EXPERT_GROUPS_MAX = 32;

// Whether the experts of a gating are chosen by the logits themselves.
CA_FN bool has_logit_keys(Gating gating) {
    return gating == Gating::softmax || gating == Gating::softmax_all;
}
// Whether weights are parts of a softmax.
CA_FN bool is_softmax(Gating gating) {
    return has_logit_keys(gating) || gating == Gating::biased_softmax;
}

// The softmax over all experts: the largest logit, and the sum of exp(logit - largest). NaN and 1 where a logit
// is not finite.
struct SoftmaxOfAll {
    float largest = 0.0f;
    float sum = 1.0f;
};

// What an expert adds to the sum over all, in units of 2^-20: a sum of up to 1024 is exact in any order.
CA_FN int32_t part_of_all(float part) { return round_to_int(mul_rn(part, 0x1p20f)); }
CA_FN float sum_of_all(int32_t sum) { return mul_rn(float_rn(sum), 0x1p-20f); }

CA_FN SoftmaxOfAll softmax_of_all(const float* logit, int n) {
    SoftmaxOfAll all;
    bool finite = true;
    for (int i = 0; i < n; i++) {
        finite = is_finite(logit[i]) && finite;
        if (i == 0 || logit[i] > all.largest) all.largest = logit[i];
    }
    if (!finite) return {canonical_nan(), 1.0f};
    int32_t sum = 0;
    for (int i = 0; i < n; i++) sum += part_of_all(expc(sub_rn(logit[i], all.largest)));
    all.sum = sum_of_all(sum);
    return all;
}

// The key of an expert: those with the largest keys are chosen. It is the logit; of other gatings it is the
// logistic function, or the part of the softmax over all, and a bias, which is finite. Not finite where the
// logit is not.
CA_FN float choice_key(Gating gating, float logit, float bias, const SoftmaxOfAll& all) {
    if (has_logit_keys(gating)) return logit;
    if (gating == Gating::biased_softmax)
        return add_rn(div_rn(expc(sub_rn(logit, all.largest)), all.sum), bias);
    return add_rn(sigmoid(logit), bias);
}

// The best two keys of a group, to which more are added one by one.
struct BestTwo {
    float first = -0x1.fffffep127f;
    float second = -0x1.fffffep127f;
};
CA_FN void add_key(BestTwo& best, float key) {
    if (key > best.first) {
        best.second = best.first;
        best.first = key;
    } else if (key > best.second) {
        best.second = key;
    }
}

// What groups are ordered by, the best first: the sum of their best two keys.
CA_FN uint32_t group_order(const BestTwo& best) { return falling_key(add_rn(best.first, best.second)); }

// The part of a chosen expert, before weight_of_part; largest: the largest logit of a softmax.
CA_FN float weight_part(Gating gating, float logit, float largest) {
    return is_softmax(gating) ? expc(sub_rn(logit, largest)) : sigmoid(logit);
}

// The weight of an expert; sum: of the parts of the chosen ones, by ascending id, or of all.
CA_FN float weight_of_part(Gating gating, float part, float sum, float scale, const SoftmaxOfAll& all) {
    float divisor = sum;
    if (gating == Gating::sigmoid) divisor = 1.0f;
    if (gating == Gating::normed_sigmoid && sum < WEIGHT_SUM_MIN) divisor = WEIGHT_SUM_MIN;
    const float least = mul_rn(WEIGHT_SUM_MIN, all.sum);  // exact
    if (gating == Gating::biased_softmax && sum < least) divisor = least;
    return mul_rn(div_rn(part, divisor), scale);
}

// Groups of neighbouring experts: those of `kept` groups alone can be chosen.
struct ExpertGroups {
    int n = 1;
    int kept = 1;
};

// The groups that are kept, as bits: those with the largest orders, of equal ones those with lower numbers.
CA_FN uint32_t kept_groups(const float* key_of, int n, const ExpertGroups& groups) {
    uint32_t order[EXPERT_GROUPS_MAX], kept = 0;
    const int each = n / groups.n;
    for (int g = 0; g < groups.n; g++) {
        BestTwo best;
        for (int i = g * each; i < (g + 1) * each; i++) add_key(best, key_of[i]);
        order[g] = group_order(best);
    }
    for (int g = 0; g < groups.n; g++) {
        int better = 0;
        for (int other = 0; other < groups.n; other++)
            better += order[other] < order[g] || (order[other] == order[g] && other < g);
        if (better < groups.kept) kept |= 1u << g;
    }
    return kept;
}

// The experts of a token and their weights, by ascending id: the n_used largest of n keys, of equal ones
// those with lower ids. A key that is not finite: the first experts, weights NaN. logit: of the selector; all:
// their softmax, of biased_softmax. scales: of the output of each expert, or null.
CA_FN void select_experts(Gating gating, const float* logit, const float* key_of, const SoftmaxOfAll& all,
                          int n, int n_used, const ExpertGroups& groups, float scale, const float* scales,
                          int32_t* id, float* weight) {
    bool finite = true;
    for (int i = 0; i < n; i++) finite = is_finite(key_of[i]) && finite;
    for (int j = 0; j < n_used; j++) {
        id[j] = j;
        weight[j] = canonical_nan();
    }
    if (!finite) return;
    const bool has_groups = groups.n > 1;
    const uint32_t kept = has_groups ? kept_groups(key_of, n, groups) : 1u;
    const int each = n / groups.n;
    uint32_t last_key = 0;
    int last = -1, top = 0;
    for (int j = 0; j < n_used; j++) {
        uint32_t best_key = 0xFFFFFFFFu;
        int best = -1;
        for (int i = 0; i < n; i++) {
            const uint32_t key = falling_key(key_of[i]);
            const bool is_left = key > last_key || (key == last_key && i > last);
            if (!is_left || (best >= 0 && key >= best_key)) continue;
            if (!has_groups || (kept >> (i / each) & 1u)) best = i, best_key = key;
        }
        if (j == 0) top = best;
        int at = j;
        for (; at > 0 && id[at - 1] > best; at--) id[at] = id[at - 1];
        id[at] = best;
        last = best, last_key = best_key;
    }
    const float largest = gating == Gating::biased_softmax ? all.largest : logit[top];
    float sum = 0.0f;
    for (int j = 0; j < n_used; j++) {
        weight[j] = weight_part(gating, logit[id[j]], largest);
        sum = add_rn(sum, weight[j]);
    }
    if (gating == Gating::softmax_all) sum = softmax_of_all(logit, n).sum;
    for (int j = 0; j < n_used; j++) {
        weight[j] = weight_of_part(gating, weight[j], sum, scale, all);
        if (scales) weight[j] = mul_rn(weight[j], scales[id[j]]);
    }
}

}  // namespace ca
