// The primitives of gpu.h on the CPU: every thread of a block is a fiber, so that the source of a kernel runs
// unchanged and its faults are found.
//
// Faults, each an exception that names the kernel, the thread and the place: an access outside an
// allocation or a shared array, a misaligned one, a read of memory that nothing has written, two accesses
// to one byte without a barrier between them (in shared memory, and in global memory within and across
// blocks), an access to shared memory that a copy is under way to, a collective that some threads do
// not reach, reach elsewhere or by other calls, or never leave, a byte of `bytes_of` that does not exist.
// With SIMT_UNCHECKED only the last two kinds are found, and pointers are plain: for running whole models.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#define GPU_FN [[maybe_unused]] inline
#define GPU_UNROLL
#define GPU_UNROLL_4
#define GPU_NO_UNROLL
#define __shared__ static
#define KERNEL(name, threads, ...)                                                                 \
    static void name(__VA_ARGS__);                                                                 \
    static const simt::Kernel name##_kernel(#name, threads, &name);                                \
    static void name(__VA_ARGS__)
#define KERNEL_AT_ONCE(name, threads, blocks, ...) KERNEL(name, threads, __VA_ARGS__)

namespace simt {

constexpr int WARP = 32;
constexpr int THREADS_MAX = 1024;

struct Fault : std::runtime_error {
    using std::runtime_error::runtime_error;
};
[[noreturn]] void fail(const std::string& what);  // adds the kernel, the block and the thread

// Where the thread that runs is.
struct Place {
    int block[3];
    int blocks[3];
    uint32_t number;  // of the block in its launch
    int thread;
    int threads;
    uint32_t barriers;       // that this thread has passed in this block
    uint32_t warp_barriers;  // of its warp
    uint64_t run;            // number of this run of a block, ever rising
    uint64_t launch;
};
extern Place here;

// Who accessed a byte last: one thread, or several of a warp, a block or the grid that nothing orders.
enum class Scope : uint8_t { thread, warp, block, grid };
struct Mark {
    uint32_t thread = 0;  // 1 + number in the launch; 0: none
    uint32_t barriers = 0;
    uint32_t warp_barriers = 0;
    Scope scope = Scope::thread;
};
enum class Access { read, write, atomic };
struct Cell {
    Mark marks[3];  // by Access
};
// Most accesses are of whole words: one cell stands for the bytes of a word until one is accessed alone.
constexpr size_t WORD_BYTES = 4;
struct Word {
    Cell whole;
    uint32_t parts = 0;       // 1 + the number of the cells of its bytes; 0: `whole` is each one's
    bool is_awaited = false;  // a copy to it is under way
};
// Memory of the device or of a block, and who touched each byte in the launch that runs.
struct Allocation {
    uint8_t* base;
    size_t bytes;
    std::vector<uint8_t> is_written;  // each byte, ever
    std::vector<Word> words;          // made when first touched
    std::vector<std::array<Cell, WORD_BYTES>> parts;
    uint64_t launch = 0;              // that the words are of

    void forget() {
        words.assign((bytes + WORD_BYTES - 1) / WORD_BYTES, Word());
        parts.clear();
    }
};
const Allocation* find(uint64_t address);

void touch(const Allocation* at, const void* p, size_t bytes, size_t alignment, Access access);
void check_prefetch(const Allocation* at, const void* p, int64_t bytes);

// The launches before this one have ended, as far as this thread knows.
void dependency_wait();

// Collectives. `kind` and `line` must be those of every thread.
void barrier(int line);
using Words = uint64_t[12];
// Exchanges the words of 32 lanes: `compute` gets all of them once and may change them.
void exchange(Words& words, int kind, int line, void (*compute)(Words* lanes));
void warp_barrier(int line);
// c += A * B of a warp with k bytes a row, from the fragments as gpu.h lays them out. The words of a lane:
// c[4], then a[k / 8], then b[k / 16].
template <int k, bool is_unsigned>
void multiply(Words* lanes);

// Copies that wait: `begin_copy` before one to shared memory, `end_copy` when it takes effect.
void begin_copy(const Allocation* at, const void* p, size_t bytes);
void end_copy(const Allocation* at, const void* p, size_t bytes);
void copy_later(std::function<void()> copy);
void copies_commit();
void copies_wait(int n);

// A kernel by name; arguments come as 64-bit words.
struct Kernel {
    template <class... P>
    Kernel(const char* name, int threads_max, void (*body)(P...)) {
        add(name, threads_max, sizeof...(P), [body](const uint64_t* words) {
            call(body, words, std::index_sequence_for<P...>());
        });
    }
    static void add(const char* name, int threads_max, size_t n,
                    std::function<void(const uint64_t*)> call);

