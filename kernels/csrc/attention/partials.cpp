// See partials.h.
#include "attention/partials.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "rows/rowops.h"

namespace batchengine {
namespace {

static_assert(std::endian::native == std::endian::little, "the exported bytes are the memory's");

constexpr size_t HEADER_BYTES = 16;
constexpr size_t ENTRY_BYTES = 24;
constexpr size_t POSITIONS_MAX = size_t{1} << 40;

std::string text(size_t n) { return std::to_string(n); }

std::string range(const PartialEntry& entry) {
    return "super-pages " + text(entry.first) + ".." + text(entry.end());
}

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument(what); }

void require_span(const PartialEntry& entry, const std::string& where) {
    const size_t seen = entry.seen(entry.n_tokens - 1);
    if (entry.first > seen || entry.count > seen - entry.first)
        refuse(where + " has " + text(seen) + " super-pages, not " + text(entry.count) + " from " +
               text(entry.first));
}

// Numbers the accumulators of the entries in order; returns how many there are.
size_t number_accumulators(std::vector<PartialEntry>& entries, size_t n_head) {
    size_t total = 0;
    for (PartialEntry& entry : entries) {
        entry.start = total;
        total += entry.terms() * entry.n_tokens * n_head;
    }
    return total;
}

void copy_accumulators(const Accumulators& from, size_t source, Accumulators& to, size_t target,
                       size_t count, size_t values) {
    std::copy_n(from.m.data() + source, count, to.m.data() + target);
    std::copy_n(from.l.data() + source, count, to.l.data() + target);
    std::copy_n(from.o.data() + source * values, count * values, to.o.data() + target * values);
}

// The entries of `into` after a fold; their `start` is not set.
std::vector<PartialEntry> joined(const Partials& into, const Partials& next) {
    if (into.n_head != next.n_head || into.head_dim != next.head_dim || into.v_first != next.v_first ||
        into.entries.size() != next.entries.size())
        refuse("fold: the partials differ in heads, head_dim, v_first or entries");
    std::vector<PartialEntry> entries = into.entries;
    for (size_t e = 0; e < entries.size(); e++) {
        PartialEntry& mine = entries[e];
        const PartialEntry& other = next.entries[e];
        const std::string where = "fold: entry " + text(e);
        if (mine.n_tokens != other.n_tokens || mine.start_position != other.start_position)
            refuse(where + " is of another step");
        if (other.count == 0) continue;
        if (mine.count == 0) mine.first = other.first;
        else if (mine.end() != other.first)
            refuse(where + ": " + range(other) + " do not follow " + range(mine));
        mine.count += other.count;
    }
    return entries;
}

// Folds the terms of `other` into the one accumulator that each head of a token has.
void fold_token(const RowOps& ops, Partials& into, const PartialEntry& mine, const Partials& next,
                const PartialEntry& other, size_t token) {
    const size_t values = into.values();
    const size_t seen = mine.seen(token);
    const size_t terms = std::min(other.end(), seen) - std::min(other.first, seen);
    for (size_t term = 0; term < terms; term++)
        for (size_t head = 0; head < into.n_head; head++) {
            const size_t i = into.index(mine, 0, token, head);
            const size_t j = next.index(other, term, token, head);
            ops.fold(into.at.m.data() + i, into.at.l.data() + i, into.at.o.data() + i * values,
                     next.at.m[j], next.at.l[j], next.at.o.data() + j * values, values);
        }
}

// Whether a token sees any of the super-pages [first, end).
bool sees(const PartialEntry& entry, size_t token, size_t first, size_t end, size_t window) {
    const size_t position = entry.start_position + token;
    return first * SUPERPAGE_TOKENS <= position &&
           first_seen(position, window) < end * SUPERPAGE_TOKENS;
}

struct EntryToken {
    size_t entry;
    size_t token;
};

template <class T>
T read(const uint8_t* bytes) {
    T value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
}

template <class T>
void append(std::string& bytes, const T* values, size_t count) {
    bytes.append(reinterpret_cast<const char*>(values), count * sizeof(T));
}

}  // namespace

