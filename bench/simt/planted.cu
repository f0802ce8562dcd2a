// Kernels with one fault each, and one without, for the tests of the emulator.
#include "gpu.h"

namespace {

constexpr int N = 64;

// Sums of N values, from the right neighbour's and the own one: through shared memory.
template <bool has_barrier>
GPU_FN void add_neighbours(gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    __shared__ gpu::Shared<int32_t, N> shared;
    const int i = gpu::thread();
    shared[i] = x[i];
    if (has_barrier) gpu::barrier();
    y[i] = shared[i] + shared[(i + 1) % N];
}

}  // namespace

KERNEL(right, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    add_neighbours<true>(x, y);
}

KERNEL(missing_barrier, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    add_neighbours<false>(x, y);
}

// The second round overwrites what others still read.
KERNEL(missing_second_barrier, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    __shared__ gpu::Shared<int32_t, N> shared;
    const int i = gpu::thread();
    int32_t sum = 0;
    for (int round = 0; round < 2; round++) {
        shared[i] = x[i] + round;
        gpu::barrier();
        sum += shared[(i + 1) % N];
    }
    y[i] = sum;
}

KERNEL(barrier_of_half, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    if (gpu::thread() < N / 2) gpu::barrier();
    y[gpu::thread()] = x[gpu::thread()];
}

KERNEL(two_barriers, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    if (gpu::thread() < N / 2)
        gpu::barrier();
    else
        gpu::barrier();
    y[gpu::thread()] = x[gpu::thread()];
}

KERNEL(shuffle_of_half, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    int32_t value = x[gpu::thread()];
    if (gpu::lane() < 16) value = gpu::shuffle_xor(value, 1);
    y[gpu::thread()] = value;
}

namespace {

// One line of a helper, to which half of the threads come by one call and half by the other.
GPU_FN int32_t neighbour(int32_t value) { return gpu::shuffle_xor(value, 1); }
GPU_FN void all_here() { gpu::barrier(); }

}  // namespace

KERNEL(shuffle_by_two_calls, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    const int i = gpu::thread();
    int32_t value = x[i];
    if (gpu::lane() < 16)
        value = neighbour(value) + 1;
    else
        value = neighbour(value + 1);
    y[i] = value;
}

KERNEL(barrier_by_two_calls, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    const int i = gpu::thread();
    if (i < N / 2) {
        y[i] = x[i];
        all_here();
    } else {
        all_here();
        y[i] = x[i] + 1;
    }
}

KERNEL(out_of_bounds, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    y[gpu::thread()] = x[gpu::thread() + 1];
}

KERNEL(out_of_shared, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    __shared__ gpu::Shared<int32_t, N - 1> shared;
    shared[gpu::thread()] = x[gpu::thread()];
    gpu::barrier();
    y[gpu::thread()] = shared[0];
}

KERNEL(misaligned, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    const gpu::Words4 words = gpu::in_as<gpu::Words4>(x + 1)[0];
    y[gpu::thread()] = static_cast<int32_t>(words.word[0]);
}

KERNEL(unwritten_shared, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    __shared__ gpu::Shared<int32_t, N> shared;
    if (gpu::thread() > 0) shared[gpu::thread()] = x[gpu::thread()];
    gpu::barrier();
    y[gpu::thread()] = shared[0];
}

KERNEL(unwritten_global, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    const int i = gpu::thread();
    y[i] = x[i] + y[2 * N + i];
}

KERNEL(two_writers, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    y[gpu::thread() % (N / 2)] = x[gpu::thread()];
}

// Bytes of one word, each written by a thread, and the whole word read by each of them.
KERNEL(word_of_bytes, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    const int i = gpu::thread();
    gpu::out_as<uint8_t>(y)[i] = static_cast<uint8_t>(x[i]);
    y[N + i] = y[i / 4];
}

KERNEL(byte_of_a_word, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    const int i = gpu::thread();
    y[i] = x[i];
    if (i + 1 < N) y[N + i] = gpu::out_as<uint8_t>(y)[(i + 1) * 4 + 2];
}

KERNEL(bytes, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    __shared__ gpu::Shared<uint8_t, N> shared;
    const int i = gpu::thread();
    shared[i] = static_cast<uint8_t>(x[i]);
    gpu::out_as<uint8_t>(y)[4 * N + i] = static_cast<uint8_t>(x[i]);
    gpu::barrier();
    y[i] = shared[(i + 1) % N];
}

