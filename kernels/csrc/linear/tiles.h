// The layout of packed weights: GGUF tensors rearranged once into tiles of 16 rows, one layout for every
// instruction set and for GPUs, so that processes share one read-only cache file.
//
// Inside a tile, byte 4r+i of a 64-byte vector belongs to row r: 16 rows are the 16 lanes of a
// vector, and four consecutive k are the four bytes of a dword. Those dwords are also the registers of
// A in a GPU's 16x8x32 matrix product. No scale d is 0, so that kernels may
// add to its exponent: a block whose d is 0 becomes zero weights with d = 1, which mean the same. So do
// blocks of MXFP4 with e < 2, and the rows past the last. (IQ4_NL, IQ4_XS and the types with a codebook have
// no weight 0, and keep a d of 0.)
// Quantised kinds need cols to be a multiple of their block; f16, bf16 and f32 take any cols and are padded
// with zeros to 32.
// Compiles as C++ and CUDA C++.
#pragma once

#include "common/ca.h"

namespace batchengine {

constexpr size_t TILE_ROWS = 16;           // rows of a packed tile: one fp32 lane of a zmm each
constexpr size_t GROUPS = ca::BLOCK / 4;  // dwords (4 k each) of a block

// Two blocks, so that every vector load is aligned: 64 bytes of scales, then 2 x 256 nibble bytes.
// The low nibble of vector j belongs to k = 4j..4j+3, the high one to 16 more. An odd last block is
// followed by a zero block.
struct PackedQ4_0 {
    uint16_t d[2][TILE_ROWS];
    uint8_t q[2][GROUPS / 2][TILE_ROWS][4];
};
static_assert(sizeof(PackedQ4_0) == 576);

struct PackedQ4_1 {
    uint16_t d[TILE_ROWS];
    uint16_t m[TILE_ROWS];
    uint8_t q[GROUPS / 2][TILE_ROWS][4];
};
static_assert(sizeof(PackedQ4_1) == 320);

// As PackedQ4_0; bytes hold weight + 128, the unsigned operand of the dot instructions.
struct PackedQ8_0 {
    uint16_t d[2][TILE_ROWS];
    uint8_t q[2][GROUPS][TILE_ROWS][4];
};
static_assert(sizeof(PackedQ8_0) == 1088);

// 256 k. low: as PackedQ4_0. high[h]: the two upper bits of four vectors at once, placed so that
// they need few shifts: bits 5:4 belong to vector 2h, 7:6 to 2h+4, 3:2 to 2h+1, 1:0 to 2h+5.
struct PackedQ6_K {
    float d[TILE_ROWS];
    int8_t scale[16][TILE_ROWS];  // one per 16 k
    struct Block {
        uint8_t low[GROUPS / 2][TILE_ROWS][4];
        uint8_t high[2][TILE_ROWS][4];
    } block[8];
};
static_assert(sizeof(PackedQ6_K) == 3392);

// 256 k of weights of three bits. low: the two lower bits, as PackedQ6_K::Block::high has its two upper ones;
// bit g of `top` is the upper bit of vector g. scale is the six-bit integer of the file less 32.
struct PackedQ3_K {
    float d[TILE_ROWS];
    int8_t scale[16][TILE_ROWS];  // one per 16 k
    struct Block {
        uint8_t low[2][TILE_ROWS][4];
        uint8_t top[TILE_ROWS][4];
    } block[8];
};
static_assert(sizeof(PackedQ3_K) == 1856);

// 256 k of weights of two bits, placed as PackedQ3_K::Block::low. Of the two halves of 32 k, 16 each, a byte has
// the four-bit scale and, above it, the four-bit minimum; m = -dmin.
struct PackedQ2_K {
    uint16_t d[TILE_ROWS];
    uint16_t m[TILE_ROWS];
    uint8_t scale_and_min[8][TILE_ROWS][2];
    struct Block {
        uint8_t low[2][TILE_ROWS][4];
    } block[8];
};
static_assert(sizeof(PackedQ2_K) == 1344);

// Five-bit weights of 32 k. Vector j < 4 has the whole weights of k = 4j..4j+3 in its low bits and, above
// them, the three upper bits of those 16 further on; the two lower bits of these are bits 2j and 2j+1
// of the last vector.
struct FiveBits {
    uint8_t q[GROUPS / 2 + 1][TILE_ROWS][4];
};

struct PackedQ5_0 {
    uint16_t d[2][TILE_ROWS];
    FiveBits block[2];
};
static_assert(sizeof(PackedQ5_0) == 704);

struct PackedQ5_1 {
    uint16_t d[TILE_ROWS];
    uint16_t m[TILE_ROWS];
    FiveBits block;
};
static_assert(sizeof(PackedQ5_1) == 384);

// 256 k; scale and min are the six-bit integers of the file, per 32 k, and m = -dmin. A sub-block of
// scale 0 has zero weights and scale 1.
struct PackedQ4_K {
    uint16_t d[TILE_ROWS];
    uint16_t m[TILE_ROWS];
    uint8_t scale[8][TILE_ROWS];
    uint8_t min[8][TILE_ROWS];
    uint8_t q[8][GROUPS / 2][TILE_ROWS][4];
};
static_assert(sizeof(PackedQ4_K) == 2368);

struct PackedQ5_K {
    uint16_t d[TILE_ROWS];
    uint16_t m[TILE_ROWS];
    uint8_t scale[8][TILE_ROWS];
    uint8_t min[8][TILE_ROWS];
    FiveBits block[8];
};
static_assert(sizeof(PackedQ5_K) == 2880);

// IQ4_NL is packed as PackedQ4_0; a nibble is the index of its weight here.
constexpr int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};