Sinks::Sinks(const float* logits, size_t n_head_) : n_head(n_head_), values(2 * n_head_) {
    for (size_t head = 0; head < n_head; head++) {
        const ca::Sink sink = ca::sink_of(logits[head]);
        if (!ca::is_finite(sink.m))
            refuse("Sinks: that of head " + text(head) + " is not finite in base 2");
        values[head] = sink.m;
        values[n_head + head] = sink.l;
    }
}

void set_spans(Partials& partials, const Batch& batch, const std::vector<Span>& spans, size_t window) {
    std::vector<PartialEntry> entries(batch.n_entries);
    for (size_t e = 0; e < entries.size(); e++) {
        const BatchEntry& entry = batch.entries[e];
        entries[e] = {entry.first_token, entry.n_tokens, entry.start_position, 0, 0, 0};
    }
    std::vector<bool> named(entries.size());
    for (const Span& span : spans) {
        if (span.entry >= entries.size())
            refuse("attend_partials: entry " + text(span.entry) + " of " + text(entries.size()));
        const std::string where = "attend_partials: entry " + text(span.entry);
        if (named[span.entry]) refuse(where + " has two spans");
        named[span.entry] = true;
        if (span.count == 0) continue;
        PartialEntry& entry = entries[span.entry];
        entry.first = span.first;
        entry.count = span.count;
        require_span(entry, where);
    }
    const size_t total = number_accumulators(entries, partials.n_head);
    const size_t values = partials.values();
    partials.at.reserve(total, values);
    partials.entries = std::move(entries);
    partials.n_tokens = batch.n_tokens;
    partials.n_accumulators = total;
    for (const PartialEntry& entry : partials.entries)
        for (size_t term = 0; term < entry.terms(); term++) {
            const size_t first = entry.first + term, end = entry.first == 0 ? entry.end() : first + 1;
            for (size_t token = 0; token < entry.n_tokens; token++) {
                if (sees(entry, token, first, end, window)) continue;
                const size_t i = partials.index(entry, term, token, 0), n = partials.n_head;
                std::fill_n(partials.at.m.data() + i, n, 0.0f);
                std::fill_n(partials.at.l.data() + i, n, 0.0f);
                std::fill_n(partials.at.o.data() + i * values, n * values, 0.0f);
            }
        }
}

void fold(Pool& pool, Partials& into, const Partials& next) {
    std::vector<PartialEntry> entries = joined(into, next);
    const size_t total = number_accumulators(entries, into.n_head), values = into.values();
    if (total != into.n_accumulators) {  // no entry's count falls: equal totals mean equal indexes
        Accumulators at;
        at.reserve(total, values);
        for (size_t e = 0; e < entries.size(); e++) {
            const PartialEntry& old = into.entries[e];
            copy_accumulators(into.at, old.start, at, entries[e].start,
                              old.terms() * into.rows(old), values);
        }
        into.at = std::move(at);
        into.n_accumulators = total;
    }
    std::vector<EntryToken> tokens;
    for (size_t e = 0; e < entries.size(); e++) {
        const PartialEntry& old = into.entries[e];
        const PartialEntry& other = next.entries[e];
        if (other.count == 0) continue;
        if (old.count > 0 && old.first == 0)
            for (size_t t = 0; t < old.n_tokens; t++) tokens.push_back({e, t});
        else  // the terms follow one another
            copy_accumulators(next.at, other.start, into.at,
                              entries[e].start + old.terms() * into.rows(old),
                              other.terms() * next.rows(other), values);
    }
    into.entries = std::move(entries);
    const RowOps& ops = rowops();
    const bool alone = tokens.size() * into.n_head * values <= VALUES_ALONE;
    for_each(pool, tokens.size(), alone, [&](size_t i) {
        const auto [e, token] = tokens[i];
        fold_token(ops, into, into.entries[e], next, next.entries[e], token);
    });
}

void finish_head(float m, float l, const float* o, size_t n_values, const Sinks* sinks, size_t head,
                 float* out) {
    const RowOps& ops = rowops();
    if (sinks) {
        alignas(CACHE_LINE) static constexpr float none[HEAD_DIM_MAX] = {};
        std::copy_n(o, n_values, out);
        ops.fold(&m, &l, out, sinks->m()[head], sinks->l()[head], none, n_values);
        o = out;
    }
    ops.finish(l, o, n_values, out);
}

