// See sampling.h.
#include "sample/sampling.h"

#include <algorithm>
#include <cstring>

#include "common/ca.h"
#include "rows/rowops.h"

namespace batchengine {
namespace {

// Smaller weights cannot change a cumsum that starts at 1: they are below half an ulp of 1.
constexpr float WEIGHT_MIN = 0x1p-24f;
constexpr float LOGIT_LOWEST = -0x1.fffffep127f;
constexpr size_t RADIX_BITS = 11;
constexpr size_t RADIX_MIN = 512;  // fewer candidates sort faster by comparison

// A top_k up to this is selected in one scan; anything larger sorts.
constexpr size_t SCAN_MAX = 256;

struct Candidate {
    uint32_t key;  // rises as the logit falls
    int32_t id;
};

using Ranked = std::vector<std::pair<int32_t, float>>;  // token, value; best first

struct Scratch {
    std::vector<float> logits;      // after penalties
    std::vector<float> weights;     // by token
    std::vector<Candidate> candidates, spare;
    std::vector<int32_t> ids;       // candidates in order
    std::vector<float> in_order;    // their weights
    std::vector<int32_t> history;
};

// An unsigned integer that rises as the float falls; equal for both zeros.
uint32_t falling_key(float x) {
    const uint32_t bits = ca::bits_of(x + 0.0f);
    const uint32_t rising = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return ~rising;
}

bool comes_first(const Candidate& a, const Candidate& b) {
    return a.key != b.key ? a.key < b.key : a.id < b.id;
}

// Sorts by key; the input is in id order and every pass is stable, so ids rise among equals.
void radix_sort(std::vector<Candidate>& candidates, std::vector<Candidate>& spare) {
    constexpr uint32_t MASK = (1u << RADIX_BITS) - 1;
    constexpr size_t PASSES = 3;
    static_assert(PASSES * RADIX_BITS >= 32);
    uint32_t start[PASSES][MASK + 2];
    std::memset(start, 0, sizeof start);
    spare.resize(candidates.size());
    for (const Candidate& c : candidates)
        for (size_t pass = 0; pass < PASSES; pass++)
            start[pass][((c.key >> (pass * RADIX_BITS)) & MASK) + 1]++;
    for (size_t pass = 0; pass < PASSES; pass++) {
        for (size_t i = 1; i <= MASK; i++) start[pass][i] += start[pass][i - 1];
        for (const Candidate& c : candidates)
            spare[start[pass][(c.key >> (pass * RADIX_BITS)) & MASK]++] = c;
        candidates.swap(spare);
    }
}

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
        const float count = static_cast<float>(end - i);
        float& y = x[token];
        y = y > 0.0f ? y / spec.repetition_penalty : y * spec.repetition_penalty;
        y = (y - count * spec.frequency_penalty) - spec.presence_penalty;
        i = end;
    }
    const auto settle = [&](int32_t token) {
        if (x[token] < LOGIT_LOWEST) x[token] = LOGIT_LOWEST;
        return ca::is_finite(x[token]);
    };
    for (const auto& [token, bias] : spec.bias)
        if (!settle(token)) return false;
    for (const int32_t token : scratch.history)
        if (!settle(token)) return false;
    return true;
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

void drop_light(Scratch& scratch) {
    size_t kept = 0;
    for (size_t i = 0; i < scratch.ids.size(); i++) {
        scratch.ids[kept] = scratch.ids[i];
        scratch.in_order[kept] = scratch.in_order[i];
        kept += scratch.in_order[i] >= WEIGHT_MIN;
    }
    scratch.ids.resize(kept);
    scratch.in_order.resize(kept);
}

// Candidates when top_k is small: only their weights are computed.
void select_few(const SampleSpec& spec, const float* x, size_t vocab, float top, Scratch& scratch) {
    const Ranked ranked = best(x, vocab, static_cast<size_t>(spec.top_k));
    scratch.ids.clear();
    scratch.weights.clear();
    for (const auto& [token, value] : ranked) {
        scratch.ids.push_back(token);
        scratch.weights.push_back(value);
    }
    scratch.in_order.resize(ranked.size());
    rowops().weights(scratch.weights.data(), ranked.size(), top, spec.temperature,
                     scratch.in_order.data());
    drop_light(scratch);
}

// Candidates otherwise: all tokens with a weight of WEIGHT_MIN or more.
void sort_all(const SampleSpec& spec, const float* x, size_t vocab, float top, Scratch& scratch) {
    scratch.weights.resize(vocab);
    rowops().weights(x, vocab, top, spec.temperature, scratch.weights.data());
    auto& found = scratch.candidates;
    found.resize(vocab);
    size_t count = 0;
    for (size_t i = 0; i < vocab; i++) {  // no branch: half of a flat vocabulary may pass
        found[count] = {falling_key(x[i]), static_cast<int32_t>(i)};
        count += scratch.weights[i] >= WEIGHT_MIN;
    }
    found.resize(count);
    if (count >= RADIX_MIN)
        radix_sort(found, scratch.spare);
    else
        std::sort(found.begin(), found.end(), comes_first);
    if (spec.top_k > 0) found.resize(std::min(count, static_cast<size_t>(spec.top_k)));
    scratch.ids.resize(found.size());
    scratch.in_order.resize(found.size());
    for (size_t i = 0; i < found.size(); i++) {
        scratch.ids[i] = found[i].id;
        scratch.in_order[i] = scratch.weights[static_cast<size_t>(found[i].id)];
    }
}

float sum_in_order(const Scratch& scratch, size_t count) {
    float sum = 0.0f;
    for (size_t i = 0; i < count; i++) sum = sum + scratch.in_order[i];
    return sum;
}

// First index whose cumsum satisfies `reached`, or the last one.
template <class Reached>
size_t first_reached(const Scratch& scratch, size_t count, Reached&& reached) {
    float sum = 0.0f;
    for (size_t i = 0; i < count; i++) {
        sum = sum + scratch.in_order[i];
        if (reached(sum)) return i;
    }
    return count - 1;
}

int32_t draw(const SampleSpec& spec, const float* x, size_t vocab, float top, Scratch& scratch) {
    if (spec.top_k > 0 && static_cast<size_t>(spec.top_k) <= SCAN_MAX)
        select_few(spec, x, vocab, top, scratch);
    else
        sort_all(spec, x, vocab, top, scratch);
    size_t count = scratch.ids.size();
    if (spec.top_p < 1.0f) {
        const float target = spec.top_p * sum_in_order(scratch, count);
        count = first_reached(scratch, count, [&](float sum) { return sum >= target; }) + 1;
    }
    for (size_t i = 1; i < count; i++)
        if (scratch.in_order[i] < spec.min_p) count = i;
    uint32_t random[4];
    philox(spec.seed, spec.position, spec.draw, random);
    const float u = static_cast<float>(random[0] >> 8) * 0x1p-24f;
    const float target = u * sum_in_order(scratch, count);
    return scratch.ids[first_reached(scratch, count, [&](float sum) { return sum > target; })];
}

void add_logprobs(const SampleSpec& spec, const float* x, size_t vocab, float top, Sampled& out) {
    const float log_sum = ca::logc(rowops().exp_sum(x, vocab, top));
    const auto logprob = [&](float logit) { return (logit - top) - log_sum; };
    out.logprob = logprob(x[out.token]);
    out.top = best(x, vocab, static_cast<size_t>(spec.logprobs));
    for (auto& [token, value] : out.top) value = logprob(value);
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
    if (!spec.bias.empty() || !spec.history.empty()) {
        if (!apply_penalties(spec, vocab, logits, scratch)) {
            out.nonfinite = true;
            return out;
        }
        x = scratch.logits.data();
        ops.largest(x, vocab, &top, &first);
    }
    out.token = spec.temperature == 0.0f ? static_cast<int32_t>(first)
                                         : draw(spec, x, vocab, top, scratch);
    if (spec.logprobs >= 0) add_logprobs(spec, logits, vocab, raw_top, out);
    return out;
}

}  // namespace

void philox(uint64_t seed, uint64_t position, uint32_t draw, uint32_t out[4]) {
    uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    uint32_t c[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), draw, 0};
    for (int round = 0; round < 10; round++) {
        const uint64_t a = uint64_t{0xD2511F53u} * c[0], b = uint64_t{0xCD9E8D57u} * c[2];
        const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ key[0],
                                  static_cast<uint32_t>(b),
                                  static_cast<uint32_t>(a >> 32) ^ c[3] ^ key[1],
                                  static_cast<uint32_t>(a)};
        std::copy_n(next, 4, c);
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    std::copy_n(c, 4, out);
}

std::vector<Sampled> sample(Pool& pool, const Rows& logits, const std::vector<SampleSpec>& specs) {
    std::vector<Sampled> out(specs.size());
    for_each(pool, specs.size(), specs.size() == 1, [&](size_t i) {
        static thread_local Scratch scratch;
        out[i] = sample_row(specs[i], logits.row(i), logits.width, scratch);
    });
    return out;
}

}  // namespace batchengine
