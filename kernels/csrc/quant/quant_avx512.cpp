// CA-3 rule 1 with AVX-512: eight blocks at once, of eight tokens or of one token.
//
// The sixteen vectors stay in registers from the first load to the store; one tree of maxima and one
// tree of sums serve all eight blocks.
#include "common/simd.h"
#include "quant/quant.h"

namespace batchengine {
namespace {

constexpr int AT_ONCE = 8;
// Prefetch distance: rows are streams a page or more apart, too many for the hardware prefetcher.
constexpr size_t AHEAD_FLOATS = 128;

struct Inputs {
    __m512 x[AT_ONCE][2];
};
struct Quantised {
    __m512i q[AT_ONCE / 2];  // 32 bytes per block
    __mmask8 bad;            // the nonfinite blocks
    __m256 scale;
    __m256i half0, half1;  // sums of q[0..15], of q[16..31]
};

// Lane c of the result is the largest of the 16 lanes of v[c].
SIMD_FN __m256i largest_of_each(const __m512i (&v)[AT_ONCE]) {
    __m512i pair[4], four[2];
    UNROLL for (int i = 0; i < 4; ++i)
        pair[i] = _mm512_max_epi32(_mm512_shuffle_i64x2(v[2 * i], v[2 * i + 1], 0x44),
                                   _mm512_shuffle_i64x2(v[2 * i], v[2 * i + 1], 0xEE));
    UNROLL for (int i = 0; i < 2; ++i)
        four[i] = _mm512_max_epi32(_mm512_shuffle_i64x2(pair[2 * i], pair[2 * i + 1], 0x88),
                                   _mm512_shuffle_i64x2(pair[2 * i], pair[2 * i + 1], 0xDD));
    // 128-bit lane i now holds four candidates each of v[i] (in four[0]) and of v[4 + i].
    __m512i m = _mm512_max_epi32(_mm512_unpacklo_epi32(four[0], four[1]),
                                 _mm512_unpackhi_epi32(four[0], four[1]));
    m = _mm512_max_epi32(m, _mm512_shuffle_epi32(m, _MM_PERM_BADC));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_castsi512_si256(_mm512_permutexvar_epi32(order, m));
}

SIMD_FN void sum_halves(Quantised& to) {
    __m512i s[4];
    UNROLL for (int i = 0; i < 4; ++i)
        s[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), to.q[i]);
    const __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi32(s[0], s[1]),
                                       _mm512_unpackhi_epi32(s[0], s[1]));
    const __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi32(s[2], s[3]),
                                       _mm512_unpackhi_epi32(s[2], s[3]));
    // 128-bit lanes: half 0 of blocks 0 2 4 6, half 1 of these, half 0 of 1 3 5 7, half 1.
    const __m512i sums =
        _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    const __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    const __m512i sorted = _mm512_permutexvar_epi32(order, sums);
    to.half0 = _mm512_castsi512_si256(sorted);
    to.half1 = _mm512_extracti64x4_epi64(sorted, 1);
}