void finish(Pool& pool, const Partials& partials, const std::vector<size_t>& rows,
            size_t first_head, Rows& out, const Sinks* sinks) {
    std::vector<EntryToken> tokens;
    for (size_t e = 0; e < partials.entries.size(); e++) {
        const PartialEntry& entry = partials.entries[e];
        const size_t seen = entry.seen(entry.n_tokens - 1);
        if (entry.first != 0 || entry.count != seen)
            refuse("finish: entry " + text(e) + " has " + range(entry) + " of 0.." + text(seen));
        for (size_t t = 0; t < entry.n_tokens; t++) tokens.push_back({e, t});
    }
    const size_t head_dim = partials.head_dim, v_first = partials.v_first, values = partials.values();
    for_each(pool, tokens.size(), tokens.size() * partials.n_head * values <= VALUES_ALONE, [&](size_t index) {
        const auto [e, token] = tokens[index];
        const PartialEntry& entry = partials.entries[e];
        float* row = out.row(rows[e] + token) + first_head * head_dim;
        for (size_t head = 0; head < partials.n_head; head++) {
            const size_t i = partials.index(entry, 0, token, head);
            float* const to = row + head * head_dim;
            std::fill_n(to, v_first, 0.0f);
            finish_head(partials.at.m[i], partials.at.l[i], partials.at.o.data() + i * values, values,
                        sinks, first_head + head, to + v_first);
        }
    });
}

std::string partials_to_bytes(const Partials& partials) {
    const size_t n = partials.n_accumulators, n_entries = partials.entries.size();
    std::string bytes;
    bytes.reserve(HEADER_BYTES + ENTRY_BYTES * n_entries + 4 * (partials.values() + 2) * n);
    const uint32_t header[4] = {static_cast<uint32_t>(partials.n_head),
                                static_cast<uint32_t>(partials.head_dim),
                                static_cast<uint32_t>(n_entries),
                                static_cast<uint32_t>(partials.v_first)};
    append(bytes, header, 4);
    for (const PartialEntry& entry : partials.entries) {
        const uint32_t counts[4] = {static_cast<uint32_t>(entry.n_tokens),
                                    static_cast<uint32_t>(entry.first),
                                    static_cast<uint32_t>(entry.count), 0};
        const uint64_t position = entry.start_position;
        append(bytes, counts, 4);
        append(bytes, &position, 1);
    }
    append(bytes, partials.at.m.data(), n);
    append(bytes, partials.at.l.data(), n);
    append(bytes, partials.at.o.data(), n * partials.values());
    return bytes;
}

