// The quantised blocks of a GGUF file, little-endian, as stored, and the integers in them.
//
// quant(block, k) is the stored integer n of element k, without sign or minimum: values are
// d (n - 8) for Q4_0, d n + m for Q4_1 and so on, as docs/numerics.md lists them. Only packing reads
// these forms, once per model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "codebooks/blocks.h"

namespace batchengine {

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
struct FileQ5_0 {
    uint16_t d;
    uint8_t high[4];  // bit k % 8 of byte k / 8: the fifth bit of element k
    uint8_t q[16];
};
static_assert(sizeof(FileQ5_0) == 22);
struct FileQ5_1 {
    uint16_t d;
    uint16_t m;
    uint8_t high[4];
    uint8_t q[16];
};
static_assert(sizeof(FileQ5_1) == 24);
struct FileQ8_0 {
    uint16_t d;
    int8_t q[32];
};
static_assert(sizeof(FileQ8_0) == 34);
struct FileIQ4_NL {
    uint16_t d;
    uint8_t q[16];  // indices into IQ4_VALUES
};
static_assert(sizeof(FileIQ4_NL) == 18);
struct FileQ2_K {
    uint8_t scales[16];  // of 16 k each: the scale, and above it the minimum
    uint8_t q[64];       // 128 k per 32 bytes: the bits 0-1 first, then 2-3, 4-5, 6-7
    uint16_t d;
    uint16_t dmin;
};
static_assert(sizeof(FileQ2_K) == 84);
struct FileQ3_K {
    uint8_t high[32];   // bit k / 32 of byte k % 32: the third bit of element k
    uint8_t low[64];    // as FileQ2_K::q
    uint8_t scales[12];  // see scale_of
    uint16_t d;
};
static_assert(sizeof(FileQ3_K) == 110);
struct FileQ4_K {
    uint16_t d;
    uint16_t dmin;
    uint8_t scales[12];  // see scale_of and min_of
    uint8_t q[128];      // 64 k per 32 bytes: the low nibbles first
};
static_assert(sizeof(FileQ4_K) == 144);
struct FileQ5_K {
    uint16_t d;
    uint16_t dmin;
    uint8_t scales[12];
    uint8_t high[32];  // bit k / 32 of byte k % 32: the fifth bit of element k
    uint8_t q[128];
};
static_assert(sizeof(FileQ5_K) == 176);
struct FileQ6_K {
    uint8_t low[128];
    uint8_t high[64];
    int8_t scale[16];
    uint16_t d;
};
static_assert(sizeof(FileQ6_K) == 210);
struct FileIQ4_XS {
    uint16_t d;
    uint8_t scales_high[2];  // see scale_of: two bits for each 32 k
    uint8_t scales_low[4];   // four bits
    uint8_t q[128];          // indices into IQ4_VALUES, 32 k per 16 bytes as in FileIQ4_NL
};
static_assert(sizeof(FileIQ4_XS) == 136);
struct FileMXFP4 {
    uint8_t e;      // the scale is 2^(e - 128)
    uint8_t q[16];  // indices into MXFP4_VALUES
};
static_assert(sizeof(FileMXFP4) == 17);

// A file block at an address of any alignment.
template <class Block>
Block load_block(const uint8_t* source, size_t index) {
    Block block;
    std::memcpy(&block, source + index * sizeof(Block), sizeof(Block));
    return block;
}

inline bool finite_half(uint16_t half) { return (half & 0x7C00u) != 0x7C00u; }
inline bool zero_half(uint16_t half) { return (half & 0x7FFFu) == 0; }

// Whether a block's scales are legal: finite, and of MXFP4 at most 2^32, far above those of any model.
constexpr uint8_t MXFP4_E_MAX = 160;
inline bool legal(const FileMXFP4& from) { return from.e <= MXFP4_E_MAX; }
template <class Block>
bool legal(const Block& from) {
    if constexpr (requires { from.m; }) return finite_half(from.d) && finite_half(from.m);
    if constexpr (requires { from.dmin; }) return finite_half(from.d) && finite_half(from.dmin);
    return finite_half(d_of(from));
}

inline unsigned two_bits_of(const uint8_t (&q)[64], size_t k) {
    return q[k / 128 * 32 + k % 32] >> (k % 128 / 32 * 2) & 3u;
}
inline unsigned nibble_of(const uint8_t (&q)[16], size_t k) {
    return q[k % 16] >> (k < 16 ? 0 : 4) & 15u;
}
inline unsigned nibble_of(const uint8_t (&q)[128], size_t k) {
    return q[k / 64 * 32 + k % 32] >> (k % 64 < 32 ? 0 : 4) & 15u;
}

inline unsigned quant(const FileQ4_0& from, size_t k) { return nibble_of(from.q, k); }
inline unsigned quant(const FileQ4_1& from, size_t k) { return nibble_of(from.q, k); }
inline unsigned quant(const FileIQ4_NL& from, size_t k) { return nibble_of(from.q, k); }
inline unsigned quant(const FileMXFP4& from, size_t k) { return nibble_of(from.q, k); }
inline unsigned quant(const FileQ5_0& from, size_t k) {
    return nibble_of(from.q, k) | (from.high[k / 8] >> k % 8 & 1u) << 4;
}
inline unsigned quant(const FileQ5_1& from, size_t k) {
    return nibble_of(from.q, k) | (from.high[k / 8] >> k % 8 & 1u) << 4;
}
inline unsigned quant(const FileQ2_K& from, size_t k) { return two_bits_of(from.q, k); }
inline unsigned quant(const FileQ3_K& from, size_t k) {
    return two_bits_of(from.low, k) | (from.high[k % 32] >> k / 32 & 1u) << 2;
}
inline unsigned quant(const FileQ4_K& from, size_t k) { return nibble_of(from.q, k); }
inline unsigned quant(const FileQ5_K& from, size_t k) {
    return nibble_of(from.q, k) | (from.high[k % 32] >> k / 32 & 1u) << 4;
}
inline unsigned quant(const FileQ6_K& from, size_t k) {
    const size_t half = k / 128, part = k % 128 / 32, i = k % 32;
    const unsigned nibble = from.low[64 * half + 32 * (part % 2) + i] >> (part < 2 ? 0 : 4) & 15u;
    return nibble | (from.high[32 * half + i] >> (2 * part) & 3u) << 4;
}

inline unsigned quant(const FileIQ4_XS& from, size_t k) {
    return from.q[k / 32 * 16 + k % 16] >> (k % 32 < 16 ? 0 : 4) & 15u;
}

// The six-bit scale and minimum of sub-block j (32 k) of Q4_K and Q5_K. The upper two bits of the
// last four of each stand above those of the first four.
inline unsigned scale_of(const uint8_t (&scales)[12], size_t j) {
    return j < 4 ? scales[j] & 63u : (scales[j + 4] & 15u) | scales[j - 4] >> 6 << 4;
}
inline unsigned min_of(const uint8_t (&scales)[12], size_t j) {
    return j < 4 ? scales[j + 4] & 63u : scales[j + 4] >> 4 | scales[j] >> 6 << 4;
}

// The scale of sub-block j, -32 .. 31: of 16 k in Q3_K, of 32 k in IQ4_XS.
inline int scale_of(const FileQ3_K& from, size_t j) {
    const unsigned low = from.scales[j % 8] >> (j < 8 ? 0 : 4) & 15u;
    const unsigned high = from.scales[8 + j % 4] >> (j / 4 * 2) & 3u;
    return static_cast<int>(low | high << 4) - 32;
}
inline int scale_of(const FileIQ4_XS& from, size_t j) {
    const unsigned low = from.scales_low[j / 2] >> (j % 2 * 4) & 15u;
    const unsigned high = from.scales_high[j / 4] >> (j % 4 * 2) & 3u;
    return static_cast<int>(low | high << 4) - 32;
}

}  // namespace batchengine
