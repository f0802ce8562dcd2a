// Matrix products (rule 2) of packed weights with quantised activations, and what follows them.
//
// Every output is one chain per segment of 1024 k, and segments are added in order, so neither the split
// of work nor the number of tokens changes a bit. Products of blocks are exact integers on the tensor
// cores: A is 16 rows of weights as unsigned bytes, B is 8 tokens. Two kernels per kind: `few` gives a
// tile of rows to a block and a segment to each warp, for decoding, where weights are read once and the
// memory bounds; `many` gives 64 rows and 64 tokens to a block, for prefill.
#include "activations.h"
#include "blocks.h"

namespace {

using gpu::Kind;

constexpr int FEW_WARPS = 8;
constexpr int FEW_TOKENS = 8;
constexpr int MANY_WARPS = 4;
constexpr int MANY_TOKENS = 64;
constexpr int STAGE_BLOCKS = 4;  // blocks of k whose activations a block of `many` holds at once
constexpr int STAGE_ROW = STAGE_BLOCKS * ca::BLOCK + 16;  // bytes; 16 more spread rows over the banks

// What becomes of a product y.
enum class Then : int {
    store,  // out = y + bias
    add,    // out = out + (y + bias): the residual stream
    gate,   // out = silu(out) * (y + bias): out holds the gate's product
};

struct Target {
    gpu::In<float> bias;  // or null
    gpu::In<uint8_t> nonfinite;
    gpu::Out<float> out;
    int64_t stride;
    int rows;
    int tokens;
    Then then;
};

GPU_FN void put(const Target& to, int token, int row, float y) {
    if (row >= to.rows || token >= to.tokens) return;
    if (to.nonfinite[token]) y = ca::canonical_nan();
    if (to.bias) y = ca::add_rn(y, to.bias[row]);
    const int64_t at = token * to.stride + row;
    if (to.then == Then::add) y = ca::add_rn(to.out[at], y);
    if (to.then == Then::gate) y = ca::mul_rn(ca::silu(to.out[at]), y);
    to.out[at] = y;
}

// The activations of a block of k for the two tokens 2t, 2t + 1 whose outputs a lane holds.
struct Pair {
    float scale[2];
    uint32_t sums[2];
};

// One block of k into the four chains of a lane (rows g, g, g + 8, g + 8; tokens 2t, 2t + 1 of each).
template <Kind kind>
GPU_FN void step(float (&acc)[4], const gpu::Part (&a)[2], const uint32_t (&b)[2], const Pair& x) {
    constexpr int zero = gpu::zero_of(kind);
    int32_t first[4], second[4];
    GPU_UNROLL
    for (int i = 0; i < 4; i++) {
        first[i] = -zero * gpu::first_sum(x.sums[i % 2]);
        second[i] = -zero * gpu::second_sum(x.sums[i % 2]);
    }
    if constexpr (kind == Kind::q6_k) {  // a factor for each half
        const uint32_t low[2] = {a[0].q[0], a[1].q[0]}, high[2] = {a[0].q[1], a[1].q[1]};
        gpu::mma_k16_us(first, low, b[0]);
        gpu::mma_k16_us(second, high, b[1]);
    } else {
        const uint32_t all[4] = {a[0].q[0], a[1].q[0], a[0].q[1], a[1].q[1]};
        GPU_UNROLL
        for (int i = 0; i < 4; i++) first[i] += second[i];
        gpu::mma_k32_us(first, all, b);
    }
    GPU_UNROLL
    for (int i = 0; i < 4; i++) {
        const gpu::Part& row = a[i / 2];
        int32_t integer = row.factor[0] * first[i];
        if constexpr (kind == Kind::q6_k) integer += row.factor[1] * second[i];
        acc[i] = ca::step(acc[i], integer, row.d, x.scale[i % 2]);
        if constexpr (gpu::has_minimum(kind)) {
            const uint32_t sums = x.sums[i % 2];
            const int32_t least = row.min * (gpu::first_sum(sums) + gpu::second_sum(sums));
            acc[i] = ca::step(acc[i], least, row.m, x.scale[i % 2]);
        }
    }
}

// Grid: tiles of 16 rows, groups of 8 tokens.
template <Kind kind>
GPU_FN void few(gpu::In<uint8_t> matrix, int cols, gpu::In<int8_t> q, gpu::In<float> scale,
                gpu::In<uint32_t> sums, const Target& to) {
    __shared__ gpu::Shared<float, FEW_WARPS * gpu::TILE * FEW_TOKENS> partial;
    const int blocks = (cols + ca::BLOCK - 1) / ca::BLOCK;
    const int segments = (blocks + gpu::SEGMENT_BLOCKS - 1) / gpu::SEGMENT_BLOCKS;
    const int g = gpu::lane() / 4, t = gpu::lane() % 4, token0 = gpu::block_y() * FEW_TOKENS;
    const gpu::In<uint8_t> tile = matrix + gpu::block() * gpu::tile_bytes(kind, cols);
    // Tokens past the last compute what is not stored, from the last one's activations.
    const auto held = [&](int token) { return token < to.tokens ? token : to.tokens - 1; };
    const int64_t column = held(token0 + g);
    const int64_t mine[2] = {held(token0 + 2 * t), held(token0 + 2 * t + 1)};
    // The 128 outputs of a tile belong to the first 128 threads, which add the segments in order.
    const int row = gpu::thread() / FEW_TOKENS, token = gpu::thread() % FEW_TOKENS;
    float y = 0.0f;
    for (int first = 0; first < segments; first += gpu::warps()) {
        const int segment = first + gpu::warp();
        if (segment < segments) {
            float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            const int end = (segment + 1) * gpu::SEGMENT_BLOCKS;
            GPU_UNROLL_4
            for (int b = segment * gpu::SEGMENT_BLOCKS; b < (end < blocks ? end : blocks); b++) {
                const gpu::Part a[2] = {gpu::read_part<kind>(tile, b, g, t),
                                        gpu::read_part<kind>(tile, b, g + 8, t)};
                const gpu::In<uint32_t> words =
                    gpu::in_as<uint32_t>(q + (column * blocks + b) * ca::BLOCK);
                const uint32_t right[2] = {words[t], words[t + 4]};
                Pair x;
                for (int i = 0; i < 2; i++) {
                    x.scale[i] = scale[mine[i] * blocks + b];
                    x.sums[i] = sums[mine[i] * blocks + b];
                }
                step<kind>(acc, a, right, x);
            }
            GPU_UNROLL
            for (int i = 0; i < 4; i++)
                partial[(gpu::warp() * gpu::TILE + g + i / 2 * 8) * FEW_TOKENS + 2 * t + i % 2] =
                    acc[i];
        }
        gpu::barrier();
        const int now = segments - first < gpu::warps() ? segments - first : gpu::warps();
        if (row < gpu::TILE)
            for (int s = 0; s < now; s++) {
                const float part = partial[(s * gpu::TILE + row) * FEW_TOKENS + token];
                y = first + s == 0 ? part : ca::add_rn(y, part);
            }
        gpu::barrier();
    }
    if (row < gpu::TILE) put(to, token0 + token, gpu::block() * gpu::TILE + row, y);
}

// Grid: groups of 64 rows (a tile of 16 for each warp), groups of 64 tokens.
template <Kind kind>
GPU_FN void many(gpu::In<uint8_t> matrix, int cols, gpu::In<int8_t> q, gpu::In<float> scale,
                 gpu::In<uint32_t> sums, const Target& to) {
    constexpr int PARTS = MANY_TOKENS / 8, WORDS = STAGE_ROW / 4;
    constexpr int COPIES = STAGE_BLOCKS * ca::BLOCK / 16;  // of 16 bytes, per token
    __shared__ gpu::Shared<gpu::Words4, 2 * MANY_TOKENS * STAGE_ROW / 16> values;
    __shared__ gpu::Shared<float, MANY_TOKENS * STAGE_BLOCKS> scales;
    __shared__ gpu::Shared<uint32_t, MANY_TOKENS * STAGE_BLOCKS> all_sums;
    const int blocks = (cols + ca::BLOCK - 1) / ca::BLOCK;
    const int stages = (blocks + STAGE_BLOCKS - 1) / STAGE_BLOCKS;
    const int g = gpu::lane() / 4, t = gpu::lane() % 4, token0 = gpu::block_y() * MANY_TOKENS;
    const int tiles = (to.rows + gpu::TILE - 1) / gpu::TILE;
    const int tile_index = gpu::block() * MANY_WARPS + gpu::warp();
    const bool has_tile = tile_index < tiles;
    const gpu::In<uint8_t> tile =
        matrix + (has_tile ? tile_index : 0) * gpu::tile_bytes(kind, cols);
    const auto held = [&](int token) { return token < to.tokens ? token : to.tokens - 1; };
    // Copies the activations of stage s, in the background, to the half of `values` that it uses.
    const auto fetch = [&](int s) {
        for (int i = gpu::thread(); i < MANY_TOKENS * COPIES; i += gpu::threads()) {
            const int token = i / COPIES, part = i % COPIES;
            const int64_t k = s * STAGE_BLOCKS * ca::BLOCK + part * 16;
            if (k < int64_t{blocks} * ca::BLOCK)
                gpu::copy_async(values[(s % 2 * MANY_TOKENS + token) * STAGE_ROW / 16 + part],
                                gpu::in_as<gpu::Words4>(
                                    q + (held(token0 + token) * int64_t{blocks} * ca::BLOCK + k)));
        }
        gpu::copies_commit();
    };
    float acc[PARTS][4], y[PARTS][4];
    GPU_UNROLL
    for (int p = 0; p < PARTS; p++)
        GPU_UNROLL
        for (int i = 0; i < 4; i++) acc[p][i] = y[p][i] = 0.0f;
    fetch(0);
    for (int s = 0; s < stages; s++) {
        const int first = s * STAGE_BLOCKS;
        const int now = blocks - first < STAGE_BLOCKS ? blocks - first : STAGE_BLOCKS;
        for (int i = gpu::thread(); i < MANY_TOKENS * now; i += gpu::threads()) {
            const int token = i / now, b = i % now;
            const int64_t at = held(token0 + token) * int64_t{blocks} + first + b;
            scales[token * STAGE_BLOCKS + b] = scale[at];
            all_sums[token * STAGE_BLOCKS + b] = sums[at];
        }
        if (s + 1 < stages) fetch(s + 1);
        if (s + 1 < stages)
            gpu::copies_wait<1>();
        else
            gpu::copies_wait<0>();
        gpu::barrier();
        for (int b = 0; b < now; b++) {
            const gpu::Part a[2] = {gpu::read_part<kind>(tile, first + b, g, t),
                                    gpu::read_part<kind>(tile, first + b, g + 8, t)};
            GPU_UNROLL
            for (int p = 0; p < PARTS; p++) {
                const int row = (s % 2 * MANY_TOKENS + p * 8 + g) * WORDS + b * 8;
                const uint32_t right[2] = {gpu::shared_word(values, row + t),
                                           gpu::shared_word(values, row + t + 4)};
                Pair x;
                for (int i = 0; i < 2; i++) {
                    const int at = (p * 8 + 2 * t + i) * STAGE_BLOCKS + b;
                    x.scale[i] = scales[at];
                    x.sums[i] = all_sums[at];
                }
                step<kind>(acc[p], a, right, x);
            }
        }
        // A stage ends a segment, or the row does.
        const int end = first + now;
        if (end % gpu::SEGMENT_BLOCKS == 0 || end == blocks)
            GPU_UNROLL
            for (int p = 0; p < PARTS; p++)
                GPU_UNROLL
                for (int i = 0; i < 4; i++) {
                    y[p][i] = end <= gpu::SEGMENT_BLOCKS ? acc[p][i] : ca::add_rn(y[p][i], acc[p][i]);
                    acc[p][i] = 0.0f;
                }
        gpu::barrier();
    }
    if (!has_tile) return;
    GPU_UNROLL
    for (int p = 0; p < PARTS; p++)
        GPU_UNROLL
        for (int i = 0; i < 4; i++)
            put(to, token0 + p * 8 + 2 * t + i % 2, tile_index * gpu::TILE + g + i / 2 * 8, y[p][i]);
}

// Float weights: a thread per row and token, the row's floats as they are.
template <Kind kind>
GPU_FN void floats(gpu::In<uint8_t> matrix, int cols, gpu::In<float> values, int64_t stride,
                   const Target& to) {
    const int row = gpu::thread() % gpu::TILE;
    const int token = gpu::block_y() * FEW_TOKENS + gpu::thread() / gpu::TILE;
    if (token >= to.tokens) return;
    const gpu::In<uint8_t> tile = matrix + gpu::block() * gpu::tile_bytes(kind, cols);
    float y = 0.0f;
    for (int first = 0; first < cols; first += ca::SEGMENT) {
        const int end = first + ca::SEGMENT < cols ? first + ca::SEGMENT : cols;
        float acc = 0.0f;
        for (int k = first; k < end; k++)
            acc = ca::fma_rn(gpu::float_at<kind>(tile, row, k), values[token * stride + k], acc);
        y = first == 0 ? acc : ca::add_rn(y, acc);
    }
    put(to, token, gpu::block() * gpu::TILE + row, y);
}

}  // namespace

