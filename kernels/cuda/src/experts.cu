// Mixtures of experts (rule 11): the experts of each token, its pairs with them sorted by expert, and the
// sum of what a token's experts gave.
//
// A block chooses for a chunk of tokens, a warp for each, and counts the pairs of each expert, a thread for
// each. One chunk is sorted at once; the counts of several are added up by `sort_pairs`. The host does not
// learn what was chosen: a product of pairs has a block for each portion that so many tokens may need (see
// Pairs in products.h), and those that have none leave.
#include "experts/choice.h"
#include "gpu.h"

namespace {

constexpr int THREADS_MAX = 1024;  // experts, too
constexpr int PAIRS_MAX = 1024;  // of a chunk

using Numbers = gpu::Shared<int32_t, PAIRS_MAX>;
using Floats = gpu::Shared<float, PAIRS_MAX>;
using PerWarp = gpu::Shared<uint64_t, THREADS_MAX / gpu::WARP>;

// What the products of pairs read.
struct Sorted {
    gpu::Out<gpu::Words4> portions;
    int portions_max;
    int columns;  // of a portion, at most
    gpu::Out<int32_t> order;
};

// How experts are chosen; bias: of the keys, scales: of the output of each expert; or null. groups: 1 of 1, or
// those of a gating that is no softmax. all: of the token at hand, of biased_softmax.
struct Choice {
    ca::Gating gating;
    float scale;
    gpu::In<float> bias;
    gpu::In<float> scales;
    ca::ExpertGroups groups;
    ca::SoftmaxOfAll all;

