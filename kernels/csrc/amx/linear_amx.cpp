// CA-3 rule 2 with AMX-INT8, for several tokens; fewer are left to AVX512-VNNI.
//
// A panel of 16 tokens and one block is operand A of a tile product as it lies in memory, and 16 unpacked rows
// are operand B: C[token][row] is the integer sum of the block. Sums go through the level-1 cache to vector
// registers, whose lanes are rows; there an output is the same chain of fma in block order as on every level.
// The products of block b + 1 overlap with the folds of block b. A segment of a row tile is unpacked once for
// all token groups of a call.
#include "amx/blocks_amx.h"

namespace batchengine {
namespace {

constexpr TileShapes SHAPES = TileShapes()
                                  .set(0, GROUP_TOKENS, TILE_ROW_BYTES)   // sums
                                  .set(1, GROUP_TOKENS, TILE_ROW_BYTES)
                                  .set(2, GROUP_TOKENS, BLOCK_WIDTH)      // tokens
                                  .set(3, GROUPS, TILE_ROW_BYTES)         // weights
                                  .set(4, GROUPS, TILE_ROW_BYTES);

template <int PARTS>
struct BlockSums {
    alignas(64) int32_t of[PARTS][GROUP_TOKENS][TILE_ROWS];
};

template <int PARTS>
SIMD_FN void sum_block(const int8_t* tokens, const Operands<PARTS>& from, size_t b,
                       BlockSums<PARTS>& to) {
    tile_load<2>(tokens, BLOCK_WIDTH);
    tile_zero<0>();
    tile_load<3>(from.weights[b][0], TILE_ROW_BYTES);
    tile_dot<0, 2, 3>();
    if constexpr (PARTS == 2) {
        tile_zero<1>();
        tile_load<4>(from.weights[b][1], TILE_ROW_BYTES);
        tile_dot<1, 2, 4>();
    }
    tile_store<0>(to.of[0], TILE_ROW_BYTES);
    if constexpr (PARTS == 2) tile_store<1>(to.of[1], TILE_ROW_BYTES);
}

template <int PARTS>
SIMD_FN __m512i sum_of(const BlockSums<PARTS>& sums, int token) {
    const __m512i first = _mm512_load_si512(sums.of[0][token]);
    if constexpr (PARTS == 1)
        return first;
    else
        return _mm512_add_epi32(_mm512_slli_epi32(first, 7), _mm512_load_si512(sums.of[1][token]));
}

template <FoldKind FOLD, int PARTS>
SIMD_FN void fold_block(__m512 (&acc)[GROUP_TOKENS], const BlockSums<PARTS>& sums,
                        const Operands<PARTS>& from, size_t b, const Panel& x, size_t block) {
    constexpr bool HAS_MINIMA = FOLD == FoldKind::scale_and_minima;
    const float* scale = x.scale + block * GROUP_TOKENS;
    const float* sum = x.sum + block * GROUP_TOKENS;
    const int32_t* halves = x.halves + 2 * block * GROUP_TOKENS;
    const __m512 dw = from.scale[b];
    const __m512 mw =
        FOLD == FoldKind::scale_and_minimum || HAS_MINIMA ? from.minimum[b] : _mm512_setzero_ps();
    repeat<GROUP_TOKENS>(EACH(n) {
        const __m512 value = _mm512_cvtepi32_ps(sum_of(sums, n));
        const __m512 dx = _mm512_set1_ps(scale[n]);
        if constexpr (FOLD == FoldKind::power)
            acc[n] = _mm512_fmadd_ps(_mm512_mul_ps(value, dx), dw, acc[n]);
        else
            acc[n] = _mm512_fmadd_ps(value, _mm512_mul_ps(dw, dx), acc[n]);
        if constexpr (FOLD == FoldKind::scale_and_minimum)
            acc[n] = _mm512_fmadd_ps(_mm512_set1_ps(sum[n]), mw, acc[n]);
        if constexpr (HAS_MINIMA) {
            const __m512i sums = _mm512_set1_epi32(half_sums(halves + n));
            acc[n] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_madd_epi16(sums, from.minima[b])),
                                     _mm512_mul_ps(mw, dx), acc[n]);
        }
    });
}

// The packed weights that are unpacked next, if no cache holds them: a share is prefetched at every block of one
// token group.
struct Next {
    const uint8_t* packed;
    size_t lines;  // of all blocks; 0: nothing

    void fetch(size_t block, size_t blocks) const {
        const size_t end = lines * (block + 1) / blocks;
        for (size_t line = lines * block / blocks; line < end; ++line)
            __builtin_prefetch(packed + line * CACHE_LINE, 0, 2);
    }
};

