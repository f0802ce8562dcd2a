// Packed weights: GGUF tensors rearranged once into tiles of 16 rows, one layout for every
// instruction set, so that processes share one read-only cache file.
//
// Inside a tile, byte 4r+i of a 64-byte vector belongs to row r: 16 rows are the 16 lanes of a
// vector, and four consecutive k are the four bytes of a dword. No scale d is 0, so that kernels may
// add to its exponent: a block whose d is 0 becomes zero weights with d = 1, which mean the same. So do
// the rows past the last. Quantised kinds need cols to be a multiple of their block; f16, bf16 and
// f32 take any cols and are padded with zeros to 32.
#pragma once

#include "common/pool.h"
#include "common/types.h"

namespace batchengine {

constexpr int PACK_VERSION = 2;  // recorded in the cache file: change it with any layout below

constexpr size_t GROUPS = BLOCK_WIDTH / 4;  // dwords (4 k each) of a block

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

// f16, bf16, f32: [k][row 16] in the type of the file.

const char* kind_name(Kind kind);
Kind kind_of(const std::string& name);                            // throws std::invalid_argument
void require_shape(Kind kind, size_t rows, size_t cols);          // throws std::invalid_argument
size_t source_bytes(Kind kind, size_t rows, size_t cols);         // the tensor's size in a GGUF file
size_t tile_bytes(Kind kind, size_t cols);
size_t packed_bytes(Kind kind, size_t rows, size_t cols);

// Throws std::invalid_argument naming the first row and block whose scale (or row and column whose
// value) is NaN or infinite; the destination is then unspecified.
void pack(Pool& pool, Kind kind, size_t rows, size_t cols, const uint8_t* source, uint8_t* packed);

// Row `row` as fp32, the weights' exact meaning:
//   q4_0, q8_0  RN(float(q) * d)         q6_k  RN(float(scale * q) * d)
//   q4_1        fma(float(q), d, m)      f16, bf16, f32  the value itself
// +0 (q4_1: m) where the file's d is 0.
void unpack_row(const Matrix& matrix, size_t row, float* out);

}  // namespace batchengine
