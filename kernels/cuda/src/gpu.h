// The primitives of a GPU that the kernels use: pointers, shared memory, barriers, shuffles, matrix products,
// asynchronous copies.
//
// Kernels use these and nothing else of CUDA, so that the same source runs under an emulator: with
// BATCHENGINE_SIMT, bench/simt/simt.h defines each of them on the CPU, with checks. Blocks have
// one dimension and whole warps. Every collective is called by all threads of its warp or block.
// Floats are computed by the functions of ca.h only.
#pragma once

#include "common/ca.h"

#if defined(BATCHENGINE_SIMT)
#include "simt.h"
#else

// A kernel: its name, the most threads of a block, and its parameters.
#define KERNEL(name, threads, ...)                                                                 \
    extern "C" __global__ void __launch_bounds__(threads) name(__VA_ARGS__)
// The same, with registers for so many blocks on a multiprocessor at once.
#define KERNEL_AT_ONCE(name, threads, blocks, ...)                                                 \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(__VA_ARGS__)

#define GPU_FN __device__ __forceinline__
#define GPU_UNROLL _Pragma("unroll")
#define GPU_UNROLL_4 _Pragma("unroll 4")
#define GPU_NO_UNROLL _Pragma("unroll 1")

namespace gpu {

constexpr int WARP = 32;

// Global memory that a kernel reads, and that it may write; reads and writes are of whole T, aligned. They
// are not __restrict__: reads would be those of memory that no launch writes (ld.global.nc), and a launch that
// begins early might see what was there before.
template <class T>
using In = const T*;
template <class T>
using Out = T*;

// Global memory at an address that a kernel has read from memory.
template <class T>
GPU_FN T* out_at(uint64_t address) {
    // Else the compiler of CUDA 13.0 does not end where it looks for the parts of such addresses.
    asm("" : "+l"(address));
    // Else reads are generic ones, which take longer.
    return static_cast<T*>(__cvta_global_to_generic(address));
}
template <class T>
GPU_FN const T* in_at(uint64_t address) {
    return out_at<const T>(address);
}

// The same memory as elements of another type.
template <class To, class From>
GPU_FN const To* in_as(const From* from) {
    return reinterpret_cast<const To*>(from);
}
template <class To, class From>
GPU_FN To* out_as(From* from) {
    return reinterpret_cast<To*>(from);
}

// 8 and 16 bytes that are read or written at once.
struct alignas(8) Words2 {
    uint32_t word[2];
};
struct alignas(16) Words4 {
    uint32_t word[4];
};

// Memory of a block, declared `__shared__ gpu::Shared<T, n> name;`.
template <class T, int n>
struct alignas(16) Shared {
    T value[n];
    GPU_FN T& operator[](int i) { return value[i]; }
};

// Dword i of shared memory that is copied 16 bytes at a time.
template <int n>
GPU_FN uint32_t shared_word(Shared<Words4, n>& from, int i) {
    return reinterpret_cast<uint32_t*>(from.value)[i];
}

GPU_FN int thread() { return threadIdx.x; }
GPU_FN int threads() { return blockDim.x; }
GPU_FN int lane() { return threadIdx.x % WARP; }
GPU_FN int warp() { return threadIdx.x / WARP; }
GPU_FN int warps() { return blockDim.x / WARP; }
GPU_FN int block() { return blockIdx.x; }
GPU_FN int block_y() { return blockIdx.y; }
GPU_FN int block_z() { return blockIdx.z; }
GPU_FN int blocks() { return gridDim.x; }

// All threads of the block, or of the warp, are here, and see what the others wrote before.
GPU_FN void barrier() { __syncthreads(); }
GPU_FN void warp_barrier() { __syncwarp(); }

// The value of another lane.
template <class T>
GPU_FN T shuffle(T value, int lane) {
    return __shfl_sync(0xFFFFFFFFu, value, lane);
}
template <class T>
GPU_FN T shuffle_xor(T value, int mask) {
    return __shfl_xor_sync(0xFFFFFFFFu, value, mask);
}
GPU_FN bool any(bool x) { return __any_sync(0xFFFFFFFFu, x); }
GPU_FN uint32_t ballot(bool x) { return __ballot_sync(0xFFFFFFFFu, x); }
// The smallest value of all lanes.
GPU_FN uint32_t min_of_lanes(uint32_t x) { return __reduce_min_sync(0xFFFFFFFFu, x); }

// The number of the lowest bit that is set; some bit is.
GPU_FN int lowest_bit(uint32_t bits) { return __ffs(static_cast<int>(bits)) - 1; }
GPU_FN int count_bits(uint32_t bits) { return __popc(bits); }
// x, of which the compiler knows nothing: it makes no copies of code for its values.
GPU_FN int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}
// Four of the bytes of `low` (0 to 3) and `high` (4 to 7): byte i of the result is the one that bits 4i..4i+2 of
// `numbers` name. Bits 4i+3 are 0.
GPU_FN uint32_t bytes_of(uint32_t low, uint32_t high, uint32_t numbers) {
    uint32_t bytes;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(numbers));
    return bytes;
}

