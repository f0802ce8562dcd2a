// Distributes row-by-row operations on the tokens of a step over the pool.
#pragma once

#include <algorithm>

#include "common/pool.h"
#include "common/types.h"
#include "quant/quant.h"

namespace batchengine {

// Calls body(token, count) for runs of tokens that start at a whole octet, so that a run fills
// panels with vector stores; two octets when there are enough, because they share cache lines.
template <class Body>
void for_each_run(Pool& pool, size_t tokens, size_t width, Body&& body) {
    if (pool.threads() == 1 || tokens * width <= VALUES_ALONE) {
        const FloatEnvironment environment;
        body(size_t{0}, tokens);
        return;
    }
    const bool many = tokens >= 2 * GROUP_TOKENS * static_cast<size_t>(pool.threads());
    const size_t run = many ? GROUP_TOKENS : OCTET_TOKENS;
    for_each(pool, div_up(tokens, run), false,
             [&](size_t i) { body(i * run, std::min(run, tokens - i * run)); });
}

}  // namespace batchengine
