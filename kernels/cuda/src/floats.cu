// Matrix products (rule 2) of float matrices, which read fp32 rows.
//
// The products of a segment are one chain of multiply-adds, of four cycles each at best: at a token a step
// the chain is what takes the time. So each segment has threads of its own, and weights and values are
// copied to shared memory well before their turn.
#include "products.h"

namespace {

using gpu::Kind;

constexpr int SLOTS = 8;  // threads of a row of weights, each with `each` columns
constexpr int TEAM = SLOTS * gpu::TILE;  // threads of a segment
constexpr int STAGES = 3;  // blocks of 32 k that are held or under way

// Teams of a block: shared memory bounds them.
GPU_FN constexpr int teams_of(int each) { return each == 1 ? 4 : 2; }

// Weight k of row `row` of a staged block of 32 k.
template <Kind kind, int n>
GPU_FN float weight_of(gpu::Shared<gpu::Words4, n>& weights, int first, int k, int row) {
    if constexpr (kind == Kind::f32)
        return ca::float_of(gpu::shared_word(weights, 4 * first + k * gpu::TILE + row));
    const uint32_t both = gpu::shared_word(weights, 4 * first + k * gpu::TILE / 2 + row / 2);
    const auto half = static_cast<uint16_t>(both >> 16 * (row & 1));
    return kind == Kind::f16 ? ca::half_to_float(half) : ca::bf16_to_float(half);
}

// Grid: groups of 8 * `each` columns, tiles, and, if a portion of pairs has more columns, groups of them.
template <Kind kind, int each>
GPU_FN void floats(gpu::In<uint8_t> matrix, int cols, gpu::In<float> values, int64_t stride,
                   gpu::In<float> scale, const gpu::Target& to, const gpu::Pairs& pairs) {
    constexpr int COLUMNS = SLOTS * each, TEAMS = teams_of(each);
    constexpr int BLOCK_BYTES = ca::BLOCK * gpu::TILE * (kind == Kind::f32 ? 4 : 2);
    constexpr int WEIGHTS = BLOCK_BYTES / 16, ROW = ca::BLOCK / 4;  // copies of 16 bytes
    __shared__ gpu::Shared<gpu::Words4, TEAMS * STAGES * WEIGHTS> weights;
    __shared__ gpu::Shared<gpu::Words4, TEAMS * STAGES * COLUMNS * ROW> staged;
    __shared__ gpu::Shared<float, TEAMS * gpu::TILE * COLUMNS> partial;
    __shared__ gpu::Shared<int32_t, COLUMNS> held;
    const int row = gpu::thread() % gpu::TILE, slot = gpu::thread() / gpu::TILE % SLOTS;
    const int team = gpu::thread() / TEAM, teams = gpu::threads() / TEAM, own = gpu::thread() % TEAM;
    const int tiles = (to.rows + gpu::TILE - 1) / gpu::TILE, blocks = cols / ca::BLOCK;
    const int segments = (blocks + gpu::SEGMENT_BLOCKS - 1) / gpu::SEGMENT_BLOCKS;
    const int64_t bytes = gpu::tile_bytes(kind, cols);
    gpu::Columns columns = gpu::begin_with(pairs, to.tokens, COLUMNS, [&](int expert) {
        gpu::prefetch(matrix + (int64_t{expert} * tiles + gpu::block_y()) * bytes, bytes);
    });
    if (columns.order) columns.order += gpu::block_z() * COLUMNS;
    columns.last -= gpu::block_z() * COLUMNS;
    if (columns.last < 0) return;
    const gpu::In<uint8_t> tile = matrix + (int64_t{columns.expert} * tiles + gpu::block_y()) * bytes;
    const gpu::In<float> rows = values + columns.base() * stride;
    const int64_t groups = gpu::spans_of(cols) * gpu::SPAN;
    const gpu::In<float> scales = scale + columns.base() * groups;
    if (gpu::thread() < COLUMNS) held[gpu::thread()] = columns.held(gpu::thread());
    gpu::barrier();
    float y[each];
    GPU_UNROLL
    for (int i = 0; i < each; i++) y[i] = 0.0f;
    for (int first = 0; first < segments; first += teams) {
        const int start = (first + team) * gpu::SEGMENT_BLOCKS, behind = start + gpu::SEGMENT_BLOCKS;
        const int end = behind < blocks ? behind : blocks;
        const int left = blocks - first * gpu::SEGMENT_BLOCKS;  // of the first team, which has most
        const int steps = left < gpu::SEGMENT_BLOCKS ? left : gpu::SEGMENT_BLOCKS;
        // Copies a block of k of this team, in the background.
        const auto fetch = [&](int i) {
            const int b = start + i, stage = team * STAGES + i % STAGES;
            if (b < end) {
                if (own < WEIGHTS)
                    gpu::copy_async(weights[stage * WEIGHTS + own],
                                    gpu::in_as<gpu::Words4>(tile) + (b * WEIGHTS + own));
                GPU_UNROLL
                for (int j = own; j < COLUMNS * ROW; j += TEAM)
                    gpu::copy_async(staged[stage * COLUMNS * ROW + j],
                                    gpu::in_as<gpu::Words4>(rows + (held[j / ROW] * stride + b * ca::BLOCK)) +
                                        j % ROW);
            }
            gpu::copies_commit();
        };
        for (int i = 0; i < STAGES - 1; i++) fetch(i);
        bool is_poisoned[each];  // a value may be too large for rule 1, and finite
        GPU_UNROLL
        for (int i = 0; i < each; i++) {
            bool fine = true;
            for (int b = start + row; b < end; b += gpu::TILE)
                fine = fine && ca::is_finite(scales[held[slot + i * SLOTS] * groups + b]);
            is_poisoned[i] = gpu::ballot(!fine) >> (gpu::lane() & gpu::TILE) & 0xFFFFu;
        }
        float acc[each];
        GPU_UNROLL
        for (int i = 0; i < each; i++) acc[i] = 0.0f;
        for (int i = 0; i < steps; i++) {
            gpu::copies_wait<STAGES - 2>();
            gpu::barrier();  // the copies of all are there, and the block before was read
            fetch(i + STAGES - 1);
            const int stage = team * STAGES + i % STAGES;
            if (start + i >= end || slot > columns.last) continue;
            GPU_UNROLL
            for (int k = 0; k < ca::BLOCK; k += 4) {
                float w[4];
                GPU_UNROLL
                for (int j = 0; j < 4; j++) w[j] = weight_of<kind>(weights, stage * WEIGHTS, k + j, row);
                GPU_UNROLL
                for (int c = 0; c < each; c++) {
                    const gpu::Words4 x = staged[(stage * COLUMNS + slot + c * SLOTS) * ROW + k / 4];
                    GPU_UNROLL
                    for (int j = 0; j < 4; j++) acc[c] = ca::fma_rn(w[j], ca::float_of(x.word[j]), acc[c]);
                }
            }
        }
        gpu::copies_wait<0>();
        GPU_UNROLL
        for (int i = 0; i < each; i++)
            partial[(team * gpu::TILE + row) * COLUMNS + slot + i * SLOTS] =
                is_poisoned[i] ? ca::canonical_nan() : acc[i];
        gpu::barrier();
        const int now = segments - first < teams ? segments - first : teams;
        for (int s = 0; s < now && team == 0; s++)
            GPU_UNROLL
            for (int i = 0; i < each; i++) {
                const float part = partial[(s * gpu::TILE + row) * COLUMNS + slot + i * SLOTS];
                y[i] = first + s == 0 ? part : ca::add_rn(y[i], part);
            }
    }
    const int expert = gpu::columns_of(pairs, to.tokens, COLUMNS).expert;  // again: registers are few
    if (team == 0)
        GPU_UNROLL
        for (int i = 0; i < each; i++)
            if (slot + i * SLOTS <= columns.last)
                gpu::put(to, expert, columns.row(slot + i * SLOTS), gpu::block_y() * gpu::TILE + row, y[i]);
}

}  // namespace

// values: fp32 rows, `stride` a multiple of 4; scale: of their quantised form; the other parameters are
// those of linear.cu. Grid (groups of 8 or 32 columns, tiles, groups of columns of a portion), a multiple
// of 128 threads.
#define FLOATS(kind, name, each)                                                                   \
    KERNEL(name, TEAM* teams_of(each), gpu::In<uint8_t> matrix, int rows, int cols,                \
           gpu::In<float> values, int values_stride, gpu::In<float> scale, int tokens,             \
           gpu::In<float> bias, int then, gpu::Out<float> out, int stride, float limit,            \
           gpu::In<gpu::Words4> portions, gpu::In<int32_t> order, int of_row) {                    \
        floats<Kind::kind, each>(matrix, cols, values, values_stride, scale,                       \
                                 {bias, out, stride, limit, rows, tokens,                          \
                                  static_cast<gpu::Then>(then)},                                   \
                                 {portions, order, of_row});                                       \
    }
FLOATS(f16, linear_f16, 1)
FLOATS(bf16, linear_bf16, 1)
FLOATS(f32, linear_f32, 1)
FLOATS(f16, linear_many_f16, 4)
FLOATS(bf16, linear_many_bf16, 4)
FLOATS(f32, linear_many_f32, 4)
