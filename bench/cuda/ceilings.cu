// What a GPU does at most in a second: bytes copied and read, products of bytes on the tensor cores alone
// and with the float step that rule 2 wants after each block, and float multiply-adds.
#include "gpu.h"

namespace {

constexpr int THREADS = 256;
constexpr int CHAINS = 8;          // of a warp, that do not wait for each other
constexpr int AT_ONCE = 4;         // loads of 16 bytes under way in a thread
constexpr uint32_t MAGIC = 0x4B400000u;  // 1.5 * 2^23, whose low bits count in ones

// Calls `body` with AT_ONCE indices of `count` that are this thread's, some of them past the end.
template <class Body>
GPU_FN void for_indices(int64_t count, Body body) {
    const int64_t stride = int64_t{gpu::blocks()} * gpu::threads();
    const int64_t first = int64_t{gpu::block()} * gpu::threads() + gpu::thread();
    for (int64_t i = first; i < count; i += AT_ONCE * stride) body(i, stride);
}

// Bytes that differ between lanes, chains and rounds, so that no product is computed once for several.
GPU_FN uint32_t some_bytes(int i) {
    return static_cast<uint32_t>(gpu::thread() * 37 + i + 1) * 0x9E3779B9u;
}

struct Operands {
    uint32_t a[4];
    uint32_t b[CHAINS][2];
};
GPU_FN Operands operands() {
    Operands x;
    GPU_UNROLL
    for (int i = 0; i < 4; i++) x.a[i] = some_bytes(i);
    GPU_UNROLL
    for (int i = 0; i < 2 * CHAINS; i++) x.b[i / 2][i % 2] = some_bytes(4 + i);
    return x;
}

// How the integer of a product becomes a float: by a conversion, by an addition, which is exact below 2^22, or,
// of kinds with few bits, by the multiply-add that scales it (`scales_first` of linear.cu).
enum class Way { converted, added, scaled };

// A product of each chain per round, and the step of each of its four outputs.
template <Way way>
GPU_FN void steps(int rounds, float weight_scale, float scale, gpu::Out<float> out) {
    Operands x = operands();
    const float of_rows[2] = {weight_scale, ca::add_rn(weight_scale, weight_scale)};
    float of_tokens[2];  // other ones in each thread, as those of activations
    for (int i = 0; i < 2; i++)
        of_tokens[i] = ca::float_of(ca::bits_of(scale) + static_cast<uint32_t>(2 * gpu::thread() + i));
    float acc[CHAINS][4];
    GPU_UNROLL
    for (int i = 0; i < 4 * CHAINS; i++) acc[i / 4][i % 4] = 0.0f;
    for (int r = 0; r < rounds; r++) {
        x.a[0] ^= static_cast<uint32_t>(r);
        GPU_UNROLL
        for (int i = 0; i < CHAINS; i++) {
            GPU_UNROLL
            for (int j = 0; j < 2; j++)  // so that no product of scales is used twice
                of_tokens[j] = ca::float_of(ca::bits_of(of_tokens[j]) + static_cast<uint32_t>(r));
            int32_t c[4];
            GPU_UNROLL
            for (int j = 0; j < 4; j++) c[j] = way == Way::converted ? 0 : static_cast<int32_t>(MAGIC);
            gpu::mma_k32_us(c, x.a, x.b[i]);
            float offsets[2];
            GPU_UNROLL
            for (int j = 0; j < 2; j++) offsets[j] = ca::mul_rn(of_tokens[j], -ca::float_of(MAGIC));
            GPU_UNROLL
            for (int j = 0; j < 4; j++) {
                const float bits = ca::float_of(static_cast<uint32_t>(c[j]));
                if constexpr (way == Way::scaled) {
                    const float scaled = ca::fma_rn(bits, of_tokens[j % 2], offsets[j % 2]);
                    acc[i][j] = ca::fma_rn(scaled, of_rows[j / 2], acc[i][j]);
                } else if constexpr (way == Way::added) {
                    const float integer = ca::sub_rn(bits, ca::float_of(MAGIC));
                    const float both = ca::mul_rn(of_rows[j / 2], of_tokens[j % 2]);
                    acc[i][j] = ca::fma_rn(integer, both, acc[i][j]);
                } else {
                    acc[i][j] = ca::step(acc[i][j], c[j], of_rows[j / 2], of_tokens[j % 2]);
                }
            }
        }
    }
    float sum = 0.0f;
    GPU_UNROLL
    for (int i = 0; i < 4 * CHAINS; i++) sum = ca::add_rn(sum, acc[i / 4][i % 4]);
    out[int64_t{gpu::block()} * gpu::threads() + gpu::thread()] = sum;
}

}  // namespace