// Integer sums over threads in any order; the result is exact, so the order does not matter.
template <class T>
GPU_FN T atomic_add(T& at, T value) {
    return atomicAdd(&at, value);
}
GPU_FN uint64_t atomic_add(uint64_t& at, uint64_t value) {
    return atomicAdd(reinterpret_cast<unsigned long long*>(&at), value);
}
template <class T>
GPU_FN T atomic_max(T& at, T value) {
    return atomicMax(&at, value);
}

// c += A * B over a warp, int32, exact. A has 16 rows and B 8 columns of k bytes; g = lane / 4 and
// t = lane % 4:
//   a[0], a[1]   k = 4t..4t+3 of rows g and g + 8; with 32 k, a[2], a[3] have 16 k more
//   b[0], b[1]   k = 4t..4t+3 of column g, and 16 k more
//   c[0..3]      rows g, g, g + 8, g + 8 of columns 2t, 2t + 1, 2t, 2t + 1
// _ss: signed times signed bytes; _us: A is unsigned.
#define GPU_MMA_K32(name, types)                                                                   \
    GPU_FN void name(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {            \
        asm volatile("mma.sync.aligned.m16n8k32.row.col.s32." types \
            ".s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                 \
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])                                       \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                   \
    }
#define GPU_MMA_K16(name, types)                                                                   \
    GPU_FN void name(int32_t (&c)[4], const uint32_t (&a)[2], uint32_t b) {                        \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.s32." types \
            ".s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"                             \
            : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])                                       \
            : "r"(a[0]), "r"(a[1]), "r"(b));                                                       \
    }
GPU_MMA_K32(mma_k32_ss, "s8.s8")
GPU_MMA_K32(mma_k32_us, "u8.s8")
GPU_MMA_K16(mma_k16_ss, "s8.s8")
#undef GPU_MMA_K32
#undef GPU_MMA_K16

// Asks for `bytes` from an address on, both multiples of 16, so that reads some time later wait for a cache
// only. All threads of a block call it and share the work.
template <class T>
GPU_FN void prefetch(const T* from, int64_t bytes) {
    const auto first = reinterpret_cast<const char*>(from);
#if __CUDA_ARCH__ >= 900
    constexpr int PART = 4096;
    if (lane()) return;  // the instruction is one of a warp
    GPU_NO_UNROLL
    for (int64_t i = warp() * PART; i < bytes; i += warps() * PART) {
        const auto n = static_cast<uint32_t>(bytes - i < PART ? bytes - i : PART);
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(first + i), "r"(n));
    }
#else
    constexpr int LINE = 64;  // what devices fetch at least, by default
    GPU_NO_UNROLL
    for (int64_t i = thread() * LINE; i < bytes; i += threads() * LINE)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(first + i));
#endif
}

// Programmatic dependent launch, where the device has it and the launch asks for it: a grid begins while the
// one before it ends. After launch_dependents() of all blocks the next grid may begin. dependency_wait()
// returns when all launches before have ended, and what they wrote is seen. Before it, a thread touches no
// global memory and may `prefetch` what no launch writes. Every thread of every kernel calls both.
GPU_FN void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
GPU_FN void dependency_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Both, for a kernel that has nothing to do before.
GPU_FN void begin() {
    launch_dependents();
    dependency_wait();
}

// Copies 16 bytes to shared memory in the background. They are there after copies_wait<n>(), which waits
// until at most the n last committed groups are under way, and a barrier.
template <class T, class From>
GPU_FN void copy_async(T& to, const From* from) {
    const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(&to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}
GPU_FN void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int n>
GPU_FN void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
}

}  // namespace gpu

#endif