    GPU_FN float key(gpu::In<float> logits, int expert) const {
        return ca::choice_key(gating, logits[expert], bias ? float(bias[expert]) : 0.0f, all);
    }
};

// ca::softmax_of_all by a warp.
GPU_FN ca::SoftmaxOfAll softmax_of_all(gpu::In<float> logits, int n) {
    bool finite = true;
    float largest = logits[0];
    for (int i = gpu::lane(); i < n; i += gpu::WARP) {
        const float logit = logits[i];
        finite = ca::is_finite(logit) && finite;
        if (logit > largest) largest = logit;
    }
    if (gpu::any(!finite)) return {ca::canonical_nan(), 1.0f};
    for (int mask = gpu::WARP / 2; mask >= 1; mask /= 2) {
        const float other = gpu::shuffle_xor(largest, mask);
        if (other > largest) largest = other;
    }
    int32_t sum = 0;
    for (int i = gpu::lane(); i < n; i += gpu::WARP)
        sum += ca::part_of_all(ca::expc(ca::sub_rn(logits[i], largest)));
    for (int mask = gpu::WARP / 2; mask >= 1; mask /= 2) sum += gpu::shuffle_xor(sum, mask);
    return {largest, ca::sum_of_all(sum)};
}

// ca::kept_groups by a warp: a lane has the keys of a group.
GPU_FN uint32_t kept_groups(gpu::In<float> logits, int n, const Choice& choice) {
    const int each = n / choice.groups.n, group = gpu::lane();
    ca::BestTwo best;
    for (int i = 0; i < each && group < choice.groups.n; i++)
        ca::add_key(best, choice.key(logits, group * each + i));
    const uint32_t order = ca::group_order(best);
    int better = 0;
    for (int other = 0; other < choice.groups.n; other++) {
        const uint32_t of_other = gpu::shuffle(order, other);
        better += of_other < order || (of_other == order && other < group);
    }
    return gpu::ballot(group < choice.groups.n && better < choice.groups.kept);
}

// The experts of a token and their weights, by ascending id, from `at` on; those of the chunk from
// `in_chunk` on. As ca::select_experts, by a warp.
GPU_FN void choose(gpu::In<float> logits, int n, int n_used, Choice choice, Numbers& chunk_ids,
                   Floats& parts, int in_chunk, gpu::Out<int32_t> ids, gpu::Out<float> weights, int64_t at) {
    const bool is_biased = choice.gating == ca::Gating::biased_softmax;
    if (is_biased) choice.all = softmax_of_all(logits, n);
    bool finite = true;
    for (int i = gpu::lane(); i < n; i += gpu::WARP) finite = ca::is_finite(choice.key(logits, i)) && finite;
    const bool is_poisoned = gpu::any(!finite);
    const bool has_groups = choice.groups.n > 1;
    const uint32_t kept = has_groups ? kept_groups(logits, n, choice) : 1u;
    const int of_group = n / choice.groups.n;
    uint32_t last_key = 0;
    int last = is_poisoned ? n_used - 1 : -1, top = 0;
    for (int j = 0; j < n_used && !is_poisoned; j++) {
        uint32_t best_key = 0xFFFFFFFFu;  // no finite logit has it
        int best = n;
        for (int i = gpu::lane(); i < n; i += gpu::WARP) {
            const uint32_t key = ca::falling_key(choice.key(logits, i));
            const bool is_left = key > last_key || (key == last_key && i > last);
            if (!is_left || key >= best_key) continue;
            if (!has_groups || (kept >> (i / of_group) & 1u)) best = i, best_key = key;
        }
        last_key = gpu::min_of_lanes(best_key);
        const int candidate = best_key == last_key ? best : n;
        last = static_cast<int>(gpu::min_of_lanes(static_cast<uint32_t>(candidate)));
        if (j == 0) top = last;
    }
    const float largest = is_biased ? choice.all.largest : float(logits[top]);
    int found = 0;
    for (int first = 0; first < n; first += gpu::WARP) {
        const int i = first + gpu::lane();
        const uint32_t key = i < n && !is_poisoned ? ca::falling_key(choice.key(logits, i)) : last_key;
        const bool is_kept = i < n && (is_poisoned || !has_groups || (kept >> (i / of_group) & 1u));
        const bool is_chosen = is_kept && (key < last_key || (key == last_key && i <= last));
        const uint32_t chosen = gpu::ballot(is_chosen);
        if (is_chosen) {
            const int to = in_chunk + found + gpu::count_bits(chosen & ((1u << gpu::lane()) - 1u));
            chunk_ids[to] = i;
            parts[to] = ca::weight_part(choice.gating, logits[i], largest);
        }
        found += gpu::count_bits(chosen);
    }
    gpu::warp_barrier();
    float sum = 0.0f;
    for (int j = 0; j < n_used; j++) sum = ca::add_rn(sum, parts[in_chunk + j]);
    if (choice.gating == ca::Gating::softmax_all) sum = softmax_of_all(logits, n).sum;
    for (int j = gpu::lane(); j < n_used; j += gpu::WARP) {
        float weight = ca::weight_of_part(choice.gating, parts[in_chunk + j], sum, choice.scale, choice.all);
        if (choice.scales) weight = ca::mul_rn(weight, choice.scales[chunk_ids[in_chunk + j]]);
        ids[at + j] = int32_t(chunk_ids[in_chunk + j]);
        weights[at + j] = is_poisoned ? ca::canonical_nan() : weight;
    }
}

// How many of n pairs are of the expert with the number of this thread; `ranks`: of each pair among those
// of its expert.
GPU_FN int rank_pairs(Numbers& ids, Numbers& ranks, int n) {
    int count = 0;
    GPU_UNROLL_4
    for (int i = 0; i < n; i++)
        if (ids[i] == gpu::thread()) ranks[i] = count++;
    return count;
}

// The sum of the threads before this one, and of all.
GPU_FN uint64_t sum_before(uint64_t x, PerWarp& shared, uint64_t& all) {
    uint64_t sum = x;
    for (int step = 1; step < gpu::WARP; step *= 2) {
        const bool has_before = gpu::lane() >= step;
        const uint64_t before = gpu::shuffle(sum, has_before ? gpu::lane() - step : 0);
        if (has_before) sum += before;
    }
    if (gpu::lane() == gpu::WARP - 1) shared[gpu::warp()] = sum;
    gpu::barrier();
    uint64_t before = sum - x;
    all = 0;
    for (int warp = 0; warp < gpu::warps(); warp++) {
        const uint64_t of = shared[warp];
        if (warp < gpu::warp()) before += of;
        all += of;
    }
    return before;
}

// Sorts the n pairs of a chunk, of which `first_pair` is the first. count: of the pairs of this thread's
// expert, and `earlier` of them are in chunks before. One block also writes the portions.
GPU_FN void sort_chunk(Numbers& ids, Numbers& ranks, Numbers& firsts, PerWarp& shared, int n,
                       int first_pair, int count, int earlier, bool has_portions, const Sorted& to) {
    const int own = (count + to.columns - 1) / to.columns;
    uint64_t all;
    const uint64_t before = sum_before(uint64_t(own) << 32 | static_cast<uint32_t>(count), shared, all);
    const int first = static_cast<int>(before & 0xFFFFFFFFu), portion = static_cast<int>(before >> 32);
    firsts[gpu::thread()] = first + earlier;
    for (int i = 0; i < own && has_portions; i++) {
        const int at = i * to.columns, left = count - at;
        const auto columns = static_cast<uint32_t>(left < to.columns ? left : to.columns);
        const auto expert = static_cast<uint32_t>(gpu::thread()), start = static_cast<uint32_t>(first + at);
        to.portions[portion + i] = gpu::Words4{{expert, start, columns, static_cast<uint32_t>(i)}};
    }
    for (int i = int(all >> 32) + gpu::thread(); i < to.portions_max && has_portions; i += gpu::threads())
        to.portions[i] = gpu::Words4{{0, 0, 0, 0}};
    gpu::barrier();
    for (int i = gpu::thread(); i < n; i += gpu::threads())
        to.order[firsts[ids[i]] + ranks[i]] = first_pair + i;
}

}  // namespace

