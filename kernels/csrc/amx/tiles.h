// Tile registers of AMX-INT8: shapes, loads, products of signed bytes, stores.
//
// A tile has up to 16 rows of up to 64 bytes. dot<C, A, B> adds to C[m][n] the sum over k of A[m][k] * B[k][n],
// where row k / 4 of B holds the four k of a dword side by side: the layout of packed weights and of pages.
// With BATCHENGINE_EMULATE_AMX a tile is plain memory and every use of one is checked against its shape, so
// that kernels on tiles can be tested on any processor with AVX-512.
//
// Included by *_amx.cpp only; all of it has internal linkage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "common/simd.h"

namespace batchengine {
namespace {

constexpr int TILE_COUNT = 8;
constexpr size_t TILE_ROW_BYTES = 64;

// The operand of LDTILECFG.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    constexpr TileShapes& set(int tile, int rows_, int row_bytes_) {
        rows[tile] = static_cast<uint8_t>(rows_);
        row_bytes[tile] = static_cast<uint16_t>(row_bytes_);
        return *this;
    }
};
static_assert(sizeof(TileShapes) == 64);

#if defined(BATCHENGINE_EMULATE_AMX)

struct EmulatedTiles {
    TileShapes shapes;
    bool configured = false;
    uint8_t bytes[TILE_COUNT][16][TILE_ROW_BYTES];
};
thread_local EmulatedTiles emulated;

inline void require(bool holds) {
    if (!holds) abort();
}
inline void tiles_begin(const TileShapes& shapes) {
    require(!emulated.configured);
    emulated.shapes = shapes;
    emulated.configured = true;
    std::memset(emulated.bytes, 0xA5, sizeof emulated.bytes);  // the processor writes zeros; no kernel needs them
}
inline void tiles_end() {
    require(emulated.configured);
    emulated.configured = false;
}
template <int T>
void tile_zero() {
    require(emulated.configured);
    std::memset(emulated.bytes[T], 0, sizeof emulated.bytes[T]);
}
template <int T>
void tile_load(const void* from, size_t stride) {
    require(emulated.configured && emulated.shapes.rows[T] > 0);
    for (size_t row = 0; row < 16; ++row) {
        std::memset(emulated.bytes[T][row], 0, TILE_ROW_BYTES);
        if (row < emulated.shapes.rows[T])
            std::memcpy(emulated.bytes[T][row], static_cast<const uint8_t*>(from) + row * stride,
                        emulated.shapes.row_bytes[T]);
    }
}
template <int T>
void tile_store(void* to, size_t stride) {
    require(emulated.configured && emulated.shapes.rows[T] > 0);
    for (size_t row = 0; row < emulated.shapes.rows[T]; ++row)
        std::memcpy(static_cast<uint8_t*>(to) + row * stride, emulated.bytes[T][row],
                    emulated.shapes.row_bytes[T]);
}
template <int C, int A, int B>
void tile_dot() {
    const TileShapes& is = emulated.shapes;
    require(emulated.configured && is.rows[C] == is.rows[A] && is.row_bytes[C] == is.row_bytes[B] &&
            is.row_bytes[A] == 4 * is.rows[B]);
    for (size_t m = 0; m < is.rows[A]; ++m)
        for (size_t n = 0; n < is.row_bytes[B] / 4u; ++n) {
            int32_t sum;
            std::memcpy(&sum, emulated.bytes[C][m] + 4 * n, 4);
            for (size_t k = 0; k < is.row_bytes[A]; ++k)
                sum += static_cast<int8_t>(emulated.bytes[A][m][k]) *
                       static_cast<int8_t>(emulated.bytes[B][k / 4][4 * n + k % 4]);
            std::memcpy(emulated.bytes[C][m] + 4 * n, &sum, 4);
        }
}

#else

// Assembly, since the intrinsics of GCC take no template parameter as a tile's number.
SIMD_FN void tiles_begin(const TileShapes& shapes) {
    asm volatile("ldtilecfg %0" : : "m"(shapes) : "memory");
}
SIMD_FN void tiles_end() { asm volatile("tilerelease" : : : "memory"); }
template <int T>
SIMD_FN void tile_zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(T));
}
template <int T>
SIMD_FN void tile_load(const void* from, size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
SIMD_FN void tile_store(void* to, size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(T) : "memory");
}
template <int C, int A, int B>
SIMD_FN void tile_dot() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

#endif

// The tiles of this thread, for as long as it exists. Outside, none are in use: their 8 KiB would be saved at
// every change of the thread.
class TilesInUse {
  public:
    explicit TilesInUse(const TileShapes& shapes) { tiles_begin(shapes); }
    ~TilesInUse() { tiles_end(); }
    TilesInUse(const TilesInUse&) = delete;
    TilesInUse& operator=(const TilesInUse&) = delete;
};

}  // namespace
}  // namespace batchengine
