// Measured peaks: register-only int8 dots, and streaming reads. Not part of any computation.
#include "common/peak.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "common/dispatch.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace batchengine {
namespace {

using Clock = std::chrono::steady_clock;

double since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

constexpr std::int64_t kRounds = 4000;  // per clock reading: long enough that it costs nothing
constexpr double kWindow = 0.005;  // seconds; the best window is one that no other program shared

#if defined(__x86_64__)
// The loops are assembly, because compilers surround such instructions with register copies. Twelve
// independent sums cover latency times issue width, and four turns of them the loop's own cost.
#define ALL_TWELVE(OP) OP(0) OP(1) OP(2) OP(3) OP(4) OP(5) OP(6) OP(7) OP(8) OP(9) OP(10) OP(11)
#define CLOBBERED                                                                        \
    "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", \
        "xmm10", "xmm11", "xmm12", "xmm13", "xmm14"
#define LOOP(setup, body)                                                                     \
    asm volatile(setup "1:\n\t.rept 4\n\t" body ".endr\n\tdec %0\n\tjnz 1b\n\t" : "+r"(rounds) \
                 :                                                                            \
                 : CLOBBERED)

#define DOT(sum) "vpdpbusd %%zmm12, %%zmm13, %%zmm" #sum "\n\t"
__attribute__((target("avx512f"))) void dots_avx512(std::int64_t rounds) {
    LOOP("vpternlogd $255, %%zmm12, %%zmm12, %%zmm12\n\tvpabsd %%zmm12, %%zmm13\n\t",
         ALL_TWELVE(DOT));
}
#undef DOT

#define FMA(sum) "vfmadd231ps %%zmm12, %%zmm12, %%zmm" #sum "\n\t"
__attribute__((target("avx512f"))) void fmas_avx512(std::int64_t rounds) {
    LOOP("vpxord %%zmm12, %%zmm12, %%zmm12\n\t", ALL_TWELVE(FMA));
}
#undef FMA

// A dot of AVX2 is three instructions; six sums, since each needs a register for its products.
#define DOT(sum, products)                                         \
    "vpmaddubsw %%ymm12, %%ymm13, %%ymm" #products "\n\t"          \
    "vpmaddwd %%ymm14, %%ymm" #products ", %%ymm" #products "\n\t" \
    "vpaddd %%ymm" #products ", %%ymm" #sum ", %%ymm" #sum "\n\t"
#define SIX_DOTS DOT(0, 6) DOT(1, 7) DOT(2, 8) DOT(3, 9) DOT(4, 10) DOT(5, 11)
__attribute__((target("avx2"))) void dots_avx2(std::int64_t rounds) {
    LOOP("vpcmpeqd %%ymm12, %%ymm12, %%ymm12\n\tvpabsb %%ymm12, %%ymm13\n\t"
         "vpabsw %%ymm12, %%ymm14\n\t",
         SIX_DOTS SIX_DOTS);
}
#undef SIX_DOTS
#undef DOT

#define FMA(sum) "vfmadd231ps %%ymm12, %%ymm12, %%ymm" #sum "\n\t"
__attribute__((target("avx2,fma"))) void fmas_avx2(std::int64_t rounds) {
    LOOP("vxorps %%ymm12, %%ymm12, %%ymm12\n\t", ALL_TWELVE(FMA));
}
#undef FMA
#undef LOOP
#undef CLOBBERED
#undef ALL_TWELVE

constexpr double kPerRound = 12 * 4;  // dots or fmas
#endif

// A loop of one instruction, and the operations of one round of it.
struct Rounds {
    void (*run)(std::int64_t rounds) = nullptr;
    double operations = 0;
};

Rounds dots_of(Level level) {
#if defined(__x86_64__)
    if (level == Level::avx512) return {dots_avx512, 128 * kPerRound};
    if (level == Level::avx2) return {dots_avx2, 64 * kPerRound};
#endif
    (void)level;
    return {};
}

Rounds fmas_of(Level level) {
#if defined(__x86_64__)
    if (level == Level::avx512) return {fmas_avx512, 32 * kPerRound};
    if (level == Level::avx2) return {fmas_avx2, 16 * kPerRound};
#endif
    (void)level;
    return {};
}

// Giga-operations per second of `threads` threads that run `rounds` for about `seconds`: the sum of
// what each did in its best window.
double rate_of(Rounds rounds, int threads, double seconds) {
    if (!rounds.run) return 0.0;
    std::vector<double> rates(static_cast<std::size_t>(std::max(threads, 1)));
    std::vector<std::thread> pool;
    pool.reserve(rates.size());
    for (auto& rate : rates)
        pool.emplace_back([&rate, rounds, seconds] {
            const auto start = Clock::now();
            do {
                double operations = 0;
                const auto begin = Clock::now();
                do {
                    rounds.run(kRounds);
                    operations += rounds.operations * kRounds;
                } while (since(begin) < kWindow);
                rate = std::max(rate, operations / since(begin) / 1e9);
            } while (since(start) < seconds);
        });
    for (auto& thread : pool) thread.join();
    double total = 0;
    for (const double rate : rates) total += rate;
    return total;
}

std::uint64_t read_plain(const std::uint64_t* words, std::size_t count) {
    std::uint64_t sums[8] = {};
    for (std::size_t i = 0; i < count; i += 8)
        for (std::size_t j = 0; j < 8; ++j) sums[j] += words[i + j];
    std::uint64_t total = 0;
    for (const auto sum : sums) total += sum;
    return total;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) std::uint64_t read_avx2(const std::uint64_t* words,
                                                        std::size_t count) {
    __m256i sums[8];
    for (auto& sum : sums) sum = _mm256_setzero_si256();
    for (std::size_t i = 0; i < count; i += 32)
        for (std::size_t j = 0; j < 8; ++j)
            sums[j] = _mm256_add_epi64(
                sums[j], _mm256_load_si256(reinterpret_cast<const __m256i*>(words + i + 4 * j)));
    __m256i total = sums[0];
    for (int j = 1; j < 8; ++j) total = _mm256_add_epi64(total, sums[j]);
    return static_cast<std::uint64_t>(_mm256_extract_epi64(total, 0));
}
#endif

std::uint64_t read_all(const std::uint64_t* words, std::size_t count) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) return read_avx2(words, count);
#endif
    return read_plain(words, count);
}

