// See blocks.h.
#include "codebooks/blocks.h"

#include "codebooks/grids.h"

namespace batchengine {
namespace {

constexpr auto IQ3_XXS = grids::entries_of<4, 256>(grids::IQ3_XXS);
constexpr auto IQ3_S = grids::entries_of<4, 512>(grids::IQ3_S);
constexpr auto IQ2_XXS = grids::entries_of<8, 256>(grids::IQ2_XXS);
constexpr auto IQ2_XS = grids::entries_of<8, 512>(grids::IQ2_XS);
constexpr auto IQ2_S = grids::entries_of<8, 1024>(grids::IQ2_S);
constexpr auto IQ1 = grids::entries_of<8, 2048>(grids::IQ1);

uint32_t dword_of(const uint8_t (&bytes)[4]) {
    return bytes[0] | uint32_t{bytes[1]} << 8 | uint32_t{bytes[2]} << 16 | uint32_t{bytes[3]} << 24;
}

// Signs of eight weights of which seven are stored: an even number of them is negative.
uint8_t eight_signs(uint32_t seven) {
    seven &= 127u;
    return static_cast<uint8_t>(seven | (std::popcount(seven) % 2 ? 128u : 0u));
}

// A stored scale s means s + 1/2 steps: this many halves.
uint8_t odd(unsigned scale) { return static_cast<uint8_t>(2 * scale + 1); }

// An index is a digit of an entry, and SIGN where the sign of the weight is negative.
template <unsigned SIGN, size_t DIGITS>
void put(uint8_t* index, const std::array<uint8_t, DIGITS>& entry, unsigned signs) {
    for (size_t i = 0; i < DIGITS; ++i)
        index[i] = static_cast<uint8_t>(entry[i] | (signs >> i & 1u ? SIGN : 0u));
}
void put_three_bits(uint8_t* index, const std::array<uint8_t, 8>& entry, unsigned signs) {
    put<4>(index, entry, signs);
}
void put_nibbles(uint8_t* index, const std::array<uint8_t, 4>& entry, unsigned signs) {
    put<8>(index, entry, signs);
}

}  // namespace

SuperblockIndices indices_of(const FileIQ3_XXS& from) {
    SuperblockIndices to;
    for (size_t j = 0; j < 8; ++j) {
        const uint32_t both = dword_of(from.signs_and_scale[j]);
        to.scale[2 * j] = to.scale[2 * j + 1] = odd(both >> 28);
        for (size_t i = 0; i < 8; ++i) {
            const unsigned signs = eight_signs(both >> i / 2 * 7);
            put_nibbles(to.index + 32 * j + 4 * i, IQ3_XXS[from.entry[8 * j + i]],
                        signs >> i % 2 * 4);
        }
    }
    return to;
}

SuperblockIndices indices_of(const FileIQ3_S& from) {
    SuperblockIndices to;
    for (size_t j = 0; j < 8; ++j) {
        to.scale[2 * j] = to.scale[2 * j + 1] = odd(from.scales[j / 2] >> j % 2 * 4 & 15u);
        for (size_t i = 0; i < 8; ++i) {
            const unsigned upper = from.high[j] >> i & 1u;
            put_nibbles(to.index + 32 * j + 4 * i, IQ3_S[from.entry[8 * j + i] | upper << 8],
                        unsigned{from.signs[4 * j + i / 2]} >> i % 2 * 4);
        }
    }
    return to;
}

SuperblockIndices indices_of(const FileIQ2_XXS& from) {
    SuperblockIndices to;
    for (size_t j = 0; j < 8; ++j) {
        const uint32_t both = dword_of(from.part[j].signs_and_scale);
        to.scale[2 * j] = to.scale[2 * j + 1] = odd(both >> 28);
        for (size_t i = 0; i < 4; ++i)
            put_three_bits(to.index + 32 * j + 8 * i, IQ2_XXS[from.part[j].entry[i]],
                           eight_signs(both >> 7 * i));
    }
    return to;
}

SuperblockIndices indices_of(const FileIQ2_XS& from) {
    SuperblockIndices to;
    for (size_t j = 0; j < 16; ++j) to.scale[j] = odd(from.scales[j / 2] >> j % 2 * 4 & 15u);
    for (size_t i = 0; i < 32; ++i) {
        const unsigned both = from.entry_and_signs[i];
        put_three_bits(to.index + 8 * i, IQ2_XS[both & 511u], eight_signs(both >> 9));
    }
    return to;
}

SuperblockIndices indices_of(const FileIQ2_S& from) {
    SuperblockIndices to;
    for (size_t j = 0; j < 16; ++j) to.scale[j] = odd(from.scales[j / 2] >> j % 2 * 4 & 15u);
    for (size_t i = 0; i < 32; ++i) {
        const unsigned upper = from.high[i / 4] >> i % 4 * 2 & 3u;
        put_three_bits(to.index + 8 * i, IQ2_S[from.entry[i] | upper << 8], from.signs[i]);
    }
    return to;
}

SuperblockIndices indices_of(const FileIQ1_S& from) {
    SuperblockIndices to;
    for (size_t j = 0; j < 8; ++j) {
        const unsigned high = from.high[j];
        to.scale[2 * j] = to.scale[2 * j + 1] = odd(high >> 12 & 7u);
        for (size_t i = 0; i < 4; ++i) {
            const unsigned upper = high >> 3 * i & 7u;
            put_three_bits(to.index + 32 * j + 8 * i, IQ1[from.entry[4 * j + i] | upper << 8],
                           high >> 15 ? 255u : 0u);
        }
    }
    return to;
}

SuperblockIndices indices_of(const FileIQ1_M& from) {
    SuperblockIndices to;
    for (size_t j = 0; j < 16; ++j) to.scale[j] = odd(from.scales[j / 4] >> j % 4 * 3 & 7u);
    for (size_t i = 0; i < 32; ++i) {
        const unsigned high = from.high[i / 2] >> i % 2 * 4 & 15u;
        put_three_bits(to.index + 8 * i, IQ1[from.entry[i] | (high & 7u) << 8],
                       high >> 3 ? 255u : 0u);
    }
    return to;
}

}  // namespace batchengine