void partials_from_bytes(const uint8_t* bytes, size_t size, Partials& partials) {
    const std::string where = "Partials.load_bytes";
    if (size < HEADER_BYTES) refuse(where + ": " + text(size) + " bytes have no header");
    const size_t n_entries = read<uint32_t>(bytes + 8);
    if (read<uint32_t>(bytes) != partials.n_head || read<uint32_t>(bytes + 4) != partials.head_dim ||
        read<uint32_t>(bytes + 12) != partials.v_first)
        refuse(where + ": not partials of " + text(partials.n_head) + " heads of " +
               text(partials.head_dim) + ", v_first " + text(partials.v_first));
    const uint8_t* const table = bytes + HEADER_BYTES;
    if (n_entries > (size - HEADER_BYTES) / ENTRY_BYTES)
        refuse(where + ": " + text(n_entries) + " entries do not fit " + text(size) + " bytes");
    const size_t payload = size - HEADER_BYTES - n_entries * ENTRY_BYTES;
    const size_t values = partials.values(), total = payload / (4 * (values + 2));
    std::vector<PartialEntry> entries(n_entries);
    size_t n_tokens = 0, left = total;
    for (size_t e = 0; e < n_entries; e++) {
        const uint8_t* at = table + e * ENTRY_BYTES;
        const std::string entry_is = where + ": entry " + text(e);
        PartialEntry& entry = entries[e];
        entry = {n_tokens, read<uint32_t>(at), read<uint64_t>(at + 16), read<uint32_t>(at + 4),
                 read<uint32_t>(at + 8), 0};
        if (entry.n_tokens == 0 || entry.n_tokens > partials.tokens_max - n_tokens)
            refuse(entry_is + " has " + text(entry.n_tokens) + " tokens, at most " +
                   text(partials.tokens_max) + " in all");
        if (entry.start_position > POSITIONS_MAX || read<uint32_t>(at + 12) != 0 ||
            (entry.count == 0 && entry.first != 0))
            refuse(entry_is + " is malformed");
        require_span(entry, entry_is);
        n_tokens += entry.n_tokens;
        if (entry.terms() > left / partials.rows(entry))
            refuse(entry_is + " has more accumulators than the bytes hold");
        left -= entry.terms() * partials.rows(entry);
    }
    if (left != 0 || payload != total * 4 * (values + 2))
        refuse(where + ": " + text(payload) + " bytes are not the accumulators of these entries");
    number_accumulators(entries, partials.n_head);
    partials.at.reserve(total, values);
    const uint8_t* from = table + n_entries * ENTRY_BYTES;
    std::memcpy(partials.at.m.data(), from, total * 4);
    std::memcpy(partials.at.l.data(), from + total * 4, total * 4);
    std::memcpy(partials.at.o.data(), from + total * 8, total * values * 4);
    partials.entries = std::move(entries);
    partials.n_tokens = n_tokens;
    partials.n_accumulators = total;
}

std::string queries_to_bytes(const Queries& queries, size_t n_kv_head, QueryHeads heads,
                             const std::vector<TokenRun>& runs) {
    const size_t group = queries.n_head / n_kv_head, blocks = queries.head_dim / 32;
    std::string bytes, scales;
    const auto add = [&](size_t kv_head, size_t token, size_t head_of_group, size_t n) {
        const size_t row = queries.row(n_kv_head, kv_head, token, head_of_group);
        append(bytes, queries.q.data() + row * queries.head_dim, n * queries.head_dim);
        append(scales, queries.scale.data() + row * blocks, n * blocks);
    };
    const size_t end = heads.first + heads.count;
    for (size_t head = heads.first; head < end; head = (head / group + 1) * group) {
        const size_t first = head % group, count = std::min(group - first, end - head);
        for (const TokenRun& run : runs) {
            if (count == group) {
                add(head / group, run.first, 0, run.count * group);
                continue;
            }
            for (size_t token = run.first; token < run.first + run.count; token++)
                add(head / group, token, first, count);
        }
    }
    return bytes + scales;
}

size_t queries_from_bytes(const uint8_t* bytes, size_t size, size_t n_kv_head, Queries& queries) {
    const size_t head_dim = queries.head_dim, blocks = head_dim / 32;
    const size_t token_bytes = queries.n_head * (head_dim + blocks * sizeof(float));
    const size_t n_tokens = size / token_bytes;
    if (size % token_bytes != 0 || n_tokens > queries.tokens_max)
        refuse("Queries.load_bytes: " + text(size) + " bytes are not those of 0 to " +
               text(queries.tokens_max) + " tokens of " + text(token_bytes));
    const size_t rows = n_tokens * (queries.n_head / n_kv_head);  // of a KV head
    const uint8_t* const scales = bytes + n_tokens * queries.n_head * head_dim;
    for (size_t head = 0; head < n_kv_head; head++) {
        const size_t from = head * rows, to = queries.row(n_kv_head, head, 0, 0);
        int8_t* const q = queries.q.data() + to * head_dim;
        std::memcpy(q, bytes + from * head_dim, rows * head_dim);
        std::memcpy(queries.scale.data() + to * blocks, scales + from * blocks * sizeof(float),
                    rows * blocks * sizeof(float));
        for (size_t block = 0; block < rows * blocks; block++) {
            int32_t sum = 0;
            for (size_t d = 0; d < 32; d++) sum += q[block * 32 + d];
            queries.offset[to * blocks + block] = -128 * sum;
        }
    }
    return n_tokens;
}

}  // namespace batchengine
