// A small pool of threads that starts a kernel within a microsecond or two.
//
// The caller is thread ith = 0 of nth. Workers spin for a while after each kernel and then park on a
// futex, so an idle lane costs nothing. Work may be split by ith or handed out by a Tickets counter:
// no result may depend on which thread did what. Bodies must not throw. Not usable after fork().
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace batchengine {

// Round to nearest even, no flush to zero, all exceptions masked (sticky flags are ignored). Other
// libraries in the process may change it; kernels put it back around every run.
class FloatEnvironment {
  public:
    FloatEnvironment();
    ~FloatEnvironment();
    FloatEnvironment(const FloatEnvironment&) = delete;
    FloatEnvironment& operator=(const FloatEnvironment&) = delete;
    static bool canonical();

  private:
    unsigned saved_;
};

// Below this many values of row-by-row arithmetic, waking the pool costs more than computing alone.
constexpr size_t VALUES_ALONE = 8192;

class Pool {
  public:
    // cores: empty = let the kernel place the threads; else one core per thread, ith on cores[ith]
    // (the constructing thread is pinned to cores[0] until close()).
    Pool(int threads, std::vector<int> cores, int spin_us);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }
    bool closed() const { return closed_; }
    void close();

    // body(ith, nth) on every thread; returns when all are done. Calls from several threads queue.
    template <class Body>
    void run(Body&& body) {
        using Plain = std::remove_reference_t<Body>;
        run_raw([](void* context, int ith, int nth) { (*static_cast<Plain*>(context))(ith, nth); },
                const_cast<void*>(static_cast<const void*>(&body)));
    }

  private:
    using Job = void (*)(void*, int, int);
    void run_raw(Job job, void* context);
    void serve(int ith);
    void wait_for_epoch(uint32_t seen);
    void wait_for_workers();

    const int threads_;
    const int64_t spin_ns_;
    bool closed_ = false;
    std::mutex mutex_;
    std::vector<std::thread> workers_;
    std::vector<int> cores_;
    struct CallerAffinity;
    std::unique_ptr<CallerAffinity> caller_;
    Job job_ = nullptr;
    void* context_ = nullptr;
    // Own cache lines: workers poll epoch_ while others count down remaining_.
    alignas(64) std::atomic<uint32_t> epoch_{0};
    std::atomic<uint32_t> parked_{0};
    std::atomic<bool> stop_{false};
    alignas(64) std::atomic<uint32_t> remaining_{0};
    std::atomic<uint32_t> caller_parked_{0};
};

// Hands out 0, 1, 2 ... to any thread that asks: dynamic balance for pieces of unequal cost.
class Tickets {
  public:
    explicit Tickets(size_t count) : count_(count) {}
    bool take(size_t* index) {
        *index = next_.fetch_add(1, std::memory_order_relaxed);
        return *index < count_;
    }

  private:
    alignas(64) std::atomic<size_t> next_{0};
    const size_t count_;
};

// body(i) for 0 .. count - 1, each by one thread; on the calling thread only if `alone`.
template <class Body>
void for_each(Pool& pool, size_t count, bool alone, Body&& body) {
    if (alone) {
        const FloatEnvironment environment;
        for (size_t i = 0; i < count; ++i) body(i);
        return;
    }
    Tickets tickets(count);
    pool.run([&](int, int) {
        for (size_t i; tickets.take(&i);) body(i);
    });
}

// Hands out 0 .. count - 1 from `ranges` ranges, each from front to back. With one range per
// thread, neighbouring pieces are one stream from memory; a thread that is done takes from the next.
class Shares {
  public:
    Shares(size_t count, int ranges) : ranges_(static_cast<size_t>(ranges)) {
        size_t begin = 0;
        for (size_t i = 0; i < ranges_.size(); ++i) {
            ranges_[i].next.store(begin, std::memory_order_relaxed);
            ranges_[i].end = begin = count * (i + 1) / ranges_.size();
        }
    }
    bool take(int ith, size_t* index) {
        for (size_t i = 0; i < ranges_.size(); ++i) {
            Range& range = ranges_[(static_cast<size_t>(ith) + i) % ranges_.size()];
            if (range.next.load(std::memory_order_relaxed) >= range.end) continue;
            *index = range.next.fetch_add(1, std::memory_order_relaxed);
            if (*index < range.end) return true;
        }
        return false;
    }

  private:
    struct alignas(64) Range {
        std::atomic<size_t> next{0};
        size_t end = 0;
    };
    std::vector<Range> ranges_;
};

}  // namespace batchengine