  private:
    template <class T>
    static T argument(uint64_t word) {
        if constexpr (std::is_same_v<T, float>) {
            const auto bits = static_cast<uint32_t>(word);
            float x;
            std::memcpy(&x, &bits, sizeof x);
            return x;
        } else if constexpr (std::is_pointer_v<T>) {
            return reinterpret_cast<T>(word);
        } else {
            return T(word);
        }
    }
    template <class... P, size_t... I>
    static void call(void (*body)(P...), const uint64_t* words, std::index_sequence<I...>) {
        body(argument<P>(words[I])...);
    }
};

#if !defined(SIMT_UNCHECKED)

// One element of memory: reading and assigning are accesses.
template <class T>
class Element {
  public:
    Element(T* at, const Allocation* allocation) : at_(at), allocation_(allocation) {}
    Element(const Element&) = default;
    operator T() const {
        touch(allocation_, at_, sizeof(T), alignof(T), Access::read);
        return *at_;
    }
    Element& operator=(T value) {
        touch(allocation_, at_, sizeof(T), alignof(T), Access::write);
        *at_ = value;
        return *this;
    }
    Element& operator=(const Element& other) { return *this = static_cast<T>(other); }
    Element& operator+=(T value) { return *this = static_cast<T>(static_cast<T>(*this) + value); }
    T* atomic() const {
        touch(allocation_, at_, sizeof(T), alignof(T), Access::atomic);
        return at_;
    }
    T* place() const { return at_; }
    const Allocation* allocation() const { return allocation_; }

  private:
    T* at_;
    const Allocation* allocation_;
};

// A pointer that knows its allocation.
template <class T>
class Pointer {
  public:
    Pointer() = default;
    explicit Pointer(uint64_t address)
        : at_(reinterpret_cast<T*>(address)), allocation_(address ? find(address) : nullptr) {}
    Pointer(T* at, const Allocation* allocation) : at_(at), allocation_(allocation) {}
    template <class U>
        requires std::is_same_v<const U, T>
    Pointer(const Pointer<U>& other) : at_(other.get()), allocation_(other.allocation()) {}

    using Value = std::remove_const_t<T>;
    auto operator[](int64_t i) const {
        if constexpr (std::is_const_v<T>) {
            touch(allocation_, at_ + i, sizeof(T), alignof(T), Access::read);
            return Value(at_[i]);
        } else {
            return Element<T>(at_ + i, allocation_);
        }
    }
    auto operator*() const { return (*this)[0]; }
    Pointer operator+(int64_t n) const { return {at_ + n, allocation_}; }
    Pointer& operator+=(int64_t n) { return at_ += n, *this; }
    explicit operator bool() const { return at_ != nullptr; }
    T* get() const { return at_; }
    const Allocation* allocation() const { return allocation_; }

  private:
    T* at_ = nullptr;
    const Allocation* allocation_ = nullptr;
};

#endif

}  // namespace simt

