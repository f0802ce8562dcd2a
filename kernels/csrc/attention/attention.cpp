// See attention.h. A step is cut into tiles (entry, KV head, rows); a tile too long for one thread's
// share is also cut by super-page, and its super-page results fold in order afterwards.
#include "attention/attention.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "attention/attention_page.h"
#include "rows/rowops.h"

namespace batchengine {
namespace {

// A run of query rows of one entry and KV head. Row = (token, head of the group), flat.
struct Tile {
    const BatchEntry* entry;
    size_t kv_head;
    size_t first_row;  // counted from the entry's first token
    size_t rows;
    size_t first_superpage;  // of the span, those that any row sees: [first, end)
    size_t end_superpage;
    bool is_folded;      // into one accumulator: the span begins at super-page 0
    size_t split_start;  // index of its first result in Queries::split, when split

    size_t superpages() const { return end_superpage - first_superpage; }
};

// Whole: all super-pages of a tile, folded. Split: one of them, to be folded afterwards. Term: one of
// them, which stays by itself because the super-pages before it are in another span.
enum class PieceKind { whole, split, term };
struct Piece {
    const Tile* tile;
    PieceKind kind;
    size_t superpage;
};

static_assert(HEAD_DIM_MAX == HEAD_BLOCKS_MAX * 32);

struct TileAccumulators {
    float m[ATTENTION_ROWS_MAX];
    float l[ATTENTION_ROWS_MAX];
    alignas(64) float o[ATTENTION_ROWS_MAX][HEAD_DIM_MAX];
};

// K scales and V of a latent layer's page, as other layers have them.
struct LatentPage {
    alignas(64) uint16_t k_scale[PAGE_TOKENS * HEAD_BLOCKS_MAX];
    alignas(64) int8_t v[PAGE_TOKENS * HEAD_DIM_MAX];
};

struct Workspace {
    AttentionScratch scratch;
    LatentPage latent;
    TileAccumulators page, superpage, total;
};

Workspace& workspace() {
    static thread_local std::unique_ptr<Workspace> mine;
    if (!mine) mine.reset(new Workspace());
    return *mine;
}

PageKernel page_kernel() {
#if defined(BATCHENGINE_X86)
    if (level() == Level::amx) return page_partials_amx;
    if (level() == Level::avx512) return page_partials_avx512;
    if (level() == Level::avx2) return page_partials_avx2;
#elif defined(BATCHENGINE_ARM)
    if (level() != Level::scalar) return page_partials_neon;
#endif
    return page_partials_scalar;
}

// The data shared by all pieces of one call.
struct Job {
    const Queries& queries;
    const Batch& batch;
    const LayerShape& shape;
    const KvHeads heads;  // those of `queries`; a tile counts from heads.first
    const size_t group;   // query heads per KV head
    const size_t window;  // 0: none
    const PageKernel kernel;
    const RowOps& ops;

