// See norm.h.
#include "quant/norm.h"

#include "quant/quant.h"
#include "quant/token_runs.h"
#include "rows/rowops.h"

namespace batchengine {

namespace {

void norm_rows(Pool& pool, decltype(RowOps::rmsnorm) norm, const Rows& x, const Vector& w, float eps,
               size_t tokens, Rows& out) {
    for_each_run(pool, tokens, x.width, [&](size_t token, size_t count) {
        for (size_t t = token; t < token + count; t++)
            norm(x.row(t), w.data.data(), x.width, eps, out.row(t));
    });
}

}  // namespace

void rmsnorm_rows(Pool& pool, const Rows& x, const Vector& w, float eps, size_t tokens, Rows& out) {
    norm_rows(pool, rowops().rmsnorm, x, w, eps, tokens, out);
}

void norm_add(Pool& pool, const Rows& x, const Vector& w, float eps, size_t tokens, Rows& out) {
    norm_rows(pool, rowops().norm_add, x, w, eps, tokens, out);
}

void quantise(Pool& pool, const Rows& x, size_t tokens, Activations& out) {
    const QuantiseRows rows = quantise_rows();
    for_each_run(pool, tokens, x.width, [&](size_t token, size_t count) {
        rows(x.row(token), x.stride, token, count, out);
    });
}

void norm_quantise(Pool& pool, const Rows& x, const Vector& w, float eps, size_t tokens,
                   Activations& out) {
    const RowOps& ops = rowops();
    const QuantiseRows quantise = quantise_rows();
    // A cache line more than a row: rows a page apart would share the same sets of the cache.
    const size_t stride = round_up(x.width, 16) + 16;
    for_each_run(pool, tokens, x.width, [&](size_t token, size_t count) {
        static thread_local Buffer<float> scratch;
        if (scratch.size() < OCTET_TOKENS * stride) scratch = Buffer<float>(OCTET_TOKENS * stride);
        for (const size_t end = token + count; token < end; token += OCTET_TOKENS) {
            const size_t now = std::min(OCTET_TOKENS, end - token);
            for (size_t t = 0; t < now; t++)
                ops.rmsnorm(x.row(token + t), w.data.data(), x.width, eps,
                            scratch.data() + t * stride);
            quantise(scratch.data(), stride, token, now, out);
        }
    });
}

}  // namespace batchengine
