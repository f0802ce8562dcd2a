// See pool.h. The wake-up is the classic pair: the caller publishes the epoch and then looks for
// sleepers, a worker announces its sleep and then looks at the epoch; both orders are sequentially
// consistent, so one of them sees the other.
#include "common/pool.h"

#include <cerrno>
#include <cfenv>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(BATCHENGINE_X86)
#include <immintrin.h>
#endif

namespace batchengine {
namespace {

#if defined(BATCHENGINE_X86)
constexpr unsigned CANONICAL = 0x1F80;  // of MXCSR
constexpr unsigned FLAGS = 0x3F;        // sticky exception flags: any inexact operation sets one
unsigned environment() { return _mm_getcsr(); }
void set_environment(unsigned value) { _mm_setcsr(value); }
void relax() { _mm_pause(); }
#elif defined(__aarch64__)
constexpr unsigned CANONICAL = 0;  // of FPCR; its sticky flags are in another register
constexpr unsigned FLAGS = 0;
unsigned environment() {
    uint64_t fpcr;
    asm volatile("mrs %0, fpcr" : "=r"(fpcr) : : "memory");
    return static_cast<unsigned>(fpcr);
}
void set_environment(unsigned value) {
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{value}) : "memory");
}
void relax() { asm volatile("yield"); }
#else  // the rounding mode at least
constexpr unsigned CANONICAL = FE_TONEAREST;
constexpr unsigned FLAGS = 0;
unsigned environment() { return static_cast<unsigned>(fegetround()); }
void set_environment(unsigned value) { fesetround(static_cast<int>(value)); }
void relax() {}
#endif

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, expected, nullptr,
            nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr,
            nullptr, 0);
}

// Polls `done` for a bounded time; the clock is read rarely because reading it costs 20 polls.
template <class Done>
bool spin(int64_t budget_ns, Done&& done) {
    const int64_t start = now_ns();
    do {
        for (int i = 0; i < 32; ++i) {
            if (done()) return true;
            relax();
        }
    } while (now_ns() - start < budget_ns);
    return done();
}

void pin(pthread_t thread, int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (core < 0 || core >= CPU_SETSIZE)
        throw std::invalid_argument("pool: no such core " + std::to_string(core));
    CPU_SET(core, &set);
    if (pthread_setaffinity_np(thread, sizeof set, &set) != 0)
        throw std::invalid_argument("pool: this process may not run on core " +
                                    std::to_string(core));
}

}  // namespace

FloatEnvironment::FloatEnvironment() : saved_(environment()) {
    if (!canonical()) set_environment(CANONICAL);
}

FloatEnvironment::~FloatEnvironment() {
    if ((saved_ & ~FLAGS) != CANONICAL) set_environment(saved_);
}

bool FloatEnvironment::canonical() {
    return (environment() & ~FLAGS) == CANONICAL;
}

struct Pool::CallerAffinity {
    pthread_t thread = pthread_self();
    cpu_set_t before;
    CallerAffinity() { pthread_getaffinity_np(thread, sizeof before, &before); }
};

Pool::Pool(int threads, std::vector<int> cores, int spin_us)
    : threads_(threads), spin_ns_(int64_t{1000} * spin_us), cores_(std::move(cores)) {
    if (threads < 1 || threads > 1024)
        throw std::invalid_argument("pool: threads must be 1..1024, not " + std::to_string(threads));
    if (spin_us < 0) throw std::invalid_argument("pool: spin_us must not be negative");
    if (!cores_.empty() && cores_.size() != static_cast<size_t>(threads))
        throw std::invalid_argument("pool: give one core per thread, or none");
    if (!cores_.empty()) {
        caller_ = std::make_unique<CallerAffinity>();
        pin(pthread_self(), cores_[0]);
    }
    try {
        for (int ith = 1; ith < threads_; ++ith) {
            workers_.emplace_back([this, ith] { serve(ith); });
            if (!cores_.empty())
                pin(workers_.back().native_handle(), cores_[static_cast<size_t>(ith)]);
        }
    } catch (...) {
        close();
        throw;
    }
}

Pool::~Pool() { close(); }

void Pool::close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;
    closed_ = true;
    stop_.store(true);
    epoch_.fetch_add(1);
    futex_wake_all(epoch_);
    for (auto& worker : workers_) worker.join();
    workers_.clear();
    if (caller_ && pthread_equal(caller_->thread, pthread_self()))
        pthread_setaffinity_np(caller_->thread, sizeof caller_->before, &caller_->before);
}

void Pool::run_raw(Job job, void* context) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) throw std::runtime_error("pool: used after close()");
    const FloatEnvironment canonical;
    if (threads_ == 1) {
        job(context, 0, 1);
        return;
    }
    job_ = job;
    context_ = context;
    remaining_.store(static_cast<uint32_t>(threads_ - 1), std::memory_order_relaxed);
    epoch_.fetch_add(1);
    if (parked_.load() != 0) futex_wake_all(epoch_);
    job(context, 0, threads_);
    wait_for_workers();
}

void Pool::serve(int ith) {
    set_environment(CANONICAL);
    uint32_t seen = 0;
    for (;;) {
        wait_for_epoch(seen);
        ++seen;  // the caller never starts a run before the last one ended: one epoch at a time
        if (stop_.load()) return;
        if (!FloatEnvironment::canonical()) {
            std::fputs("batchengine: a kernel changed the floating-point environment\n", stderr);
            std::abort();
        }
        job_(context_, ith, threads_);
        if (remaining_.fetch_sub(1) == 1 && caller_parked_.load() != 0) futex_wake_all(remaining_);
    }
}

void Pool::wait_for_epoch(uint32_t seen) {
    const auto changed = [&] { return epoch_.load(std::memory_order_acquire) != seen; };
    if (spin(spin_ns_, changed)) return;
    parked_.fetch_add(1);
    while (epoch_.load() == seen) futex_wait(epoch_, seen);
    parked_.fetch_sub(1);
}

void Pool::wait_for_workers() {
    const auto done = [&] { return remaining_.load(std::memory_order_acquire) == 0; };
    if (spin(spin_ns_, done)) return;
    caller_parked_.store(1);
    for (uint32_t left; (left = remaining_.load()) != 0;) futex_wait(remaining_, left);
    caller_parked_.store(0);
}

}  // namespace batchengine
