// See xxh3.h. Inputs fall into five classes by length; above 240 bytes eight 64-bit accumulators
// consume stripes of 64 bytes and are scrambled once per block of stripes.
#include "common/xxh3.h"

#include <cstring>

namespace batchengine {
namespace {

constexpr uint64_t PRIME32_1 = 0x9E3779B1u, PRIME32_2 = 0x85EBCA77u, PRIME32_3 = 0xC2B2AE3Du;
constexpr uint64_t PRIME64_1 = 0x9E3779B185EBCA87u, PRIME64_2 = 0xC2B2AE3D27D4EB4Fu,
                   PRIME64_3 = 0x165667B19E3779F9u, PRIME64_4 = 0x85EBCA77C2B2AE63u,
                   PRIME64_5 = 0x27D4EB2F165667C5u;
constexpr uint64_t PRIME_MX1 = 0x165667919E3779F9u, PRIME_MX2 = 0x9FB21C651E98DF25u;

constexpr size_t SECRET_SIZE = 192;
constexpr size_t STRIPE = 64;
constexpr size_t STRIPES_PER_BLOCK = (SECRET_SIZE - STRIPE) / 8;

alignas(64) constexpr uint8_t SECRET[SECRET_SIZE] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

uint64_t read64(const uint8_t* p) {
    uint64_t x;
    std::memcpy(&x, p, 8);
    return x;
}
uint64_t read32(const uint8_t* p) {
    uint32_t x;
    std::memcpy(&x, p, 4);
    return x;
}
uint64_t rotate_left(uint64_t x, int n) { return (x << n) | (x >> (64 - n)); }

uint64_t multiply_fold(uint64_t a, uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t avalanche(uint64_t h) {
    h ^= h >> 37;
    h *= PRIME_MX1;
    return h ^ (h >> 32);
}

uint64_t avalanche_64(uint64_t h) {
    h ^= h >> 33;
    h *= PRIME64_2;
    h ^= h >> 29;
    h *= PRIME64_3;
    return h ^ (h >> 32);
}

uint64_t hash_up_to_16(const uint8_t* p, size_t n, uint64_t seed) {
    if (n > 8) {
        const uint64_t flip_low = (read64(SECRET + 24) ^ read64(SECRET + 32)) + seed;
        const uint64_t flip_high = (read64(SECRET + 40) ^ read64(SECRET + 48)) - seed;
        const uint64_t low = read64(p) ^ flip_low;
        const uint64_t high = read64(p + n - 8) ^ flip_high;
        return avalanche(n + __builtin_bswap64(low) + high + multiply_fold(low, high));
    }
    if (n >= 4) {
        seed ^= static_cast<uint64_t>(__builtin_bswap32(static_cast<uint32_t>(seed))) << 32;
        const uint64_t flip = (read64(SECRET + 8) ^ read64(SECRET + 16)) - seed;
        uint64_t h = (read32(p + n - 4) + (read32(p) << 32)) ^ flip;
        h ^= rotate_left(h, 49) ^ rotate_left(h, 24);
        h *= PRIME_MX2;
        h ^= (h >> 35) + n;
        h *= PRIME_MX2;
        return h ^ (h >> 28);
    }
    if (n > 0) {
        const uint32_t combined = (static_cast<uint32_t>(p[0]) << 16) |
                                  (static_cast<uint32_t>(p[n >> 1]) << 24) | p[n - 1] |
                                  (static_cast<uint32_t>(n) << 8);
        const uint64_t flip = (read32(SECRET) ^ read32(SECRET + 4)) + seed;
        return avalanche_64(combined ^ flip);
    }
    return avalanche_64(seed ^ read64(SECRET + 56) ^ read64(SECRET + 64));
}

uint64_t mix_16(const uint8_t* p, const uint8_t* secret, uint64_t seed) {
    return multiply_fold(read64(p) ^ (read64(secret) + seed), read64(p + 8) ^ (read64(secret + 8) - seed));
}

uint64_t hash_up_to_128(const uint8_t* p, size_t n, uint64_t seed) {
    uint64_t sum = n * PRIME64_1;
    // Pairs from both ends, the innermost pair first; they may overlap.
    for (size_t i = (n - 1) / 32 + 1; i-- > 0;) {
        sum += mix_16(p + 16 * i, SECRET + 32 * i, seed);
        sum += mix_16(p + n - 16 * (i + 1), SECRET + 32 * i + 16, seed);
    }
    return avalanche(sum);
}

uint64_t hash_up_to_240(const uint8_t* p, size_t n, uint64_t seed) {
    uint64_t sum = n * PRIME64_1;
    for (size_t i = 0; i < 8; i++) sum += mix_16(p + 16 * i, SECRET + 16 * i, seed);
    sum = avalanche(sum);
    for (size_t i = 8; i < n / 16; i++) sum += mix_16(p + 16 * i, SECRET + 16 * (i - 8) + 3, seed);
    sum += mix_16(p + n - 16, SECRET + 136 - 17, seed);
    return avalanche(sum);
}

void accumulate(uint64_t sums[8], const uint8_t* p, const uint8_t* secret) {
    for (size_t i = 0; i < 8; i++) {
        const uint64_t value = read64(p + 8 * i);
        const uint64_t key = value ^ read64(secret + 8 * i);
        sums[i ^ 1] += value;
        sums[i] += (key & 0xFFFFFFFFu) * (key >> 32);
    }
}

void scramble(uint64_t sums[8], const uint8_t* secret) {
    for (size_t i = 0; i < 8; i++) {
        sums[i] ^= sums[i] >> 47;
        sums[i] ^= read64(secret + 8 * i);
        sums[i] *= PRIME32_1;
    }
}

uint64_t hash_long(const uint8_t* p, size_t n, uint64_t seed) {
    alignas(64) uint8_t secret[SECRET_SIZE];
    for (size_t i = 0; i < SECRET_SIZE; i += 16) {
        const uint64_t low = read64(SECRET + i) + seed, high = read64(SECRET + i + 8) - seed;
        std::memcpy(secret + i, &low, 8);
        std::memcpy(secret + i + 8, &high, 8);
    }
    alignas(64) uint64_t sums[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                    PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    const size_t stripes = (n - 1) / STRIPE;  // the last stripe ends with the input, see below
    for (size_t s = 0; s < stripes; s++) {
        accumulate(sums, p + s * STRIPE, secret + 8 * (s % STRIPES_PER_BLOCK));
        if (s % STRIPES_PER_BLOCK == STRIPES_PER_BLOCK - 1)
            scramble(sums, secret + SECRET_SIZE - STRIPE);
    }
    accumulate(sums, p + n - STRIPE, secret + SECRET_SIZE - STRIPE - 7);

    uint64_t result = n * PRIME64_1;
    for (size_t i = 0; i < 4; i++)
        result += multiply_fold(sums[2 * i] ^ read64(secret + 11 + 16 * i),
                                sums[2 * i + 1] ^ read64(secret + 19 + 16 * i));
    return avalanche(result);
}

}  // namespace

uint64_t xxh3_64(const void* input, size_t size, uint64_t seed) {
    const uint8_t* p = static_cast<const uint8_t*>(input);
    if (size <= 16) return hash_up_to_16(p, size, seed);
    if (size <= 128) return hash_up_to_128(p, size, seed);
    if (size <= 240) return hash_up_to_240(p, size, seed);
    return hash_long(p, size, seed);
}

}  // namespace batchengine
