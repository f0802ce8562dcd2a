// See sampling.h.
#include "sample/sampling.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "common/ca.h"
#include "rows/rowops.h"

namespace batchengine {
namespace {

// A top_k up to this is selected in one scan, before any weight is computed.
constexpr int32_t SCAN_MAX = 256;
constexpr size_t CHUNK = 1024;

using Ranked = std::vector<std::pair<int32_t, float>>;  // token, value; best first

struct Scratch {
    std::vector<float> logits;      // after penalties
    std::vector<int32_t> history;
    std::vector<int32_t> ids;       // of the first top_k candidates, rising
    std::vector<float> values;      // their logits
    std::vector<int32_t> weights;   // by candidate; 0: it is not kept
    std::vector<int64_t> sums;      // of the weights of each CHUNK candidates
    std::vector<uint32_t> rest;
};

// What keeps the candidates above `value` and, of those equal to it, the first `ties` indices.
struct Cut {
    float value;
    size_t ties;
};

// Step 2. Returns false when a logit became NaN or +infinity.
bool apply_penalties(const SampleSpec& spec, size_t vocab, const float* logits, Scratch& scratch) {
    scratch.logits.assign(logits, logits + vocab);
    float* x = scratch.logits.data();
    for (const auto& [token, bias] : spec.bias) x[token] = x[token] + bias;
    scratch.history = spec.history;
    std::sort(scratch.history.begin(), scratch.history.end());
    for (size_t i = 0; i < scratch.history.size();) {
        const int32_t token = scratch.history[i];
        size_t end = i;
        while (end < scratch.history.size() && scratch.history[end] == token) end++;
        x[token] = ca::penalised(x[token], static_cast<int32_t>(end - i), spec.repetition_penalty,
                                 spec.frequency_penalty, spec.presence_penalty);
        i = end;
    }
    const auto settle = [&](int32_t token) {
        if (x[token] < ca::LOGIT_LOWEST) x[token] = ca::LOGIT_LOWEST;
        return ca::is_finite(x[token]);
    };
    for (const auto& [token, bias] : spec.bias)
        if (!settle(token)) return false;
    for (const int32_t token : scratch.history)
        if (!settle(token)) return false;
    return true;
}

// The end of step 2: minus infinity for tokens that the mask excludes. The largest of the others, of which
// there is one.
std::pair<float, size_t> apply_mask(const std::vector<uint32_t>& mask, size_t vocab, float* x) {
    size_t first = vocab;
    for (size_t word = 0; word < mask.size(); word++) {
        const size_t begin = 32 * word, end = std::min(begin + 32, vocab);
        const uint32_t bits = mask[word];
        if (bits == 0) {
            std::fill(x + begin, x + end, -HUGE_VALF);
            continue;
        }
        for (size_t i = begin; i < end; i++) {
            if (!(bits >> (i - begin) & 1))
                x[i] = -HUGE_VALF;
            else if (first == vocab || x[i] > x[first])
                first = i;
        }
    }
    return {x[first], first};
}

// The n largest values, largest first, lowest id among equals.
Ranked best(const float* x, size_t vocab, size_t n) {
    Ranked top;
    if (n == 0) return top;
    constexpr size_t RUN = 64;
    for (size_t run = 0; run < vocab; run += RUN) {
        const size_t end = std::min(run + RUN, vocab);
        if (top.size() == n) {  // most runs hold no value above those found
            const float worst = top.back().second;
            int any = 0;
            for (size_t i = run; i < end; i++) any |= x[i] > worst;
            if (!any) continue;
        }
        for (size_t i = run; i < end; i++) {
            if (top.size() == n && !(x[i] > top.back().second)) continue;
            if (top.size() == n) top.pop_back();
            auto at = top.end();
            while (at != top.begin() && x[i] > (at - 1)->second) --at;
            top.insert(at, {static_cast<int32_t>(i), x[i]});
        }
    }
    return top;
}

int64_t total(const Scratch& scratch) {
    int64_t sum = 0;
    for (const int64_t of_chunk : scratch.sums) sum += of_chunk;
    return sum;
}

// Calls action(first index, count) for each chunk of n candidates; its result is the chunk's sum.
template <class Action>
void sum_chunks(size_t n, Scratch& scratch, Action&& action) {
    scratch.sums.clear();
    for (size_t first = 0; first < n; first += CHUNK)
        scratch.sums.push_back(action(first, std::min(CHUNK, n - first)));
}

void weigh(const float* x, size_t n, float top, float temperature, Scratch& scratch) {
    scratch.weights.resize(n);
    sum_chunks(n, scratch, [&](size_t first, size_t count) {
        return rowops().weigh(x + first, count, top, temperature, scratch.weights.data() + first);
    });
}

// The cut behind the shortest run of candidates, by value falling and index rising, whose mass reaches
// `target`, which is at most the mass of all. The last value of the run is found digit by digit: a
// histogram of masses by digit says where the run ends.
template <class Mass>
Cut cut_behind(const float* x, size_t n, int64_t target, Scratch& scratch, Mass&& mass) {
    constexpr int DIGIT = 11;
    auto& rest = scratch.rest;  // the candidates that share the digits found
    rest.resize(n);
    size_t count = 0;
    const auto find_digit = [&](int shift, auto&& visit) {
        const auto digit = [&](size_t i) { return (ca::falling_key(x[i]) >> shift) % (1u << DIGIT); };
        int64_t histogram[1u << DIGIT] = {};
        visit([&](size_t i) { histogram[digit(i)] += mass(i); });
        uint32_t last = 0;
        while (histogram[last] < target) target -= histogram[last++];
        size_t kept = 0;  // at most the number visited, so that `rest` may be what is visited
        visit([&](size_t i) {
            rest[kept] = static_cast<uint32_t>(i);
            kept += digit(i) == last;
        });
        count = kept;
    };
    const auto visit_all = [&](auto&& action) {
        for (size_t c = 0; c < scratch.sums.size(); c++)
            if (scratch.sums[c] > 0)
                for (size_t i = c * CHUNK; i < std::min(n, (c + 1) * CHUNK); i++) action(i);
    };
    const auto visit_rest = [&](auto&& action) {
        for (size_t k = 0; k < count; k++) action(rest[k]);
    };
    find_digit(2 * DIGIT, visit_all);
    find_digit(DIGIT, visit_rest);
    find_digit(0, visit_rest);
    size_t ends = 0;
    while (mass(rest[ends]) < target) target -= mass(rest[ends++]);
    return {x[rest[ends]], rest[ends] + size_t{1}};
}

// Step 5, on n candidates that have their weights.
void restrict_weights(const SampleSpec& spec, const float* x, size_t n, Scratch& scratch) {
    const auto keep = [&](const Cut& cut, int32_t least) {
        sum_chunks(n, scratch, [&](size_t first, size_t count) {
            const size_t ties = cut.ties > first ? std::min(cut.ties - first, count) : 0;
            return rowops().keep(x + first, count, cut.value, ties, least,
                                 scratch.weights.data() + first);
        });
    };
    const int32_t* w = scratch.weights.data();
    if (spec.top_k > 0 && static_cast<size_t>(spec.top_k) < n) {
        int64_t candidates = 0;
        for (size_t i = 0; i < n; i++) candidates += w[i] > 0;
        if (spec.top_k < candidates)
            keep(cut_behind(x, n, spec.top_k, scratch, [&](size_t i) { return w[i] > 0; }), 0);
    }
    Cut cut{ca::LOGIT_LOWEST, n};
    if (spec.top_p < 1.0f) {
        const int64_t share = ca::share_of(total(scratch), ca::fraction_of(spec.top_p));
        cut = cut_behind(x, n, std::max<int64_t>(share, 1), scratch, [&](size_t i) { return w[i]; });
    }
    const int32_t least = ca::integer_weight(spec.min_p);
    if (spec.top_p < 1.0f || least > 0) keep(cut, least);
}

// The first index whose running sum of weights exceeds `target`, which is below their sum.
size_t index_at(int64_t target, const Scratch& scratch) {
    size_t chunk = 0;
    while (scratch.sums[chunk] <= target) target -= scratch.sums[chunk++];
    size_t i = chunk * CHUNK;
    while (scratch.weights[i] <= target) target -= scratch.weights[i++];
    return i;
}

int32_t draw(const SampleSpec& spec, const float* x, size_t vocab, float top, Scratch& scratch) {
    const bool few = spec.top_k > 0 && spec.top_k <= SCAN_MAX;
    size_t n = vocab;
    if (few) {
        scratch.ids.clear();
        scratch.values.clear();
        for (const auto& [token, value] : best(x, vocab, static_cast<size_t>(spec.top_k)))
            scratch.ids.push_back(token);
        std::sort(scratch.ids.begin(), scratch.ids.end());
        for (const int32_t token : scratch.ids) scratch.values.push_back(x[token]);
        x = scratch.values.data();
        n = scratch.values.size();
    }
    weigh(x, n, top, spec.temperature, scratch);
    restrict_weights(spec, x, n, scratch);
    uint32_t random[4];
    ca::philox(spec.seed, spec.position, spec.draw, random);
    const size_t i = index_at(ca::share_of(total(scratch), random[0]), scratch);
    return few ? scratch.ids[i] : static_cast<int32_t>(i);
}

void add_logprobs(const SampleSpec& spec, const float* x, size_t vocab, float top, Scratch& scratch,
                  Sampled& out) {
    weigh(x, vocab, top, 1.0f, scratch);
    const float log_sum = ca::log_of_sum(total(scratch));
    out.logprob = ca::log_probability(x[out.token], top, log_sum);
    out.top = best(x, vocab, static_cast<size_t>(spec.logprobs));
    for (auto& [token, value] : out.top) value = ca::log_probability(value, top, log_sum);
}

Sampled sample_row(const SampleSpec& spec, const float* logits, size_t vocab, Scratch& scratch) {
    const RowOps& ops = rowops();
    Sampled out;
    float raw_top;
    size_t raw_first;
    if (!ops.largest(logits, vocab, &raw_top, &raw_first)) {
        out.nonfinite = true;
        return out;
    }
    const float* x = logits;
    float top = raw_top;
    size_t first = raw_first;
    if (!spec.bias.empty() || !spec.history.empty() || !spec.mask.empty()) {
        if (!apply_penalties(spec, vocab, logits, scratch)) {
            out.nonfinite = true;
            return out;
        }
        x = scratch.logits.data();
        if (spec.mask.empty())
            ops.largest(x, vocab, &top, &first);
        else
            std::tie(top, first) = apply_mask(spec.mask, vocab, scratch.logits.data());
    }
    out.token = spec.temperature == 0.0f ? static_cast<int32_t>(first)
                                         : draw(spec, x, vocab, top, scratch);
    if (spec.logprobs >= 0) add_logprobs(spec, logits, vocab, raw_top, scratch, out);
    return out;
}

}  // namespace

std::vector<Sampled> sample(Pool& pool, const Rows& logits, const std::vector<SampleSpec>& specs) {
    std::vector<Sampled> out(specs.size());
    for_each(pool, specs.size(), specs.size() == 1, [&](size_t i) {
        static thread_local Scratch scratch;
        out[i] = sample_row(specs[i], logits.row(i), logits.width, scratch);
    });
    return out;
}

}  // namespace batchengine
