// See attention.h. Work is cut into pieces (entry, KV head, rows); a sequence too long for one
// thread's share is also cut by super-page, and the super-page results fold in order afterwards.
#include "attention.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "attention_page.h"
#include "rowops.h"

namespace batchengine {
namespace {

constexpr size_t SUPERPAGE_TOKENS = PAGE_TOKENS * SUPERPAGE_PAGES;

// A run of query rows of one entry and KV head. Row = (token, head of the group), flat.
struct Tile {
    const BatchEntry* entry;
    size_t kv_head;
    size_t first_row;  // counted from the entry's first token
    size_t rows;
    size_t superpages;   // that its last row sees
    size_t split_start;  // index of its first result in Queries::split, when split
};

// A whole tile, or one super-page of a split one.
struct Piece {
    const Tile* tile;
    bool split;
    size_t superpage;
};

struct Accumulator {
    float m[ATTENTION_ROWS_MAX];
    float l[ATTENTION_ROWS_MAX];
    alignas(64) float o[ATTENTION_ROWS_MAX][HEAD_DIM_MAX];
};

struct Workspace {
    AttentionScratch scratch;
    Accumulator page, superpage, total;
};

Workspace& workspace() {
    static thread_local std::unique_ptr<Workspace> mine;
    if (!mine) mine.reset(new Workspace());
    return *mine;
}

PageKernel page_kernel() {
#if defined(BATCHENGINE_X86)
    if (level() == Level::avx512) return page_partials_avx512;
    if (level() == Level::avx2) return page_partials_avx2;
#endif
    return page_partials_scalar;
}

// Everything a piece needs that is the same for the whole call.
struct Job {
    const Queries& queries;
    const Batch& batch;
    const PageShape& shape;
    const size_t layer;
    const size_t group;  // query heads per KV head
    const PageKernel kernel;
    const RowOps& ops;

