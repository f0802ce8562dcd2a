// Matrix products (rule 2) of packed weights with quantised activations, and what follows them.
//
// Every output is one chain per segment of 1024 k, and segments are added in order, so neither the split
// of work nor the number of tokens changes a bit. Products of blocks are exact integers on the tensor
// cores: A is 16 rows of weights as signed bytes, B is 8 tokens. Kernels per kind: `few` gives a tile of
// rows to a block and a segment to each warp, for decoding, where weights are read once and the memory
// bounds; `many` gives 64 rows and 32 or 64 tokens to a block. Where these are fewer blocks than a device
// computes at once, each has a part of the segments, and `add_segments` (segments.cu) adds their sums. All load weights
// well before they use them: nothing else keeps enough bytes under way. Blocks of the same rows are
// neighbours in the grid, so that one of them reads weights from memory and the others from the cache.
// That one asks for its weights while the launch before still computes the activations. The same kernels
// compute pairs of tokens and experts: see Pairs in products.h.
#include "products.h"

namespace {

using gpu::Columns;
using gpu::Gate;
using gpu::Kind;
using gpu::Pairs;
using gpu::Target;
using gpu::Then;

constexpr int FEW_WARPS = 8;
constexpr int FEW_BLOCK_TOKENS = 8;
constexpr int MANY_WARPS = 4;
constexpr int FEW_AT_ONCE = 2, MANY_AT_ONCE = 3;  // blocks whose registers a multiprocessor has
constexpr int SOME_TOKENS = 32, MANY_TOKENS = 64;
constexpr int STAGES = 3;  // spans of k whose activations a block of `many` holds or copies
constexpr int STAGE_ROW = gpu::SPAN_WORDS / 4 + 1;  // of 16 bytes; one more spreads rows over the banks

// Kinds of which t * I, with I = Σ n q before a factor, has at most 24 significant bits (7 of t, 17 of I).
// So t * I, (a factor) * d and t * S are exact floats, and a step is one fma of two of them: the same sum
// of the same exact product as fma(float(I), d * t, acc) of rule 2, which is rounded once; of mxfp4 it is
// the step of rule 2. A sum of up to 2²² over the magic number M has the bits of the float M + I, and
// fma(M + I, t, -M * t) is t * I.
GPU_FN constexpr bool scales_first(Kind kind) {
    return kind != Kind::q8_0 && kind != Kind::iq4_nl && kind != Kind::iq4_xs && kind != Kind::q2_k &&
           !gpu::has_halves(kind);
}

// An integer below 2²² over the magic number, as a float.
GPU_FN float over_magic(int32_t n) {
    return ca::float_of(ca::ROUND_MAGIC_BITS + static_cast<uint32_t>(n));
}

// What all tokens need of a block of weights, of rows 2g and 2g + 1.
struct Block {
    uint32_t q[4];       // registers of A
    float scale[2];      // d, times the factor of q4_k, q5_k, iq4_xs and iq3_*
    float min[2];        // m, times its factor
    float factor[2][2];  // of the halves: has_halves
    float offset[2];     // of these: -M * factor[...][0]
    uint32_t minima;     // of halves, of q2_k: byte 2 * row + half
};

template <Kind kind>
GPU_FN Block block_of(const gpu::Packed& from, int t) {
    const gpu::Part part = gpu::unpack<kind>(from, t);
    Block to = {};
    GPU_UNROLL
    for (int i = 0; i < 4; i++) to.q[i] = part.q[i];
    to.minima = part.minima;
    GPU_UNROLL
    for (int row = 0; row < 2; row++) {
        float factor[2];
        GPU_UNROLL
        for (int half = 0; half < 2; half++)
            factor[half] = ca::sub_rn(over_magic(part.factor[row][half]), ca::ROUND_MAGIC);
        to.scale[row] = part.d[row];
        to.min[row] = part.m[row];
        if constexpr (kind == Kind::q4_k || kind == Kind::q5_k) {
            const float min = ca::sub_rn(over_magic(part.min[row]), ca::ROUND_MAGIC);
            to.scale[row] = ca::mul_rn(part.d[row], factor[0]);
            to.min[row] = ca::mul_rn(part.m[row], min);
        } else if constexpr (gpu::has_nibbles(kind)) {
            to.scale[row] = ca::mul_rn(part.d[row], factor[0]);
        } else if constexpr (gpu::has_halves(kind)) {
            to.factor[row][0] = factor[0];
            to.factor[row][1] = factor[1];
            to.offset[row] = ca::mul_rn(factor[0], -ca::ROUND_MAGIC);
        }
    }
    return to;
}

// Of the two tokens 2t, 2t + 1 whose outputs a lane holds, in a block of k: t, -M * t and t * S.
struct TwoTokens {
    float scale[2], offset[2], sum[2];
};

// scales, sums: of both tokens; kinds without a minimum do not read the sums.
template <Kind kind>
GPU_FN TwoTokens two_of(const uint32_t (&scales)[2], const uint32_t (&sums)[2]) {
    TwoTokens to = {};
    GPU_UNROLL
    for (int i = 0; i < 2; i++) {
        to.scale[i] = ca::float_of(scales[i]);
        if constexpr (scales_first(kind) || gpu::has_minima(kind))
            to.offset[i] = ca::mul_rn(to.scale[i], -ca::ROUND_MAGIC);
        if constexpr (gpu::has_minimum(kind))
            to.sum[i] = ca::fma_rn(over_magic(static_cast<int32_t>(sums[i])), to.scale[i], to.offset[i]);
    }
    return to;
}

// One block of k into the four chains of a lane (rows 2g, 2g, 2g + 1, 2g + 1; tokens 2t, 2t + 1 of each).
template <Kind kind>
GPU_FN void step(float (&acc)[4], const Block& a, const uint32_t (&b)[2], const TwoTokens& x) {
    int32_t first[4], second[4];
    GPU_UNROLL
    for (int i = 0; i < 4; i++) first[i] = second[i] = static_cast<int32_t>(ca::ROUND_MAGIC_BITS);
    if constexpr (gpu::has_halves(kind)) {  // a factor for each half
        const uint32_t low[2] = {a.q[0], a.q[1]}, high[2] = {a.q[2], a.q[3]};
        gpu::mma_k16_ss(first, low, b[0]);
        gpu::mma_k16_ss(second, high, b[1]);
    } else {
        gpu::mma_k32_ss(first, a.q, b);
    }
    GPU_UNROLL
    for (int i = 0; i < 4; i++) {
        const int row = i / 2, token = i % 2;
        const float bits = ca::float_of(static_cast<uint32_t>(first[i]));
        if constexpr (scales_first(kind)) {
            const float scaled = ca::fma_rn(bits, x.scale[token], x.offset[token]);
            acc[i] = ca::fma_rn(scaled, a.scale[row], acc[i]);
        } else {
            float integer = ca::sub_rn(bits, ca::ROUND_MAGIC);
            if constexpr (gpu::has_halves(kind)) {  // each product and their sum have at most 24 bits
                const float other =
                    ca::sub_rn(ca::float_of(static_cast<uint32_t>(second[i])), ca::ROUND_MAGIC);
                integer = ca::fma_rn(other, a.factor[row][1],
                                     ca::fma_rn(bits, a.factor[row][0], a.offset[row]));
            }
            acc[i] = ca::fma_rn(integer, ca::mul_rn(a.scale[row], x.scale[token]), acc[i]);
        }
        if constexpr (gpu::has_minimum(kind)) acc[i] = ca::fma_rn(x.sum[token], a.min[row], acc[i]);
    }
    if constexpr (gpu::has_minima(kind)) {  // times the sums of halves, below 2^16
        const uint32_t minima[4] = {
            gpu::bytes_of(a.minima, 0, 0x0000u), gpu::bytes_of(a.minima, 0, 0x2222u),
            gpu::bytes_of(a.minima, 0, 0x1111u), gpu::bytes_of(a.minima, 0, 0x3333u)};
        gpu::mma_k32_ss(second, minima, b);
        GPU_UNROLL
        for (int i = 0; i < 4; i++) {
            const float sum = ca::fma_rn(ca::float_of(static_cast<uint32_t>(second[i])),
                                         x.scale[i % 2], x.offset[i % 2]);
            acc[i] = ca::fma_rn(sum, a.min[i / 2], acc[i]);
        }
    }
}

// Quantised activations for `few` from the first row of a block on, so that indices of spans fit 32 bits; of
// pairs, from that of the first token: a step has fewer than 2^31 times 16 bytes of them.
struct Rows {
    gpu::In<gpu::Words4> q, scale, sums;  // of a row and a span 8 times 16 bytes, and 16 bytes
};
GPU_FN Rows rows_from(int first, int64_t spans, gpu::In<uint32_t> q, gpu::In<float> scale,
                      gpu::In<int32_t> sums) {
    const int64_t at = first * spans;
    return {gpu::in_as<gpu::Words4>(q + at * gpu::SPAN_WORDS),
            gpu::in_as<gpu::Words4>(scale + at * gpu::SPAN),
            gpu::in_as<gpu::Words4>(sums + at * gpu::SPAN)};
}

// How many blocks of weights `few` loads before it uses the first of them, and again meanwhile: as many as
// leave registers for the tokens.
GPU_FN constexpr int ahead_of(Kind kind, int groups) {
    const bool is_small = kind == Kind::q4_0 || kind == Kind::q4_1 || kind == Kind::iq4_nl ||
                          kind == Kind::mxfp4 || gpu::has_nibbles(kind);
    return is_small && groups == 1 ? 8 : 4;
}
// Whether it loads them while it computes the ones before. Kinds of many words a block have no registers for
// that beside 16 tokens, whose products take long enough for the other warps to wait.
GPU_FN constexpr bool loads_early(Kind kind, int groups) {
    const bool is_large =
        kind == Kind::q5_1 || kind == Kind::q4_k || kind == Kind::q5_k || gpu::has_halves(kind) ||
        gpu::has_minima(kind);
    return groups == 1 || !is_large;
}

// The first spans of what a lane of `few` reads of each group of 8 tokens: q of token g, and scales and
// sums of tokens 2t and 2t + 1.
template <int groups>
struct FewTokens {
    int q[groups], two[groups][2];
};

// `few` blocks from b on, of which those from `end` on are not there unless `is_whole`.
template <Kind kind, int groups, bool is_whole, int few>
GPU_FN void add_blocks(float (&acc)[groups][4], const gpu::Packed (&packed)[few],
                       const Rows& x, const FewTokens<groups>& mine, int b, int end, int t) {
    constexpr int SPAN = gpu::SPAN;
    GPU_UNROLL
    for (int part = 0; part < few; part += SPAN) {
        if (!is_whole && b + part >= end) break;
        const int span = (b + part) / SPAN;
        gpu::Words4 right[groups][2], of[groups][2], sum[groups][2];
        GPU_UNROLL
        for (int i = 0; i < 2 * groups; i++) {
            const int group = i / 2, one = i % 2;
            const int at = mine.two[group][one] + span;
            right[group][one] = x.q[(mine.q[group] + span) * (gpu::SPAN_WORDS / 4) + 2 * t + one];
            of[group][one] = x.scale[at];
            sum[group][one] = {{0, 0, 0, 0}};
            if constexpr (gpu::has_minimum(kind)) sum[group][one] = x.sums[at];
        }
        GPU_UNROLL
        for (int i = 0; i < SPAN; i++) {
            if (!is_whole && b + part + i >= end) break;
            const Block a = block_of<kind>(packed[part + i], t);
            GPU_UNROLL
            for (int group = 0; group < groups; group++) {
                const gpu::Words4* const q = right[group];
                const uint32_t both[2] = {q[i / 2].word[i % 2 * 2], q[i / 2].word[i % 2 * 2 + 1]};
                const uint32_t scales[2] = {of[group][0].word[i], of[group][1].word[i]};
                const uint32_t sums[2] = {sum[group][0].word[i], sum[group][1].word[i]};
                step<kind>(acc[group], a, both, two_of<kind>(scales, sums));
            }
        }
    }
}

// Grid: `groups` groups of 8 columns, groups of `tiles` tiles of 16 rows. Each tile has a share of the
// warps; more than one need a warp for each segment. The segments of a gate come before those of the
// matrix.
template <Kind kind, int groups>
GPU_FN void few(gpu::In<uint8_t> matrix, int cols, gpu::In<uint32_t> q, gpu::In<float> scale,
                gpu::In<int32_t> sums, const Target& to, const Gate& gate, const Pairs& pairs, int tiles) {
    constexpr int AHEAD = ahead_of(kind, groups), TOKENS = groups * FEW_BLOCK_TOKENS;
    constexpr bool is_early = loads_early(kind, groups);
    __shared__ gpu::Shared<float, FEW_WARPS * gpu::TILE * TOKENS> partial;
    const int blocks = (cols + ca::BLOCK - 1) / ca::BLOCK;
    const int segments = (blocks + gpu::SEGMENT_BLOCKS - 1) / gpu::SEGMENT_BLOCKS;
    const int spans = static_cast<int>(gpu::spans_of(cols));
    const int all = gate.matrix ? 2 * segments : segments, share = gpu::warps() / tiles;
    const int g = gpu::lane() / 4, t = gpu::lane() % 4;
    const int64_t bytes = gpu::tile_bytes(kind, cols);
    const int all_tiles = (to.rows + gpu::TILE - 1) / gpu::TILE, first_tile = gpu::block_y() * tiles;
    const Columns columns = gpu::begin_with(pairs, to.tokens, TOKENS, [&](int expert) {
        const int64_t at = (int64_t{expert} * all_tiles + first_tile) * bytes;
        const int n = first_tile + tiles < all_tiles ? tiles : all_tiles - first_tile;
        if (gate.matrix) gpu::prefetch(gate.matrix + at, n * bytes);
        gpu::prefetch(matrix + at, n * bytes);
    });
    if (columns.last < 0) return;
    const Rows x = rows_from(columns.base(), spans, q, scale, sums);
    FewTokens<groups> mine;
    GPU_UNROLL
    for (int group = 0; group < groups; group++) {
        const int first = group * FEW_BLOCK_TOKENS;
        mine.q[group] = columns.held(first + g) * spans;
        for (int i = 0; i < 2; i++) mine.two[group][i] = columns.held(first + 2 * t + i) * spans;
    }
    const int own_tile = first_tile + gpu::warp() / share;
    const int64_t tile_at =
        (int64_t{columns.expert} * all_tiles + (own_tile < all_tiles ? own_tile : all_tiles - 1)) * bytes;
    // The 128 outputs of a tile and a group belong to the first 128 threads, which add the segments in order.
    const int row = gpu::thread() / FEW_BLOCK_TOKENS, token = gpu::thread() % FEW_BLOCK_TOKENS;
    float y[groups], gate_y[groups];
    GPU_UNROLL
    for (int group = 0; group < groups; group++) y[group] = gate_y[group] = 0.0f;
    for (int first = 0; first < all; first += share) {
        const int index = first + gpu::warp() % share;
        if (index < all && gpu::warp() < tiles * share) {
            float acc[groups][4];
            GPU_UNROLL
            for (int i = 0; i < 4 * groups; i++) acc[i / 4][i % 4] = 0.0f;
            const bool is_gate = index < all - segments;
            const gpu::In<uint8_t> tile = (is_gate ? gate.matrix : matrix) + tile_at;
            const int start = index % segments * gpu::SEGMENT_BLOCKS;
            const int end = start + gpu::SEGMENT_BLOCKS < blocks ? start + gpu::SEGMENT_BLOCKS : blocks;
            gpu::Packed next[AHEAD];
            const auto load = [&](int b) {
                if (b + AHEAD <= end)
                    GPU_UNROLL
                    for (int i = 0; i < AHEAD; i++)
                        next[i] = gpu::load_part_from<kind, gpu::SPAN>(tile, b, i, g, t);
                else
                    GPU_UNROLL
                    for (int i = 0; i < AHEAD; i++)
                        next[i] = gpu::load_part<kind>(tile, b + i < end ? b + i : end - 1, g, t);
            };
            if (is_early) load(start);
            for (int b = start; b < end; b += AHEAD) {
                if (!is_early) load(b);
                gpu::Packed now[AHEAD];
                GPU_UNROLL
                for (int i = 0; i < AHEAD; i++) now[i] = next[i];
                if (is_early && b + AHEAD < end) load(b + AHEAD);
                if (b + AHEAD <= end)  // without a branch between two blocks: they are computed at once
                    add_blocks<kind, groups, true>(acc, now, x, mine, b, end, t);
                else
                    add_blocks<kind, groups, false>(acc, now, x, mine, b, end, t);
            }
            GPU_UNROLL
            for (int i = 0; i < 4 * groups; i++) {
                const int of = 2 * g + i % 4 / 2, column = i / 4 * FEW_BLOCK_TOKENS + 2 * t + i % 2;
                partial[(gpu::warp() * gpu::TILE + of) * TOKENS + column] = acc[i / 4][i % 4];
            }
        }
        gpu::barrier();
        const int now = all - first < share ? all - first : share;
        for (int tile = 0; tile < tiles && row < gpu::TILE; tile++) {
            for (int s = 0; s < now; s++)
                GPU_UNROLL
                for (int group = 0; group < groups; group++) {
                    const int column = group * FEW_BLOCK_TOKENS + token;
                    const float part =
                        partial[((tile * share + s) * gpu::TILE + row) * TOKENS + column];
                    if (first + s == segments) gate_y[group] = y[group];
                    const bool is_first = first + s == 0 || first + s == segments;
                    y[group] = is_first ? part : ca::add_rn(y[group], part);
                }
            if (first + share < all) continue;
            const Columns at = gpu::columns_of(pairs, to.tokens, TOKENS);  // again: registers are few
            GPU_UNROLL
            for (int group = 0; group < groups; group++) {
                const int column = group * FEW_BLOCK_TOKENS + token;
                if (column <= at.last)
                    gpu::put(to, at.expert, at.row(column), (first_tile + tile) * gpu::TILE + row, y[group],
                             gate, gate_y[group]);
            }
        }
        gpu::barrier();
    }
}

// Sums of segments, which are added later: [segment][token][row]. Each block has `each` segments.
struct Segments {
    gpu::Out<float> partials;  // or null: a block has all of them, and adds them
    int each;
};

// Calls `put_one` with each output of a lane, its column and row, and where it lies in the accumulators. (No
// lambda with a parameter of type auto: NVRTC 13.0 takes one in a template for a function of the host.)
template <int parts, class PutOne>
GPU_FN void for_outputs(int row0, PutOne put_one) {
    const int g = gpu::lane() / 4, t = gpu::lane() % 4;
    GPU_UNROLL
    for (int p = 0; p < parts; p++)
        GPU_UNROLL
        for (int i = 0; i < 4; i++) put_one(p * 8 + 2 * t + i % 2, row0 + 2 * g + i / 2, p, i);
}

// Activations of a block of `many`, STAGES spans at once.
template <int tokens, int n_sums>
struct Staged {
    gpu::Shared<gpu::Words4, STAGES * tokens * STAGE_ROW>& values;
    gpu::Shared<gpu::Words4, STAGES * tokens>& scales;
    gpu::Shared<gpu::Words4, n_sums>& sums;
};

// One or two blocks of k into the chains of a lane: half `half` of a span. No branch is between two
// products, so that they are computed at once.
template <Kind kind, int count, int tokens, int n_sums>
GPU_FN void add_two(float (&acc)[tokens / 8][4], const Block (&a)[2], const Staged<tokens, n_sums>& x,
                     int span, int half) {
    const int g = gpu::lane() / 4, t = gpu::lane() % 4, row = span % STAGES * tokens;
    const int right_at = (row + g) * STAGE_ROW + 2 * t + half;
    const int scale_at = (row + 2 * t) * 4 + 2 * half;
    GPU_UNROLL
    for (int p = 0; p < tokens / 8; p++) {
        const gpu::Words4 right = x.values[right_at + p * 8 * STAGE_ROW];
        GPU_UNROLL
        for (int i = 0; i < count; i++) {
            uint32_t scales[2], sums[2] = {};
            GPU_UNROLL
            for (int token = 0; token < 2; token++) {
                const int at = scale_at + p * 8 * 4 + token * 4 + i;
                scales[token] = gpu::shared_word(x.scales, at);
                if constexpr (gpu::has_minimum(kind)) sums[token] = gpu::shared_word(x.sums, at);
            }
            const uint32_t both[2] = {right.word[2 * i], right.word[2 * i + 1]};
            step<kind>(acc[p], a[i], both, two_of<kind>(scales, sums));
        }
    }
}

// Grid: groups of `tokens` columns, groups of 64 rows (a tile of 16 for each warp), groups of segments.
template <Kind kind, int tokens>
GPU_FN void many(gpu::In<uint8_t> matrix, int cols, gpu::In<uint32_t> q, gpu::In<float> scale,
                 gpu::In<int32_t> sums, const Target& to, const Segments& segments, const Pairs& pairs) {
    constexpr int PARTS = tokens / 8, COPIES = gpu::SPAN_WORDS / 4;  // of 16 bytes, per token
    constexpr int SEGMENT_SPANS = gpu::SEGMENT_BLOCKS / gpu::SPAN;
    constexpr bool has_sums = gpu::has_minimum(kind);
    constexpr int THREADS = MANY_WARPS * gpu::WARP;
    static_assert(2 * tokens <= THREADS && THREADS % COPIES == 0);
    constexpr int TWOS = kind == Kind::q4_0 ? gpu::SPAN / 2 : 1;  // of a round: others lack registers for two
    constexpr int N_SUMS = has_sums ? STAGES * tokens : 1;
    __shared__ gpu::Shared<gpu::Words4, STAGES * tokens * STAGE_ROW> values;
    __shared__ gpu::Shared<gpu::Words4, STAGES * tokens> scales;
    __shared__ gpu::Shared<gpu::Words4, N_SUMS> all_sums;
    __shared__ gpu::Shared<int32_t, tokens> held;  // rows of activations of the columns, of all
    const Staged<tokens, N_SUMS> staged = {values, scales, all_sums};
    const int blocks = (cols + ca::BLOCK - 1) / ca::BLOCK;
    const int all_spans = static_cast<int>(gpu::spans_of(cols));
    const int first_span = gpu::block_z() * segments.each * SEGMENT_SPANS;
    const int behind = first_span + segments.each * SEGMENT_SPANS;
    const int spans = behind < all_spans ? behind : all_spans;
    const int end = spans * gpu::SPAN < blocks ? spans * gpu::SPAN : blocks;
    const int g = gpu::lane() / 4, t = gpu::lane() % 4;
    const int tiles = (to.rows + gpu::TILE - 1) / gpu::TILE, first_tile = gpu::block_y() * MANY_WARPS;
    const int tile_index = first_tile + gpu::warp(), row0 = tile_index * gpu::TILE;
    const bool has_tile = tile_index < tiles;
    const int64_t bytes = gpu::tile_bytes(kind, cols);
    const Columns columns = gpu::begin_with(pairs, to.tokens, tokens, [&](int expert) {
        const int64_t from = gpu::tile_bytes(kind, first_span * gpu::SPAN * ca::BLOCK);
        const int64_t end =
            spans < all_spans ? gpu::tile_bytes(kind, spans * gpu::SPAN * ca::BLOCK) : bytes;
        for (int i = first_tile; i < first_tile + MANY_WARPS && i < tiles; i++)
            gpu::prefetch(matrix + ((int64_t{expert} * tiles + i) * bytes + from), end - from);
    });
    if (columns.last < 0) return;
    const gpu::In<uint8_t> tile =
        matrix + (int64_t{columns.expert} * tiles + (has_tile ? tile_index : tiles - 1)) * bytes;
    if (gpu::thread() < tokens) held[gpu::thread()] = columns.base() + columns.held(gpu::thread());
    gpu::barrier();
    // From the first row of all on: a pointer of a block's own would need registers.
    const auto span_at = [&](int token, int span) { return int64_t{held[token]} * all_spans + span; };
    // Copies the activations of a span, in the background.
    const auto fetch = [&](int span) {
        const int stage = span % STAGES * tokens, part = gpu::thread() % COPIES;
        if (span < spans) {
            GPU_UNROLL
            for (int i = 0; i < tokens; i += THREADS / COPIES) {
                const int token = i + gpu::thread() / COPIES;
                gpu::copy_async(values[(stage + token) * STAGE_ROW + part],
                                gpu::in_as<gpu::Words4>(q) + (span_at(token, span) * COPIES + part));
            }
            const int token = gpu::thread() % tokens;
            if (gpu::thread() < tokens)
                gpu::copy_async(scales[stage + token],
                                gpu::in_as<gpu::Words4>(scale) + span_at(token, span));
            else if (has_sums && gpu::thread() < 2 * tokens)
                gpu::copy_async(all_sums[stage + token],
                                gpu::in_as<gpu::Words4>(sums) + span_at(token, span));
        }
        gpu::copies_commit();
    };
    gpu::Packed next[2];
    const auto load_two = [&](int b) {
        next[0] = gpu::load_part_from<kind, 2>(tile, b, 0, g, t);
        next[1] = gpu::load_part_from<kind, 2>(tile, b, 1, g, t);
    };
    const auto load = [&](int b) {  // the same, where the second or both may be past the last
        const int first = b < blocks ? b : 0;
        next[0] = gpu::load_part_from<kind, 2>(tile, first, 0, g, t);
        next[1] = gpu::load_part_from<kind, 2>(tile, first, first + 1 < blocks ? 1 : 0, g, t);
    };
    float acc[PARTS][4], y[PARTS][4];
    GPU_UNROLL
    for (int p = 0; p < PARTS; p++)
        GPU_UNROLL
        for (int i = 0; i < 4; i++) acc[p][i] = y[p][i] = 0.0f;
    for (int i = 0; i < STAGES - 1; i++) fetch(first_span + i);
    load(first_span * gpu::SPAN);
    const auto arrive = [&](int b) {  // block b is there
        if (b % gpu::SPAN) return;
        gpu::copies_wait<STAGES - 2>();
        gpu::barrier();  // the copies of all are there, and the span before was read
        fetch(b / gpu::SPAN + STAGES - 1);
    };
    for (int first = first_span * gpu::SPAN; first < end; first += gpu::SEGMENT_BLOCKS) {
        const int segment_end = first + gpu::SEGMENT_BLOCKS < end ? first + gpu::SEGMENT_BLOCKS : end;
        int b = first;
        GPU_NO_UNROLL  // fewer registers, so that three blocks share a multiprocessor
        for (; b + 2 * TWOS <= segment_end; b += 2 * TWOS) {
            arrive(b);
            GPU_UNROLL
            for (int i = 0; i < TWOS; i++) {
                const Block a[2] = {block_of<kind>(next[0], t), block_of<kind>(next[1], t)};
                if (i + 1 < TWOS)
                    load_two(b + 2 * i + 2);
                else
                    load(b + 2 * i + 2);
                add_two<kind, 2, tokens>(acc, a, staged, b / gpu::SPAN,
                                          TWOS == 1 ? b % gpu::SPAN / 2 : i);
            }
        }
        GPU_NO_UNROLL
        for (; b < segment_end; b += 2) {  // the last blocks of a row
            arrive(b);
            const Block a[2] = {block_of<kind>(next[0], t), block_of<kind>(next[1], t)};
            load(b + 2);
            if (b + 1 < segment_end)
                add_two<kind, 2, tokens>(acc, a, staged, b / gpu::SPAN, b % gpu::SPAN / 2);
            else
                add_two<kind, 1, tokens>(acc, a, staged, b / gpu::SPAN, b % gpu::SPAN / 2);
        }
        const int segment = first / gpu::SEGMENT_BLOCKS;
        if (segments.partials)
            for_outputs<PARTS>(row0, [&](int column, int row, int p, int i) {  // of tokens
                const int token = gpu::block() * tokens + column;
                if (row >= to.rows || token >= to.tokens) return;
                segments.partials[(segment * int64_t{to.tokens} + token) * to.rows + row] = acc[p][i];
            });
        GPU_UNROLL
        for (int p = 0; p < PARTS; p++)
            GPU_UNROLL
            for (int i = 0; i < 4; i++) {
                y[p][i] = segment == 0 ? acc[p][i] : ca::add_rn(y[p][i], acc[p][i]);
                acc[p][i] = 0.0f;
            }
    }
    gpu::copies_wait<0>();
    const Columns at = gpu::columns_of(pairs, to.tokens, tokens);  // again: registers are few
    if (has_tile && !segments.partials)
        for_outputs<PARTS>(row0, [&](int column, int row, int p, int i) {
            if (column <= at.last) gpu::put(to, at.expert, at.row(column), row, y[p][i]);
        });
}

}  // namespace