SIMD_FN Quantised quantise_eight(Inputs in) {
    // Magnitudes compare as integers; NaN and infinities are the largest of them.
    const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
    __m512i largest[AT_ONCE];
    UNROLL for (int c = 0; c < AT_ONCE; ++c)
        largest[c] =
            _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(in.x[c][0]), magnitude),
                             _mm512_and_si512(_mm512_castps_si512(in.x[c][1]), magnitude));
    const __m256i bits = largest_of_each(largest);
    const __m256i large = _mm256_set1_epi32(static_cast<int>(ca::bits_of(ca::LARGE)));
    const __m256i tiny = _mm256_set1_epi32(static_cast<int>(ca::bits_of(ca::TINY)));
    Quantised out;
    out.bad = _mm256_cmpge_epi32_mask(bits, large);
    const __mmask8 used = _mm256_cmpge_epi32_mask(bits, tiny) & ~out.bad;
    // ca::group_scale
    const __m256i quotient = _mm256_castps_si256(
        _mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(ca::float_of(0x3C010204u))));
    const __m256i scale = _mm256_and_si256(_mm256_add_epi32(quotient, _mm256_set1_epi32(0x1FFFF)),
                                           _mm256_set1_epi32(static_cast<int>(0xFFFE0000u)));
    const __m256 one = _mm256_set1_ps(1.0f);
    out.scale = _mm256_mask_mov_ps(one, used, _mm256_castsi256_ps(scale));
    alignas(32) float inverse[AT_ONCE];
    _mm256_store_ps(inverse, _mm256_maskz_div_ps(used, one, out.scale));
    if (out.bad)
        UNROLL for (int c = 0; c < AT_ONCE; ++c)
            if (out.bad >> c & 1) in.x[c][0] = in.x[c][1] = _mm512_setzero_ps();
    // The packs work inside 128-bit lanes; the permutation puts the dwords of two blocks in order.
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    UNROLL for (int i = 0; i < AT_ONCE / 2; ++i) {
        __m512i words[2];
        UNROLL for (int k = 0; k < 2; ++k) {
            const int c = 2 * i + k;
            const __m512 by = _mm512_set1_ps(inverse[c]);
            words[k] = _mm512_packs_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(in.x[c][0], by)),
                                          _mm512_cvtps_epi32(_mm512_mul_ps(in.x[c][1], by)));
        }
        out.q[i] = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(words[0], words[1]));
    }
    sum_halves(out);
    return out;
}

SIMD_FN __m256i offset_of(const Quantised& from) {
    return _mm256_sub_epi32(_mm256_setzero_si256(),
                            _mm256_slli_epi32(_mm256_add_epi32(from.half0, from.half1), 3));
}

SIMD_FN __m256 scaled_sum(const Quantised& from) {
    return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(from.half0, from.half1)), from.scale);
}

SIMD_FN __m256i negated_times_32(__m256i half) {
    return _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(half, 5));
}

// One block of eight tokens side by side; `cell` and `lane` (index in its group) are the first's.
SIMD_FN void put_tokens(const Quantised& from, Activations& out, size_t cell, size_t lane) {
    int8_t* q = out.q.data() + cell * BLOCK_WIDTH;
    UNROLL for (int i = 0; i < AT_ONCE / 2; ++i) _mm512_store_si512(q + 64 * i, from.q[i]);
    _mm256_store_ps(out.scale.data() + cell, from.scale);
    _mm256_store_ps(out.sum.data() + cell, scaled_sum(from));
    _mm256_store_si256(reinterpret_cast<__m256i*>(out.offset.data() + cell), offset_of(from));
    int32_t* halves = out.halves.data() + (2 * cell - lane);
    _mm256_store_si256(reinterpret_cast<__m256i*>(halves), negated_times_32(from.half0));
    _mm256_store_si256(reinterpret_cast<__m256i*>(halves + GROUP_TOKENS),
                       negated_times_32(from.half1));
}

// Eight blocks (or `count`) of one token.
SIMD_FN void put_blocks(const Quantised& from, Activations& out, size_t cell, size_t lane,
                       size_t count) {
    alignas(64) int8_t q[AT_ONCE][BLOCK_WIDTH];
    alignas(32) float scale[AT_ONCE], sum[AT_ONCE];
    alignas(32) int32_t offset[AT_ONCE], half0[AT_ONCE], half1[AT_ONCE];
    UNROLL for (int i = 0; i < AT_ONCE / 2; ++i) _mm512_store_si512(q[2 * i], from.q[i]);
    _mm256_store_ps(sum, scaled_sum(from));
    _mm256_store_ps(scale, from.scale);
    _mm256_store_si256(reinterpret_cast<__m256i*>(offset), offset_of(from));
    _mm256_store_si256(reinterpret_cast<__m256i*>(half0), negated_times_32(from.half0));
    _mm256_store_si256(reinterpret_cast<__m256i*>(half1), negated_times_32(from.half1));
    for (size_t b = 0; b < count; ++b, cell += GROUP_TOKENS) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(out.q.data() + cell * BLOCK_WIDTH),
                           _mm256_load_si256(reinterpret_cast<const __m256i*>(q[b])));
        out.scale[cell] = scale[b];
        out.sum[cell] = sum[b];
        out.offset[cell] = offset[b];
        int32_t* halves = out.halves.data() + (2 * cell - lane);
        halves[0] = half0[b];
        halves[GROUP_TOKENS] = half1[b];
    }
}

