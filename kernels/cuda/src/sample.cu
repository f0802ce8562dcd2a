// Sampling (rule 10): one row of logits and its parameters -> one token. A block computes a row.
//
// Candidates are ranked by a key that rises as the logit falls, then by id. Where a selection ends is found
// digit by digit of the key, from a histogram of weights; the token drawn is found by sums of weights over
// runs of ids. All sums are of integers.
#include "gpu.h"
#include "sample/sample_row.h"

namespace {

using batchengine::SampleRow;

constexpr int THREADS_MAX = 1024;
constexpr int TOP_MAX = gpu::WARP;
constexpr int DIGIT = 8;
constexpr int BINS = 1 << DIGIT;
constexpr int ROUNDS = 4;  // values that a thread loads before it uses the first

using Bins = gpu::Shared<uint64_t, BINS>;
using PerWarp = gpu::Shared<uint64_t, THREADS_MAX / gpu::WARP>;

// What keeps the candidates of a smaller key and, of those of this key, the ids up to `last`.
struct Cut {
    uint32_t key;
    int last;

    GPU_FN bool keeps(float x, int id) const {
        const uint32_t of = ca::falling_key(x);
        return of < key || (of == key && id <= last);
    }
};

// Rises with the rank of a candidate; the id is the low word.
GPU_FN uint64_t rank_key(float x, int id) {
    return (uint64_t{ca::falling_key(x)} << 32) | static_cast<uint32_t>(id);
}

GPU_FN uint64_t sum_of_warp(uint64_t x) {
    for (int mask = 16; mask >= 1; mask /= 2) x += gpu::shuffle_xor(x, mask);
    return x;
}

GPU_FN uint64_t min_of_warp(uint64_t x) {
    for (int mask = 16; mask >= 1; mask /= 2) {
        const uint64_t other = gpu::shuffle_xor(x, mask);
        x = other < x ? other : x;
    }
    return x;
}

// The sum, and the smallest, of a value of every thread; `shared` is free before and afterwards.
GPU_FN uint64_t sum_of_block(uint64_t x, PerWarp& shared) {
    x = sum_of_warp(x);
    if (gpu::lane() == 0) shared[gpu::warp()] = x;
    gpu::barrier();
    x = sum_of_warp(gpu::lane() < gpu::warps() ? uint64_t(shared[gpu::lane()]) : uint64_t{0});
    gpu::barrier();
    return x;
}
GPU_FN uint64_t min_of_block(uint64_t x, PerWarp& shared) {
    x = min_of_warp(x);
    if (gpu::lane() == 0) shared[gpu::warp()] = x;
    gpu::barrier();
    x = min_of_warp(uint64_t(shared[gpu::lane() < gpu::warps() ? gpu::lane() : 0]));
    gpu::barrier();
    return x;
}

// The first lane up to which the sum of the masses exceeds `target`, which loses the sum before that
// lane; -1, and it loses the whole sum, when there is none.
GPU_FN int lane_at(uint64_t mass, uint64_t& target) {
    uint64_t sum = mass;
    for (int step = 1; step < gpu::WARP; step *= 2) {
        const bool has_before = gpu::lane() >= step;
        const uint64_t before = gpu::shuffle(sum, has_before ? gpu::lane() - step : 0);
        if (has_before) sum += before;
    }
    const uint32_t exceed = gpu::ballot(sum > target);
    const int first = exceed ? gpu::lowest_bit(exceed) : gpu::WARP - 1;
    target -= gpu::shuffle(exceed ? sum - mass : sum, first);
    return exceed ? first : -1;
}

// The first bin up to which the sum exceeds `target`, which loses the sum before it. Every warp finds it.
GPU_FN int bin_at(Bins& bins, uint64_t& target) {
    constexpr int EACH = BINS / gpu::WARP;
    uint64_t mass = 0;
    for (int i = 0; i < EACH; i++) mass += bins[gpu::lane() * EACH + i];
    int bin = lane_at(mass, target) * EACH;
    for (uint64_t of = bins[bin]; of <= target; of = bins[++bin]) target -= of;
    return bin;
}

// The lowest of n ids up to which the sum of mass(id) exceeds `target`, which is below the sum of all.
// `bins` are free before and afterwards.
template <class Mass>
GPU_FN int id_at(int n, uint64_t target, Bins& bins, Mass mass) {
    const int run = ((n + BINS - 1) / BINS + gpu::WARP - 1) / gpu::WARP * gpu::WARP;
    for (int bin = gpu::warp(); bin < BINS; bin += gpu::warps()) {
        uint64_t sum = 0;
        GPU_UNROLL_4
        for (int i = bin * run + gpu::lane(); i < (bin + 1) * run && i < n; i += gpu::WARP)
            sum += mass(i);
        sum = sum_of_warp(sum);
        if (gpu::lane() == 0) bins[bin] = sum;
    }
    gpu::barrier();
    int first = bin_at(bins, target) * run, found = -1;
    while (true) {
        const int i = first + gpu::lane();
        found = lane_at(i < n ? mass(i) : uint64_t{0}, target);
        if (found >= 0) break;
        first += gpu::WARP;
    }
    gpu::barrier();
    return first + found;
}

// Adds the mass of every lane to the bin of its digit. Neighbours mostly share the leading digits, so two
// sums are made in the warp before lanes add their own.
GPU_FN void add_masses(Bins& bins, int digit, uint64_t mass) {
    for (int round = 0; round < 2; round++) {
        const uint32_t left = gpu::ballot(mass > 0);
        if (left == 0) return;
        const int first = gpu::lowest_bit(left);
        const bool is_same = digit == gpu::shuffle(digit, first);
        const uint64_t sum = sum_of_warp(is_same ? mass : uint64_t{0});
        if (gpu::lane() == first) gpu::atomic_add(bins[digit], sum);
        if (is_same) mass = 0;
    }
    if (mass > 0) gpu::atomic_add(bins[digit], mass);
}

// The cut behind the shortest run of candidates, in their order, whose mass exceeds `target`, which is
// below the mass of all. `bins` are free before and afterwards.
template <class Logits, class Mass>
GPU_FN Cut cut_behind(Logits x, int n, uint64_t target, Bins& bins, Mass mass) {
    uint32_t digits = 0;  // of the last key that is kept
    for (int shift = 32 - DIGIT; shift >= 0; shift -= DIGIT) {
        for (int bin = gpu::thread(); bin < BINS; bin += gpu::threads()) bins[bin] = uint64_t{0};
        gpu::barrier();
        for (int first = gpu::warp() * gpu::WARP; first < n; first += ROUNDS * gpu::threads()) {
            uint64_t of[ROUNDS];
            uint32_t key[ROUNDS];
            GPU_UNROLL
            for (int round = 0; round < ROUNDS; round++) {
                const int i = first + round * gpu::threads() + gpu::lane();
                of[round] = i < n ? mass(i) : uint64_t{0};
                key[round] = i < n ? ca::falling_key(x[i]) : 0;
            }
            GPU_UNROLL
            for (int round = 0; round < ROUNDS; round++) {
                if (uint64_t{key[round]} >> (shift + DIGIT) != digits) of[round] = 0;
                add_masses(bins, static_cast<int>(key[round] >> shift & (BINS - 1)), of[round]);
            }
        }
        gpu::barrier();
        digits = digits << DIGIT | static_cast<uint32_t>(bin_at(bins, target));
        gpu::barrier();
    }
    const auto mass_of_key = [&](int i) {
        return ca::falling_key(x[i]) == digits ? mass(i) : uint64_t{0};
    };
    return {digits, id_at(n, target, bins, mass_of_key)};
}

// The rank_key of the first candidate; 0 if a value is NaN or infinite. `is_masked`: minus infinity is no
// candidate, and not a bad value.
template <class Logits>
GPU_FN uint64_t best_of(Logits x, int n, bool is_masked, PerWarp& shared) {
    uint64_t best = ~uint64_t{0};
    GPU_UNROLL_4
    for (int i = gpu::thread(); i < n; i += gpu::threads()) {
        const float value = x[i];
        const bool is_excluded = is_masked && value < ca::LOGIT_LOWEST;
        const uint64_t excluded = is_excluded ? ~uint64_t{0} : uint64_t{0};
        const uint64_t key = ca::is_finite(value) ? rank_key(value, i) : excluded;
        best = key < best ? key : best;
    }
    return min_of_block(best, shared);
}

// Step 2: the logits with their biases and penalties, into `x`; minus infinity for excluded tokens. `counts` is overwritten.
GPU_FN void adjust(gpu::In<float> logits, int n, const SampleRow& row, gpu::In<int32_t> history,
                   gpu::In<int32_t> bias_tokens, gpu::In<float> bias_values, gpu::In<uint32_t> masks,
                   gpu::Out<int32_t> counts, gpu::Out<float> x) {
    GPU_UNROLL_4
    for (int i = gpu::thread(); i < n; i += gpu::threads()) {
        x[i] = logits[i];
        counts[i] = 0;
    }
    gpu::barrier();
    for (int i = gpu::thread(); i < row.n_history; i += gpu::threads())
        gpu::atomic_add(counts[history[row.first_history + i]], int32_t{1});
    const int end = row.first_bias + row.n_bias;
    for (int i = row.first_bias + gpu::thread(); i < end; i += gpu::threads()) {
        const int token = bias_tokens[i];
        bool is_first = true;
        for (int j = row.first_bias; j < i; j++) is_first = is_first && bias_tokens[j] != token;
        if (!is_first) continue;  // the first bias of a token adds all of them, in order
        float value = x[token];
        for (int j = i; j < end; j++)
            if (bias_tokens[j] == token) value = ca::add_rn(value, bias_values[j]);
        x[token] = value;
    }
    gpu::barrier();
    GPU_UNROLL_4
    for (int i = gpu::thread(); i < n; i += gpu::threads()) {
        const int32_t count = counts[i];
        float value = x[i];
        if (count > 0)
            value = ca::penalised(value, count, row.repetition, row.frequency, row.presence);
        value = value < ca::LOGIT_LOWEST ? ca::LOGIT_LOWEST : value;
        const bool is_excluded =
            row.first_mask >= 0 && !(masks[row.first_mask + i / 32] >> (i % 32) & 1);
        // One that is not finite stays: there is no token then, excluded or not.
        if (is_excluded && ca::is_finite(value)) value = ca::float_of(0xFF800000u);
        x[i] = value;
    }
    gpu::barrier();
}

// Steps 4 to 6: a token of n logits whose largest is `top`. `weights` is overwritten.
template <class Logits>
GPU_FN int draw_token(Logits x, int n, float top, const SampleRow& row, gpu::Out<int32_t> weights,
                      Bins& bins, PerWarp& shared) {
    const auto weight = [&](int i) { return static_cast<uint64_t>(int32_t(weights[i])); };
    uint64_t sum = 0, candidates = 0;
    GPU_UNROLL_4
    for (int i = gpu::thread(); i < n; i += gpu::threads()) {
        const int32_t w = ca::integer_weight(ca::weight_of(x[i], top, row.temperature));
        weights[i] = w;
        sum += static_cast<uint64_t>(w);
        candidates += w > 0;
    }
    uint64_t total = sum_of_block(sum, shared);
    const auto keep = [&](const Cut& cut, int32_t least) {  // zeroes the other weights
        uint64_t kept = 0;
        GPU_UNROLL_4
        for (int i = gpu::thread(); i < n; i += gpu::threads()) {
            const int32_t w = weights[i];
            if (w >= least && cut.keeps(x[i], i))
                kept += static_cast<uint64_t>(w);
            else
                weights[i] = 0;
        }
        total = sum_of_block(kept, shared);
    };
    const auto k = static_cast<uint64_t>(row.top_k);
    if (row.top_k > 0 && k < sum_of_block(candidates, shared))
        keep(cut_behind(x, n, k - 1, bins, [&](int i) { return uint64_t{weight(i) > 0}; }), 0);
    Cut cut = {~uint32_t{0}, n};
    if (row.top_p < 1.0f) {
        const int64_t share =
            ca::share_of(static_cast<int64_t>(total), ca::fraction_of(row.top_p));
        cut = cut_behind(x, n, share > 0 ? static_cast<uint64_t>(share - 1) : 0, bins, weight);
    }
    const int32_t least = ca::integer_weight(row.min_p);
    if (row.top_p < 1.0f || least > 0) keep(cut, least);
    uint32_t random[4];
    ca::philox(row.seed, row.position, row.draw, random);
    const int64_t target = ca::share_of(static_cast<int64_t>(total), random[0]);
    return id_at(n, static_cast<uint64_t>(target), bins, weight);
}

}  // namespace