// matrix: `rows` of `cols`, or a bank of so many an expert; q, scale, sums: activations of `tokens`; bias:
// or null; then, limit: see Then; gate, gate_bias: see Gate; partials, each: see Segments; portions, order,
// of_row: see Pairs, of which `tokens` are. few and few2: grid (groups of 8 or 16 columns, groups of
// `tiles` tiles), at least 128 threads. some and many: grid (groups of 32 or 64 columns, groups of 4 tiles,
// groups of segments), 128 threads.
#define MANY(name, group, kind)                                                                    \
    KERNEL_AT_ONCE(linear_##name##_##kind, MANY_WARPS* gpu::WARP, MANY_AT_ONCE,                    \
                   gpu::In<uint8_t> matrix, int rows, int cols, gpu::In<uint32_t> q,               \
                   gpu::In<float> scale, gpu::In<int32_t> sums, int tokens, gpu::In<float> bias,   \
                   int then, gpu::Out<float> out, int stride, float limit,                         \
                   gpu::Out<float> partials, int each, gpu::In<gpu::Words4> portions,              \
                   gpu::In<int32_t> order, int of_row) {                                           \
        many<Kind::kind, group>(matrix, cols, q, scale, sums,                                      \
                                {bias, out, stride, limit, rows, tokens, static_cast<Then>(then)}, \
                                {partials, each}, {portions, order, of_row});                      \
    }