// to = from, `count` times 16 bytes. Any grid.
KERNEL(ceiling_copy, THREADS, gpu::In<gpu::Words4> from, gpu::Out<gpu::Words4> to, int64_t count) {
    gpu::begin();
    for_indices(count, [&](int64_t i, int64_t stride) {
        gpu::Words4 values[AT_ONCE];
        GPU_UNROLL
        for (int n = 0; n < AT_ONCE; n++)
            if (i + n * stride < count) values[n] = from[i + n * stride];
        GPU_UNROLL
        for (int n = 0; n < AT_ONCE; n++)
            if (i + n * stride < count) to[i + n * stride] = values[n];
    });
}

// Reads `count` times 16 bytes; each thread writes the exclusive or of its dwords.
KERNEL(ceiling_read, THREADS, gpu::In<gpu::Words4> from, gpu::Out<uint32_t> out, int64_t count) {
    gpu::begin();
    uint32_t all = 0;
    for_indices(count, [&](int64_t i, int64_t stride) {
        GPU_UNROLL
        for (int n = 0; n < AT_ONCE; n++)
            if (i + n * stride < count) {
                const gpu::Words4 value = from[i + n * stride];
                all ^= value.word[0] ^ value.word[1] ^ value.word[2] ^ value.word[3];
            }
    });
    out[int64_t{gpu::block()} * gpu::threads() + gpu::thread()] = all;
}

// `rounds` times CHAINS products m16n8k32 per warp. Any grid of THREADS threads, as the next three.
KERNEL(ceiling_products, THREADS, int rounds, gpu::Out<int32_t> out) {
    gpu::begin();
    Operands x = operands();
    int32_t c[CHAINS][4];
    GPU_UNROLL
    for (int i = 0; i < 4 * CHAINS; i++) c[i / 4][i % 4] = 0;
    for (int r = 0; r < rounds; r++) {
        GPU_UNROLL
        for (int i = 0; i < CHAINS; i++) gpu::mma_k32_us(c[i], x.a, x.b[i]);
    }
    uint32_t all = 0;
    GPU_UNROLL
    for (int i = 0; i < 4 * CHAINS; i++) all ^= static_cast<uint32_t>(c[i / 4][i % 4]);
    out[int64_t{gpu::block()} * gpu::threads() + gpu::thread()] = static_cast<int32_t>(all);
}

#define STEPS(name, way)                                                                           \
    KERNEL(name, THREADS, int rounds, float weight_scale, float scale, gpu::Out<float> out) {      \
        gpu::begin();                                                                              \
        steps<Way::way>(rounds, weight_scale, scale, out);                                         \
    }
STEPS(ceiling_steps_converted, converted)
STEPS(ceiling_steps_added, added)
STEPS(ceiling_steps_scaled, scaled)

// `rounds` times 4 * CHAINS multiply-adds per thread.
KERNEL(ceiling_floats, THREADS, int rounds, float factor, gpu::Out<float> out) {
    gpu::begin();
    float acc[4 * CHAINS];
    GPU_UNROLL
    for (int i = 0; i < 4 * CHAINS; i++) acc[i] = static_cast<float>(gpu::thread() + i);
    for (int r = 0; r < rounds; r++) {
        GPU_UNROLL
        for (int i = 0; i < 4 * CHAINS; i++) acc[i] = ca::fma_rn(acc[i], factor, 1.0f);
    }
    float sum = 0.0f;
    GPU_UNROLL
    for (int i = 0; i < 4 * CHAINS; i++) sum = ca::add_rn(sum, acc[i]);
    out[int64_t{gpu::block()} * gpu::threads() + gpu::thread()] = sum;
}