namespace gpu {

constexpr int WARP = simt::WARP;

struct alignas(8) Words2 {
    uint32_t word[2];
};
struct alignas(16) Words4 {
    uint32_t word[4];
};

#if defined(SIMT_UNCHECKED)

template <class T>
using In = const T*;
template <class T>
using Out = T*;
template <class T>
const T* in_at(uint64_t address) {
    return reinterpret_cast<const T*>(address);
}
template <class T>
T* out_at(uint64_t address) {
    return reinterpret_cast<T*>(address);
}
template <class To, class From>
const To* in_as(const From* from) {
    return reinterpret_cast<const To*>(from);
}
template <class To, class From>
To* out_as(From* from) {
    return reinterpret_cast<To*>(from);
}
template <class T, int n>
struct alignas(16) Shared {
    T value[n];
    T& operator[](int i) { return value[i]; }
};
template <class T>
T atomic_add(T& at, T value) {
    const T before = at;
    at += value;
    return before;
}
template <class T>
T atomic_max(T& at, T value) {
    const T before = at;
    if (value > at) at = value;
    return before;
}
template <int n>
uint32_t shared_word(Shared<Words4, n>& from, int i) {
    return from[i / 4].word[i % 4];
}
template <class T>
void prefetch(const T*, int64_t) {}
template <class T, class From>
void copy_async(T& to, const From* from) {
    simt::copy_later([&to, from] { std::memcpy(&to, from, 16); });
}

#else

template <class T>
using In = simt::Pointer<const T>;
template <class T>
using Out = simt::Pointer<T>;
template <class T>
In<T> in_at(uint64_t address) {
    return In<T>(address);
}
template <class T>
Out<T> out_at(uint64_t address) {
    return Out<T>(address);
}
template <class To, class From>
In<To> in_as(simt::Pointer<From> from) {
    return In<To>(reinterpret_cast<const To*>(from.get()), from.allocation());
}
template <class To, class From>
Out<To> out_as(simt::Pointer<From> from) {
    return Out<To>(reinterpret_cast<To*>(from.get()), from.allocation());
}

// Shared memory of the block that runs: static in the kernel, so it begins anew with each block.
template <class T, int n>
class alignas(16) Shared {
  public:
    simt::Element<T> operator[](int i) {
        if (run_ != simt::here.run) {
            std::memset(static_cast<void*>(value_), 0xA5, sizeof value_);
            memory_.base = reinterpret_cast<uint8_t*>(value_);
            memory_.bytes = sizeof value_;
            memory_.is_written.assign(sizeof value_, false);
            memory_.forget();
            memory_.launch = 0;  // not global
            run_ = simt::here.run;
        }
        return {value_ + i, &memory_};
    }