// 256 k. scale is the six-bit integer of the file less 32, per 32 k; nibbles as in IQ4_NL.
struct PackedIQ4_XS {
    uint16_t d[TILE_ROWS];
    int8_t scale[8][TILE_ROWS];
    uint8_t unused[32];  // so that the loads of q are aligned
    uint8_t q[8][GROUPS / 2][TILE_ROWS][4];
};
static_assert(sizeof(PackedIQ4_XS) == 2240);

// IQ3_XXS and IQ3_S are packed as PackedIQ4_XS, with scales of 1, 3, ... 31; a nibble is the index of its weight here.
// Weights of IQ3_XXS are halves of d.
constexpr int8_t IQ3_XXS_VALUES[16] = {2,  6,  10,  14,  18,  22,  26,  31,
                                       -2, -6, -10, -14, -18, -22, -26, -31};
constexpr int8_t IQ3_S_VALUES[16] = {1,  3,  5,  7,  9,  11,  13,  15,
                                     -1, -3, -5, -7, -9, -11, -13, -15};

// 256 k of IQ2_XXS, IQ2_XS, IQ2_S, IQ1_S and IQ1_M: three bits, placed as in PackedQ3_K, are the index of a weight
// below. d is an eighth of that of the file. A byte of scale has those of both halves of 32 k: n for 2n + 1. In IQ2_XXS
// and IQ1_S they are equal.
struct PackedIQ2 {
    float d[TILE_ROWS];
    uint8_t scale[8][TILE_ROWS];
    using Block = PackedQ3_K::Block;
    Block block[8];
};
static_assert(sizeof(PackedIQ2) == 1728);
constexpr int8_t IQ2_VALUES[16] = {8, 25, 43, 0, -8, -25, -43, 0};  // of IQ2_XXS, IQ2_XS and IQ2_S
constexpr int8_t IQ1_VALUES[16] = {-7, 1, 9, 0, -9, -1, 7, 0};      // of IQ1_S and IQ1_M

// Four blocks, for aligned loads with a byte of scale each: field = e - 1, the exponent field of the scale
// in binary32. Nibbles as in PackedQ4_0, indices of MXFP4_VALUES. Blocks past the last are zero.
struct PackedMXFP4 {
    uint8_t field[4][TILE_ROWS];
    uint8_t q[4][GROUPS / 2][TILE_ROWS][4];
};
static_assert(sizeof(PackedMXFP4) == 1088);
constexpr int8_t MXFP4_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// f16, bf16, f32: [k][row 16] in the type of the file.

}  // namespace batchengine
