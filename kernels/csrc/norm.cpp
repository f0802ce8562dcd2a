// See norm.h. Rows are independent, so they are dealt out in contiguous runs.
#include "norm.h"

#include "quant.h"
#include "rowops.h"

namespace batchengine {
namespace {

// Below this many values waking the team costs more than the work (a 1024-wide row takes < 1 us).
constexpr size_t VALUES_ALONE = 8192;

template <class Body>
void for_each_token(Pool& pool, size_t tokens, size_t width, Body&& body) {
    if (pool.threads() == 1 || tokens * width <= VALUES_ALONE) {
        const FloatEnvironment environment;
        for (size_t t = 0; t < tokens; t++) body(t);
        return;
    }
    pool.run([&](int ith, int nth) {
        const size_t first = tokens * static_cast<size_t>(ith) / static_cast<size_t>(nth);
        const size_t last = tokens * static_cast<size_t>(ith + 1) / static_cast<size_t>(nth);
        for (size_t t = first; t < last; t++) body(t);
    });
}

}  // namespace

void rmsnorm_rows(Pool& pool, const Rows& x, const Vector& w, float eps, size_t tokens, Rows& out) {
    const RowOps& ops = rowops();
    for_each_token(pool, tokens, x.width, [&](size_t t) {
        ops.rmsnorm(x.row(t), w.data.data(), x.width, eps, out.row(t));
    });
}

void norm_quantise(Pool& pool, const Rows& x, const Vector& w, float eps, size_t tokens,
                   Activations& out) {
    const RowOps& ops = rowops();
    const QuantiseRow quantise = quantise_row();
    for_each_token(pool, tokens, x.width, [&](size_t t) {
        static thread_local Buffer<float> scratch;
        if (scratch.size() < x.width) scratch = Buffer<float>(x.width);
        ops.rmsnorm(x.row(t), w.data.data(), x.width, eps, scratch.data());
        quantise(scratch.data(), t, out);
    });
}

}  // namespace batchengine