  private:
    T value_[n];
    simt::Allocation memory_;
    uint64_t run_ = 0;
};
template <class T>
T atomic_add(simt::Element<T> at, T value) {
    T* const p = at.atomic();
    const T before = *p;
    *p += value;
    return before;
}
template <class T>
T atomic_max(simt::Element<T> at, T value) {
    T* const p = at.atomic();
    const T before = *p;
    if (value > before) *p = value;
    return before;
}
template <int n>
uint32_t shared_word(Shared<Words4, n>& from, int i) {
    const simt::Element<Words4> words = from[i / 4];
    const uint32_t* const word = words.place()->word + i % 4;
    simt::touch(words.allocation(), word, sizeof *word, alignof(uint32_t), simt::Access::read);
    return *word;
}
template <class T>
void prefetch(simt::Pointer<T> from, int64_t bytes) {
    simt::check_prefetch(from.allocation(), from.get(), bytes);
}
template <class T, class From>
void copy_async(simt::Element<T> to, simt::Pointer<From> from) {
    simt::touch(from.allocation(), from.get(), 16, 16, simt::Access::read);
    simt::begin_copy(to.allocation(), to.place(), 16);
    simt::copy_later([to, from] {
        simt::end_copy(to.allocation(), to.place(), 16);
        std::memcpy(static_cast<void*>(to.place()), from.get(), 16);
    });
}

#endif

GPU_FN int thread() { return simt::here.thread; }
GPU_FN int threads() { return simt::here.threads; }
GPU_FN int lane() { return simt::here.thread % WARP; }
GPU_FN int warp() { return simt::here.thread / WARP; }
GPU_FN int warps() { return simt::here.threads / WARP; }
GPU_FN int block() { return simt::here.block[0]; }
GPU_FN int block_y() { return simt::here.block[1]; }
GPU_FN int block_z() { return simt::here.block[2]; }
GPU_FN int blocks() { return simt::here.blocks[0]; }

GPU_FN void launch_dependents() {}
GPU_FN void dependency_wait() { simt::dependency_wait(); }
GPU_FN void begin() { dependency_wait(); }

GPU_FN void barrier(int line = __builtin_LINE()) { simt::barrier(line); }
GPU_FN void warp_barrier(int line = __builtin_LINE()) { simt::warp_barrier(line); }

// Collectives that exchange values; every thread of a warp must be in the same.
enum Collective { SHUFFLE, SHUFFLE_XOR, BALLOT, SMALLEST, K32_SS, K32_US, K16_SS };

template <class T>
T exchanged(T value, int other, Collective kind, int line) {
    static_assert(sizeof(T) <= 8);
    simt::Words words = {};
    std::memcpy(&words[0], &value, sizeof value);
    words[1] = static_cast<uint64_t>(other);
    simt::exchange(words, kind, line, [](simt::Words* lanes) {
        for (int i = 0; i < WARP; i++) lanes[i][2] = lanes[lanes[i][1] % WARP][0];
    });
    std::memcpy(&value, &words[2], sizeof value);
    return value;
}
template <class T>
T shuffle(T value, int lane, int line = __builtin_LINE()) {
    return exchanged(value, lane, SHUFFLE, line);
}
template <class T>
T shuffle_xor(T value, int mask, int line = __builtin_LINE()) {
    return exchanged(value, lane() ^ mask, SHUFFLE_XOR, line);
}
GPU_FN uint32_t ballot(bool x, int line = __builtin_LINE()) {
    simt::Words words = {x};
    simt::exchange(words, BALLOT, line, [](simt::Words* lanes) {
        uint64_t all = 0;
        for (int i = 0; i < WARP; i++) all |= lanes[i][0] << i;
        for (int i = 0; i < WARP; i++) lanes[i][0] = all;
    });
    return static_cast<uint32_t>(words[0]);
}
GPU_FN uint32_t min_of_lanes(uint32_t x, int line = __builtin_LINE()) {
    simt::Words words = {x};
    simt::exchange(words, SMALLEST, line, [](simt::Words* lanes) {
        uint64_t smallest = lanes[0][0];
        for (int i = 1; i < WARP; i++) smallest = lanes[i][0] < smallest ? lanes[i][0] : smallest;
        for (int i = 0; i < WARP; i++) lanes[i][0] = smallest;
    });
    return static_cast<uint32_t>(words[0]);
}
GPU_FN int lowest_bit(uint32_t bits) { return __builtin_ctz(bits); }
GPU_FN int count_bits(uint32_t bits) { return __builtin_popcount(bits); }
GPU_FN int opaque(int x) { return x; }
GPU_FN uint32_t bytes_of(uint32_t low, uint32_t high, uint32_t numbers) {
    if (numbers & 0x8888u) simt::fail("a number of a byte is above 7");
    const uint64_t both = uint64_t{high} << 32 | low;
    uint32_t bytes = 0;
    for (int i = 0; i < 4; i++)
        bytes |= static_cast<uint32_t>(both >> (numbers >> 4 * i & 7u) * 8 & 255u) << 8 * i;
    return bytes;
}
GPU_FN bool any(bool x, int line = __builtin_LINE()) { return ballot(x, line) != 0; }

template <int k, bool is_unsigned, int n_a, int n_b>
void mma(int32_t (&c)[4], const uint32_t (&a)[n_a], const uint32_t (&b)[n_b], Collective kind, int line) {
    simt::Words words = {};
    for (int i = 0; i < 4; i++) words[i] = static_cast<uint32_t>(c[i]);
    for (int i = 0; i < n_a; i++) words[4 + i] = a[i];
    for (int i = 0; i < n_b; i++) words[4 + n_a + i] = b[i];
    simt::exchange(words, kind, line, simt::multiply<k, is_unsigned>);
    for (int i = 0; i < 4; i++) c[i] = static_cast<int32_t>(words[i]);
}
GPU_FN void mma_k32_ss(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                       int line = __builtin_LINE()) {
    mma<32, false>(c, a, b, K32_SS, line);
}
GPU_FN void mma_k32_us(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                       int line = __builtin_LINE()) {
    mma<32, true>(c, a, b, K32_US, line);
}
GPU_FN void mma_k16_ss(int32_t (&c)[4], const uint32_t (&a)[2], uint32_t b,
                       int line = __builtin_LINE()) {
    const uint32_t columns[1] = {b};
    mma<16, false>(c, a, columns, K16_SS, line);
}
GPU_FN void copies_commit() { simt::copies_commit(); }
template <int n>
void copies_wait() {
    simt::copies_wait(n);
}

}  // namespace gpu
