// See pack.h. Runs once per model file, so simplicity comes before speed.
#include "linear/pack.h"

#include <algorithm>
#include <limits>

#include "common/ca.h"
#include "linear/gguf_blocks.h"

namespace batchengine {
namespace {

struct KindFacts {
    const char* name;
    size_t block;       // k per file block
    size_t file_bytes;  // per file block
};
constexpr KindFacts FACTS[KIND_COUNT] = {
    {"q4_0", 32, sizeof(FileQ4_0)},  {"q4_1", 32, sizeof(FileQ4_1)}, {"q5_0", 32, sizeof(FileQ5_0)},
    {"q5_1", 32, sizeof(FileQ5_1)},  {"q8_0", 32, sizeof(FileQ8_0)}, {"iq4_nl", 32, sizeof(FileIQ4_NL)},
    {"q4_k", 256, sizeof(FileQ4_K)}, {"q5_k", 256, sizeof(FileQ5_K)}, {"q6_k", 256, sizeof(FileQ6_K)},
    {"mxfp4", 32, sizeof(FileMXFP4)}, {"iq4_xs", 256, sizeof(FileIQ4_XS)},
    {"q3_k", 256, sizeof(FileQ3_K)}, {"q2_k", 256, sizeof(FileQ2_K)},
    {"iq3_xxs", 256, sizeof(FileIQ3_XXS)}, {"iq3_s", 256, sizeof(FileIQ3_S)},
    {"iq2_xxs", 256, sizeof(FileIQ2_XXS)}, {"iq2_xs", 256, sizeof(FileIQ2_XS)},
    {"iq2_s", 256, sizeof(FileIQ2_S)}, {"iq1_s", 256, sizeof(FileIQ1_S)},
    {"iq1_m", 256, sizeof(FileIQ1_M)},
    {"f16", 1, 2}, {"bf16", 1, 2}, {"f32", 1, 4},
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

constexpr uint16_t ONE_HALF = 0x3C00;

using Nibbles = uint8_t[GROUPS / 2][TILE_ROWS][4];

// Weight i of a block of 32, in nibbles or five bits; put() wants zeros before.
void put(Nibbles& to, size_t row, size_t i, unsigned q) {
    to[i % 16 / 4][row][i % 4] |= static_cast<uint8_t>((q & 15u) << (i < 16 ? 0 : 4));
}
unsigned weight_at(const Nibbles& from, size_t row, size_t i) {
    return from[i % 16 / 4][row][i % 4] >> (i < 16 ? 0 : 4) & 15u;
}
void put(FiveBits& to, size_t row, size_t i, unsigned q) {
    const size_t j = i % 16 / 4;
    to.q[j][row][i % 4] |= static_cast<uint8_t>(i < 16 ? q : q >> 2 << 5);
    if (i >= 16) to.q[4][row][i % 4] |= static_cast<uint8_t>((q & 3u) << (2 * j));
}
unsigned weight_at(const FiveBits& from, size_t row, size_t i) {
    const size_t j = i % 16 / 4;
    const unsigned byte = from.q[j][row][i % 4];
    return i < 16 ? byte & 31u : byte >> 5 << 2 | (from.q[4][row][i % 4] >> (2 * j) & 3u);
}

// Block b of a row goes into its tile; a d of 0 is replaced as pack.h says.
uint16_t usable(uint16_t d) { return zero_half(d) ? ONE_HALF : d; }

// 32 weights; all of them `zero` if d is 0.
template <class File, class Weights>
void put_all(const File& from, Weights& to, size_t row, unsigned zero) {
    for (size_t i = 0; i < 32; ++i) put(to, row, i, zero_half(from.d) ? zero : quant(from, i));
}

void place(const FileQ4_0& from, PackedQ4_0* tile, size_t b, size_t row) {
    tile[b / 2].d[b % 2][row] = usable(from.d);
    put_all(from, tile[b / 2].q[b % 2], row, 8);
}

void place(const FileQ4_1& from, PackedQ4_1* tile, size_t b, size_t row) {
    tile[b].d[row] = usable(from.d);
    tile[b].m[row] = from.m;
    put_all(from, tile[b].q, row, 0);
}

void place(const FileQ5_0& from, PackedQ5_0* tile, size_t b, size_t row) {
    tile[b / 2].d[b % 2][row] = usable(from.d);
    put_all(from, tile[b / 2].block[b % 2], row, 16);
}

void place(const FileQ5_1& from, PackedQ5_1* tile, size_t b, size_t row) {
    tile[b].d[row] = usable(from.d);
    tile[b].m[row] = from.m;
    put_all(from, tile[b].block, row, 0);
}

void place(const FileQ8_0& from, PackedQ8_0* tile, size_t b, size_t row) {
    PackedQ8_0& to = tile[b / 2];
    to.d[b % 2][row] = usable(from.d);
    for (size_t i = 0; i < 32; ++i) {
        const int q = zero_half(from.d) ? 0 : from.q[i];
        to.q[b % 2][i / 4][row][i % 4] = static_cast<uint8_t>(q + 128);
    }
}

// IQ4_NL has no weight of zero, so a scale of zero stays.
void place(const FileIQ4_NL& from, PackedQ4_0* tile, size_t b, size_t row) {
    tile[b / 2].d[b % 2][row] = from.d;
    for (size_t i = 0; i < 32; ++i) put(tile[b / 2].q[b % 2], row, i, quant(from, i));
}

// Nor has IQ4_XS: there a scale of zero, of the block or of a sub-block, stays. Nor have the types with a codebook.
void place(const FileIQ4_XS& from, PackedIQ4_XS* tile, size_t b, size_t row) {
    tile[b].d[row] = from.d;
    for (size_t j = 0; j < 8; ++j) {
        tile[b].scale[j][row] = static_cast<int8_t>(scale_of(from, j));
        for (size_t i = 0; i < 32; ++i) put(tile[b].q[j], row, i, quant(from, 32 * j + i));
    }
}

template <class File>
void place(const File& from, PackedIQ4_XS* tile, size_t b, size_t row) {
    const SuperblockIndices indices = indices_of(from);
    tile[b].d[row] = from.d;
    for (size_t j = 0; j < 8; ++j) {
        tile[b].scale[j][row] = static_cast<int8_t>(indices.scale[2 * j]);
        for (size_t i = 0; i < 32; ++i) put(tile[b].q[j], row, i, indices.index[32 * j + i]);
    }
}

// d, dmin and the sub-blocks' scales of Q4_K and Q5_K; true for a sub-block that has weights.
template <class File, class Packed>
bool place_scales(const File& from, Packed& to, size_t j, size_t row) {
    const bool zero = zero_half(from.d) || scale_of(from.scales, j) == 0;
    to.d[row] = usable(from.d);
    to.m[row] = from.dmin ^ 0x8000u;
    to.scale[j][row] = static_cast<uint8_t>(zero ? 1 : scale_of(from.scales, j));
    to.min[j][row] = static_cast<uint8_t>(min_of(from.scales, j));
    return !zero;
}

void place(const FileQ4_K& from, PackedQ4_K* tile, size_t b, size_t row) {
    for (size_t j = 0; j < 8; ++j)
        if (place_scales(from, tile[b], j, row))
            for (size_t i = 0; i < 32; ++i) put(tile[b].q[j], row, i, quant(from, 32 * j + i));
}

void place(const FileQ5_K& from, PackedQ5_K* tile, size_t b, size_t row) {
    for (size_t j = 0; j < 8; ++j)
        if (place_scales(from, tile[b], j, row))
            for (size_t i = 0; i < 32; ++i)
                put(tile[b].block[j], row, i, quant(from, 32 * j + i));
}

// Shift of the two upper bits of vector g inside high[(g % 4) / 2]; see PackedQ6_K.
constexpr unsigned high_shift(size_t g) { return g % 2 == 0 ? (g < 4 ? 4 : 6) : (g < 4 ? 2 : 0); }

void place(const FileQ6_K& from, PackedQ6_K* tile, size_t b, size_t row) {
    tile[b].d[row] = ca::half_to_float(usable(from.d));
    for (size_t i = 0; i < 16; ++i)
        tile[b].scale[i][row] = zero_half(from.d) ? int8_t{0} : from.scale[i];
    for (size_t k = 0; k < 256; ++k) {
        PackedQ6_K::Block& block = tile[b].block[k / 32];
        const size_t g = k % 32 / 4;
        const unsigned q = quant(from, k);
        put(block.low, row, k % 32, q);
        block.high[g % 4 / 2][row][k % 4] |= static_cast<uint8_t>((q >> 4) << high_shift(g));
    }
}

// Weight k % 32 of a block of three bits; wants zeros before.
void put(PackedQ3_K::Block& to, size_t row, size_t i, unsigned q) {
    const size_t g = i / 4;
    to.low[g % 4 / 2][row][i % 4] |= static_cast<uint8_t>((q & 3u) << high_shift(g));
    to.top[row][i % 4] |= static_cast<uint8_t>(q >> 2 << g);
}

void place(const FileQ3_K& from, PackedQ3_K* tile, size_t b, size_t row) {
    tile[b].d[row] = ca::half_to_float(usable(from.d));
    for (size_t i = 0; i < 16; ++i)
        tile[b].scale[i][row] = static_cast<int8_t>(zero_half(from.d) ? 0 : scale_of(from, i));
    for (size_t k = 0; k < 256; ++k) put(tile[b].block[k / 32], row, k % 32, quant(from, k));
}

template <class File>
void place(const File& from, PackedIQ2* tile, size_t b, size_t row) {
    const SuperblockIndices indices = indices_of(from);
    tile[b].d[row] = ca::mul_rn(ca::half_to_float(d_of(from)), 0x1p-3f);
    for (size_t j = 0; j < 8; ++j)
        tile[b].scale[j][row] = static_cast<uint8_t>(indices.scale[2 * j] / 2 |
                                                     indices.scale[2 * j + 1] / 2 << 4);
    for (size_t k = 0; k < 256; ++k)
        put(tile[b].block[k / 32], row, k % 32, indices.index[k]);
}

void place(const FileQ2_K& from, PackedQ2_K* tile, size_t b, size_t row) {
    tile[b].d[row] = usable(from.d);
    tile[b].m[row] = from.dmin ^ 0x8000u;
    for (size_t i = 0; i < 16; ++i)
        tile[b].scale_and_min[i / 2][row][i % 2] =
            static_cast<uint8_t>(zero_half(from.d) ? from.scales[i] & 0xF0u : from.scales[i]);
    for (size_t k = 0; k < 256; ++k) {
        const size_t g = k % 32 / 4;
        tile[b].block[k / 32].low[g % 4 / 2][row][k % 4] |=
            static_cast<uint8_t>(quant(from, k) << high_shift(g));
    }
}

void place(const FileMXFP4& from, PackedMXFP4* tile, size_t b, size_t row) {
    const bool is_zero = from.e < 2;
    tile[b / 4].field[b % 4][row] = static_cast<uint8_t>(is_zero ? 127 : from.e - 1);
    for (size_t i = 0; i < 32; ++i) put(tile[b / 4].q[b % 4], row, i, is_zero ? 0 : quant(from, i));
}

// One row of a tensor, and the tile it belongs to.
struct RowSource {
    const uint8_t* source;
    size_t row, cols;
    uint8_t* tile;
    FirstBad& bad;
};

template <class File, class Packed>
void pack_blocks(const RowSource& from, size_t block_width) {
    for (size_t b = 0; b < from.cols / block_width; ++b) {
        const auto block = load_block<File>(from.source, b);
        if (!legal(block)) from.bad.report(from.row, b);
        place(block, reinterpret_cast<Packed*>(from.tile), b, from.row % TILE_ROWS);
    }
}

// `exponent`: the bits that are all set in NaN and infinity.
template <class Bits>
void pack_floats(const RowSource& from, Bits exponent) {
    for (size_t k = 0; k < from.cols; ++k) {
        const auto bits = load_block<Bits>(from.source, k);
        if ((bits & exponent) == exponent) from.bad.report(from.row, k);
        reinterpret_cast<Bits*>(from.tile)[k * TILE_ROWS + from.row % TILE_ROWS] = bits;
    }
}

void pack_row(Kind kind, const RowSource& from) {
    switch (kind) {
        case Kind::q4_0: return pack_blocks<FileQ4_0, PackedQ4_0>(from, 32);
        case Kind::q4_1: return pack_blocks<FileQ4_1, PackedQ4_1>(from, 32);
        case Kind::q5_0: return pack_blocks<FileQ5_0, PackedQ5_0>(from, 32);
        case Kind::q5_1: return pack_blocks<FileQ5_1, PackedQ5_1>(from, 32);
        case Kind::q8_0: return pack_blocks<FileQ8_0, PackedQ8_0>(from, 32);
        case Kind::iq4_nl: return pack_blocks<FileIQ4_NL, PackedQ4_0>(from, 32);
        case Kind::q4_k: return pack_blocks<FileQ4_K, PackedQ4_K>(from, 256);
        case Kind::q5_k: return pack_blocks<FileQ5_K, PackedQ5_K>(from, 256);
        case Kind::q6_k: return pack_blocks<FileQ6_K, PackedQ6_K>(from, 256);
        case Kind::mxfp4: return pack_blocks<FileMXFP4, PackedMXFP4>(from, 32);
        case Kind::iq4_xs: return pack_blocks<FileIQ4_XS, PackedIQ4_XS>(from, 256);
        case Kind::q3_k: return pack_blocks<FileQ3_K, PackedQ3_K>(from, 256);
        case Kind::q2_k: return pack_blocks<FileQ2_K, PackedQ2_K>(from, 256);
        case Kind::iq3_xxs: return pack_blocks<FileIQ3_XXS, PackedIQ4_XS>(from, 256);
        case Kind::iq3_s: return pack_blocks<FileIQ3_S, PackedIQ4_XS>(from, 256);
        case Kind::iq2_xxs: return pack_blocks<FileIQ2_XXS, PackedIQ2>(from, 256);
        case Kind::iq2_xs: return pack_blocks<FileIQ2_XS, PackedIQ2>(from, 256);
        case Kind::iq2_s: return pack_blocks<FileIQ2_S, PackedIQ2>(from, 256);
        case Kind::iq1_s: return pack_blocks<FileIQ1_S, PackedIQ2>(from, 256);
        case Kind::iq1_m: return pack_blocks<FileIQ1_M, PackedIQ2>(from, 256);
        case Kind::f16: return pack_floats<uint16_t>(from, 0x7C00u);
        case Kind::bf16: return pack_floats<uint16_t>(from, 0x7F80u);
        case Kind::f32: return pack_floats<uint32_t>(from, ca::INFINITY_BITS);
    }
}

int q6_at(const PackedQ6_K::Block& block, size_t lane, size_t i) {
    const size_t g = i / 4;
    const unsigned high = block.high[g % 4 / 2][lane][i % 4] >> high_shift(g) & 3u;
    return static_cast<int>(weight_at(block.low, lane, i) | high << 4) - 32;
}

unsigned three_bits_at(const PackedQ3_K::Block& block, size_t lane, size_t i) {
    const size_t g = i / 4;
    const unsigned low = block.low[g % 4 / 2][lane][i % 4] >> high_shift(g) & 3u;
    return low | (block.top[lane][i % 4] >> g & 1u) << 2;
}

unsigned q2_at(const PackedQ2_K::Block& block, size_t lane, size_t i) {
    const size_t g = i / 4;
    return block.low[g % 4 / 2][lane][i % 4] >> high_shift(g) & 3u;
}

float scaled(int q, float d) { return ca::mul_rn(static_cast<float>(q), d); }
float scaled(unsigned q, unsigned zero, uint16_t d) {
    return scaled(static_cast<int>(q) - static_cast<int>(zero), ca::half_to_float(d));
}
float with_minimum(unsigned q, uint16_t d, uint16_t m) {
    return ca::fma_rn(static_cast<float>(q), ca::half_to_float(d), ca::half_to_float(m));
}
float with_minimum(unsigned q, unsigned scale, unsigned min, uint16_t d, uint16_t m) {
    const float least = ca::mul_rn(static_cast<float>(min), ca::half_to_float(m));
    return ca::fma_rn(static_cast<float>(q * scale), ca::half_to_float(d), least);
}
// A weight of Q4_K or Q5_K, in sub-block j.
template <class Packed>
float with_minimum(unsigned q, const Packed& from, size_t j, size_t lane) {
    return with_minimum(q, from.scale[j][lane], from.min[j][lane], from.d[lane], from.m[lane]);
}

// Weight k of a superblock of nibbles or of three bits that are indices of `values`.
float table_weight(const PackedIQ4_XS& super, const int8_t (&values)[16], float unit, size_t lane, size_t k) {
    const int q = values[weight_at(super.q[k / 32], lane, k % 32)] * super.scale[k / 32][lane];
    return scaled(q, ca::mul_rn(ca::half_to_float(super.d[lane]), unit));
}
float table_weight(const PackedIQ2& super, const int8_t (&values)[16], size_t lane, size_t k) {
    const int scale = 2 * (super.scale[k / 32][lane] >> k % 32 / 16 * 4 & 15) + 1;
    return scaled(values[three_bits_at(super.block[k / 32], lane, k % 32)] * scale, super.d[lane]);
}

float value_at(Kind kind, const uint8_t* tile, size_t lane, size_t k) {
    const size_t b = k / 32, i = k % 32, at = k * TILE_ROWS + lane;
    const auto half_at = [&] { return reinterpret_cast<const uint16_t*>(tile)[at]; };
    switch (kind) {
        case Kind::q4_0: {
            const auto& pair = reinterpret_cast<const PackedQ4_0*>(tile)[b / 2];
            return scaled(weight_at(pair.q[b % 2], lane, i), 8, pair.d[b % 2][lane]);
        }
        case Kind::q4_1: {
            const auto& block = reinterpret_cast<const PackedQ4_1*>(tile)[b];
            return with_minimum(weight_at(block.q, lane, i), block.d[lane], block.m[lane]);
        }
        case Kind::q5_0: {
            const auto& pair = reinterpret_cast<const PackedQ5_0*>(tile)[b / 2];
            return scaled(weight_at(pair.block[b % 2], lane, i), 16, pair.d[b % 2][lane]);
        }
        case Kind::q5_1: {
            const auto& from = reinterpret_cast<const PackedQ5_1*>(tile)[b];
            return with_minimum(weight_at(from.block, lane, i), from.d[lane], from.m[lane]);
        }
        case Kind::q8_0: {
            const auto& pair = reinterpret_cast<const PackedQ8_0*>(tile)[b / 2];
            return scaled(pair.q[b % 2][i / 4][lane][i % 4], 128, pair.d[b % 2][lane]);
        }
        case Kind::iq4_nl: {
            const auto& pair = reinterpret_cast<const PackedQ4_0*>(tile)[b / 2];
            const int q = IQ4_VALUES[weight_at(pair.q[b % 2], lane, i)];
            return scaled(q, ca::half_to_float(pair.d[b % 2][lane]));
        }
        case Kind::q4_k: {
            const auto& super = reinterpret_cast<const PackedQ4_K*>(tile)[b / 8];
            return with_minimum(weight_at(super.q[b % 8], lane, i), super, b % 8, lane);
        }
        case Kind::q5_k: {
            const auto& super = reinterpret_cast<const PackedQ5_K*>(tile)[b / 8];
            return with_minimum(weight_at(super.block[b % 8], lane, i), super, b % 8, lane);
        }
        case Kind::q6_k: {
            const auto& super = reinterpret_cast<const PackedQ6_K*>(tile)[b / 8];
            const int q = q6_at(super.block[b % 8], lane, i) * super.scale[k % 256 / 16][lane];
            return scaled(q, super.d[lane]);
        }
        case Kind::mxfp4: {
            const auto& four = reinterpret_cast<const PackedMXFP4*>(tile)[b / 4];
            const int q = MXFP4_VALUES[weight_at(four.q[b % 4], lane, i)];
            return scaled(q, ca::power_of_field(four.field[b % 4][lane]));
        }
        case Kind::iq4_xs: {
            const auto& super = reinterpret_cast<const PackedIQ4_XS*>(tile)[b / 8];
            return table_weight(super, IQ4_VALUES, 1.0f, lane, k % 256);
        }
        case Kind::iq3_xxs: {
            const auto& super = reinterpret_cast<const PackedIQ4_XS*>(tile)[b / 8];
            return table_weight(super, IQ3_XXS_VALUES, 0.5f, lane, k % 256);
        }
        case Kind::iq3_s: {
            const auto& super = reinterpret_cast<const PackedIQ4_XS*>(tile)[b / 8];
            return table_weight(super, IQ3_S_VALUES, 1.0f, lane, k % 256);
        }
        case Kind::iq2_xxs:
        case Kind::iq2_xs:
        case Kind::iq2_s: {
            const auto& super = reinterpret_cast<const PackedIQ2*>(tile)[b / 8];
            return table_weight(super, IQ2_VALUES, lane, k % 256);
        }
        case Kind::iq1_s:
        case Kind::iq1_m: {
            const auto& super = reinterpret_cast<const PackedIQ2*>(tile)[b / 8];
            return table_weight(super, IQ1_VALUES, lane, k % 256);
        }
        case Kind::q3_k: {
            const auto& super = reinterpret_cast<const PackedQ3_K*>(tile)[b / 8];
            const int n = static_cast<int>(three_bits_at(super.block[b % 8], lane, i)) - 4;
            return scaled(n * super.scale[k % 256 / 16][lane], super.d[lane]);
        }
        case Kind::q2_k: {
            const auto& super = reinterpret_cast<const PackedQ2_K*>(tile)[b / 8];
            const unsigned both = super.scale_and_min[b % 8][lane][i / 16];
            return with_minimum(q2_at(super.block[b % 8], lane, i), both & 15u, both >> 4,
                                super.d[lane], super.m[lane]);
        }
        case Kind::f16: return ca::half_to_float(half_at());
        case Kind::bf16: return ca::bf16_to_float(half_at());
        case Kind::f32: return reinterpret_cast<const float*>(tile)[at];
    }
    return 0.0f;
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
        case Kind::q4_0:
        case Kind::iq4_nl: return div_up(blocks, 2) * sizeof(PackedQ4_0);
        case Kind::q4_1: return blocks * sizeof(PackedQ4_1);
        case Kind::q5_0: return div_up(blocks, 2) * sizeof(PackedQ5_0);
        case Kind::q5_1: return blocks * sizeof(PackedQ5_1);
        case Kind::q8_0: return div_up(blocks, 2) * sizeof(PackedQ8_0);
        case Kind::q4_k: return blocks / 8 * sizeof(PackedQ4_K);
        case Kind::q5_k: return blocks / 8 * sizeof(PackedQ5_K);
        case Kind::q6_k: return blocks / 8 * sizeof(PackedQ6_K);
        case Kind::mxfp4: return div_up(blocks, 4) * sizeof(PackedMXFP4);
        case Kind::iq4_xs:
        case Kind::iq3_xxs:
        case Kind::iq3_s: return blocks / 8 * sizeof(PackedIQ4_XS);
        case Kind::q3_k: return blocks / 8 * sizeof(PackedQ3_K);
        case Kind::q2_k: return blocks / 8 * sizeof(PackedQ2_K);
        case Kind::iq2_xxs:
        case Kind::iq2_xs:
        case Kind::iq2_s:
        case Kind::iq1_s:
        case Kind::iq1_m: return blocks / 8 * sizeof(PackedIQ2);
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
            pack_row(kind, {source + row * row_bytes, row, cols, to, bad});
        for (size_t row = end; row < (tile + 1) * TILE_ROWS; ++row)
            pack_row(kind, {zeros.data(), row, cols, to, bad});
    });
    if (!bad.any()) return;
    const auto [row, place] = bad.where();
    const bool floats = facts(kind).block == 1;
    const char* why = kind == Kind::mxfp4 ? " is NaN or above 2^32" : " is NaN or infinite";
    throw std::invalid_argument(std::string(kind_name(kind)) + ": row " + std::to_string(row) +
                                (floats ? ", column " : ", block ") + std::to_string(place) +
                                (floats ? ": the value" : ": the scale") + why);
}

void unpack_row(const Matrix& matrix, size_t row, float* out) {
    const uint8_t* tile = matrix.data + row / TILE_ROWS * tile_bytes(matrix.kind, matrix.cols);
    for (size_t k = 0; k < matrix.cols; ++k)
        out[k] = value_at(matrix.kind, tile, row % TILE_ROWS, k);
}

}  // namespace batchengine
