// Sampling (CA-1 rule 10): one row of logits, its history and its parameters -> one token.
//
// Steps, in this order, each a fixed fp32 expression:
//   1. a row with a NaN or an infinity is nonfinite: no token
//   2. x = logit + bias; then for tokens of the history that occur c times
//      x = x > 0 ? x / repetition : x * repetition;  x = (x - c * frequency) - presence
//   3. temperature 0: the largest x, lowest id first
//   4. otherwise weights w = expc(RN((x - max x) / temperature)), candidates by x falling, id rising
//   5. top_k: the first k;  top_p: of those the shortest run with cumsum >= top_p * total (at least
//      one);  min_p: of those the run before the first w < min_p
//   6. the first candidate whose cumsum exceeds u * total, u = (philox >> 8) * 2^-24
// All cumsums are sequential in candidate order. Candidates with w < 2^-24 are dropped: the first
// weight is 1, so adding them could not change a sum.
// Log-probabilities come from the raw logits: (x_i - max) - logc(sum of expc(x - max) in 64 lanes).
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
};

struct Sampled {
    int32_t token = -1;
    bool nonfinite = false;
    float logprob = 0.0f;
    std::vector<std::pair<int32_t, float>> top;  // token, log-probability; best first
};

// Philox4x32-10, key = seed, counter = (position, draw, 0).
void philox(uint64_t seed, uint64_t position, uint32_t draw, uint32_t out[4]);

// Row i of logits with specs[i]. Token ids in specs were checked against the width.
std::vector<Sampled> sample(Pool& pool, const Rows& logits, const std::vector<SampleSpec>& specs);

}  // namespace batchengine