std::size_t last_cache_bytes() {
#if defined(_SC_LEVEL3_CACHE_SIZE)
    return static_cast<std::size_t>(std::max(sysconf(_SC_LEVEL3_CACHE_SIZE), 0L));
#else
    return 0;
#endif
}

// Memory of its own pages, huge ones where the system gives them: the reads are not to wait for
// page walks.
class Buffer {
public:
    explicit Buffer(std::size_t bytes) : bytes_(bytes) {
        void* memory =
            mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) return;
#if defined(MADV_HUGEPAGE)
        madvise(memory, bytes, MADV_HUGEPAGE);
#endif
        std::memset(memory, 1, bytes);  // real pages, not the zero page
        words_ = static_cast<std::uint64_t*>(memory);
    }
    ~Buffer() {
        if (words_) munmap(words_, bytes_);
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    const std::uint64_t* words() const { return words_; }

private:
    std::size_t bytes_;
    std::uint64_t* words_ = nullptr;
};

}  // namespace

double peak_int8_gops(int threads, double seconds) {
    return rate_of(dots_of(vector_level()), threads, seconds);
}

double peak_float_gops(int threads, double seconds) {
    return rate_of(fmas_of(vector_level()), threads, seconds);
}

double peak_read_gbps(int threads, std::size_t bytes, int repeats) {
    const std::size_t count = static_cast<std::size_t>(std::max(threads, 1));
    if (bytes == 0)
        bytes = std::max(16 * last_cache_bytes(), std::size_t{512} << 20) / count;
    bytes = std::max(bytes & ~std::size_t{4095}, std::size_t{4096});
    std::vector<std::unique_ptr<Buffer>> buffers;
    for (std::size_t i = 0; i < count; ++i) {
        buffers.push_back(std::make_unique<Buffer>(bytes));
        if (!buffers.back()->words()) return 0.0;
    }
    // The threads live for all repeats and start each together; one is read from its start to the
    // end of the last thread.
    std::vector<double> ends(count);
    double best = 0;
    Clock::time_point start;
    const auto begin = [&]() noexcept { start = Clock::now(); };
    const auto note = [&]() noexcept {
        const double slowest = *std::max_element(ends.begin(), ends.end());
        best = std::max(best, static_cast<double>(bytes * count) / slowest / 1e9);
    };
    std::barrier started(static_cast<std::ptrdiff_t>(count), begin);
    std::barrier ended(static_cast<std::ptrdiff_t>(count), note);
    std::vector<std::thread> pool;
    pool.reserve(count);
    for (std::size_t i = 0; i < count; ++i)
        pool.emplace_back([&, i] {
            for (int repeat = 0; repeat < repeats; ++repeat) {
                started.arrive_and_wait();
                const std::uint64_t sum = read_all(buffers[i]->words(), bytes / sizeof(sum));
                asm volatile("" ::"r"(sum));
                ends[i] = since(start);
                ended.arrive_and_wait();
            }
        });
    for (auto& thread : pool) thread.join();
    return best;
}

}  // namespace batchengine