// Chooses the experts of each token; gating, bias: see Choice. Grid: chunks of `chunk` tokens, of up to
// PAIRS_MAX pairs. At least as many threads as experts. One chunk is sorted, too; the counts of several are
// counts[chunk][n_expert].
KERNEL(select_experts, THREADS_MAX, gpu::In<float> logits, int stride, int n_expert, int n_used, int tokens,
       int chunk, float scale, int gating, gpu::In<float> bias, gpu::In<float> scales, gpu::Out<int32_t> ids,
       gpu::Out<float> weights, gpu::Out<int32_t> counts, gpu::Out<gpu::Words4> portions, int portions_max,
       int columns, gpu::Out<int32_t> order, int n_group, int n_group_kept) {
    __shared__ Numbers chunk_ids, ranks, firsts;
    __shared__ Floats parts;
    __shared__ PerWarp shared;
    gpu::begin();
    const int first = gpu::block() * chunk, n = tokens - first < chunk ? tokens - first : chunk;
    for (int i = gpu::warp(); i < n; i += gpu::warps())
        choose(logits + static_cast<int64_t>(first + i) * stride, n_expert, n_used,
               {static_cast<ca::Gating>(gating), scale, bias, scales, {n_group, n_group_kept}, {}}, chunk_ids,
               parts, i * n_used, ids, weights, static_cast<int64_t>(first + i) * n_used);
    gpu::barrier();
    const int count = rank_pairs(chunk_ids, ranks, n * n_used);
    if (gpu::blocks() == 1)
        sort_chunk(chunk_ids, ranks, firsts, shared, n * n_used, 0, count, 0, true,
                   {portions, portions_max, columns, order});
    else if (gpu::thread() < n_expert)
        counts[gpu::block() * n_expert + gpu::thread()] = count;
}

// Sorts the pairs of several chunks, of which select_experts has written the counts. Grid and threads as
// there.
KERNEL(sort_pairs, THREADS_MAX, gpu::In<int32_t> ids, gpu::In<int32_t> counts, int n_expert, int n_used,
       int tokens, int chunk, gpu::Out<gpu::Words4> portions, int portions_max, int columns,
       gpu::Out<int32_t> order) {
    __shared__ Numbers chunk_ids, ranks, firsts;
    __shared__ PerWarp shared;
    gpu::begin();
    const int first = gpu::block() * chunk, n = tokens - first < chunk ? tokens - first : chunk;
    for (int i = gpu::thread(); i < n * n_used; i += gpu::threads())
        chunk_ids[i] = int32_t(ids[first * n_used + i]);
    int count = 0, earlier = 0;
    GPU_UNROLL_4
    for (int i = 0; i < gpu::blocks(); i++) {
        const int of = gpu::thread() < n_expert ? int(counts[i * n_expert + gpu::thread()]) : 0;
        count += of;
        if (i < gpu::block()) earlier += of;
    }
    gpu::barrier();
    rank_pairs(chunk_ids, ranks, n * n_used);
    sort_chunk(chunk_ids, ranks, firsts, shared, n * n_used, first * n_used, count, earlier, gpu::block() == 0,
               {portions, portions_max, columns, order});
}

// Sorts rows of heads as sort_pairs does those of experts: every token has chosen each of n_head heads, and
// row `head` of a token has the number token * n_head + head. Grid: blocks that share the rows.
KERNEL(sort_heads, 256, int n_head, int tokens, int columns, gpu::Out<gpu::Words4> portions,
       gpu::Out<int32_t> order) {
    gpu::begin();
    const int i = gpu::block() * gpu::threads() + gpu::thread();
    if (i >= n_head * tokens) return;
    const int head = i / tokens, token = i % tokens;
    order[i] = token * n_head + head;
    if (token % columns != 0) return;
    const int each = (tokens + columns - 1) / columns, part = token / columns;
    const int left = tokens - token, count = left < columns ? left : columns;
    portions[head * each + part] = gpu::Words4{{static_cast<uint32_t>(head), static_cast<uint32_t>(i),
                                                static_cast<uint32_t>(count), static_cast<uint32_t>(part)}};
}

// out row of a token += the sum of weight * y of its pairs, experts ascending; y: a row of `width` for each
// pair. Grid: tokens, blocks that share the columns.
KERNEL(add_pairs, 256, gpu::In<float> y, gpu::In<float> weights, int n_used, int width,
       gpu::Out<float> out, int stride) {
    gpu::begin();
    const int64_t token = gpu::block(), first = token * n_used;
    const int column = gpu::block_y() * gpu::threads() + gpu::thread();
    if (column >= width) return;
    float sum = 0.0f;
    GPU_UNROLL_4
    for (int j = 0; j < n_used; j++)
        sum = ca::add_expert(sum, weights[first + j], y[(first + j) * width + column]);
    out[token * stride + column] = ca::add_rn(out[token * stride + column], sum);
}
