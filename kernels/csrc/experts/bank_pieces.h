// How products of banks are cut into pieces: row tiles of one matrix of a bank, and the rows that it meets.
// Functions have internal linkage.
#pragma once

#include <algorithm>

#include "common/types.h"
#include "linear/linear.h"

namespace batchengine {
namespace {

// Pieces per thread, because all threads wait for the last piece; each piece of a step of few tokens
// streams its weights from memory, which takes 10 us or more.
constexpr size_t BANK_PIECES_PER_THREAD = 16;

// Row tiles of a piece, of `tiles` of one matrix and `all` that the step reads. Whole runs, so that
// only the last run of a matrix is not; few enough to stay in the cache for all groups that it meets.
size_t piece_tiles(size_t tiles, size_t all, size_t bytes_per_tile, size_t run, int threads) {
    const size_t wanted = threads == 1 ? 1 : BANK_PIECES_PER_THREAD * static_cast<size_t>(threads);
    const size_t least = round_up(div_up(STREAM_BYTES, bytes_per_tile), run);
    const size_t most = std::max(run, REREAD_BYTES / bytes_per_tile / run * run);
    const size_t balanced = std::max(least, all / wanted / run * run);
    return std::min(std::min(balanced, most), round_up(tiles, run));
}

// Calls body(tile, tiles, group, rows, whether the group is the first) for the row tiles [first, end) of one
// matrix and its `rows` rows of activations, which begin at a whole group; at most `groups_max` groups at a time.
template <class Body>
void walk_bank(size_t first_group, size_t rows, size_t first, size_t end, size_t run, size_t groups_max,
               Body&& body) {
    for (size_t done = 0; done < rows; done += groups_max * GROUP_TOKENS)
        for (size_t tile = first; tile < end; tile += run)
            body(tile, std::min(run, end - tile), first_group + done / GROUP_TOKENS,
                 std::min(rows - done, groups_max * GROUP_TOKENS), done == 0);
}

}  // namespace
}  // namespace batchengine
