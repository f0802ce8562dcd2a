// Matrix products (rule 2) of packed weights with quantised activations, and what follows them.
//
// Every output is one chain per segment of 1024 k, and segments are added in order, so neither the split
// of work nor the number of tokens changes a bit. Products of blocks are exact integers on the tensor
// cores: A is 16 rows of weights as signed bytes, B is 8 tokens. Kernels per kind: `few` gives a tile of
// rows to a block and a segment to each warp, for decoding, where weights are read once and the memory
// bounds; `many` gives 64 rows and 32 or 64 tokens to a block. Where these are fewer blocks than a device
// computes at once, each has a part of the segments, and `add_segments` adds their sums. All load weights
// well before they use them: nothing else keeps enough bytes under way. Blocks of the same rows are
// neighbours in the grid, so that one of them reads weights from memory and the others from the cache.
// That one asks for its weights while the launch before still computes the activations.
#include "activations.h"
#include "blocks.h"

namespace {

using gpu::Kind;

constexpr int FEW_WARPS = 8;
constexpr int FEW_BLOCK_TOKENS = 8;
constexpr int MANY_WARPS = 4;
constexpr int ADD_THREADS = 256;
constexpr int SOME_TOKENS = 32, MANY_TOKENS = 64;
constexpr int STAGES = 3;  // spans of k whose activations a block of `many` holds or copies
constexpr int STAGE_ROW = gpu::SPAN_WORDS / 4 + 1;  // of 16 bytes; one more spreads rows over the banks

// What becomes of a product y.
enum class Then : int {
    store,  // out = y + bias
    add,    // out = out + (y + bias): the residual stream
    gate,   // out = silu(gate) * (y + bias)
};

// The gate's matrix, of the size of the other one, and its bias, which may be null. Without a matrix, `out`
// holds the gate's product.
struct Gate {
    gpu::In<uint8_t> matrix;
    gpu::In<float> bias;
};

struct Target {
    gpu::In<float> bias;  // or null
    gpu::Out<float> out;
    int64_t stride;
    int rows;
    int tokens;
    Then then;
};

// gate_y: the gate's product, if `gate` has a matrix.
GPU_FN void put(const Target& to, int token, int row, float y, const Gate& gate = {}, float gate_y = 0.0f) {
    if (row >= to.rows || token >= to.tokens) return;
    if (to.bias) y = ca::add_rn(y, to.bias[row]);
    const int64_t at = token * to.stride + row;
    if (to.then == Then::add) y = ca::add_rn(to.out[at], y);
    if (to.then == Then::gate) {
        if (!gate.matrix) gate_y = to.out[at];
        if (gate.bias) gate_y = ca::add_rn(gate_y, gate.bias[row]);
        y = ca::mul_rn(ca::silu(gate_y), y);
    }
    to.out[at] = y;
}

// Of the two tokens 2t, 2t + 1 whose outputs a lane holds, in a block of k.
struct Pair {
    float scale[2];
    int32_t sum[2];  // kinds without a minimum do not read it
};

// One block of k into the four chains of a lane (rows 2g, 2g, 2g + 1, 2g + 1; tokens 2t, 2t + 1 of each).
template <Kind kind>
GPU_FN void step(float (&acc)[4], const gpu::Part& a, const uint32_t (&b)[2], const Pair& x) {
    constexpr bool has_factor = kind == Kind::q4_k || kind == Kind::q5_k || kind == Kind::q6_k;
    int32_t first[4], second[4];
    GPU_UNROLL
    for (int i = 0; i < 4; i++) {  // a sum of up to 2²² over the magic number has the bits of a float
        first[i] = has_factor ? 0 : static_cast<int32_t>(ca::ROUND_MAGIC_BITS);
        second[i] = 0;
    }
    if constexpr (kind == Kind::q6_k) {  // a factor for each half
        const uint32_t low[2] = {a.q[0], a.q[1]}, high[2] = {a.q[2], a.q[3]};
        gpu::mma_k16_ss(first, low, b[0]);
        gpu::mma_k16_ss(second, high, b[1]);
    } else {
        gpu::mma_k32_ss(first, a.q, b);
    }
    GPU_UNROLL
    for (int i = 0; i < 4; i++) {
        const int row = i / 2, token = i % 2;
        if constexpr (has_factor) {
            int32_t integer = a.factor[row][0] * first[i];
            if constexpr (kind == Kind::q6_k) integer += a.factor[row][1] * second[i];
            acc[i] = ca::step(acc[i], integer, a.d[row], x.scale[token]);
        } else {
            const float bits = ca::float_of(static_cast<uint32_t>(first[i]));
            const float integer = ca::sub_rn(bits, ca::ROUND_MAGIC);
            acc[i] = ca::fma_rn(integer, ca::mul_rn(a.d[row], x.scale[token]), acc[i]);
        }
        if constexpr (gpu::has_minimum(kind))
            acc[i] = ca::step(acc[i], a.min[row] * x.sum[token], a.m[row], x.scale[token]);
    }
}

// Before the activations are there, the blocks of the first tokens ask for their weights.
template <class Ask>
GPU_FN void begin_with(Ask ask) {
    gpu::launch_dependents();
    if (gpu::block() == 0) ask();
    gpu::dependency_wait();
}

// How many blocks of weights `few` loads before it uses the first of them, and again meanwhile.
GPU_FN constexpr int ahead_of(Kind kind) {
    return kind == Kind::q4_0 || kind == Kind::iq4_nl || kind == Kind::q4_1 ? 8 : 4;
}

// Grid: groups of 8 tokens, tiles of 16 rows. The segments of a gate come before those of the matrix.
template <Kind kind>
GPU_FN void few(gpu::In<uint8_t> matrix, int cols, gpu::In<uint32_t> q, gpu::In<float> scale,
                gpu::In<int32_t> sums, const Target& to, const Gate& gate) {
    constexpr int AHEAD = ahead_of(kind), SPAN = gpu::SPAN;
    __shared__ gpu::Shared<float, FEW_WARPS * gpu::TILE * FEW_BLOCK_TOKENS> partial;
    const int blocks = (cols + ca::BLOCK - 1) / ca::BLOCK;
    const int segments = (blocks + gpu::SEGMENT_BLOCKS - 1) / gpu::SEGMENT_BLOCKS;
    const int64_t spans = gpu::spans_of(cols);
    const int all = gate.matrix ? 2 * segments : segments;
    const int g = gpu::lane() / 4, t = gpu::lane() % 4, token0 = gpu::block() * FEW_BLOCK_TOKENS;
    const int64_t bytes = gpu::tile_bytes(kind, cols), tile_at = gpu::block_y() * bytes;
    begin_with([&] {
        if (gate.matrix) gpu::prefetch(gate.matrix + tile_at, bytes);
        gpu::prefetch(matrix + tile_at, bytes);
    });
    // Tokens past the last compute what is not stored, from the last one's activations.
    const auto held = [&](int token) { return token < to.tokens ? token : to.tokens - 1; };
    const auto words = gpu::in_as<gpu::Words4>(q + held(token0 + g) * spans * gpu::SPAN_WORDS);
    const int64_t mine[2] = {held(token0 + 2 * t) * spans, held(token0 + 2 * t + 1) * spans};
    // The 128 outputs of a tile belong to the first 128 threads, which add the segments in order.
    const int row = gpu::thread() / FEW_BLOCK_TOKENS, token = gpu::thread() % FEW_BLOCK_TOKENS;
    float y = 0.0f, gate_y = 0.0f;
    for (int first = 0; first < all; first += gpu::warps()) {
        const int index = first + gpu::warp();
        if (index < all) {
            float acc[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            const bool is_gate = index < all - segments;
            const gpu::In<uint8_t> tile = (is_gate ? gate.matrix : matrix) + tile_at;
            const int start = index % segments * gpu::SEGMENT_BLOCKS;
            const int end = start + gpu::SEGMENT_BLOCKS < blocks ? start + gpu::SEGMENT_BLOCKS : blocks;
            gpu::Packed next[AHEAD];
            const auto load = [&](int b) {
                if (b + AHEAD <= end)
                    GPU_UNROLL
                    for (int i = 0; i < AHEAD; i++)
                        next[i] = gpu::load_part_from<kind>(tile, b, i, g, t);
                else
                    GPU_UNROLL
                    for (int i = 0; i < AHEAD; i++)
                        next[i] = gpu::load_part<kind>(tile, b + i < end ? b + i : end - 1, g, t);
            };
            load(start);
            for (int b = start; b < end; b += AHEAD) {
                gpu::Packed now[AHEAD];
                GPU_UNROLL
                for (int i = 0; i < AHEAD; i++) now[i] = next[i];
                if (b + AHEAD < end) load(b + AHEAD);
                GPU_UNROLL
                for (int part = 0; part < AHEAD; part += SPAN) {
                    if (b + part >= end) break;
                    const int span = (b + part) / SPAN;
                    gpu::Words4 right[2], of[2], sum[2];
                    GPU_UNROLL
                    for (int i = 0; i < 2; i++) {
                        right[i] = words[span * (gpu::SPAN_WORDS / 4) + 2 * t + i];
                        of[i] = gpu::in_as<gpu::Words4>(scale)[mine[i] + span];
                        sum[i] = {{0, 0, 0, 0}};
                        if constexpr (gpu::has_minimum(kind))
                            sum[i] = gpu::in_as<gpu::Words4>(sums)[mine[i] + span];
                    }
                    GPU_UNROLL
                    for (int i = 0; i < SPAN; i++) {
                        if (b + part + i >= end) break;
                        const uint32_t both[2] = {right[i / 2].word[i % 2 * 2],
                                                  right[i / 2].word[i % 2 * 2 + 1]};
                        const Pair x = {{ca::float_of(of[0].word[i]), ca::float_of(of[1].word[i])},
                                        {static_cast<int32_t>(sum[0].word[i]),
                                         static_cast<int32_t>(sum[1].word[i])}};
                        step<kind>(acc, gpu::unpack<kind>(now[part + i], t), both, x);
                    }
                }
            }
            GPU_UNROLL
            for (int i = 0; i < 4; i++)
                partial[(gpu::warp() * gpu::TILE + 2 * g + i / 2) * FEW_BLOCK_TOKENS + 2 * t + i % 2] =
                    acc[i];
        }
        gpu::barrier();
        const int now = all - first < gpu::warps() ? all - first : gpu::warps();
        if (row < gpu::TILE)
            for (int s = 0; s < now; s++) {
                const float part = partial[(s * gpu::TILE + row) * FEW_BLOCK_TOKENS + token];
                if (first + s == segments) gate_y = y;
                y = first + s == 0 || first + s == segments ? part : ca::add_rn(y, part);
            }
        gpu::barrier();
    }
    if (row < gpu::TILE)
        put(to, token0 + token, gpu::block_y() * gpu::TILE + row, y, gate, gate_y);
}

// Sums of segments, which are added later: [segment][token][row]. Each block has `each` segments.
struct Segments {
    gpu::Out<float> partials;  // or null: a block has all of them, and adds them
    int each;
};

// Calls `put_one` with each output of a lane, its token and row, and where it lies in the accumulators. (No
// lambda with a parameter of type auto: NVRTC 13.0 takes one in a template for a function of the host.)
template <int parts, class PutOne>
GPU_FN void for_outputs(int token0, int row0, PutOne put_one) {
    const int g = gpu::lane() / 4, t = gpu::lane() % 4;
    GPU_UNROLL
    for (int p = 0; p < parts; p++)
        GPU_UNROLL
        for (int i = 0; i < 4; i++) put_one(token0 + p * 8 + 2 * t + i % 2, row0 + 2 * g + i / 2, p, i);
}

// Grid: groups of `tokens` tokens, groups of 64 rows (a tile of 16 for each warp), groups of segments.
template <Kind kind, int tokens>
GPU_FN void many(gpu::In<uint8_t> matrix, int cols, gpu::In<uint32_t> q, gpu::In<float> scale,
                 gpu::In<int32_t> sums, const Target& to, const Segments& segments) {
    constexpr int PARTS = tokens / 8, COPIES = gpu::SPAN_WORDS / 4;  // of 16 bytes, per token
    constexpr int SEGMENT_SPANS = gpu::SEGMENT_BLOCKS / gpu::SPAN;
    constexpr bool has_sums = gpu::has_minimum(kind);
    __shared__ gpu::Shared<gpu::Words4, STAGES * tokens * STAGE_ROW> values;
    __shared__ gpu::Shared<gpu::Words4, STAGES * tokens> scales;
    __shared__ gpu::Shared<gpu::Words4, has_sums ? STAGES * tokens : 1> all_sums;
    const int blocks = (cols + ca::BLOCK - 1) / ca::BLOCK;
    const int all_spans = static_cast<int>(gpu::spans_of(cols));
    const int first_span = gpu::block_z() * segments.each * SEGMENT_SPANS;
    const int behind = first_span + segments.each * SEGMENT_SPANS;
    const int spans = behind < all_spans ? behind : all_spans;
    const int g = gpu::lane() / 4, t = gpu::lane() % 4, token0 = gpu::block() * tokens;
    const int tiles = (to.rows + gpu::TILE - 1) / gpu::TILE, first_tile = gpu::block_y() * MANY_WARPS;
    const int tile_index = first_tile + gpu::warp(), row0 = tile_index * gpu::TILE;
    const bool has_tile = tile_index < tiles;
    const int64_t bytes = gpu::tile_bytes(kind, cols);
    const gpu::In<uint8_t> tile = matrix + (has_tile ? tile_index : tiles - 1) * bytes;
    begin_with([&] {
        const int64_t from = gpu::tile_bytes(kind, first_span * gpu::SPAN * ca::BLOCK);
        const int64_t end =
            spans < all_spans ? gpu::tile_bytes(kind, spans * gpu::SPAN * ca::BLOCK) : bytes;
        for (int i = first_tile; i < first_tile + MANY_WARPS && i < tiles; i++)
            gpu::prefetch(matrix + (i * bytes + from), end - from);
    });
    // Copies the activations of a span, in the background.
    const auto fetch = [&](int span) {
        for (int i = gpu::thread(); span < spans && i < tokens * COPIES; i += gpu::threads()) {
            const int token = i / COPIES, part = i % COPIES, row = span % STAGES * tokens + token;
            const int64_t held = token0 + token < to.tokens ? token0 + token : to.tokens - 1;
            const int64_t from = held * all_spans + span;
            gpu::copy_async(values[row * STAGE_ROW + part],
                            gpu::in_as<gpu::Words4>(q) + (from * COPIES + part));
            if (part == 0) gpu::copy_async(scales[row], gpu::in_as<gpu::Words4>(scale) + from);
            if (has_sums && part == 1)
                gpu::copy_async(all_sums[row], gpu::in_as<gpu::Words4>(sums) + from);
        }
        gpu::copies_commit();
    };
    gpu::Packed next[2];
    const auto load = [&](int b) {  // two blocks, of which the last may be there twice
        const int first = b < blocks ? b : 0;
        next[0] = gpu::load_part_from<kind>(tile, first, 0, g, t);
        next[1] = gpu::load_part_from<kind>(tile, first, first + 1 < blocks ? 1 : 0, g, t);
    };
    float acc[PARTS][4], y[PARTS][4];
    GPU_UNROLL
    for (int p = 0; p < PARTS; p++)
        GPU_UNROLL
        for (int i = 0; i < 4; i++) acc[p][i] = y[p][i] = 0.0f;
    for (int i = 0; i < STAGES - 1; i++) fetch(first_span + i);
    load(first_span * gpu::SPAN);
    for (int span = first_span; span < spans; span++) {
        gpu::copies_wait<STAGES - 2>();
        gpu::barrier();  // the copies of all are there, and the span before was read
        fetch(span + STAGES - 1);
        GPU_NO_UNROLL  // fewer registers, so that three blocks share a multiprocessor
        for (int two = 0; two < gpu::SPAN / 2; two++) {
            const int b = span * gpu::SPAN + 2 * two;
            if (b >= blocks) break;
            const bool has_second = b + 1 < blocks;
            const gpu::Part a[2] = {gpu::unpack<kind>(next[0], t), gpu::unpack<kind>(next[1], t)};
            load(b + 2);
            const int row = span % STAGES * tokens;
            const int right_at = (row + g) * STAGE_ROW + 2 * t + two;
            const int scale_at = (row + 2 * t) * 4 + 2 * two;
            GPU_UNROLL
            for (int p = 0; p < PARTS; p++) {
                const gpu::Words4 right = values[right_at + p * 8 * STAGE_ROW];
                Pair x[2] = {};
                GPU_UNROLL
                for (int i = 0; i < 4; i++) {
                    const int at = scale_at + p * 8 * 4 + i % 2 * 4 + i / 2;
                    x[i / 2].scale[i % 2] = ca::float_of(gpu::shared_word(scales, at));
                    if constexpr (has_sums)
                        x[i / 2].sum[i % 2] = static_cast<int32_t>(gpu::shared_word(all_sums, at));
                }
                const uint32_t first[2] = {right.word[0], right.word[1]};
                const uint32_t second[2] = {right.word[2], right.word[3]};
                step<kind>(acc[p], a[0], first, x[0]);
                if (has_second) step<kind>(acc[p], a[1], second, x[1]);
            }
        }
        // A span ends a segment, or the row does.
        const int end = (span + 1) * gpu::SPAN;
        if (end % gpu::SEGMENT_BLOCKS && end < blocks) continue;
        if (segments.partials) {
            const int64_t segment = span / SEGMENT_SPANS * int64_t{to.tokens};
            for_outputs<PARTS>(token0, row0, [&](int token, int row, int p, int i) {
                if (row < to.rows && token < to.tokens)
                    segments.partials[(segment + token) * to.rows + row] = acc[p][i];
            });
        }
        GPU_UNROLL
        for (int p = 0; p < PARTS; p++)
            GPU_UNROLL
            for (int i = 0; i < 4; i++) {
                y[p][i] = end <= gpu::SEGMENT_BLOCKS ? acc[p][i] : ca::add_rn(y[p][i], acc[p][i]);
                acc[p][i] = 0.0f;
            }
    }
    gpu::copies_wait<0>();
    if (has_tile && !segments.partials)
        for_outputs<PARTS>(token0, row0, [&](int token, int row, int p, int i) {
            put(to, token, row, y[p][i]);
        });
}

// Float weights: a thread per row and token, the row's floats as they are.
template <Kind kind>
GPU_FN void floats(gpu::In<uint8_t> matrix, int cols, gpu::In<float> values, int64_t stride,
                   gpu::In<float> scale, const Target& to) {
    const int row = gpu::thread() % gpu::TILE;
    const int token = gpu::block() * FEW_BLOCK_TOKENS + gpu::thread() / gpu::TILE;
    const int64_t bytes = gpu::tile_bytes(kind, cols);
    const gpu::In<uint8_t> tile = matrix + gpu::block_y() * bytes;
    begin_with([&] { gpu::prefetch(tile, bytes); });
    if (token >= to.tokens) return;
    float y = 0.0f;
    for (int first = 0; first < cols; first += ca::SEGMENT) {
        const int end = first + ca::SEGMENT < cols ? first + ca::SEGMENT : cols;
        float acc = 0.0f;
        for (int k = first; k < end; k++)
            acc = ca::fma_rn(gpu::float_at<kind>(tile, row, k), values[token * stride + k], acc);
        y = first == 0 ? acc : ca::add_rn(y, acc);
    }
    const gpu::In<float> scales = scale + token * gpu::spans_of(cols) * gpu::SPAN;
    for (int b = 0; b * ca::BLOCK < cols; b++)  // a value may be too large for rule 1, and finite
        if (!ca::is_finite(scales[b])) y = ca::canonical_nan();
    put(to, token, gpu::block_y() * gpu::TILE + row, y);
}

}  // namespace

// matrix: `rows` of `cols`; q, scale, sums: activations of `tokens`; bias: or null; then: see
// Then; gate, gate_bias: see Gate; partials, each: see Segments. few: grid (groups of 8 tokens, tiles), at
// least 128 threads. some and many: grid (groups of 32 or 64 tokens, groups of 4 tiles, groups of
// segments), 128 threads.
#define MANY(name, group, kind)                                                                    \
    KERNEL(linear_##name##_##kind, MANY_WARPS* gpu::WARP, gpu::In<uint8_t> matrix, int rows,       \
           int cols, gpu::In<uint32_t> q, gpu::In<float> scale, gpu::In<int32_t> sums, int tokens, \
           gpu::In<float> bias, int then, gpu::Out<float> out, int stride,                         \
           gpu::Out<float> partials, int each) {                                                   \
        many<Kind::kind, group>(matrix, cols, q, scale, sums,                                      \
                                {bias, out, stride, rows, tokens, static_cast<Then>(then)},        \
                                {partials, each});                                                 \
    }
#define QUANTISED(kind)                                                                            \
    KERNEL(linear_few_##kind, FEW_WARPS* gpu::WARP, gpu::In<uint8_t> matrix, int rows, int cols,   \
           gpu::In<uint32_t> q, gpu::In<float> scale, gpu::In<int32_t> sums, int tokens,           \
           gpu::In<float> bias, int then, gpu::Out<float> out, int stride, gpu::In<uint8_t> gate,  \
           gpu::In<float> gate_bias) {                                                             \
        few<Kind::kind>(matrix, cols, q, scale, sums,                                              \
                        {bias, out, stride, rows, tokens, static_cast<Then>(then)},                \
                        {gate, gate_bias});                                                        \
    }                                                                                              \
    MANY(some, SOME_TOKENS, kind)                                                                  \
    MANY(many, MANY_TOKENS, kind)
QUANTISED(q4_0)
QUANTISED(q4_1)
QUANTISED(q5_0)
QUANTISED(q5_1)
QUANTISED(q8_0)
QUANTISED(iq4_nl)
QUANTISED(q4_k)
QUANTISED(q5_k)
QUANTISED(q6_k)

// As linear_few, from fp32 rows. Grid (groups of 8 tokens, tiles), 128 threads.
#define FLOATS(kind)                                                                               \
    KERNEL(linear_##kind, FEW_BLOCK_TOKENS* gpu::TILE, gpu::In<uint8_t> matrix, int rows, int cols,      \
           gpu::In<float> values, int values_stride, gpu::In<float> scale, int tokens,             \
           gpu::In<float> bias, int then, gpu::Out<float> out, int stride) {                       \
        floats<Kind::kind>(matrix, cols, values, values_stride, scale,                             \
                           {bias, out, stride, rows, tokens, static_cast<Then>(then)});            \
    }
FLOATS(f16)
FLOATS(bf16)
FLOATS(f32)

// Adds the sums of `segments` segments in order; what follows is as above. Grid (tokens, blocks that share
// the rows).
KERNEL(add_segments, ADD_THREADS, gpu::In<float> partials, int segments, int rows, int tokens,
       gpu::In<float> bias, int then, gpu::Out<float> out, int stride) {
    gpu::begin();
    const int token = gpu::block(), row = gpu::block_y() * gpu::threads() + gpu::thread();
    if (row >= rows) return;
    const auto at = [&](int segment) {
        return partials[(int64_t{segment} * tokens + token) * rows + row];
    };
    float y = at(0);
    GPU_UNROLL_4
    for (int segment = 1; segment < segments; segment++) y = ca::add_rn(y, at(segment));
    put({bias, out, stride, rows, tokens, static_cast<Then>(then)}, token, row, y);
}