// Values [k, k + 16) of a row; lanes past its end are zero.
SIMD_FN __m512 values_at(const float* row, size_t k, size_t width) {
    if (k + 16 <= width) return _mm512_loadu_ps(row + k);
    const unsigned valid = k < width ? (1u << (width - k)) - 1u : 0u;
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>(valid), row + k);
}

void quantise_octet(const float* rows, size_t stride, size_t token, Activations& out) {
    const size_t lane = token % GROUP_TOKENS, whole = out.width / BLOCK_WIDTH;
    __mmask8 bad = 0;
    for (size_t block = 0; block < out.blocks; ++block) {
        Inputs in;
        const float* from = rows + block * BLOCK_WIDTH;
        if (block < whole) {
            UNROLL for (size_t c = 0; c < AT_ONCE; ++c) {
                in.x[c][0] = _mm512_loadu_ps(from + c * stride);
                in.x[c][1] = _mm512_loadu_ps(from + c * stride + 16);
                const auto* ahead =
                    reinterpret_cast<const char*>(from + c * stride + AHEAD_FLOATS);
                _mm_prefetch(ahead, _MM_HINT_T0);
                _mm_prefetch(ahead + CACHE_LINE, _MM_HINT_T0);
            }
        } else {
            UNROLL for (size_t c = 0; c < AT_ONCE; ++c)
                UNROLL for (size_t half = 0; half < 2; ++half)
                    in.x[c][half] =
                        values_at(rows + c * stride, block * BLOCK_WIDTH + 16 * half, out.width);
        }
        const Quantised eight = quantise_eight(in);
        bad |= eight.bad;
        put_tokens(eight, out, out.cell(token, block), lane);
    }
    for (size_t t = 0; t < AT_ONCE; ++t) out.nonfinite[token + t] = bad >> t & 1;
}

void quantise_one(const float* row, size_t token, Activations& out) {
    const size_t lane = token % GROUP_TOKENS;
    bool finite = true;
    for (size_t block = 0; block < out.blocks; block += AT_ONCE) {
        Inputs in;
        UNROLL for (size_t c = 0; c < AT_ONCE; ++c)
            UNROLL for (size_t half = 0; half < 2; ++half)
                in.x[c][half] = values_at(row, (block + c) * BLOCK_WIDTH + 16 * half, out.width);
        const size_t left = out.blocks - block;
        const Quantised eight = quantise_eight(in);
        finite &= eight.bad == 0;  // blocks past the last are zero
        put_blocks(eight, out, out.cell(token, block), lane, left < AT_ONCE ? left : AT_ONCE);
    }
    out.nonfinite[token] = !finite;
}

}  // namespace

void quantise_rows_avx512(const float* rows, size_t stride, size_t token, size_t count,
                          Activations& out) {
    if (out.keep_float)
        for (size_t t = 0; t < count; ++t)
            std::memcpy(out.values.data() + (token + t) * out.padded_width, rows + t * stride,
                        out.width * sizeof(float));
    for (const size_t end = token + count; token < end;) {
        const size_t now = token % AT_ONCE == 0 && token + AT_ONCE <= end ? AT_ONCE : 1;
        if (now == AT_ONCE)
            quantise_octet(rows, stride, token, out);
        else
            quantise_one(rows, token, out);
        rows += now * stride;
        token += now;
    }
}

}  // namespace batchengine