// Blocks of one launch have no order.
KERNEL(across_blocks, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    const int i = gpu::thread();
    if (gpu::block() == 0) y[i] = x[i];
    if (gpu::block() == 1) y[N + i] = y[i];
}

KERNEL(no_wait_for_copy, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    __shared__ gpu::Shared<gpu::Words4, N / 4> shared;
    const int i = gpu::thread();
    if (i < N / 4) gpu::copy_async(shared[i], gpu::in_as<gpu::Words4>(x) + i);
    gpu::copies_commit();
    gpu::barrier();
    const gpu::Words4 words = shared[i / 4];
    gpu::copies_wait<0>();
    y[i] = static_cast<int32_t>(words.word[i % 4]);
}

// The thread that waited sees its copy; the others do not before a barrier.
KERNEL(no_barrier_after_copy, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    __shared__ gpu::Shared<gpu::Words4, N / 4> shared;
    const int i = gpu::thread();
    if (i < N / 4) gpu::copy_async(shared[i], gpu::in_as<gpu::Words4>(x) + i);
    gpu::copies_commit();
    gpu::copies_wait<0>();
    const gpu::Words4 words = shared[i / 4];
    y[i] = static_cast<int32_t>(words.word[i % 4]);
}

// The next copy may write before others have read; that the wait comes after a barrier does not help.
KERNEL(early_copy, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    __shared__ gpu::Shared<gpu::Words4, N / 4> shared;
    const int i = gpu::thread();
    int32_t sum = 0;
    for (int round = 0; round < 2; round++) {
        if (i < N / 4) gpu::copy_async(shared[i], gpu::in_as<gpu::Words4>(x) + i);
        gpu::copies_commit();
        gpu::barrier();
        gpu::copies_wait<0>();
        gpu::barrier();
        const gpu::Words4 words = shared[(i / 4 + round) % (N / 4)];
        sum += static_cast<int32_t>(words.word[i % 4]);
    }
    y[i] = sum;
}

// Lanes of a warp are not in step, and a shuffle orders no memory.
KERNEL(missing_warp_barrier, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    __shared__ gpu::Shared<int32_t, N> shared;
    const int i = gpu::thread(), next = i / gpu::WARP * gpu::WARP + (gpu::lane() + 1) % gpu::WARP;
    shared[i] = x[i];
    y[i] = shared[next];
}
KERNEL(shuffle_for_barrier, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    __shared__ gpu::Shared<int32_t, N> shared;
    const int i = gpu::thread(), next = i / gpu::WARP * gpu::WARP + (gpu::lane() + 1) % gpu::WARP;
    shared[i] = gpu::shuffle(x[i], gpu::lane());
    const int32_t other = gpu::shuffle_xor(x[i], 1);
    y[i] = other + shared[next];
}

KERNEL(copied, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    __shared__ gpu::Shared<gpu::Words4, N / 4> shared;
    const int i = gpu::thread();
    if (i < N / 4) gpu::copy_async(shared[i], gpu::in_as<gpu::Words4>(x) + i);
    gpu::copies_commit();
    gpu::copies_wait<0>();
    gpu::barrier();
    const gpu::Words4 words = shared[i / 4];
    y[i] = static_cast<int32_t>(words.word[i % 4]);
}

namespace {

// Products of A (16 rows of 32 bytes) and B (8 columns of 32 bytes), both as dwords of consecutive k.
// `swap`: the registers of A in the order of rows instead of k.
template <bool swap, bool is_unsigned>
GPU_FN void multiply(gpu::In<uint32_t> a, gpu::In<uint32_t> b, gpu::Out<int32_t> c) {
    const int g = gpu::lane() / 4, t = gpu::lane() % 4;
    uint32_t left[4], right[2];
    int32_t sum[4] = {0, 0, 0, 0};
    for (int i = 0; i < 4; i++) {
        const int low = i % 2, high = i / 2;
        left[swap ? 2 * low + high : i] = a[(g + 8 * low) * 8 + t + 4 * high];
    }
    for (int i = 0; i < 2; i++) right[i] = b[g * 8 + t + 4 * i];
    if (is_unsigned)
        gpu::mma_k32_us(sum, left, right);
    else
        gpu::mma_k32_ss(sum, left, right);
    for (int i = 0; i < 4; i++) c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sum[i];
}

}  // namespace

