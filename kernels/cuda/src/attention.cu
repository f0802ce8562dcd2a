// Attention (rule 7): pages of one super-page against 16 or 32 query rows, then the ordered fold.
//
// `attend` gives a super-page, a KV head and a tile of query rows to a block: scores by integer products,
// softmax in shared memory, the numerators by two products of 7-bit digits, pages folded in order.
// `attend_many` has two tiles of 16 rows a block, which read K and V once. `attend_pages` gives a page to a
// block, for steps that have few blocks. Heads of more than 256 dims have `attend_wide` and `attend_pages_wide`,
// whose blocks have room for the queries and numerators of twice as many; latent layers have `attend_latent` and
// `attend_pages_latent`, which read V of K. `fold_attention` folds pages,
// super-pages and the sink in order, and quantises; `gather_partials` makes the accumulators of spans of them.
// No sum of floats crosses threads. A window of n > 0 hides from a row all tokens but its own and the n - 1
// before it.
#include "formats/activations.h"
#include "formats/kv8.h"

namespace gpu {

// Query rows of one entry: row r is token r / group of the entry, head r % group of the KV head's group.
// A span of the entry's super-pages is attended to: those of it that a row sees.
struct AttendTile {
    int32_t first_token;      // of the entry, in the step
    int32_t start_position;   // of the entry
    int32_t first_page;       // of the entry, in `pages`
    int32_t first_row;        // of the tile, in the entry
    int32_t rows;             // 1..16; 1..32 for attend_many
    int32_t superpages;       // of the span, from the first that its first row sees to the last one's last
    int32_t first_result;     // of its accumulators: [each 16 rows][super-page or page][KV head][16]
    int32_t first_superpage;  // of them
};
static_assert(sizeof(AttendTile) == 32);  // `AttendTile` of memory.py

// Where gather_partials puts the accumulators of a tile.
struct PartialsTile {
    int32_t start;       // index of the entry's first accumulator: [term][token][head]
    int32_t tokens;      // of the entry
    int32_t superpages;  // of the span
    int32_t first;       // of them
};

}  // namespace gpu