    size_t position(const Tile& tile, size_t row) const {
        return tile.entry->start_position + (tile.first_row + row) / group;
    }
    // The first position that a row of a tile sees.
    size_t begin(const Tile& tile, size_t row) const {
        return first_seen(position(tile, row), window);
    }
    // The first page of a super-page of a tile that a row of it sees.
    size_t first_page(const Tile& tile, size_t superpage) const {
        return std::max(superpage * SUPERPAGE_PAGES, begin(tile, 0) / PAGE_TOKENS);
    }
    // Token (within the entry) and query head of a row of a tile.
    size_t token(const Tile& tile, size_t row) const { return (tile.first_row + row) / group; }
    size_t head(const Tile& tile, size_t row) const {
        return tile.kv_head * group + (tile.first_row + row) % group;
    }
};

// Rows [first, end) of a tile.
struct RowRun {
    size_t first;
    size_t end;
};

// Makes K scales and V of the tokens [first, end) of a latent page, in whole tiles: every dim from v_first on has
// the scale of V, and V is K. Numerators of the dims before are of no use.
void spread_latent(const HeadPage& head, const LayerShape& shape, size_t first, size_t end,
                   const RowOps& ops, LatentPage& out) {
    const size_t blocks = shape.blocks(), own = shape.k_scales(), tile = first / 16;
    const size_t tiles = div_up(end, 16) - tile;
    for (size_t t = tile; t < tile + tiles; t++) {
        uint16_t* const scale = out.k_scale + t * blocks * 16;
        std::copy_n(head.k_scale + t * own * 16, own * 16, scale);
        for (size_t b = own; b < blocks; b++) std::copy_n(head.v_scale + t * 16, 16, scale + b * 16);
    }
    const size_t at = tile * 16 * shape.head_dim;
    ops.v_of_k(head.k + at, tiles, shape.head_dim, out.v + at);
}

// One page against the rows of a tile that see any of it, which are returned. `after` is read when the
// pages of the tile have been.
RowRun attend_page(const Job& job, const Tile& tile, size_t page_index, const int8_t* after,
                   Workspace& space, TileAccumulators& into) {
    const size_t page_start = page_index * PAGE_TOKENS;
    int32_t hidden[ATTENTION_ROWS_MAX], visible[ATTENTION_ROWS_MAX];
    size_t first = 0, end = 0;
    while (job.position(tile, first) < page_start) first++;
    for (end = first; end < tile.rows; end++) {
        const size_t position = job.position(tile, end), begin = first_seen(position, job.window);
        if (begin >= page_start + PAGE_TOKENS) break;
        hidden[end] = static_cast<int32_t>(std::max(begin, page_start) - page_start);
        visible[end] = static_cast<int32_t>(std::min(position + 1 - page_start, PAGE_TOKENS));
    }

    const size_t head_dim = job.shape.head_dim;
    uint8_t* base = job.batch.page(*tile.entry, page_start);
    const size_t kv_head = job.heads.first + tile.kv_head;
    const HeadPage head(base, job.shape, kv_head);
    const size_t row = job.queries.row(job.heads.count, tile.kv_head, tile.entry->first_token, 0) +
                       tile.first_row + first;
    const QueryRows rows{job.queries.q.data() + row * head_dim,
                         job.queries.scale.data() + row * (head_dim / 32),
                         job.queries.offset.data() + row * (head_dim / 32), hidden + first,
                         visible + first, static_cast<int>(end - first)};
    const size_t next_start = page_start + PAGE_TOKENS;
    const int8_t* next_k = after;
    if (next_start <= job.position(tile, tile.rows - 1) &&
        next_start < tile.end_superpage * SUPERPAGE_TOKENS)
        next_k = HeadPage(job.batch.page(*tile.entry, next_start), job.shape, kv_head).k;
    PageView view{head.k, head.k_scale, head.v, head.v_scale, next_k};
    if (job.shape.is_latent()) {
        const auto begin = static_cast<size_t>(hidden[first]), seen = static_cast<size_t>(visible[end - 1]);
        spread_latent(head, job.shape, begin, seen, job.ops, space.latent);
        view.k_scale = space.latent.k_scale;
        view.v = space.latent.v;
    }
    job.kernel(view, static_cast<int>(head_dim), rows, space.scratch,
               {into.m + first, into.l + first, into.o[0] + first * head_dim});
    return {first, end};
}

void fold_rows(const Job& job, TileAccumulators& into, const TileAccumulators& next, RowRun rows) {
    const size_t d = job.shape.head_dim;
    for (size_t r = rows.first; r < rows.end; r++)
        job.ops.fold(into.m + r, into.l + r, into.o[0] + r * d, next.m[r], next.l[r],
                     next.o[0] + r * d, d);
}

// Folds the pages of one super-page, left to right from the first page that a row sees. Returns the rows
// that see any of it; those after them are empty.
RowRun attend_superpage(const Job& job, const Tile& tile, size_t superpage, const int8_t* after,
                        Workspace& space, TileAccumulators& into) {
    const size_t last_position = job.position(tile, tile.rows - 1);
    const size_t first_page = job.first_page(tile, superpage);
    const size_t last_page =
        std::min((superpage + 1) * SUPERPAGE_PAGES, last_position / PAGE_TOKENS + 1);
    RowRun rows = attend_page(job, tile, first_page, after, space, into);
    for (size_t r = rows.end; r < tile.rows; r++) into.l[r] = 0.0f;
    for (size_t p = first_page + 1; p < last_page; p++) {
        const RowRun seen = attend_page(job, tile, p, after, space, space.page);
        fold_rows(job, into, space.page, seen);
        rows.end = seen.end;
    }
    return rows;
}

// A row's accumulator, or a part of it, when it is complete.
struct Emitted {
    size_t row;
    size_t superpage;  // the first one it covers
    float m;
    float l;
    const float* o;
};

template <class Emit>
void emit_rows(const Job& job, const Tile& tile, size_t superpage, const TileAccumulators& from,
               RowRun rows, Emit& emit) {
    for (size_t r = rows.first; r < rows.end; r++)
        emit(tile, Emitted{r, superpage, from.m[r], from.l[r], from.o[0] + r * job.shape.head_dim});
}

template <class Emit>
void attend_whole(const Job& job, const Tile& tile, const int8_t* after, Emit& emit) {
    Workspace& space = workspace();
    attend_superpage(job, tile, tile.first_superpage, after, space, space.total);
    for (size_t s = tile.first_superpage + 1; s < tile.end_superpage; s++) {
        const RowRun seen = attend_superpage(job, tile, s, after, space, space.superpage);
        fold_rows(job, space.total, space.superpage, seen);
    }
    emit_rows(job, tile, 0, space.total, {0, tile.rows}, emit);
}

template <class Emit>
void attend_term(const Job& job, const Tile& tile, size_t superpage, const int8_t* after, Emit& emit) {
    Workspace& space = workspace();
    const RowRun seen = attend_superpage(job, tile, superpage, after, space, space.superpage);
    emit_rows(job, tile, superpage, space.superpage, seen, emit);
}

// Index of a split result: per tile [superpage][row].
size_t split_index(const Tile& tile, size_t superpage, size_t row) {
    return tile.split_start + (superpage - tile.first_superpage) * tile.rows + row;
}

void attend_split(const Job& job, const Tile& tile, size_t superpage, const int8_t* after,
                  Accumulators& split) {
    const size_t d = job.shape.head_dim;
    auto store = [&](const Tile&, const Emitted& part) {
        const size_t i = split_index(tile, superpage, part.row);
        split.m[i] = part.m;
        split.l[i] = part.l;
        std::copy_n(part.o, d, split.o.data() + i * d);
    };
    attend_term(job, tile, superpage, after, store);
}

template <class Emit>
void fold_split(const Job& job, const Tile& tile, size_t row, const Accumulators& split,
                Emit& emit) {
    const size_t d = job.shape.head_dim;
    const size_t end = std::min(tile.end_superpage, job.position(tile, row) / SUPERPAGE_TOKENS + 1);
    const size_t first =
        std::max(tile.first_superpage, job.begin(tile, row) / SUPERPAGE_TOKENS);
    const size_t start = split_index(tile, first, row);
    alignas(64) float o[HEAD_DIM_MAX];
    float m = split.m[start], l = split.l[start];
    std::copy_n(split.o.data() + start * d, d, o);
    for (size_t s = first + 1; s < end; s++) {
        const size_t i = split_index(tile, s, row);
        job.ops.fold(&m, &l, o, split.m[i], split.l[i], split.o.data() + i * d, d);
    }
    emit(tile, Emitted{row, 0, m, l, o});
}

// The K that a piece reads first.
const int8_t* first_k(const Job& job, const Piece& piece) {
    const size_t first = job.first_page(*piece.tile, piece.superpage);
    uint8_t* const page = job.batch.page(*piece.tile->entry, first * PAGE_TOKENS);
    return HeadPage(page, job.shape, job.heads.first + piece.tile->kv_head).k;
}

// Adds the tiles of an entry's rows that see any of the super-pages [first, end).
void cut_entry(const Job& job, const BatchEntry& entry, size_t first, size_t end,
               std::vector<Tile>& tiles) {
    const size_t group = job.group, start = entry.start_position;
    const size_t span_start = first * SUPERPAGE_TOKENS;
    const size_t first_token = span_start > start ? span_start - start : 0;
    size_t end_token = entry.n_tokens;
    while (end_token > first_token &&
           first_seen(start + end_token - 1, job.window) / SUPERPAGE_TOKENS >= end)
        end_token--;
    for (size_t head = 0; head < job.heads.count; head++)
        for (size_t row = first_token * group; row < end_token * group; row += ATTENTION_ROWS_MAX) {
            const size_t rows = std::min<size_t>(ATTENTION_ROWS_MAX, end_token * group - row);
            const size_t begin = first_seen(start + row / group, job.window) / SUPERPAGE_TOKENS;
            const size_t last = (start + (row + rows - 1) / group) / SUPERPAGE_TOKENS;
            tiles.push_back({&entry, head, row, rows, std::max(first, begin),
                             std::min(end, last + 1), first == 0, 0});
        }
}

// A tile that is folded is split when it alone is more than a quarter of a thread's fair share.
std::vector<Piece> cut_pieces(std::vector<Tile>& tiles, size_t threads, size_t* split_rows) {
    size_t total = 0;
    for (const Tile& tile : tiles) total += tile.rows * tile.superpages();
    std::vector<Piece> pieces;
    *split_rows = 0;
    for (Tile& tile : tiles) {
        const size_t size = tile.rows * tile.superpages();
        PieceKind kind = PieceKind::term;
        if (tile.is_folded) {
            const bool split = threads > 1 && tile.superpages() > 1 && size * threads * 4 > total;
            kind = split ? PieceKind::split : PieceKind::whole;
        }
        if (kind == PieceKind::whole) {
            pieces.push_back({&tile, kind, tile.first_superpage});
            continue;
        }
        if (kind == PieceKind::split) {
            tile.split_start = *split_rows;
            *split_rows += size;
        }
        for (size_t s = tile.first_superpage; s < tile.end_superpage; s++)
            pieces.push_back({&tile, kind, s});
    }
    return pieces;
}

// emit(tile, Emitted) for every row of every tile, from any thread: once for a tile that is folded,
// else once per super-page that the row sees.
template <class Emit>
void attend_tiles(Pool& pool, const Job& job, std::vector<Tile>& tiles, Accumulators& split,
                  Emit&& emit) {
    size_t split_rows = 0;
    const std::vector<Piece> pieces =
        cut_pieces(tiles, static_cast<size_t>(pool.threads()), &split_rows);
    split.reserve(split_rows, job.shape.head_dim);

    const auto attend_piece = [&](const Piece& piece, const int8_t* after) {
        switch (piece.kind) {
            case PieceKind::whole: return attend_whole(job, *piece.tile, after, emit);
            case PieceKind::split: return attend_split(job, *piece.tile, piece.superpage, after, split);
            case PieceKind::term: return attend_term(job, *piece.tile, piece.superpage, after, emit);
        }
    };
    // Later tiles of a chunk see more tokens, so handing them out from the back evens the finish. A
    // thread's next piece is nearly always the one before, which it prefetches.
    Shares shares(pieces.size(), pool.threads());
    pool.run([&](int ith, int) {
        for (size_t i; shares.take(ith, &i);) {
            const Piece* const piece = &pieces[pieces.size() - 1 - i];
            attend_piece(*piece, piece == pieces.data() ? nullptr : first_k(job, piece[-1]));
        }
    });
    if (split_rows == 0) return;
    std::vector<std::pair<const Tile*, size_t>> rows;
    for (const Piece& piece : pieces)
        if (piece.kind == PieceKind::split && piece.superpage == piece.tile->first_superpage)
            for (size_t r = 0; r < piece.tile->rows; r++) rows.emplace_back(piece.tile, r);
    for_each(pool, rows.size(), false, [&](size_t i) {
        fold_split(job, *rows[i].first, rows[i].second, split, emit);
    });
}

Job make_job(const Queries& queries, const Batch& batch, const LayerShape& shape, KvHeads heads,
             size_t window) {
    const size_t group = queries.n_head / heads.count;
    return {queries, batch, shape, heads, group, window, page_kernel(), rowops()};
}

}  // namespace

void attend_partials(Pool& pool, Queries& queries, const Batch& batch, const LayerShape& shape,
                     const std::vector<Span>& spans, KvHeads heads, Partials& out, size_t window) {
    const Job job = make_job(queries, batch, shape, heads, window);
    set_spans(out, batch, spans, window);
    std::vector<Tile> tiles;
    for (size_t e = 0; e < batch.n_entries; e++) {
        const PartialEntry& entry = out.entries[e];
        if (entry.count > 0) cut_entry(job, batch.entries[e], entry.first, entry.end(), tiles);
    }
    attend_tiles(pool, job, tiles, queries.split, [&](const Tile& tile, const Emitted& part) {
        const PartialEntry& entry = out.entries[static_cast<size_t>(tile.entry - &batch.entries[0])];
        const size_t i = out.index(entry, part.superpage - entry.first, job.token(tile, part.row),
                                   job.head(tile, part.row));
        out.at.m[i] = part.m;
        out.at.l[i] = part.l;
        std::copy_n(part.o + out.v_first, out.values(), out.at.o.data() + i * out.values());
    });
}

void attend(Pool& pool, Queries& queries, const Batch& batch, const LayerShape& shape, Rows& out,
            size_t window, const Sinks* sinks) {
    const Job job = make_job(queries, batch, shape, {0, shape.n_kv_head}, window);
    std::vector<Tile> tiles;
    for (size_t e = 0; e < batch.n_entries; e++)
        cut_entry(job, batch.entries[e], 0, SIZE_MAX, tiles);
    attend_tiles(pool, job, tiles, queries.split, [&](const Tile& tile, const Emitted& part) {
        float* row = out.row(tile.entry->first_token + job.token(tile, part.row));
        const size_t head = job.head(tile, part.row);
        finish_head(part.m, part.l, part.o, shape.head_dim, sinks, head, row + head * shape.head_dim);
    });
}

}  // namespace batchengine