#define FEW(name, groups, kind)                                                                    \
    KERNEL_AT_ONCE(linear_##name##_##kind, FEW_WARPS* gpu::WARP, FEW_AT_ONCE,                      \
                   gpu::In<uint8_t> matrix, int rows, int cols, gpu::In<uint32_t> q,               \
                   gpu::In<float> scale, gpu::In<int32_t> sums, int tokens, gpu::In<float> bias,   \
                   int then, gpu::Out<float> out, int stride, float limit,                         \
                   gpu::In<uint8_t> gate, gpu::In<float> gate_bias,                                \
                   gpu::In<gpu::Words4> portions, gpu::In<int32_t> order, int of_row, int tiles) { \
        few<Kind::kind, groups>(matrix, cols, q, scale, sums,                                      \
                                {bias, out, stride, limit, rows, tokens, static_cast<Then>(then)}, \
                                {gate, gate_bias}, {portions, order, of_row}, tiles);              \
    }
#define QUANTISED(kind)                                                                            \
    FEW(few, 1, kind)                                                                              \
    FEW(few2, 2, kind)                                                                             \
    MANY(some, SOME_TOKENS, kind)                                                                  \
    MANY(many, MANY_TOKENS, kind)
#ifdef KIND  // one of those below: units() of compile.py
QUANTISED(KIND)
#else
QUANTISED(q4_0)
QUANTISED(q4_1)
QUANTISED(q5_0)
QUANTISED(q5_1)
QUANTISED(q8_0)
QUANTISED(iq4_nl)
QUANTISED(q4_k)
QUANTISED(q5_k)
QUANTISED(q6_k)
QUANTISED(mxfp4)
QUANTISED(iq4_xs)
QUANTISED(q3_k)
QUANTISED(q2_k)
QUANTISED(iq3_xxs)
QUANTISED(iq3_s)
// For all kinds that are packed as one of these.
QUANTISED(iq2_s)
QUANTISED(iq1_m)
#endif