namespace {

constexpr int TOKENS = gpu::PAGE_TOKENS;
constexpr int STRIDE = TOKENS + 4;  // dwords of a row in shared memory; spreads rows over the banks
constexpr int LOW = TOKENS / 4;     // dword of the low digits of the weights

constexpr int WARPS = 8, THREADS = WARPS * gpu::WARP;
constexpr int AHEAD = 4;  // products whose loads are under way at once
constexpr int FOLDED = 8;  // accumulators that a fold loads at once, while it adds as many
constexpr int NARROW_DIMS = 256;  // of a head, up to which registers and shared memory hold two tiles of 16 rows

// Per row: the bits of 256 scores, then in their place the high digits of the weights and the low ones.
template <int tiles>
using Scores = gpu::Shared<uint32_t, 16 * tiles * STRIDE>;
template <int tiles>
using PerRow = gpu::Shared<float, 16 * tiles>;

// What a row sees of the page that starts at `page_start`: 0..256 tokens.
GPU_FN int visible_of(const gpu::AttendTile& tile, int group, int row, int page_start) {
    const int n = tile.start_position + (tile.first_row + row) / group + 1 - page_start;
    return row >= tile.rows || n <= 0 ? 0 : n < TOKENS ? n : TOKENS;
}

// The first position that a row at `position` sees.
GPU_FN int first_seen(int position, int window) {
    return window && position >= window ? position - window + 1 : 0;
}

// What the window hides from a row at the start of the page: 0..256 tokens.
GPU_FN int hidden_of(const gpu::AttendTile& tile, int group, int row, int page_start, int window) {
    const int position = tile.start_position + (tile.first_row + row) / group;
    const int n = first_seen(position, window) - page_start;
    return n <= 0 ? 0 : n < TOKENS ? n : TOKENS;
}

// The accumulator of a row in the first super-page of its tile.
GPU_FN int64_t result_index(const gpu::AttendTile& tile, int row, int n_kv_head, int kv_head) {
    const int first = tile.first_result + row / 16 * tile.superpages * n_kv_head + kv_head;
    return int64_t{first} * 16 + row % 16;
}

// Queries of a tile, of heads of up to `dims_max`: registers of A [16 rows][group][lane], and scales [group][row].
template <int tiles, int dims_max>
struct Queries {
    static constexpr int GROUPS_MAX = dims_max / ca::BLOCK;
    gpu::Shared<gpu::Words4, tiles * GROUPS_MAX * gpu::WARP>& q;
    gpu::Shared<float, 16 * tiles * GROUPS_MAX>& scale;
};

// AHEAD groups from `first` on into the scores of 8 tokens; those past the last of a head are not there unless
// `is_whole`. Without a branch between two products they are computed at once.
template <int tiles, int dims_max, bool is_whole>
GPU_FN void score_groups(float (&acc)[tiles][4], gpu::In<uint8_t> head, const gpu::HeadLayout& at,
                         const Queries<tiles, dims_max>& queries, int token, int first) {
    const int g = gpu::lane() / 4, t = gpu::lane() % 4, last = at.groups() - 1;
    const gpu::In<uint32_t> k = gpu::in_as<uint32_t>(head);
    const gpu::In<uint16_t> k_scale = gpu::in_as<uint16_t>(head + at.k_scales());
    uint32_t b[AHEAD][2];
    uint16_t d[AHEAD][2];
    GPU_UNROLL
    for (int i = 0; i < AHEAD; i++) {  // loads of K that are under way at once
        const int group = is_whole || first + i < last ? first + i : last;
        for (int j = 0; j < 2; j++) {
            b[i][j] = k[at.k_dword(token + g, group * 8 + t + 4 * j)];
            d[i][j] = k_scale[at.k_scale(token + 2 * t + j, group)];
        }
    }
    GPU_UNROLL
    for (int i = 0; i < AHEAD; i++) {
        if (!is_whole && first + i > last) break;
        const float scale[2] = {ca::half_to_float(d[i][0]), ca::half_to_float(d[i][1])};
        GPU_UNROLL
        for (int tile = 0; tile < tiles; tile++) {
            const int group = first + i, row = (group * tiles + tile) * 16 + g;
            int32_t dot[4];  // over the magic number: a sum of up to 2²² has the bits of a float
            GPU_UNROLL
            for (int j = 0; j < 4; j++) dot[j] = static_cast<int32_t>(ca::ROUND_MAGIC_BITS);
            const gpu::Words4 q = queries.q[(tile * at.groups() + group) * gpu::WARP + gpu::lane()];
            const uint32_t a[4] = {q.word[0], q.word[1], q.word[2], q.word[3]};
            const float of_rows[2] = {queries.scale[row], queries.scale[row + 8]};
            gpu::mma_k32_ss(dot, a, b[i]);
            GPU_UNROLL
            for (int j = 0; j < 4; j++) {
                const float bits = ca::float_of(static_cast<uint32_t>(dot[j]));
                acc[tile][j] = ca::fma_rn(ca::sub_rn(bits, ca::ROUND_MAGIC),
                                          ca::mul_rn(scale[j % 2], of_rows[j / 2]), acc[tile][j]);
            }
        }
    }
}

// Scores of tokens [begin, seen), 8 for each step of a warp; row r, token n: chain over the groups of the head.
template <int tiles, int dims_max>
GPU_FN void score_page(gpu::In<uint8_t> head, const gpu::HeadLayout& at,
                       const Queries<tiles, dims_max>& queries, int begin, int seen,
                       Scores<tiles>& scores) {
    const int g = gpu::lane() / 4, t = gpu::lane() % 4;
    for (int token = begin / 8 * 8 + gpu::warp() * 8; token < seen; token += WARPS * 8) {
        float acc[tiles][4];
        GPU_UNROLL
        for (int i = 0; i < tiles * 4; i++) acc[i / 4][i % 4] = 0.0f;
        for (int first = 0; first < at.groups(); first += AHEAD)
            if (first + AHEAD <= at.groups())
                score_groups<tiles, dims_max, true>(acc, head, at, queries, token, first);
            else
                score_groups<tiles, dims_max, false>(acc, head, at, queries, token, first);
        GPU_UNROLL
        for (int i = 0; i < tiles * 4; i++)
            scores[(g + i / 2 * 8) * STRIDE + token + 2 * t + i % 2] = ca::bits_of(acc[i / 4][i % 4]);
    }
}

template <class T>
GPU_FN T max_of_warp(T x) {
    for (int mask = 16; mask >= 1; mask /= 2) {
        const T other = gpu::shuffle_xor(x, mask);
        x = other > x ? other : x;
    }
    return x;
}

// Scores of the tokens [first, n) that a row sees -> weights, m, l and unit; a row that sees nothing has
// l = 0. One warp, a lane computes four tokens of each 128; the weights of tokens that the row does not see
// are 0.
template <int tiles>
GPU_FN void page_softmax_row(gpu::In<uint8_t> head, const gpu::HeadLayout& at, int row, int first,
                             int n, Scores<tiles>& scores, PerRow<tiles>& m, PerRow<tiles>& l,
                             PerRow<tiles>& unit) {
    constexpr int EACH = TOKENS / gpu::WARP;
    const gpu::In<uint16_t> v_scale = gpu::in_as<uint16_t>(head + at.v_scales());
    const auto token_of = [](int i) { return (i / 4 * gpu::WARP + gpu::lane()) * 4 + i % 4; };
    const auto sees = [&](int i) {
        return static_cast<uint32_t>(token_of(i) - first) < static_cast<uint32_t>(n - first);
    };
    float score[EACH], p[EACH];
    const float lowest = ca::float_of(0xFF7FFFFFu);
    float top = lowest;
    uint32_t largest_score = 0;
    GPU_UNROLL
    for (int i = 0; i < EACH; i++) {
        score[i] = sees(i) ? ca::float_of(scores[row * STRIDE + token_of(i)]) : lowest;
        if (ca::magnitude_bits(score[i]) > largest_score) largest_score = ca::magnitude_bits(score[i]);
        if (score[i] > top) top = score[i];
    }
    gpu::warp_barrier();  // the scores are read
    bool finite = !gpu::any(largest_score >= ca::INFINITY_BITS);  // what follows is of no use if not
    const float peak = ca::add_rn(ca::ceil_exact(max_of_warp(top)), 0.0f);
    int32_t sum = 0;
    uint32_t largest = 0;
    GPU_UNROLL
    for (int i = 0; i < EACH; i++) {
        const bool is_seen = sees(i);  // selects, since a branch would keep the others waiting
        const float e = ca::exp2c(ca::sub_rn(score[i], peak));
        sum += is_seen ? ca::round_to_int(ca::mul_rn(e, 0x1p22f)) : 0;
        p[i] = ca::mul_rn(e, is_seen ? ca::half_to_float(v_scale[token_of(i)]) : 0.0f);
        if (ca::magnitude_bits(p[i]) > largest) largest = ca::magnitude_bits(p[i]);
    }
    largest = max_of_warp(largest);
    for (int mask = 16; mask >= 1; mask /= 2) sum += gpu::shuffle_xor(sum, mask);
    finite = finite && largest < ca::INFINITY_BITS;
    const ca::WeightUnit weights = ca::weight_unit(largest);
    GPU_UNROLL
    for (int i = 0; i < EACH; i += 4) {
        uint32_t high = 0, low = 0;
        GPU_UNROLL
        for (int j = 0; j < 4; j++) {
            const int32_t weight =
                finite ? ca::round_to_int(ca::mul_rn(p[i + j], weights.inverse)) : int32_t{0};
            high |= static_cast<uint32_t>(weight >> 7) << (8 * j);
            low |= static_cast<uint32_t>(weight & 127) << (8 * j);
        }
        scores[row * STRIDE + token_of(i) / 4] = high;
        scores[row * STRIDE + LOW + token_of(i) / 4] = low;
    }
    if (gpu::lane() == 0) {
        m[row] = finite ? peak : 0.0f;
        l[row] = finite ? ca::mul_rn(ca::float_rn(sum), 0x1p-22f) : ca::canonical_nan();
        unit[row] = finite ? weights.unit : 0.0f;
    }
}

// Four neighbouring tokens of dim d of K, as a dword of V has them.
GPU_FN uint32_t v_of_k(gpu::In<uint32_t> k, const gpu::HeadLayout& at, int t4, int d) {
    const gpu::Words4 four = gpu::in_as<gpu::Words4>(k)[at.k_dword(4 * t4, d / 4) / 4];
    const uint32_t numbers = 0x40u + 0x11u * (d % 4);  // byte d % 4 of two words
    const uint32_t first = gpu::bytes_of(four.word[0], four.word[1], numbers);
    const uint32_t second = gpu::bytes_of(four.word[2], four.word[3], numbers);
    return gpu::bytes_of(first, second, 0x5410u);
}

// Accumulators of `tiles` times 16 rows, a KV head of up to `dims_max` and `n_pages` pages: a super-page, or one of it.
template <int tiles, int n_pages, int dims_max, bool is_latent>
GPU_FN void attend_rows(gpu::In<int8_t> q, gpu::In<float> q_scale, const gpu::AttendTile& tile,
                        gpu::In<uint64_t> pages, int layer_lines, int n_head, int n_kv_head,
                        int head_dim, gpu::Out<float> m_out, gpu::Out<float> l_out,
                        gpu::Out<float> o_out, int window, int v_first) {
    constexpr int PARTS_MAX = dims_max / 8 / WARPS;  // groups of 8 dims of a warp
    constexpr int GROUPS_MAX = Queries<tiles, dims_max>::GROUPS_MAX;
    constexpr int PAIRS = 2 * tiles;
    __shared__ Scores<tiles> scores;
    __shared__ PerRow<tiles> m, l, unit;  // of the page
    __shared__ gpu::Shared<gpu::Words4, tiles * GROUPS_MAX * gpu::WARP> query_words;
    __shared__ gpu::Shared<float, 16 * tiles * GROUPS_MAX> query_scales;
    const Queries<tiles, dims_max> queries = {query_words, query_scales};
    const int kv_head = gpu::block_y(), group = n_head / n_kv_head;
    const int first_page = tile.first_superpage * ca::SUPERPAGE_PAGES + gpu::block_z() * n_pages;
    // The last row sees the most.
    if (visible_of(tile, group, tile.rows - 1, first_page * TOKENS) == 0) return;
    if (gpu::block_z() * n_pages >= tile.superpages * ca::SUPERPAGE_PAGES) return;
    int first = 0;  // of the pages that a row sees; the first row sees the first token
    while (first < n_pages &&
           hidden_of(tile, group, 0, (first_page + first) * TOKENS, window) == TOKENS)
        first++;
    if (first == n_pages) return;
    const gpu::HeadLayout at = {head_dim, is_latent ? v_first : 0};
    const auto head_of = [&](int page) {
        return gpu::in_at<uint8_t>(pages[tile.first_page + page]) +
               gpu::head_offset(at, layer_lines, kv_head);
    };
    gpu::prefetch(head_of(first_page + first), at.bytes());
    const int g = gpu::lane() / 4, t = gpu::lane() % 4, parts = head_dim / 8;
    // Where a row's groups begin, of eight dwords each. Rows past the last of a tile read the last one.
    const auto group_of = [&](int in_tile) {
        const int row = tile.first_row + (in_tile < tile.rows ? in_tile : tile.rows - 1);
        return ((tile.first_token + row / group) * n_head + kv_head * group + row % group) * at.groups();
    };
    const gpu::In<uint32_t> dwords = gpu::in_as<uint32_t>(q);
    for (int i = gpu::thread(); i < tiles * at.groups() * gpu::WARP; i += THREADS) {
        const int which = i / gpu::WARP, of_lane = i % gpu::WARP;
        const int row = which / at.groups() * 16 + of_lane / 4, column = which % at.groups();
        const int first = (group_of(row) + column) * 8 + of_lane % 4;
        const int second = (group_of(row + 8) + column) * 8 + of_lane % 4;
        query_words[i] = {{dwords[first], dwords[second], dwords[first + 4], dwords[second + 4]}};
    }
    for (int i = gpu::thread(); i < 16 * tiles * at.groups(); i += THREADS)
        query_scales[i] = q_scale[group_of(i % (16 * tiles)) + i / (16 * tiles)];
    // Rows past the last of the tile have weights of any value, whose unit is 0.
    for (int i = gpu::thread(); i < (16 * tiles - tile.rows) * 2 * LOW; i += THREADS)
        scores[(tile.rows + i / (2 * LOW)) * STRIDE + i % (2 * LOW)] = uint32_t{0};
    if (gpu::thread() >= tile.rows && gpu::thread() < 16 * tiles)
        m[gpu::thread()] = l[gpu::thread()] = unit[gpu::thread()] = 0.0f;
    gpu::barrier();
    // The accumulators of rows g, g + 8, ...; o of the dims that this lane computes.
    float total_m[PAIRS], total_l[PAIRS], o[PARTS_MAX][2 * PAIRS];
    GPU_UNROLL
    for (int i = 0; i < PAIRS; i++) total_m[i] = total_l[i] = 0.0f;
    GPU_UNROLL
    for (int part = 0; part < PARTS_MAX; part++)
        GPU_UNROLL
        for (int i = 0; i < 2 * PAIRS; i++) o[part][i] = 0.0f;
    for (int p = first; p < n_pages; p++) {
        const int page = first_page + p, page_start = page * TOKENS;
        const int seen = visible_of(tile, group, tile.rows - 1, page_start);
        if (seen == 0) break;
        if (p + 1 < n_pages && visible_of(tile, group, tile.rows - 1, page_start + TOKENS) > 0)
            gpu::prefetch(head_of(page + 1), at.bytes());
        const gpu::In<uint8_t> head = head_of(page);
        // The first row sees the least of the page's end, and the last row the least of its start.
        const bool all_see_end = visible_of(tile, group, 0, page_start) == TOKENS;
        const bool all_see_start = hidden_of(tile, group, tile.rows - 1, page_start, window) == 0;
        const int begin = all_see_start ? 0 : hidden_of(tile, group, 0, page_start, window);
        score_page<tiles, dims_max>(head, at, queries, begin, seen, scores);
        gpu::barrier();
        for (int row = gpu::warp(); row < tile.rows; row += WARPS)
            page_softmax_row<tiles>(
                head, at, row,
                all_see_start ? 0 : hidden_of(tile, group, row, page_start, window),
                all_see_end ? TOKENS : visible_of(tile, group, row, page_start), scores, m, l, unit);
        gpu::barrier();
        const gpu::In<uint32_t> v = gpu::in_as<uint32_t>(head + (is_latent ? 0 : at.v()));
        float shrink[PAIRS], units[PAIRS];
        bool is_larger[PAIRS], sees[PAIRS], is_first[PAIRS];
        GPU_UNROLL
        for (int i = 0; i < PAIRS; i++) {
            const int row = g + 8 * i;
            const float now_m = m[row], now_l = l[row];
            units[i] = unit[row];
            sees[i] = now_l != 0.0f;
            is_first[i] = total_l[i] == 0.0f;
            is_larger[i] = now_m > total_m[i];
            shrink[i] = ca::exp2c(is_larger[i] ? ca::sub_rn(total_m[i], now_m)
                                               : ca::sub_rn(now_m, total_m[i]));
            if (sees[i] && is_first[i]) {
                total_m[i] = now_m, total_l[i] = now_l;
            } else if (sees[i]) {
                total_l[i] = is_larger[i] ? ca::fma_rn(total_l[i], shrink[i], now_l)
                                          : ca::fma_rn(now_l, shrink[i], total_l[i]);
                if (is_larger[i]) total_m[i] = now_m;
            }
        }
        GPU_UNROLL
        for (int part = 0; part < PARTS_MAX; part++) {
            const int dims = (part * WARPS + gpu::warp()) * 8;
            if (part * WARPS + gpu::warp() >= parts) break;
            int32_t upper[tiles][4], lower[tiles][4];
            GPU_UNROLL
            for (int i = 0; i < tiles * 4; i++) upper[i / 4][i % 4] = lower[i / 4][i % 4] = 0;
            for (int from = begin / (32 * AHEAD) * 32 * AHEAD; from < seen; from += 32 * AHEAD) {
                uint32_t b[AHEAD][2];  // weights of tokens that no row sees are 0
                GPU_UNROLL
                for (int n = 0; n < AHEAD; n++)
                    for (int j = 0; j < 2; j++) {
                        const int t4 = from / 4 + 8 * n + t + 4 * j;
                        b[n][j] = is_latent ? v_of_k(v, at, t4, dims + g) : v[at.v_dword(t4, dims + g)];
                    }
                GPU_UNROLL
                for (int n = 0; n < AHEAD; n++) {
                    if (from + 32 * n >= seen) break;
                    GPU_UNROLL
                    for (int i = 0; i < tiles; i++) {
                        const int row = (16 * i + g) * STRIDE + from / 4 + 8 * n + t;
                        const int next = row + 8 * STRIDE;
                        const uint32_t a[4] = {scores[row], scores[next], scores[row + 4],
                                               scores[next + 4]};
                        const uint32_t c[4] = {scores[row + LOW], scores[next + LOW],
                                               scores[row + LOW + 4], scores[next + LOW + 4]};
                        gpu::mma_k32_us(upper[i], a, b[n]);
                        gpu::mma_k32_us(lower[i], c, b[n]);
                    }
                }
            }
            GPU_UNROLL
            for (int i = 0; i < 2 * PAIRS; i++) {
                const int r = i / 2;
                const float next =
                    ca::numerator(upper[i / 4][i % 4] * 128 + lower[i / 4][i % 4], units[r]);
                if (sees[r] && is_first[r])
                    o[part][i] = next;
                else if (sees[r])
                    o[part][i] = is_larger[r] ? ca::fma_rn(o[part][i], shrink[r], next)
                                              : ca::fma_rn(next, shrink[r], o[part][i]);
            }
        }
        gpu::barrier();  // m, l, unit and the weights are read
    }
    const auto result_of = [&](int row) {
        return result_index(tile, row, n_kv_head, kv_head) + int64_t{gpu::block_z()} * n_kv_head * 16;
    };
    GPU_UNROLL
    for (int part = 0; part < PARTS_MAX; part++) {
        if (part * WARPS + gpu::warp() >= parts) break;
        const int dims = (part * WARPS + gpu::warp()) * 8;
        GPU_UNROLL
        for (int i = 0; i < 2 * PAIRS; i++)
            if (i < 4 || tile.rows > 16)
                o_out[result_of(g + i / 2 * 8) * head_dim + dims + 2 * t + i % 2] = o[part][i];
    }
    if (gpu::warp() == 0 && t == 0)
        for (int i = 0; i < PAIRS; i++)
            if (i < 2 || tile.rows > 16) {
                m_out[result_of(g + 8 * i)] = total_m[i];
                l_out[result_of(g + 8 * i)] = total_l[i];
            }
}

struct Accumulator {
    float m;
    float l;
    float o;  // of one dim
};

// A row of a tile in its accumulators: `each` for a super-page, `stride` rows from one to the next. It sees
// tokens of those in [begin, end), which may be none.
struct ResultRow {
    gpu::In<float> m, l, o;
    int64_t first;
    int stride;
    int head_dim;
    int each;
    int begin, end;

