// Measured peaks: register-only int8 dots, and streaming reads. Not part of any computation.
#include "common/peak.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace batchengine {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

constexpr int kRounds = 20000;  // per clock reading: long enough that the reading costs nothing
constexpr int kChains = 12;     // independent accumulators: covers latency times issue width

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni"))) double dots_vnni(double seconds) {
    __m512i sums[kChains];
    for (auto& sum : sums) sum = _mm512_setzero_si512();
    const __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(5);
    double operations = 0;
    const auto start = Clock::now();
    while (since(start) < seconds) {
        for (int i = 0; i < kRounds; ++i) {
            for (int j = 0; j < kChains; ++j) sums[j] = _mm512_dpbusd_epi32(sums[j], a, b);
            asm volatile("" ::"v"(sums[0]));
        }
        operations += 128.0 * kChains * kRounds;
    }
    const double elapsed = since(start);
    int keep = 0;
    for (auto& sum : sums) keep += _mm512_reduce_add_epi32(sum);
    asm volatile("" ::"r"(keep));
    return operations / elapsed / 1e9;
}

__attribute__((target("avx2"))) double dots_avx2(double seconds) {
    __m256i sums[kChains];
    for (auto& sum : sums) sum = _mm256_setzero_si256();
    __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(5);
    const __m256i ones = _mm256_set1_epi16(1);
    double operations = 0;
    const auto start = Clock::now();
    while (since(start) < seconds) {
        for (int i = 0; i < kRounds; ++i) {
            for (int j = 0; j < kChains; ++j) {
                asm volatile("" : "+x"(a));  // the product must be computed every time
                const __m256i pairs = _mm256_maddubs_epi16(a, b);
                sums[j] = _mm256_add_epi32(sums[j], _mm256_madd_epi16(pairs, ones));
            }
        }
        operations += 64.0 * kChains * kRounds;
    }
    const double elapsed = since(start);
    __m256i total = sums[0];
    for (int j = 1; j < kChains; ++j) total = _mm256_add_epi32(total, sums[j]);
    asm volatile("" ::"x"(total));
    return operations / elapsed / 1e9;
}
#endif

double dots(double seconds) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512vnni")) return dots_vnni(seconds);
    if (__builtin_cpu_supports("avx2")) return dots_avx2(seconds);
#endif
    (void)seconds;
    return 0.0;  // no peak is known for this machine's int8 unit
}

std::uint64_t read_all(const std::uint64_t* words, std::size_t count) {
    std::uint64_t sums[8] = {};
    for (std::size_t i = 0; i < count; i += 8)
        for (int j = 0; j < 8; ++j) sums[j] += words[i + static_cast<std::size_t>(j)];
    std::uint64_t total = 0;
    for (const auto sum : sums) total += sum;
    return total;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) std::uint64_t read_all_avx2(const std::uint64_t* words,
                                                            std::size_t count) {
    __m256i sums[8];
    for (auto& sum : sums) sum = _mm256_setzero_si256();
    for (std::size_t i = 0; i < count; i += 32)
        for (int j = 0; j < 8; ++j)
            sums[j] = _mm256_add_epi64(
                sums[j], _mm256_load_si256(reinterpret_cast<const __m256i*>(words + i + 4 * j)));
    __m256i total = sums[0];
    for (int j = 1; j < 8; ++j) total = _mm256_add_epi64(total, sums[j]);
    return static_cast<std::uint64_t>(_mm256_extract_epi64(total, 0));
}
#endif

std::uint64_t stream(const std::uint64_t* words, std::size_t count) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) return read_all_avx2(words, count);
#endif
    return read_all(words, count);
}

}  // namespace

double peak_int8_gops(int threads, double seconds) {
    std::vector<double> rates(static_cast<std::size_t>(std::max(threads, 1)));
    std::vector<std::thread> pool;
    pool.reserve(rates.size());
    for (auto& rate : rates) pool.emplace_back([&rate, seconds] { rate = dots(seconds); });
    for (auto& thread : pool) thread.join();
    double total = 0;
    for (const double rate : rates) total += rate;
    return total;
}

double peak_read_gbps(int threads, std::size_t bytes, int repeats) {
    bytes &= ~std::size_t{4095};
    const std::size_t words = bytes / sizeof(std::uint64_t);
    struct Free {
        void operator()(std::uint64_t* p) const { std::free(p); }
    };
    std::vector<std::unique_ptr<std::uint64_t, Free>> buffers;
    for (int i = 0; i < std::max(threads, 1); ++i) {
        buffers.emplace_back(static_cast<std::uint64_t*>(std::aligned_alloc(4096, bytes)));
        if (!buffers.back()) return 0.0;
        std::fill_n(buffers.back().get(), words, std::uint64_t{1});  // real pages, not the zero page
    }
    double best = 0;
    for (int repeat = 0; repeat < repeats; ++repeat) {
        std::atomic<std::uint64_t> keep{0};
        const auto start = Clock::now();
        std::vector<std::thread> pool;
        for (auto& buffer : buffers)
            pool.emplace_back([&keep, &buffer, words] { keep += stream(buffer.get(), words); });
        for (auto& thread : pool) thread.join();
        const double rate = static_cast<double>(bytes) * static_cast<double>(buffers.size()) /
                            since(start) / 1e9;
        best = std::max(best, rate);
    }
    return best;
}

}  // namespace batchengine