// A token for every row of logits, -1 where there is none, with log-probabilities: of the token, and of the
// n best in order, where the row asks for them. `adjusted` and `weights` are [rows][vocab] of any value.
// Grid: rows.
KERNEL(sample, THREADS_MAX, gpu::In<float> logits, int stride, int vocab, gpu::In<SampleRow> rows,
       gpu::In<int32_t> history, gpu::In<int32_t> bias_tokens, gpu::In<float> bias_values,
       gpu::In<uint32_t> masks, gpu::Out<float> adjusted, gpu::Out<int32_t> weights, gpu::Out<int32_t> token_out,
       gpu::Out<float> logprob_out, gpu::Out<int32_t> top_tokens, gpu::Out<float> top_logprobs,
       int top_stride) {
    gpu::begin();
    __shared__ Bins bins;
    __shared__ PerWarp shared;
    __shared__ gpu::Shared<uint64_t, TOP_MAX> best;
    __shared__ gpu::Shared<int32_t, 1> n_best;
    const int64_t index = gpu::block();
    const SampleRow row = rows[index];
    const gpu::In<float> raw = logits + index * stride;
    const gpu::Out<float> own = adjusted + index * vocab;
    const gpu::Out<int32_t> own_weights = weights + index * vocab;
    const uint64_t raw_first = best_of(raw, vocab, false, shared);
    uint64_t first = raw_first;
    const bool is_adjusted = row.n_history > 0 || row.n_bias > 0 || row.first_mask >= 0;
    if (raw_first != 0 && is_adjusted) {
        adjust(raw, vocab, row, history, bias_tokens, bias_values, masks, own_weights, own);
        first = best_of(gpu::in_as<float>(own), vocab, row.first_mask >= 0, shared);
    }
    if (first == 0) {
        if (gpu::thread() == 0) token_out[index] = -1, logprob_out[index] = 0.0f;
        return;
    }
    const auto x = is_adjusted ? gpu::in_as<float>(own) : gpu::in_as<float>(raw);
    int token = static_cast<int>(static_cast<uint32_t>(first));
    if (row.temperature != 0.0f)
        token = draw_token(x, vocab, x[token], row, own_weights, bins, shared);
    if (gpu::thread() == 0) token_out[index] = token, logprob_out[index] = 0.0f;
    if (row.logprobs < 0) return;
    const float top = raw[static_cast<uint32_t>(raw_first)];
    uint64_t sum = 0;
    GPU_UNROLL_4
    for (int i = gpu::thread(); i < vocab; i += gpu::threads())
        sum += static_cast<uint64_t>(ca::integer_weight(ca::weight_of(raw[i], top, 1.0f)));
    const float log_sum = ca::log_of_sum(static_cast<int64_t>(sum_of_block(sum, shared)));
    if (gpu::thread() == 0) logprob_out[index] = ca::log_probability(raw[token], top, log_sum);
    const int n = row.logprobs < vocab ? row.logprobs : vocab;
    if (n == 0) return;
    if (gpu::thread() == 0) n_best[0] = 0;
    const Cut cut = cut_behind(raw, vocab, static_cast<uint64_t>(n - 1), bins,
                               [](int) { return uint64_t{1}; });
    GPU_UNROLL_4
    for (int i = gpu::thread(); i < vocab; i += gpu::threads())
        if (cut.keeps(raw[i], i)) best[gpu::atomic_add(n_best[0], int32_t{1})] = rank_key(raw[i], i);
    gpu::barrier();
    if (gpu::warp() > 0) return;
    const uint64_t mine = gpu::lane() < n ? uint64_t(best[gpu::lane()]) : ~uint64_t{0};
    int place = 0;
    for (int other = 0; other < n; other++) place += gpu::shuffle(mine, other) < mine;
    if (gpu::lane() >= n) return;
    const auto id = static_cast<int32_t>(static_cast<uint32_t>(mine));
    top_tokens[index * top_stride + place] = id;
    top_logprobs[index * top_stride + place] = ca::log_probability(raw[id], top, log_sum);
}
