// The blocks of a GGUF file whose weights are entries of a codebook, little-endian, as stored, and their meaning.
//
// Every block is legal but for its fp16 scale: codebooks have as many entries as the bits of a number tell
// apart. Only packing reads these forms, once per model.
#pragma once

#include <cstddef>
#include <cstdint>

namespace batchengine {

struct FileIQ3_XXS {
    uint16_t d;
    uint8_t entry[64];           // of 4 k each
    uint8_t signs_and_scale[8][4];  // of 32 k: signs of 8 k in seven bits each, the scale in the upper four
};
static_assert(sizeof(FileIQ3_XXS) == 98);
struct FileIQ3_S {
    uint16_t d;
    uint8_t entry[64];  // of 4 k each, the lower eight bits
    uint8_t high[8];    // bit i of byte j: the upper bit of entry 8j + i
    uint8_t signs[32];  // of 8 k each
    uint8_t scales[4];  // of 32 k in four bits each
};
static_assert(sizeof(FileIQ3_S) == 110);
struct FileIQ2_XXS {
    uint16_t d;
    struct {
        uint8_t entry[4];            // of 8 k each
        uint8_t signs_and_scale[4];  // as in FileIQ3_XXS
    } part[8];                       // of 32 k each
};
static_assert(sizeof(FileIQ2_XXS) == 66);
struct FileIQ2_XS {
    uint16_t d;
    uint16_t entry_and_signs[32];  // of 8 k each: nine bits, and seven of signs
    uint8_t scales[8];             // of 16 k in four bits each
};
static_assert(sizeof(FileIQ2_XS) == 74);
struct FileIQ2_S {
    uint16_t d;
    uint8_t entry[32];  // of 8 k each, the lower eight bits
    uint8_t signs[32];  // of 8 k each
    uint8_t high[8];    // bits 2i and 2i + 1 of byte j: the upper ones of entry 4j + i
    uint8_t scales[8];  // of 16 k in four bits each
};
static_assert(sizeof(FileIQ2_S) == 82);
struct FileIQ1_S {
    uint16_t d;
    uint8_t entry[32];  // of 8 k each, the lower eight bits
    // Of 32 k: three upper bits of each entry, three bits of the scale, and the sign of the shift.
    uint16_t high[8];
};
static_assert(sizeof(FileIQ1_S) == 50);
struct FileIQ1_M {
    uint8_t entry[32];   // of 8 k each, the lower eight bits
    uint8_t high[16];    // of 16 k: three upper bits of an entry and the sign of its shift, twice
    uint16_t scales[4];  // of 64 k: those of 16 k each in three bits, and four bits of d, the lowest first
};
static_assert(sizeof(FileIQ1_M) == 56);

// Weight k is scale[k / 16] * values[index[k]] * d times a power of two, with the values of its type in tiles.h.
struct SuperblockIndices {
    uint8_t index[256];
    uint8_t scale[16];
};
SuperblockIndices indices_of(const FileIQ3_XXS& from);
SuperblockIndices indices_of(const FileIQ3_S& from);
SuperblockIndices indices_of(const FileIQ2_XXS& from);
SuperblockIndices indices_of(const FileIQ2_XS& from);
SuperblockIndices indices_of(const FileIQ2_S& from);
SuperblockIndices indices_of(const FileIQ1_S& from);
SuperblockIndices indices_of(const FileIQ1_M& from);

template <class File>
uint16_t d_of(const File& from) {
    return from.d;
}
inline uint16_t d_of(const FileIQ1_M& from) {
    unsigned d = 0;
    for (size_t i = 0; i < 4; ++i) d |= from.scales[i] >> 12 << 4 * i;
    return static_cast<uint16_t>(d);
}

}  // namespace batchengine
