// Golden vectors of sampling: every selection, on rows that are random, full of ties, all equal, and
// dominated by one token; a banned token and a history in some.
#include <algorithm>
#include <cmath>

#include "golden/golden.h"
#include "sample/sampling.h"

namespace batchengine {
namespace {

constexpr size_t ROWS = 4, VOCAB = 2501;

// Row 0 random, row 1 of quarters only, row 2 all equal, row 3 small beside one token.
float logit(size_t row, float unit) {
    if (row == 1) return std::floor(unit * 32.0f) * 0.25f;
    return unit * (row == 0 ? 8.0f : row == 3 ? 2.0f : 0.0f);
}

std::vector<SampleSpec> specs_of_row(GoldenSource& source) {
    std::vector<SampleSpec> specs;
    for (const float temperature : {0.0f, 0.7f, 1.0f, 1.4f})
        for (const int32_t top_k : {0, 40, 300})
            for (const float top_p : {0.95f, 1.0f})
                for (const float min_p : {0.0f, 0.02f}) {
                    SampleSpec spec;
                    spec.temperature = temperature;
                    spec.top_k = top_k;
                    spec.top_p = top_p;
                    spec.min_p = min_p;
                    spec.seed = source.next();
                    spec.position = source.next();
                    spec.draw = static_cast<uint32_t>(specs.size());
                    spec.logprobs = 4;
                    if (specs.size() % 3 == 1) {
                        spec.repetition_penalty = 1.1f;
                        spec.presence_penalty = 0.25f;
                        spec.frequency_penalty = 0.125f;
                        spec.history = {5, 1777, 5};
                    }
                    if (specs.size() % 3 == 2) spec.bias = {{1777, -HUGE_VALF}, {2, 1.5f}};
                    specs.push_back(spec);
                }
    return specs;
}

}  // namespace

void golden_sample(Pool& pool, Golden& golden) {
    GoldenSource source(0x5A3);
    for (size_t row = 0; row < ROWS; row++) {
        const std::vector<SampleSpec> specs = specs_of_row(source);
        Rows logits(specs.size(), VOCAB);
        for (size_t i = 0; i < VOCAB; i++) logits.row(0)[i] = logit(row, source.unit());
        if (row == 3) logits.row(0)[1777] = 12.0f;
        for (size_t i = 1; i < specs.size(); i++)
            std::copy_n(logits.row(0), VOCAB, logits.row(i));
        for (const Sampled& one : sample(pool, logits, specs)) {
            golden.add("token", &one.token, sizeof one.token);
            golden.add("logprob", &one.logprob, sizeof one.logprob);
            for (const auto& [token, logprob] : one.top)
                golden.add("top " + std::to_string(token), &logprob, sizeof logprob);
        }
    }
}

}  // namespace batchengine
