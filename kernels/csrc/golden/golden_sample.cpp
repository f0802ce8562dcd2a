// Golden vectors of sampling: tokens and log-probabilities of fixed rows of logits.
#include "golden/golden.h"
#include "sample/sampling.h"

namespace batchengine {

void golden_sample(Pool& pool, Golden& golden) {
    GoldenSource source(0x5A3);
    Rows logits(3, 1000);
    for (size_t i = 0; i < logits.data.size(); i++) logits.data[i] = source.unit() * 8.0f;
    std::vector<SampleSpec> specs(3);
    for (size_t i = 0; i < specs.size(); i++) {
        specs[i].temperature = 0.7f * static_cast<float>(i);
        specs[i].top_p = 0.95f;
        specs[i].top_k = i == 2 ? 40 : 0;
        specs[i].repetition_penalty = 1.1f;
        specs[i].history = {5, 9, 5};
        specs[i].seed = source.next();
        specs[i].logprobs = 4;
    }
    for (const Sampled& one : sample(pool, logits, specs)) {
        golden.add("token", &one.token, sizeof one.token);
        golden.add("logprob", &one.logprob, sizeof one.logprob);
        for (const auto& [token, logprob] : one.top)
            golden.add("top " + std::to_string(token), &logprob, sizeof logprob);
    }
}

}  // namespace batchengine