    GPU_FN Accumulator one(int index, int d) const {
        const int64_t i = first + int64_t{index} * stride;
        return {m[i], l[i], o[i * head_dim + d]};
    }
    GPU_FN static void add(Accumulator& sum, const Accumulator& next) {
        ca::fold(sum.m, sum.l, &sum.o, next.m, next.l, &next.o, 1);
    }
    // Those of one super-page.
    GPU_FN Accumulator at(int superpage, int d) const {
        Accumulator sum = {0.0f, 0.0f, 0.0f};
        for (int i = superpage * each; i < (superpage + 1) * each; i++)
            if (i >= begin && i < end) add(sum, one(i, d));
        return sum;
    }
    // All super-pages in order.
    GPU_FN Accumulator folded(int d) const {
        return each == 1 ? folded_of<1>(d) : folded_of<ca::SUPERPAGE_PAGES>(d);
    }

  private:
    template <int of_superpage>
    GPU_FN Accumulator folded_of(int d) const {
        Accumulator next[FOLDED], total = {0.0f, 0.0f, 0.0f};
        if (begin >= end) return total;
        const auto load = [&](int from) {
            GPU_UNROLL
            for (int i = 0; i < FOLDED; i++) {
                const int index = from + i < begin ? begin : from + i;
                next[i] = one(index < end ? index : end - 1, d);
            }
        };
        const int first_loaded = begin / of_superpage * of_superpage;
        load(first_loaded);
        for (int i = first_loaded; i < end; i += FOLDED) {
            Accumulator now[FOLDED];
            GPU_UNROLL
            for (int k = 0; k < FOLDED; k++) {
                // One that is not there is empty, without a branch: the next loads would wait for it.
                const bool is_there = i + k >= begin && i + k < end;
                now[k] = {next[k].m, is_there ? next[k].l : 0.0f, next[k].o};
            }
            if (i + FOLDED < end) load(i + FOLDED);
            GPU_UNROLL
            for (int k = 0; k < FOLDED; k += of_superpage) {
                Accumulator sum = now[k];
                GPU_UNROLL
                for (int page = 1; page < of_superpage; page++) add(sum, now[k + page]);
                add(total, sum);
            }
        }
        return total;
    }
};

GPU_FN ResultRow result_row(const gpu::AttendTile& tile, gpu::In<float> m, gpu::In<float> l,
                            gpu::In<float> o, int row, int position, int n_kv_head, int head_dim,
                            int each, int window) {
    const int tokens = TOKENS * ca::SUPERPAGE_PAGES / each, base = tile.first_superpage * each;
    const int begin = first_seen(position, window) / tokens - base, end = position / tokens + 1 - base;
    const int most = tile.superpages * each;
    const int64_t first = result_index(tile, row, n_kv_head, gpu::block_y());
    return {m, l, o, first, n_kv_head * 16, head_dim, each, begin < 0 ? 0 : begin,
            end < most ? end : most};
}

}  // namespace

