// Sampling (rule 10): one row of logits, its history and its parameters -> one token.
//
//   1. a row with a NaN or an infinity is nonfinite: no token
//   2. bias, then the penalties of the tokens in the history; a mask excludes tokens after that: they
//      are no candidates below
//   3. temperature 0: the largest x, lowest id first
//   4. otherwise integer weights W = rint(2^30 expc((x - max x) / temperature))
//   5. top_k: the first k by x falling, id rising;  top_p: of those the shortest run whose sum reaches
//      its share of the total (at least one);  min_p: of those the ones with W >= rint(2^30 min_p)
//   6. the lowest id up to which the sum of the kept W exceeds a random share of their total
// Sums are integers: neither the order of the candidates nor the cuts' way of finding them matters.
// Log-probabilities come from the raw logits, with the same weights at temperature 1.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "common/pool.h"
#include "common/types.h"

namespace batchengine {

struct SampleSpec {
    float temperature = 0.0f;
    int32_t top_k = 0;   // 0: all
    float top_p = 1.0f;  // 1: all
    float min_p = 0.0f;  // 0: all
    float repetition_penalty = 1.0f;
    float presence_penalty = 0.0f;
    float frequency_penalty = 0.0f;
    uint64_t seed = 0;
    uint64_t position = 0;  // absolute position of the token to be drawn
    uint32_t draw = 0;      // number of the draw at this position
    std::vector<int32_t> history;
    std::vector<std::pair<int32_t, float>> bias;  // minus infinity bans a token
    int32_t logprobs = -1;                        // -1: none, 0: the chosen token, n: and the n best
    // A bit per token, the lowest first; 0 excludes the token. Of no words: all tokens. Else of as many as
    // the width needs, with the bit of a token of the width.
    std::vector<uint32_t> mask;
};

struct Sampled {
    int32_t token = -1;
    bool nonfinite = false;
    float logprob = 0.0f;
    std::vector<std::pair<int32_t, float>> top;  // token, log-probability; best first
};

// Row i of logits with specs[i]. Token ids in specs were checked against the width.
std::vector<Sampled> sample(Pool& pool, const Rows& logits, const std::vector<SampleSpec>& specs);

}  // namespace batchengine