KERNEL(product_ss, 32, gpu::In<uint32_t> a, gpu::In<uint32_t> b, gpu::Out<int32_t> c) {
    gpu::begin();
    multiply<false, false>(a, b, c);
}
KERNEL(product_us, 32, gpu::In<uint32_t> a, gpu::In<uint32_t> b, gpu::Out<int32_t> c) {
    gpu::begin();
    multiply<false, true>(a, b, c);
}
KERNEL(wrong_fragments, 32, gpu::In<uint32_t> a, gpu::In<uint32_t> b, gpu::Out<int32_t> c) {
    gpu::begin();
    multiply<true, false>(a, b, c);
}

// As product_ss, in two halves of k.
KERNEL(product_k16, 32, gpu::In<uint32_t> a, gpu::In<uint32_t> b, gpu::Out<int32_t> c) {
    gpu::begin();
    const int g = gpu::lane() / 4, t = gpu::lane() % 4;
    int32_t sum[4] = {0, 0, 0, 0};
    for (int half = 0; half < 2; half++) {
        const uint32_t left[2] = {a[g * 8 + t + 4 * half], a[(g + 8) * 8 + t + 4 * half]};
        gpu::mma_k16_ss(sum, left, b[g * 8 + t + 4 * half]);
    }
    for (int i = 0; i < 4; i++) c[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = sum[i];
}

KERNEL(counts, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    __shared__ gpu::Shared<int32_t, 4> shared;
    if (gpu::thread() < 4) shared[gpu::thread()] = 0;
    gpu::barrier();
    gpu::atomic_add(shared[x[gpu::thread()] & 3], 1);
    gpu::barrier();
    if (gpu::thread() < 4) gpu::atomic_add(y[gpu::thread()], int32_t(shared[gpu::thread()]));
}

// The smallest value of a warp, of unsigned ones, and how many bits it has.
KERNEL(smallest, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    const uint32_t least = gpu::min_of_lanes(static_cast<uint32_t>(~x[gpu::thread()]));
    y[gpu::thread()] = static_cast<int32_t>(least);
    y[N + gpu::thread()] = gpu::count_bits(least);
}
KERNEL(smallest_of_half, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    uint32_t least = static_cast<uint32_t>(x[gpu::thread()]);
    if (gpu::lane() < 16) least = gpu::min_of_lanes(least);
    y[gpu::thread()] = static_cast<int32_t>(least);
}

// Bytes 0 and 3 are chosen by two digits of x, to base 8: each byte holds its number.
KERNEL(chosen_bytes, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    const auto n = static_cast<uint32_t>(x[gpu::thread()]);
    const uint32_t bytes = gpu::bytes_of(0x03020100u, 0x07060504u, (n & 7u) | (n >> 3 & 7u) << 12);
    y[gpu::thread()] = static_cast<int32_t>(bytes);
}
KERNEL(number_of_no_byte, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    const auto n = static_cast<uint32_t>(x[gpu::thread()]);
    y[gpu::thread()] = static_cast<int32_t>(gpu::bytes_of(n, n, n & 15u));
}

KERNEL(count_and_write, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::begin();
    if (gpu::thread() == 3)
        y[0] = x[0];
    else
        gpu::atomic_add(y[0], 1);
}

KERNEL(no_dependency_wait, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    if (gpu::block() == 0) return;
    gpu::begin();
    y[gpu::thread()] = x[gpu::thread()];
}

KERNEL(read_before_wait, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    const int32_t value = x[gpu::thread()];
    gpu::begin();
    y[gpu::thread()] = value;
}

// One thread waits, and a barrier tells the others: only the one that waited sees what was written.
KERNEL(wait_of_one, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    if (gpu::thread() == 0) gpu::begin();
    gpu::barrier();
    y[gpu::thread()] = x[gpu::thread()];
}

KERNEL(prefetch_outside, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::prefetch(x, (N + 4) * 4);
    gpu::begin();
    y[gpu::thread()] = x[gpu::thread()];
}

KERNEL(prefetch_misaligned, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::prefetch(x + 1, 16);
    gpu::begin();
    y[gpu::thread()] = x[gpu::thread()];
}

KERNEL(prefetched, N, gpu::In<int32_t> x, gpu::Out<int32_t> y) {
    gpu::launch_dependents();
    gpu::prefetch(x, N * 4);
    gpu::dependency_wait();
    y[gpu::thread()] = x[gpu::thread()];
}
