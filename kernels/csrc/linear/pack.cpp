// See pack.h. Runs once per model file, so simplicity comes before speed.
#include "linear/pack.h"

#include <algorithm>
#include <limits>

#include "common/ca.h"

namespace batchengine {
namespace {

// The blocks of a GGUF file, little-endian, as stored.
struct FileQ4_0 {
    uint16_t d;
    uint8_t q[16];  // low nibble = k, high nibble = k + 16
};
static_assert(sizeof(FileQ4_0) == 18);
struct FileQ4_1 {
    uint16_t d;
    uint16_t m;
    uint8_t q[16];
};
static_assert(sizeof(FileQ4_1) == 20);
struct FileQ8_0 {
    uint16_t d;
    int8_t q[32];
};
static_assert(sizeof(FileQ8_0) == 34);
struct FileQ6_K {
    uint8_t low[128];
    uint8_t high[64];
    int8_t scale[16];
    uint16_t d;
};
static_assert(sizeof(FileQ6_K) == 210);

struct KindFacts {
    const char* name;
    size_t block;       // k per file block
    size_t file_bytes;  // per file block
};
constexpr KindFacts FACTS[KIND_COUNT] = {
    {"q4_0", 32, sizeof(FileQ4_0)}, {"q4_1", 32, sizeof(FileQ4_1)}, {"q6_k", 256, sizeof(FileQ6_K)},
    {"q8_0", 32, sizeof(FileQ8_0)}, {"f16", 1, 2},                  {"bf16", 1, 2},
    {"f32", 1, 4},
};
const KindFacts& facts(Kind kind) { return FACTS[static_cast<int>(kind)]; }

// The first bad scale or value in row-major order, independent of the order of threads.
class FirstBad {
  public:
    void report(size_t row, size_t place) {
        const std::lock_guard<std::mutex> lock(mutex_);
        first_ = std::min(first_, {row, place});
    }
    bool any() const { return first_ != NONE; }
    std::pair<size_t, size_t> where() const { return first_; }

