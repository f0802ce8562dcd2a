// The products of pairs of tokens and experts; see experts.h.
#include <algorithm>

#include "experts/bank_pieces.h"
#include "experts/experts.h"
#include "linear/pack.h"

namespace batchengine {
namespace {

// The rows of pairs of a run: all groups of an expert but its last are full.
size_t rows_of(const ExpertPairs& pairs, const ExpertPairs::Run& of) {
    return (of.groups - 1) * GROUP_TOKENS + static_cast<size_t>(pairs.group_pairs[of.group + of.groups - 1]);
}

// The bias of a row tile of a bank, or null.
const float* bias_of(const LinearPart& bank, size_t tile) {
    return bank.bias ? bank.bias->data.data() + tile * TILE_ROWS : nullptr;
}

// Calls body(the first tile of the expert, tile, tiles, group, pairs, whether the group is the first) for all
// tiles and pairs of a product into `tiles` row tiles; bytes_per_tile: of all matrices that the body reads.
template <class Body>
void run_pairs(Pool& pool, const ExpertPairs& pairs, size_t tiles, size_t bytes_per_tile, size_t run,
               size_t groups_max, Body&& body) {
    const size_t cut = piece_tiles(tiles, tiles * pairs.n_runs, bytes_per_tile, run, pool.threads());
    const size_t cuts = div_up(tiles, cut);
    Shares shares(pairs.n_runs * cuts, pool.threads());
    pool.run([&](int ith, int) {
        for (size_t piece; shares.take(ith, &piece);) {
            const ExpertPairs::Run& of = pairs.runs[piece / cuts];
            const size_t first = piece % cuts * cut, bank = of.expert * tiles;
            walk_bank(of.group, rows_of(pairs, of), first, std::min(tiles, first + cut), run, groups_max,
                      [&](size_t tile, size_t count, size_t group, size_t rows, bool cold) {
                          body(bank, tile, count, group, rows, cold);
                      });
        }
    });
}

// The rows of a group in the buffer of pairs; `bank` is the first tile of the expert.
TileTarget target(Rows& out, const LinearPart& part, size_t bank, size_t tile, size_t group, size_t pairs,
                  float limit = 0.0f) {
    return {out.row(group * GROUP_TOKENS) + tile * TILE_ROWS, out.stride, bias_of(part, bank + tile), pairs,
            TILE_ROWS, limit};
}

}  // namespace

void pairs_gated(Pool& pool, const Activations& x, const LinearPart& gate_part,
                 const LinearPart& up_part, const GateFunction& function, const ExpertPairs& pairs,
                 Rows& out) {
    if (pairs.n_runs == 0) return;
    const LinearKernels& kernels = linear_kernels();
    const GateTile gate_tile = kernels.gate(function.activation);
    const Matrix &gate = *gate_part.matrix, &up = *up_part.matrix;
    const size_t run = std::min(run_tiles(gate.kind), run_tiles(up.kind));
    const size_t bytes = tile_bytes(gate.kind, gate.cols) + tile_bytes(up.kind, up.cols);
    run_pairs(pool, pairs, out.width / TILE_ROWS, bytes, run, kernels.groups_max,
              [&](size_t bank, size_t tile, size_t count, size_t group, size_t rows, bool cold) {
                  RunResults gates, ups;
                  multiply_tiles(kernels, gate, x, bank + tile, count, group, rows, cold, gates.of);
                  multiply_tiles(kernels, up, x, bank + tile, count, group, rows, cold, ups.of);
                  each_group(group, rows, count, [&](size_t g, size_t of_group, size_t place) {
                      for (size_t t = 0; t < count; ++t)
                          gate_tile(gates.of[place + t], bias_of(gate_part, bank + tile + t),
                                    ups.of[place + t],
                                    target(out, up_part, bank, tile + t, g, of_group, function.limit));
                  });
              });
}

void pairs_relu2(Pool& pool, const Activations& x, const LinearPart& up_part, const ExpertPairs& pairs,
                 Rows& out) {
    if (pairs.n_runs == 0) return;
    const LinearKernels& kernels = linear_kernels();
    const Matrix& up = *up_part.matrix;
    run_pairs(pool, pairs, out.width / TILE_ROWS, tile_bytes(up.kind, up.cols), run_tiles(up.kind),
              kernels.groups_max,
              [&](size_t bank, size_t tile, size_t count, size_t group, size_t rows, bool cold) {
                  RunResults results;
                  multiply_tiles(kernels, up, x, bank + tile, count, group, rows, cold, results.of);
                  each_group(group, rows, count, [&](size_t g, size_t of_group, size_t place) {
                      for (size_t t = 0; t < count; ++t)
                          kernels.relu2(results.of[place + t],
                                        target(out, up_part, bank, tile + t, g, of_group));
                  });
              });
}

// A piece is row tiles of all experts: one thread adds what they give to these outputs, in order.
void pairs_add(Pool& pool, const Activations& x, const LinearPart& down_part,
               const ExpertPairs& pairs, Rows& out) {
    if (pairs.n_runs == 0) return;
    const LinearKernels& kernels = linear_kernels();
    const Matrix& down = *down_part.matrix;
    const size_t tiles = out.width / TILE_ROWS, run = run_tiles(down.kind);
    const size_t bytes = tile_bytes(down.kind, down.cols);
    const size_t cut = piece_tiles(tiles, tiles, bytes, run, pool.threads());
    Shares shares(div_up(tiles, cut), pool.threads());
    pool.run([&](int ith, int) {
        RunResults results;
        static thread_local Buffer<float> sums;  // [token][rows of the piece]
        const size_t stride = cut * TILE_ROWS;
        if (sums.size() < pairs.tokens * stride) sums = Buffer<float>(pairs.tokens * stride);
        for (size_t piece; shares.take(ith, &piece);) {
            const size_t first = piece * cut, end = std::min(tiles, first + cut);
            std::fill_n(sums.data(), pairs.tokens * stride, 0.0f);
            for (size_t i = 0; i < pairs.n_runs; ++i) {
                const ExpertPairs::Run& of = pairs.runs[i];
                const size_t bank = of.expert * tiles;
                walk_bank(
                    of.group, rows_of(pairs, of), first, end, run, kernels.groups_max,
                    [&](size_t tile, size_t count, size_t group, size_t rows, bool cold) {
                        multiply_tiles(kernels, down, x, bank + tile, count, group, rows, cold, results.of);
                        each_group(group, rows, count, [&](size_t g, size_t of_group, size_t place) {
                            const size_t row = g * GROUP_TOKENS;
                            for (size_t t = 0; t < count; ++t)
                                kernels.add_pairs(
                                    results.of[place + t],
                                    {pairs.row_token.data() + row, pairs.row_weight.data() + row,
                                     bias_of(down_part, bank + tile + t), of_group,
                                     sums.data() + (tile - first + t) * TILE_ROWS, stride});
                        });
                    });
            }
            for (size_t token = 0; token < pairs.tokens; ++token) {
                float* to = out.row(token) + first * TILE_ROWS;
                const float* sum = sums.data() + token * stride;
                for (size_t i = 0; i < (end - first) * TILE_ROWS; ++i) to[i] = to[i] + sum[i];
            }
        }
    });
}

}  // namespace batchengine