// Accumulators of every tile, KV head and super-page of its span: m, l [accumulator][16], o
// [accumulator][16][head_dim]. pages: addresses of the pages of all entries, in which the layer begins at
// layer_lines (head_offset); for queries of some KV heads of a page only, at the first of them. Grid: (tiles,
// KV heads, the most super-pages of a tile; of attend_pages and attend_pages_wide, pages).
// Numerators of a latent layer are those of dims from v_first on; the others mean nothing.
#define ATTEND(name, tiles, n_pages, dims_max, is_latent, at_once)                                    \
    KERNEL_AT_ONCE(name, THREADS, at_once, gpu::In<int8_t> q, gpu::In<float> q_scale,                 \
                   gpu::In<gpu::AttendTile> tile, gpu::In<uint64_t> pages, int layer_lines,           \
                   int n_head, int n_kv_head, int head_dim, gpu::Out<float> m, gpu::Out<float> l,     \
                   gpu::Out<float> o, int window, int v_first) {                                      \
        gpu::begin();                                                                                 \
        const gpu::AttendTile own = tile[gpu::block()]; /* in registers */                            \
        attend_rows<tiles, n_pages, dims_max, is_latent>(q, q_scale, own, pages, layer_lines, n_head, \
                                                         n_kv_head, head_dim, m, l, o, window, v_first); \
    }
