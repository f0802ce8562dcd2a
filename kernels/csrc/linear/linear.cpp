// The driver of the linear kernels: cuts the output into pieces; see linear.h.
#include "linear/linear.h"

#include <algorithm>

#include "common/ca.h"
#include "common/dispatch.h"
#include "linear/pack.h"

namespace batchengine {
namespace {

// A step of so few token groups is bound by its stream of weights from memory: each thread reads a range
// of its own from front to back, and all groups of a piece follow each other.
constexpr size_t FEW_GROUPS = 2;
// Pieces per thread, because all threads wait for the last piece. With few groups a piece takes
// 10 us or more anyway; with many, larger pieces read the activations less often.
constexpr size_t PIECES_PER_THREAD = 8, PIECES_PER_THREAD_FEW_GROUPS = 32;
constexpr size_t MANY_GROUPS_TILES = 6;  // whole runs of every kind

struct Plan {
    size_t chunk_tiles;   // row tiles of a piece
    size_t chunk_groups;  // token groups of a piece
    size_t tile_chunks;
    size_t group_chunks;
    size_t pieces() const { return tile_chunks * group_chunks; }
};

// Pieces are as large as balance allows, in rows first: a longer run over tokens reuses the weights.
// They are cut at multiples of `run` row tiles, so that all but the last run is whole; with many
// token groups at twice that, because a smaller piece reads the activations more often. Where weights are
// unpacked for several groups, a piece has half as many at least, if there is a piece for every thread.
Plan plan(size_t tiles, size_t bytes_per_tile, size_t run, size_t groups_max, size_t tokens,
          int threads) {
    const size_t groups = div_up(tokens, GROUP_TOKENS);
    const bool few = groups <= FEW_GROUPS;
    if (!few && groups_max == 1) run = MANY_GROUPS_TILES;
    const size_t per_thread = few ? PIECES_PER_THREAD_FEW_GROUPS : PIECES_PER_THREAD;
    const size_t wanted = threads == 1 ? 1 : per_thread * static_cast<size_t>(threads);
    Plan made{};
    const size_t least = tokens == 1 ? round_up(div_up(STREAM_BYTES, bytes_per_tile), run) : run;
    made.chunk_tiles = std::max(least, tiles / wanted / run * run);
    if (groups > 1)
        made.chunk_tiles = std::min(made.chunk_tiles,
                                    std::max(run, REREAD_BYTES / bytes_per_tile / run * run));
    made.tile_chunks = div_up(tiles, made.chunk_tiles);
    made.chunk_groups = groups;
    if (!few && made.tile_chunks < wanted) {
        const size_t chunks = groups * made.tile_chunks;
        const size_t each = std::max<size_t>(1, chunks / static_cast<size_t>(threads));
        made.chunk_groups = std::max(std::min(div_up(groups_max, 2), each), chunks / wanted);
    }
    made.group_chunks = div_up(groups, made.chunk_groups);
    return made;
}

size_t tile_count(const Matrix& matrix) { return div_up(matrix.rows, TILE_ROWS); }

// Calls body(tile, tiles, group, tokens) over one piece: of at most `run` tiles and `groups_max` groups from
// `group` on. All tiles of the piece see these groups before the next ones come.
template <class Body>
void walk(const Plan& made, size_t piece, size_t tiles, size_t tokens, size_t run, size_t groups_max,
          Body&& body) {
    const size_t tile_first = piece % made.tile_chunks * made.chunk_tiles;
    const size_t tile_end = std::min(tiles, tile_first + made.chunk_tiles);
    const size_t group_first = piece / made.tile_chunks * made.chunk_groups;
    const size_t group_end =
        std::min(div_up(tokens, GROUP_TOKENS), group_first + made.chunk_groups);
    for (size_t group = group_first; group < group_end; group += groups_max) {
        const size_t end = std::min(group_end, group + groups_max) * GROUP_TOKENS;
        for (size_t tile = tile_first; tile < tile_end; tile += run)
            body(tile, std::min(run, tile_end - tile), group,
                 std::min(end, tokens) - group * GROUP_TOKENS);
    }
}

TileTarget target(Rows& out, size_t column, const LinearPart& part, size_t tile, size_t group,
                  size_t tokens, float limit = 0.0f) {
    const size_t row = tile * TILE_ROWS;
    return {out.row(group * GROUP_TOKENS) + column + row, out.stride,
            part.bias ? part.bias->data.data() + row : nullptr, tokens,
            std::min(TILE_ROWS, part.matrix->rows - row), limit};
}

// Prefetches the output lines of `tiles` tiles while their product is computed: rows lie pages apart,
// which the hardware prefetcher does not detect, and a store that misses delays those after it. Into
// the second level, because such rows share the same few sets of the first.
void expect(const TileTarget& to, size_t tiles) {
    for (size_t token = 0; token < to.tokens; ++token)
        for (size_t tile = 0; tile < tiles; ++tile)
            __builtin_prefetch(to.out + token * to.stride + tile * TILE_ROWS, 1, 2);
}

// Number of piece ranges: one per thread where weights are streamed; many groups share the weights in
// the cache, so all threads share one range.
int ranges(const Pool& pool, size_t tokens) {
    return tokens <= FEW_GROUPS * GROUP_TOKENS ? pool.threads() : 1;
}

enum class Finish { store, add, relu2 };

void run_parts(Pool& pool, const Activations& x, const std::vector<LinearPart>& parts,
               size_t tokens, Rows& out, Finish finish) {
    if (tokens == 0) return;
    const LinearKernels& kernels = linear_kernels();
    struct Piecewise {
        const LinearPart* part;
        Plan plan;
        size_t column;      // first output column
        size_t piece_end;   // running total
    };
    std::vector<Piecewise> parts_cut;
    size_t column = 0, pieces = 0;
    for (const LinearPart& part : parts) {
        const Plan made = plan(tile_count(*part.matrix),
                               tile_bytes(part.matrix->kind, part.matrix->cols),
                               run_tiles(part.matrix->kind),
                               run_groups(kernels, part.matrix->kind), tokens, pool.threads());
        pieces += made.pieces();
        parts_cut.push_back({&part, made, column, pieces});
        column += part.matrix->rows;
    }
    const auto finish_tile = finish == Finish::add     ? kernels.add
                             : finish == Finish::relu2 ? kernels.relu2
                                                       : kernels.store;
    Shares shares(pieces, ranges(pool, tokens));
    pool.run([&](int ith, int) {
        RunResults results;
        for (size_t index; shares.take(ith, &index);) {
            size_t i = 0;
            while (index >= parts_cut[i].piece_end) ++i;
            const Piecewise& mine = parts_cut[i];
            const size_t piece = index - (mine.piece_end - mine.plan.pieces());
            const Matrix& matrix = *mine.part->matrix;
            walk(mine.plan, piece, tile_count(matrix), tokens, run_tiles(matrix.kind),
                 run_groups(kernels, matrix.kind),
                 [&](size_t tile, size_t tiles, size_t group, size_t count) {
                     each_group(group, count, tiles, [&](size_t g, size_t of_group, size_t) {
                         expect(target(out, mine.column, *mine.part, tile, g, of_group), tiles);
                     });
                     multiply_tiles(kernels, matrix, x, tile, tiles, group, count, group == 0,
                                    results.of);
                     each_group(group, count, tiles, [&](size_t g, size_t of_group, size_t place) {
                         for (size_t t = 0; t < tiles; ++t)
                             finish_tile(results.of[place + t],
                                         target(out, mine.column, *mine.part, tile + t, g, of_group));
                     });
                 });
        }
    });
}

}  // namespace

const LinearKernels& linear_kernels() {
    switch (level()) {
#if defined(BATCHENGINE_X86)
        case Level::amx: return LINEAR_AMX;
        case Level::avx512: return LINEAR_AVX512;
        case Level::avx2: return LINEAR_AVX2;
#elif defined(BATCHENGINE_ARM)
        case Level::neon_dotprod: return LINEAR_NEON;
        case Level::neon_i8mm: return LINEAR_I8MM;
#endif
        default: return LINEAR_SCALAR;
    }
}

void multiply_tiles(const LinearKernels& kernels, const Matrix& matrix, const Activations& x, size_t tile,
                    size_t tiles, size_t group, size_t tokens, bool cold, TileResult* results) {
    kernels.multiply(matrix, x, tile, tiles, group, tokens, cold, results);
    const uint8_t* nonfinite = x.nonfinite.data() + group * GROUP_TOKENS;
    for (size_t token = 0; token < tokens; ++token)
        if (nonfinite[token])
            for (size_t t = 0; t < tiles; ++t)
                std::fill_n(results[token / GROUP_TOKENS * tiles + t].y[token % GROUP_TOKENS], TILE_ROWS,
                            ca::canonical_nan());
}

void linear(Pool& pool, const Activations& x, const std::vector<LinearPart>& parts, size_t tokens,
            Rows& out) {
    run_parts(pool, x, parts, tokens, out, Finish::store);
}

void linear_add(Pool& pool, const Activations& x, const LinearPart& part, size_t tokens, Rows& out) {
    run_parts(pool, x, {part}, tokens, out, Finish::add);
}

void linear_relu2(Pool& pool, const Activations& x, const LinearPart& up, size_t tokens, Rows& out) {
    run_parts(pool, x, {up}, tokens, out, Finish::relu2);
}

// Both products of a row tile are made by one thread, so the gate is applied before anything leaves
// the level-1 cache.
void linear_gated(Pool& pool, const Activations& x, const LinearPart& gate, const LinearPart& up,
                  const GateFunction& function, size_t tokens, Rows& out) {
    if (tokens == 0) return;
    const LinearKernels& kernels = linear_kernels();
    const GateTile gate_tile = kernels.gate(function.activation);
    const size_t tiles = tile_count(*gate.matrix);
    const size_t run = std::min(run_tiles(gate.matrix->kind), run_tiles(up.matrix->kind));
    const size_t groups_max =
        std::min(run_groups(kernels, gate.matrix->kind), run_groups(kernels, up.matrix->kind));
    const Plan made = plan(tiles, tile_bytes(gate.matrix->kind, gate.matrix->cols) +
                                      tile_bytes(up.matrix->kind, up.matrix->cols),
                           run, groups_max, tokens, pool.threads());
    Shares shares(made.pieces(), ranges(pool, tokens));
    pool.run([&](int ith, int) {
        RunResults gates, ups;
        for (size_t piece; shares.take(ith, &piece);)
            walk(made, piece, tiles, tokens, run, groups_max,
                 [&](size_t tile, size_t count, size_t group, size_t run_tokens) {
                     each_group(group, run_tokens, count, [&](size_t g, size_t of_group, size_t) {
                         expect(target(out, 0, up, tile, g, of_group), count);
                     });
                     const bool cold = group == 0;
                     multiply_tiles(kernels, *gate.matrix, x, tile, count, group, run_tokens, cold,
                                    gates.of);
                     multiply_tiles(kernels, *up.matrix, x, tile, count, group, run_tokens, cold,
                                    ups.of);
                     each_group(group, run_tokens, count, [&](size_t g, size_t of_group, size_t place) {
                         for (size_t t = 0; t < count; ++t) {
                             const float* gate_bias =
                                 gate.bias ? gate.bias->data.data() + (tile + t) * TILE_ROWS : nullptr;
                             gate_tile(gates.of[place + t], gate_bias, ups.of[place + t],
                                       target(out, 0, up, tile + t, g, of_group, function.limit));
                         }
                     });
                 });
    });
}

void embed(Pool& pool, const Matrix& matrix, const int32_t* tokens, size_t count, float scale,
           Rows& out) {
    for_each(pool, count, false, [&](size_t i) {
        float* row = out.row(i);
        unpack_row(matrix, static_cast<size_t>(tokens[i]), row);
        if (scale != 1.0f)
            for (size_t k = 0; k < matrix.cols; ++k) row[k] = ca::mul_rn(row[k], scale);
    });
}

}  // namespace batchengine
