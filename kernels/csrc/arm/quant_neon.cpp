// CA-3 rule 1 with NEON: one block of one token at a time.
#include "common/simd.h"
#include "quant/quant.h"

namespace batchengine {
namespace {

bool quantise_block(const float* row, Activations& out, size_t cell, size_t token) {
    // Magnitudes compare as integers; NaN and infinities are the largest of them.
    float32x4_t x[8];
    uint32x4_t largest = vdupq_n_u32(0);
    UNROLL for (int i = 0; i < 8; ++i) {
        x[i] = vld1q_f32(row + 4 * i);
        largest = vmaxq_u32(largest, bits_of_four(vabsq_f32(x[i])));
    }
    const uint32_t bits = vmaxvq_u32(largest);
    const ca::Group kind = ca::group_kind(bits);
    const bool used = kind == ca::Group::used;
    const float scale = used ? ca::group_scale(bits) : 1.0f;
    const float inverse = ca::div_rn(1.0f, scale);
    int32x4_t q[8];
    UNROLL for (int i = 0; i < 8; ++i)
        q[i] = used ? vcvtnq_s32_f32(vmulq_n_f32(x[i], inverse)) : vdupq_n_s32(0);
    int32_t half[2];
    UNROLL for (int h = 0; h < 2; ++h) {
        const int32x4_t* from = q + 4 * h;
        half[h] = vaddvq_s32(vaddq_s32(vaddq_s32(from[0], from[1]), vaddq_s32(from[2], from[3])));
        const int16x8_t low = vcombine_s16(vmovn_s32(from[0]), vmovn_s32(from[1]));
        const int16x8_t high = vcombine_s16(vmovn_s32(from[2]), vmovn_s32(from[3]));
        vst1q_s8(out.q.data() + cell * BLOCK_WIDTH + 16 * h,
                 vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
    }
    put_sums(out, cell, token, scale, half[0], half[1]);
    return kind != ca::Group::nonfinite;
}

}  // namespace

void quantise_rows_neon(const float* rows, size_t stride, size_t token, size_t count,
                        Activations& out) {
    for (size_t t = 0; t < count; ++t) quantise_row<quantise_block>(rows + t * stride, token + t, out);
}

}  // namespace batchengine
