// See heads.h.
#include "experts/heads.h"

#include <algorithm>
#include <cstring>

#include "experts/bank_pieces.h"
#include "linear/pack.h"
#include "quant/quant.h"
#include "quant/token_runs.h"
#include "rows/rowops.h"

namespace batchengine {

void quantise_heads(Pool& pool, const Rows& x, size_t column, size_t tokens, HeadActivations& out) {
    const QuantiseRows quantise = quantise_rows();
    const size_t groups = div_up(tokens, GROUP_TOKENS), run = x.width / out.n_head;
    const bool alone = tokens * out.n_head * out.panels.width <= VALUES_ALONE;
    for_each(pool, out.n_head * groups, alone, [&](size_t item) {
        const size_t head = item / groups, token = item % groups * GROUP_TOKENS;
        quantise(x.row(token) + head * run + column, x.stride, head * out.groups * GROUP_TOKENS + token,
                 std::min(GROUP_TOKENS, tokens - token), out.panels);
    });
}

void linear_heads(Pool& pool, const HeadActivations& x, const Matrix& bank, size_t tokens, Rows& out,
                  size_t column, size_t stride) {
    if (tokens == 0) return;
    const LinearKernels& kernels = linear_kernels();
    const size_t tiles = bank.rows / x.n_head / TILE_ROWS, run = run_tiles(bank.kind);
    const size_t cut =
        piece_tiles(tiles, tiles * x.n_head, tile_bytes(bank.kind, bank.cols), run, pool.threads());
    const size_t cuts = div_up(tiles, cut);
    Shares shares(x.n_head * cuts, pool.threads());
    pool.run([&](int ith, int) {
        RunResults results;
        for (size_t piece; shares.take(ith, &piece);) {
            const size_t head = piece / cuts, first = piece % cuts * cut, group = head * x.groups;
            walk_bank(group, tokens, first, std::min(tiles, first + cut), run,
                      run_groups(kernels, bank.kind),
                      [&](size_t tile, size_t count, size_t at, size_t rows, bool cold) {
                          multiply_tiles(kernels, bank, x.panels, head * tiles + tile, count, at, rows, cold,
                                         results.of);
                          each_group(at, rows, count, [&](size_t g, size_t of_group, size_t place) {
                              float* row =
                                  out.row((g - group) * GROUP_TOKENS) + column + head * stride;
                              for (size_t t = 0; t < count; ++t)
                                  kernels.store(results.of[place + t], {row + (tile + t) * TILE_ROWS, out.stride,
                                                                        nullptr, of_group, TILE_ROWS});
                          });
                      });
        }
    });
}

void transform_heads(Pool& pool, Rows& x, size_t n_head, size_t column, size_t width, size_t tokens) {
    const RowOps& ops = rowops();
    const size_t run = x.width / n_head;
    const float inverse = ca::div_rn(1.0f, static_cast<float>(width));  // exact
    for_each_run(pool, tokens, x.width, [&](size_t token, size_t count) {
        for (size_t t = token; t < token + count; t++)
            for (size_t head = 0; head < n_head; head++) {
                float* const values = x.row(t) + head * run + column;
                ops.hadamard(values, run - column, width);
                ops.scale(values, run - column, inverse, values);
            }
    });
}

void copy_heads(Pool& pool, const Rows& x, size_t n_head, size_t tokens, Rows& out, size_t column,
                size_t stride) {
    const size_t run = x.width / n_head;
    for_each_run(pool, tokens, x.width, [&](size_t token, size_t count) {
        for (size_t t = token; t < token + count; t++)
            for (size_t head = 0; head < n_head; head++)
                std::memcpy(out.row(t) + column + head * stride, x.row(t) + head * run, run * sizeof(float));
    });
}

}  // namespace batchengine