// matrix: `rows` of `cols`; q, scale, sums, nonfinite: activations of `tokens`; bias: or null; then: see
// Then. few: grid (tiles, groups of 8 tokens), at least 128 threads. many: grid (groups of 4 tiles,
// groups of 64 tokens), 128 threads.
#define QUANTISED(kind)                                                                            \
    KERNEL(linear_few_##kind, FEW_WARPS* gpu::WARP, gpu::In<uint8_t> matrix, int rows, int cols,   \
           gpu::In<int8_t> q, gpu::In<float> scale, gpu::In<uint32_t> sums,                        \
           gpu::In<uint8_t> nonfinite, int tokens, gpu::In<float> bias, int then,                  \
           gpu::Out<float> out, int stride) {                                                      \
        few<Kind::kind>(matrix, cols, q, scale, sums,                                              \
                        {bias, nonfinite, out, stride, rows, tokens, static_cast<Then>(then)});    \
    }                                                                                              \
    KERNEL(linear_many_##kind, MANY_WARPS* gpu::WARP, gpu::In<uint8_t> matrix, int rows, int cols, \
           gpu::In<int8_t> q, gpu::In<float> scale, gpu::In<uint32_t> sums,                        \
           gpu::In<uint8_t> nonfinite, int tokens, gpu::In<float> bias, int then,                  \
           gpu::Out<float> out, int stride) {                                                      \
        many<Kind::kind>(matrix, cols, q, scale, sums,                                             \
                         {bias, nonfinite, out, stride, rows, tokens, static_cast<Then>(then)});   \
    }
QUANTISED(q4_0)
QUANTISED(q4_1)
QUANTISED(q5_0)
QUANTISED(q5_1)
QUANTISED(q8_0)
QUANTISED(iq4_nl)
QUANTISED(q4_k)
QUANTISED(q5_k)
QUANTISED(q6_k)

// As linear_few, from fp32 rows. Grid (tiles, groups of 8 tokens), 128 threads.
#define FLOATS(kind)                                                                               \
    KERNEL(linear_##kind, FEW_TOKENS* gpu::TILE, gpu::In<uint8_t> matrix, int rows, int cols,      \
           gpu::In<float> values, int values_stride, gpu::In<uint8_t> nonfinite, int tokens,       \
           gpu::In<float> bias, int then, gpu::Out<float> out, int stride) {                       \
        floats<Kind::kind>(matrix, cols, values, values_stride,                                    \
                           {bias, nonfinite, out, stride, rows, tokens, static_cast<Then>(then)}); \
    }
FLOATS(f16)
FLOATS(bf16)
FLOATS(f32)