// Adds a segment, of which `from` has the weights, to the results of one token group.
template <FoldKind FOLD, int PARTS>
void multiply_segment(const Operands<PARTS>& from, const Panel& x, size_t first, size_t end, const Next& next,
                      TileResult& result) {
    BlockSums<PARTS> sums[2];
    __m512 acc[GROUP_TOKENS];
    repeat<GROUP_TOKENS>(EACH(n) { acc[n] = _mm512_setzero_ps(); });
    const size_t blocks = end - first, cell = first * GROUP_TOKENS;
    const int8_t* q = x.q + cell * BLOCK_WIDTH;
    sum_block(q, from, 0, sums[0]);
    for (size_t b = 0; b < blocks; ++b) {
        if (b + 1 < blocks)
            sum_block(q + (b + 1) * GROUP_TOKENS * BLOCK_WIDTH, from, b + 1, sums[(b + 1) % 2]);
        if (next.lines > 0) next.fetch(b, blocks);
        fold_block<FOLD>(acc, sums[b % 2], from, b, x, first + b);
    }
    repeat<GROUP_TOKENS>(EACH(n) {
        float* y = result.y[n];
        _mm512_store_ps(y, first == 0 ? acc[n] : _mm512_add_ps(_mm512_load_ps(y), acc[n]));
    });
}

template <class Weights>
void multiply_blocks(const uint8_t* tile, size_t bytes, size_t tiles, const Panel& x, size_t tokens,
                     bool cold, TileResult* results) {
    using From = Unpack<Weights>;
    using Packed = typename From::Packed;
    const size_t groups = div_up(tokens, GROUP_TOKENS);
    Operands<From::PARTS> operands;
    const TilesInUse in_use(SHAPES);
    for (size_t t = 0; t < tiles; ++t) {
        const auto* units = reinterpret_cast<const Packed*>(tile + t * bytes);
        for (size_t first = 0; first < x.blocks; first += OPERAND_BLOCKS) {
            const size_t end = first + OPERAND_BLOCKS < x.blocks ? first + OPERAND_BLOCKS : x.blocks;
            for (size_t b = first; b < end; ++b)
                From::block(units[b / Weights::BLOCKS], b % Weights::BLOCKS, operands, b - first);
            // Tiles lie one behind the other, each from its first segment to its last.
            const Next next = {reinterpret_cast<const uint8_t*>(units + end / Weights::BLOCKS),
                               cold ? OPERAND_BLOCKS * Weights::BYTES / Weights::BLOCKS / CACHE_LINE : 0};
            for (size_t group = 0; group < groups; ++group)
                multiply_segment<From::FOLD>(operands, x.after(group), first, end,
                                             group == 0 ? next : Next{}, results[group * tiles + t]);
        }
    }
}

// Fewest tokens whose products pay for unpacking, as measured: with two parts it takes five times as long. Fewer
// of a last group than LAST_TOKENS_MIN take less time without tiles.
template <int PARTS>
constexpr size_t TOKENS_MIN = PARTS == 1 ? 13 : 48;
constexpr size_t LAST_TOKENS_MIN = 8;

void multiply_with_tiles(const Matrix& matrix, const Activations& x, size_t tile, size_t tiles,
                         size_t group, size_t tokens, bool cold, TileResult* results) {
    const size_t last = tokens % GROUP_TOKENS;
    const size_t many = last < LAST_TOKENS_MIN ? tokens - last : tokens;
    size_t first = 0;  // token that tiles leave
    of_blocks(matrix.kind, [&]<class Weights>() {
        if (many < TOKENS_MIN<Unpack<Weights>::PARTS>) return;
        const size_t bytes = tile_bytes(matrix.kind, matrix.cols);
        multiply_blocks<Weights>(matrix.data + tile * bytes, bytes, tiles, Panel(x, group), many, cold,
                                 results);
        first = many;
    });
    for (; first < tokens; first += GROUP_TOKENS) {
        const size_t now = tokens - first < GROUP_TOKENS ? tokens - first : GROUP_TOKENS;
        LINEAR_AVX512.multiply(matrix, x, tile, tiles, group + first / GROUP_TOKENS, now,
                               cold && first == 0, results + first / GROUP_TOKENS * tiles);
    }
}

}  // namespace

const LinearKernels LINEAR_AMX = {RUN_GROUPS_MAX, multiply_with_tiles, store_tile, add_tile, relu2_tile, GATES,
                                  add_pairs, multiply_then_add};

}  // namespace batchengine