    size_t position(const Tile& tile, size_t row) const {
        return tile.entry->start_position + (tile.first_row + row) / group;
    }
    float* out_row(Rows& out, const Tile& tile, size_t row) const {
        const size_t flat = tile.first_row + row;
        return out.row(tile.entry->first_token + flat / group) +
               (tile.kv_head * group + flat % group) * shape.head_dim;
    }
};

// One page against the rows of a tile that see any of it: [first, tile.rows). Returns first.
size_t attend_page(const Job& job, const Tile& tile, size_t page_index, AttentionScratch& scratch,
                   Accumulator& into) {
    const size_t page_start = page_index * PAGE_TOKENS;
    int32_t visible[ATTENTION_ROWS_MAX];
    size_t first = 0;
    while (job.position(tile, first) < page_start) first++;
    for (size_t r = first; r < tile.rows; r++)
        visible[r] = static_cast<int32_t>(
            std::min(job.position(tile, r) + 1 - page_start, PAGE_TOKENS));

    const size_t head_dim = job.shape.head_dim;
    uint8_t* base = job.batch.page(*tile.entry, page_start);
    const HeadPage head(base, job.shape, job.layer, tile.kv_head);
    const size_t row = job.queries.row(job.shape.n_kv_head, tile.kv_head, tile.entry->first_token, 0) +
                       tile.first_row + first;
    const QueryRows rows{job.queries.q.data() + row * head_dim,
                         job.queries.scale.data() + row * (head_dim / 32),
                         job.queries.offset.data() + row * (head_dim / 32), visible + first,
                         static_cast<int>(tile.rows - first)};
    const size_t next_start = page_start + PAGE_TOKENS;
    const int8_t* next_k = nullptr;
    if (next_start <= job.position(tile, tile.rows - 1))
        next_k = HeadPage(job.batch.page(*tile.entry, next_start), job.shape, job.layer, tile.kv_head).k;
    const PageView view{head.k, head.k_scale, head.v, head.v_scale, next_k};
    job.kernel(view, static_cast<int>(head_dim), rows, scratch,
               {into.m + first, into.l + first, into.o[0] + first * head_dim});
    return first;
}

void fold_rows(const Job& job, Accumulator& into, const Accumulator& next, size_t first,
               size_t rows) {
    const size_t d = job.shape.head_dim;
    for (size_t r = first; r < rows; r++)
        job.ops.fold(into.m + r, into.l + r, into.o[0] + r * d, next.m[r], next.l[r],
                     next.o[0] + r * d, d);
}

// Folds the pages of one super-page, left to right from its first page. Returns the first row that
// sees any of it.
size_t attend_superpage(const Job& job, const Tile& tile, size_t superpage, Workspace& space,
                        Accumulator& into) {
    const size_t last_position = job.position(tile, tile.rows - 1);
    const size_t first_page = superpage * SUPERPAGE_PAGES;
    const size_t last_page =
        std::min(first_page + SUPERPAGE_PAGES, last_position / PAGE_TOKENS + 1);
    const size_t first = attend_page(job, tile, first_page, space.scratch, into);
    for (size_t p = first_page + 1; p < last_page; p++) {
        const size_t seen = attend_page(job, tile, p, space.scratch, space.page);
        fold_rows(job, into, space.page, seen, tile.rows);
    }
    return first;
}

void attend_tile(const Job& job, const Tile& tile, Rows& out) {
    Workspace& space = workspace();
    attend_superpage(job, tile, 0, space, space.total);
    for (size_t s = 1; s < tile.superpages; s++) {
        const size_t first = attend_superpage(job, tile, s, space, space.superpage);
        fold_rows(job, space.total, space.superpage, first, tile.rows);
    }
    const size_t d = job.shape.head_dim;
    for (size_t r = 0; r < tile.rows; r++)
        job.ops.finish(space.total.l[r], space.total.o[0] + r * d, d, job.out_row(out, tile, r));
}

// Split results: per tile [superpage][row] of m, l, o.
float* split_row(float* split, const Tile& tile, size_t superpage, size_t row, size_t head_dim) {
    return split + (tile.split_start + superpage * tile.rows + row) * (head_dim + 16);
}

void attend_split(const Job& job, const Tile& tile, size_t superpage, float* split) {
    Workspace& space = workspace();
    const size_t first = attend_superpage(job, tile, superpage, space, space.superpage);
    const size_t d = job.shape.head_dim;
    for (size_t r = first; r < tile.rows; r++) {
        float* at = split_row(split, tile, superpage, r, d);
        at[0] = space.superpage.m[r];
        at[1] = space.superpage.l[r];
        std::copy_n(space.superpage.o[0] + r * d, d, at + 16);
    }
}

void fold_split(const Job& job, const Tile& tile, size_t row, float* split, Rows& out) {
    const size_t d = job.shape.head_dim;
    float* total = split_row(split, tile, 0, row, d);
    const size_t superpages = job.position(tile, row) / SUPERPAGE_TOKENS + 1;
    for (size_t s = 1; s < superpages; s++) {
        const float* next = split_row(split, tile, s, row, d);
        job.ops.fold(total, total + 1, total + 16, next[0], next[1], next + 16, d);
    }
    job.ops.finish(total[1], total + 16, d, job.out_row(out, tile, row));
}

std::vector<Tile> cut_tiles(const Batch& batch, const PageShape& shape, size_t group) {
    std::vector<Tile> tiles;
    for (size_t e = 0; e < batch.n_entries; e++) {
        const BatchEntry& entry = batch.entries[e];
        const size_t rows_total = entry.n_tokens * group;
        for (size_t head = 0; head < shape.n_kv_head; head++)
            for (size_t row = 0; row < rows_total; row += ATTENTION_ROWS_MAX) {
                const size_t rows = std::min<size_t>(ATTENTION_ROWS_MAX, rows_total - row);
                const size_t last = entry.start_position + (row + rows - 1) / group;
                tiles.push_back({&entry, head, row, rows, last / SUPERPAGE_TOKENS + 1, 0});
            }
    }
    return tiles;
}

// A tile is split when it alone is more than a quarter of a thread's fair share.
std::vector<Piece> cut_pieces(std::vector<Tile>& tiles, size_t threads, size_t* split_rows) {
    size_t total = 0;
    for (const Tile& tile : tiles) total += tile.rows * tile.superpages;
    std::vector<Piece> pieces;
    *split_rows = 0;
    for (Tile& tile : tiles) {
        const bool split = threads > 1 && tile.superpages > 1 &&
                           tile.rows * tile.superpages * threads * 4 > total;
        if (!split) {
            pieces.push_back({&tile, false, 0});
            continue;
        }
        tile.split_start = *split_rows;
        *split_rows += tile.rows * tile.superpages;
        for (size_t s = 0; s < tile.superpages; s++) pieces.push_back({&tile, true, s});
    }
    return pieces;
}

}  // namespace

void attend(Pool& pool, Queries& queries, const Batch& batch, const PageShape& shape, size_t layer,
            Rows& out) {
    const Job job{queries, batch, shape, layer, queries.n_head / shape.n_kv_head, page_kernel(),
                  rowops()};
    std::vector<Tile> tiles = cut_tiles(batch, shape, job.group);
    size_t split_rows = 0;
    const std::vector<Piece> pieces =
        cut_pieces(tiles, static_cast<size_t>(pool.threads()), &split_rows);
    const size_t split_size = split_rows * (shape.head_dim + 16);
    if (queries.split.size() < split_size) queries.split = Buffer<float>(split_size);
    float* split = queries.split.data();

    // Later tiles of a chunk see more tokens, so handing them out from the back evens the finish.
    Tickets tickets(pieces.size());
    pool.run([&](int, int) {
        size_t ticket;
        while (tickets.take(&ticket)) {
            const Piece& piece = pieces[pieces.size() - 1 - ticket];
            if (piece.split)
                attend_split(job, *piece.tile, piece.superpage, split);
            else
                attend_tile(job, *piece.tile, out);
        }
    });
    if (split_rows == 0) return;
    std::vector<std::pair<const Tile*, size_t>> rows;
    for (const Piece& piece : pieces)
        if (piece.split && piece.superpage == 0)
            for (size_t r = 0; r < piece.tile->rows; r++) rows.emplace_back(piece.tile, r);
    Tickets row_tickets(rows.size());
    pool.run([&](int, int) {
        size_t ticket;
        while (row_tickets.take(&ticket))
            fold_split(job, *rows[ticket].first, rows[ticket].second, split, out);
    });
}

}  // namespace batchengine