ATTEND(attend, 1, ca::SUPERPAGE_PAGES, NARROW_DIMS, false, 3)
ATTEND(attend_many, 2, ca::SUPERPAGE_PAGES, NARROW_DIMS, false, 2)
ATTEND(attend_pages, 1, 1, NARROW_DIMS, false, 4)
ATTEND(attend_wide, 1, ca::SUPERPAGE_PAGES, gpu::HEAD_DIM_MAX, false, 2)
ATTEND(attend_pages_wide, 1, 1, gpu::HEAD_DIM_MAX, false, 3)
ATTEND(attend_latent, 1, ca::SUPERPAGE_PAGES, gpu::HEAD_DIM_MAX, true, 2)
ATTEND(attend_pages_latent, 1, 1, gpu::HEAD_DIM_MAX, true, 3)
#undef ATTEND

// Folds the super-pages of every row in order and divides: out row = token, head_dim values per head, and
// the same quantised, unless `q` is null. The tiles have all that the rows see. sinks: m of all query heads,
// then l of all, or null. each: accumulators of a super-page, 4 of a kernel of pages, else 1. Grid: (tiles, KV
// heads, rows of a tile), one thread per dim at most, and THREADS.
KERNEL(fold_attention, THREADS, gpu::In<gpu::AttendTile> tiles, gpu::In<float> m_in,
       gpu::In<float> l_in, gpu::In<float> o_in, int n_head, int n_kv_head, int head_dim, int each,
       gpu::Out<float> out, int stride, gpu::Out<uint32_t> q, gpu::Out<float> scale,
       gpu::Out<int32_t> sums, int window, gpu::In<float> sinks) {
    gpu::begin();
    __shared__ gpu::Shared<float, gpu::HEAD_DIM_MAX> values;
    const gpu::AttendTile tile = tiles[gpu::block()];
    const int kv_head = gpu::block_y(), row = gpu::block_z(), group = n_head / n_kv_head;
    if (row >= tile.rows) return;
    const int in_entry = tile.first_row + row;
    const int position = tile.start_position + in_entry / group;
    const int64_t token = tile.first_token + in_entry / group;
    const int head = kv_head * group + in_entry % group;
    const int first = head * head_dim;  // value of the row
    const ResultRow from =
        result_row(tile, m_in, l_in, o_in, row, position, n_kv_head, head_dim, each, window);
    for (int d = gpu::thread(); d < head_dim; d += gpu::threads()) {
        Accumulator sum = from.folded(d);
        if (sinks) ResultRow::add(sum, {sinks[head], sinks[n_head + head], 0.0f});
        float value;
        ca::finish(sum.l, &sum.o, 1, &value);
        out[token * stride + first + d] = value;
        values[d] = value;
    }
    if (!q) return;
    gpu::barrier();
    const int groups = head_dim / ca::BLOCK;
    for (int i = gpu::warp() * gpu::SPAN; i < groups; i += gpu::warps() * gpu::SPAN) {
        const int of_head = i + gpu::lane() / 8;
        gpu::quantise_group([&](int k) { return float(values[k - first]); }, n_head * head_dim,
                            token, first / ca::BLOCK + of_head, of_head < groups,
                            {q, scale, sums});
    }
}