  private:
    static constexpr std::pair<size_t, size_t> NONE{std::numeric_limits<size_t>::max(), 0};
    std::mutex mutex_;
    std::pair<size_t, size_t> first_ = NONE;
};

bool finite_half(uint16_t half) { return (half & 0x7C00u) != 0x7C00u; }

constexpr uint16_t ONE_HALF = 0x3C00;
bool is_zero(uint16_t half) { return (half & 0x7FFFu) == 0; }

// A file block at an address of any alignment.
template <class Block>
Block load(const uint8_t* source, size_t index) {
    Block block;
    std::memcpy(&block, source + index * sizeof(Block), sizeof(Block));
    return block;
}

// The blocks below replace a d of 0 as pack.h says: zero weights are nibbles 8, nibbles 0 (q4_1, whose
// minimum stays), bytes 128, sub-scales 0 (q6_k).
void place(const FileQ4_0& from, PackedQ4_0& to, size_t odd, size_t row) {
    const bool zero = is_zero(from.d);
    to.d[odd][row] = zero ? ONE_HALF : from.d;
    for (size_t i = 0; i < 16; ++i)
        to.q[odd][i / 4][row][i % 4] = zero ? uint8_t{0x88} : from.q[i];
}

void place(const FileQ4_1& from, PackedQ4_1& to, size_t row) {
    const bool zero = is_zero(from.d);
    to.d[row] = zero ? ONE_HALF : from.d;
    to.m[row] = from.m;
    for (size_t i = 0; i < 16; ++i) to.q[i / 4][row][i % 4] = zero ? uint8_t{0} : from.q[i];
}

void place(const FileQ8_0& from, PackedQ8_0& to, size_t odd, size_t row) {
    const bool zero = is_zero(from.d);
    to.d[odd][row] = zero ? ONE_HALF : from.d;
    for (size_t i = 0; i < 32; ++i)
        to.q[odd][i / 4][row][i % 4] = static_cast<uint8_t>((zero ? 0 : from.q[i]) + 128);
}

// Shift of the two upper bits of vector g inside high[(g % 4) / 2]; see PackedQ6_K.
constexpr unsigned high_shift(size_t g) { return g % 2 == 0 ? (g < 4 ? 4 : 6) : (g < 4 ? 2 : 0); }

unsigned file_q6(const FileQ6_K& from, size_t k) {
    const size_t half = k / 128, part = k % 128 / 32, i = k % 32;
    const unsigned nibble = from.low[64 * half + 32 * (part % 2) + i] >> (part < 2 ? 0 : 4) & 15u;
    return nibble | (from.high[32 * half + i] >> (2 * part) & 3u) << 4;
}

void place(const FileQ6_K& from, PackedQ6_K& to, size_t row) {
    const bool zero = is_zero(from.d);
    to.d[row] = zero ? 1.0f : ca::half_to_float(from.d);
    for (size_t i = 0; i < 16; ++i) to.scale[i][row] = zero ? int8_t{0} : from.scale[i];
    for (size_t k = 0; k < 256; ++k) {
        PackedQ6_K::Block& block = to.block[k / 32];
        const size_t g = k % 32 / 4, byte = k % 4;
        const unsigned q = file_q6(from, k);
        block.low[g % 4][row][byte] |= static_cast<uint8_t>((q & 15u) << (g < 4 ? 0 : 4));
        block.high[g % 4 / 2][row][byte] |= static_cast<uint8_t>((q >> 4) << high_shift(g));
    }
}

void pack_row(Kind kind, size_t cols, const uint8_t* source, size_t row, uint8_t* tile, FirstBad& bad) {
    const size_t blocks = cols / facts(kind).block, lane = row % TILE_ROWS;
    for (size_t b = 0; b < blocks; ++b) {
        bool good = true;
        if (kind == Kind::q4_0) {
            const auto from = load<FileQ4_0>(source, b);
            good = finite_half(from.d);
            place(from, reinterpret_cast<PackedQ4_0*>(tile)[b / 2], b % 2, lane);
        } else if (kind == Kind::q4_1) {
            const auto from = load<FileQ4_1>(source, b);
            good = finite_half(from.d) && finite_half(from.m);
            place(from, reinterpret_cast<PackedQ4_1*>(tile)[b], lane);
        } else if (kind == Kind::q8_0) {
            const auto from = load<FileQ8_0>(source, b);
            good = finite_half(from.d);
            place(from, reinterpret_cast<PackedQ8_0*>(tile)[b / 2], b % 2, lane);
        } else if (kind == Kind::q6_k) {
            const auto from = load<FileQ6_K>(source, b);
            good = finite_half(from.d);
            place(from, reinterpret_cast<PackedQ6_K*>(tile)[b], lane);
        } else if (kind == Kind::f32) {
            const auto from = load<float>(source, b);
            good = ca::is_finite(from);
            reinterpret_cast<float*>(tile)[b * TILE_ROWS + lane] = from;
        } else {
            const auto from = load<uint16_t>(source, b);
            const unsigned exponent = kind == Kind::f16 ? 0x7C00u : 0x7F80u;
            good = (from & exponent) != exponent;
            reinterpret_cast<uint16_t*>(tile)[b * TILE_ROWS + lane] = from;
        }
        if (!good) bad.report(row, b);
    }
}

unsigned nibble_at(const uint8_t (&q)[GROUPS / 2][TILE_ROWS][4], size_t lane, size_t i) {
    return q[i % 16 / 4][lane][i % 4] >> (i < 16 ? 0 : 4) & 15u;
}

int q6_at(const PackedQ6_K::Block& block, size_t lane, size_t i) {
    const size_t g = i / 4;
    const unsigned high = block.high[g % 4 / 2][lane][i % 4] >> high_shift(g) & 3u;
    return static_cast<int>(nibble_at(block.low, lane, i) | high << 4) - 32;
}

float value_at(Kind kind, const uint8_t* tile, size_t lane, size_t k) {
    const size_t b = k / BLOCK_WIDTH, i = k % BLOCK_WIDTH;
    const auto scale = [](uint16_t half) { return ca::half_to_float(half); };
    switch (kind) {
        case Kind::q4_0: {
            const auto& pair = reinterpret_cast<const PackedQ4_0*>(tile)[b / 2];
            const int q = static_cast<int>(nibble_at(pair.q[b % 2], lane, i)) - 8;
            return static_cast<float>(q) * scale(pair.d[b % 2][lane]);
        }
        case Kind::q4_1: {
            const auto& block = reinterpret_cast<const PackedQ4_1*>(tile)[b];
            const auto q = static_cast<float>(nibble_at(block.q, lane, i));
            return ca::fma_rn(q, scale(block.d[lane]), scale(block.m[lane]));
        }
        case Kind::q8_0: {
            const auto& pair = reinterpret_cast<const PackedQ8_0*>(tile)[b / 2];
            const int q = pair.q[b % 2][i / 4][lane][i % 4] - 128;
            return static_cast<float>(q) * scale(pair.d[b % 2][lane]);
        }
        case Kind::q6_k: {
            const auto& super = reinterpret_cast<const PackedQ6_K*>(tile)[k / 256];
            const int q = q6_at(super.block[b % 8], lane, i) * super.scale[k % 256 / 16][lane];
            return static_cast<float>(q) * super.d[lane];
        }
        case Kind::f16:
            return scale(reinterpret_cast<const uint16_t*>(tile)[k * TILE_ROWS + lane]);
        case Kind::bf16:
            return ca::bf16_to_float(
                reinterpret_cast<const uint16_t*>(tile)[k * TILE_ROWS + lane]);
        case Kind::f32: return reinterpret_cast<const float*>(tile)[k * TILE_ROWS + lane];
    }
    return ca::canonical_nan();
}

}  // namespace

const char* kind_name(Kind kind) { return facts(kind).name; }

Kind kind_of(const std::string& name) {
    std::string choices;
    for (int i = 0; i < KIND_COUNT; ++i) {
        if (name == FACTS[i].name) return static_cast<Kind>(i);
        choices += std::string(i ? " " : "") + FACTS[i].name;
    }
    throw std::invalid_argument("unknown kind '" + name + "'; known: " + choices);
}

void require_shape(Kind kind, size_t rows, size_t cols) {
    const auto& fact = facts(kind);
    constexpr size_t LARGEST = size_t{1} << 31;  // keeps every product of sizes far from overflow
    if (rows == 0 || cols == 0 || rows > LARGEST || cols > LARGEST)
        throw std::invalid_argument(std::string(fact.name) + ": rows and cols must be 1..2^31");
    if (cols % fact.block != 0)
        throw std::invalid_argument(std::string(fact.name) + ": " + std::to_string(cols) +
                                    " cols are not a multiple of " + std::to_string(fact.block));
}

size_t source_bytes(Kind kind, size_t rows, size_t cols) {
    return rows * (cols / facts(kind).block) * facts(kind).file_bytes;
}

size_t tile_bytes(Kind kind, size_t cols) {
    const size_t blocks = div_up(cols, BLOCK_WIDTH);
    switch (kind) {
        case Kind::q4_0: return div_up(blocks, 2) * sizeof(PackedQ4_0);
        case Kind::q4_1: return blocks * sizeof(PackedQ4_1);
        case Kind::q8_0: return div_up(blocks, 2) * sizeof(PackedQ8_0);
        case Kind::q6_k: return blocks / 8 * sizeof(PackedQ6_K);
        case Kind::f16:
        case Kind::bf16: return blocks * BLOCK_WIDTH * TILE_ROWS * 2;
        case Kind::f32: return blocks * BLOCK_WIDTH * TILE_ROWS * 4;
    }
    return 0;
}

size_t packed_bytes(Kind kind, size_t rows, size_t cols) {
    return div_up(rows, TILE_ROWS) * tile_bytes(kind, cols);
}

void pack(Pool& pool, Kind kind, size_t rows, size_t cols, const uint8_t* source, uint8_t* packed) {
    FirstBad bad;
    const size_t bytes = tile_bytes(kind, cols), row_bytes = source_bytes(kind, 1, cols);
    const Buffer<uint8_t> zeros(row_bytes);  // source of the rows past the last
    for_each(pool, div_up(rows, TILE_ROWS), false, [&](size_t tile) {
        uint8_t* to = packed + tile * bytes;
        std::memset(to, 0, bytes);
        const size_t end = std::min(rows, (tile + 1) * TILE_ROWS);
        for (size_t row = tile * TILE_ROWS; row < end; ++row)
            pack_row(kind, cols, source + row * row_bytes, row, to, bad);
        for (size_t row = end; row < (tile + 1) * TILE_ROWS; ++row)
            pack_row(kind, cols, zeros.data(), row, to, bad);
    });
    if (!bad.any()) return;
    const auto [row, place] = bad.where();
    const bool floats = facts(kind).block == 1;
    throw std::invalid_argument(std::string(kind_name(kind)) + ": row " + std::to_string(row) +
                                (floats ? ", column " : ", block ") + std::to_string(place) +
                                (floats ? ": the value" : ": the scale") + " is NaN or infinite");
}

void unpack_row(const Matrix& matrix, size_t row, float* out) {
    const uint8_t* tile = matrix.data + row / TILE_ROWS * tile_bytes(matrix.kind, matrix.cols);
    for (size_t k = 0; k < matrix.cols; ++k)
        out[k] = value_at(matrix.kind, tile, row % TILE_ROWS, k);
}

}  // namespace batchengine