// The accumulators of spans as `Partials` has them: [entry][term][token][head], a term per super-page, but
// one for a span that begins at super-page 0; zeros where a token sees nothing. Grid: as fold_attention.
// A tile is there for all rows of an entry, without super-pages where they see nothing of the span.
KERNEL(gather_partials, 256, gpu::In<gpu::AttendTile> tiles, gpu::In<gpu::PartialsTile> places,
       gpu::In<float> m_in, gpu::In<float> l_in, gpu::In<float> o_in, int n_head, int n_kv_head,
       int head_dim, int each, gpu::Out<float> m, gpu::Out<float> l, gpu::Out<float> o, int window) {
    gpu::begin();
    const gpu::AttendTile tile = tiles[gpu::block()];
    const gpu::PartialsTile place = places[gpu::block()];
    const int kv_head = gpu::block_y(), row = gpu::block_z(), group = n_head / n_kv_head;
    if (row >= tile.rows) return;
    const int in_entry = tile.first_row + row, token = in_entry / group;
    const int position = tile.start_position + token;
    const bool is_folded = place.first == 0;
    const int terms = is_folded ? 1 : place.superpages;
    const ResultRow from =
        result_row(tile, m_in, l_in, o_in, row, position, n_kv_head, head_dim, each, window);
    for (int term = 0; term < terms; term++) {
        const int64_t to = place.start + (int64_t{term} * place.tokens + token) * n_head +
                           kv_head * group + in_entry % group;
        for (int d = gpu::thread(); d < head_dim; d += gpu::threads()) {
            const Accumulator sum =
                is_folded ? from.folded(d) : from.at(place.first + term - tile.first_superpage, d);
            o[to * head_dim + d] = sum.o;
            if (d == 0) m[to] = sum.m, l[to] = sum.l;
        }
    }
}
