// The bodies behind rowops.h, written once on V16. Included by one unit per instruction set.
#pragma once

#include "rows/rowops.h"
#include "rows/squares.h"

namespace {

template <bool IS_ADDED>
void norm(const float* x, const float* w, size_t n, float eps, float* y) {
    const float r = ca::norm_factor(sum_of_squares(x, n), static_cast<int>(n), eps);
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const V16 normed = (vload(x + i) * vset(r)) * vload(w + i);
        vstore(y + i, IS_ADDED ? vload(y + i) + normed : normed);
    }
    for (; i < n; i++) {
        const float normed = ca::norm_value(x[i], r, w[i]);
        y[i] = IS_ADDED ? ca::add_rn(y[i], normed) : normed;
    }
}

SIMD_FN void rotate(V16& x0, V16& x1, V16 c, V16 s) {
    const V16 y0 = vfma(x0, c, vneg(x1 * s));
    x1 = vfma(x0, s, x1 * c);
    x0 = y0;
}

void rope(float* x, const float* cosines, const float* sines, size_t half, bool neox) {
    size_t i = 0;
    for (; i + 16 <= half; i += 16) {
        const V16 c = vload(cosines + i), s = vload(sines + i);
        float even[16], odd[16];
        float* const first = neox ? x + i : even;
        float* const second = neox ? x + i + half : odd;
        if (!neox)
            for (size_t j = 0; j < 16; j++) even[j] = x[2 * (i + j)], odd[j] = x[2 * (i + j) + 1];
        V16 x0 = vload(first), x1 = vload(second);
        rotate(x0, x1, c, s);
        vstore(first, x0);
        vstore(second, x1);
        if (!neox)
            for (size_t j = 0; j < 16; j++) x[2 * (i + j)] = even[j], x[2 * (i + j) + 1] = odd[j];
    }
    for (; i < half; i++)
        ca::rotate(neox ? x[i] : x[2 * i], neox ? x[i + half] : x[2 * i + 1], cosines[i], sines[i]);
}

// The pairs of one step inside a vector. The second value of a pair gets first - second: one rounding
// of -1 * second + first.
template <int step>
SIMD_FN V16 butterfly(V16 x) {
    float signs[16];
    for (int i = 0; i < 16; i++) signs[i] = i & step ? -1.0f : 1.0f;
    return vfma(x, vload(signs), vswap<step>(x));
}

// One run of 16 * n values, in registers.
template <int n>
SIMD_FN void transform(float* x) {
    V16 v[n];
    repeat<n>(EACH(i) {
        v[i] = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(vload(x + 16 * i)))));
    });
    UNROLL for (int step = 1; step < n; step *= 2) {
        UNROLL for (int i = 0; i < n; i++) {
            if (i & step) continue;
            const V16 first = v[i], second = v[i + step];
            v[i] = first + second, v[i + step] = first - second;
        }
    }
    repeat<n>(EACH(i) { vstore(x + 16 * i, v[i]); });
}

// One run of 512 values: its halves in registers, and the last step in memory.
void transform_512(float* x) {
    constexpr size_t half = 256;
    transform<16>(x);
    transform<16>(x + half);
    for (size_t i = 0; i < half; i += 16) {
        const V16 first = vload(x + i), second = vload(x + half + i);
        vstore(x + i, first + second);
        vstore(x + half + i, first - second);
    }
}

void hadamard(float* x, size_t n, size_t width) {
    for (const float* const end = x + n; x < end; x += width) {
        if (width == 32) transform<2>(x);
        if (width == 64) transform<4>(x);
        if (width == 128) transform<8>(x);
        if (width == 256) transform<16>(x);
        if (width == 512) transform_512(x);
    }
}

SIMD_FN void fill_zero(int8_t* q, size_t width) {
    for (size_t i = 0; i < width; i++) q[i] = 0;
}

void quantise_query(const float* x, size_t blocks, float factor, int8_t* q, float* scale,
                    int32_t* offset) {
    for (size_t b = 0; b < blocks; b++, x += 32, q += 32) {
        const V16 x0 = vload(x) * vset(factor), x1 = vload(x + 16) * vset(factor);
        // NaN when a value is not finite, else 0.
        const bool finite = !vany_nonfinite(vfma(x0, vzero(), x1 * vzero()));
        const float a = vreduce_max(vmax(vabs(x0), vabs(x1)));
        const uint32_t largest = finite ? ca::bits_of(a) : ca::INFINITY_BITS;
        const ca::Group kind = ca::group_kind(largest);
        int32_t sum = 0;
        if (kind == ca::Group::used) {
            scale[b] = ca::group_scale(largest);
            const V16 inverse = vset(ca::div_rn(1.0f, scale[b]));
            vstore_i8(q, x0 * inverse);
            vstore_i8(q + 16, x1 * inverse);
            sum = vsum_rounded(x0 * inverse, x1 * inverse);
        } else {
            fill_zero(q, 32);
            scale[b] = kind == ca::Group::zero ? 1.0f : ca::canonical_nan();
        }
        offset[b] = -128 * sum;
    }
}

void quantise_kv8(const float* x, size_t groups, size_t width, int8_t* q, uint16_t* d) {
    for (size_t g = 0; g < groups; g++, x += width, q += width) {
        bool finite;
        const float a = largest_magnitude(x, width, &finite);
        d[g] = ca::kv8_scale(finite ? ca::bits_of(a) : ca::INFINITY_BITS);
        if (d[g] == 0 || d[g] == ca::POISON_HALF) {
            fill_zero(q, width);
            continue;
        }
        const V16 id = vset(ca::kv8_inverse(d[g]));
        for (size_t i = 0; i < width; i += 16) {
            const V16 scaled = vload(x + i) * id;
            vstore_i8(q + i, vmin(vmax(scaled, vset(-127.0f)), vset(127.0f)));
        }
    }
}

void fold(float* m, float* l, float* o, float m_next, float l_next, const float* o_next,
          size_t head_dim) {
    if (l_next == 0.0f) return;
    // The side with the smaller m shrinks by an exact power of two; the other one is added as it is.
    if (*l == 0.0f) {
        *m = m_next, *l = l_next;
        for (size_t i = 0; i < head_dim; i += 16) vstore(o + i, vload(o_next + i));
    } else if (m_next > *m) {
        const float shrink = ca::exp2c(*m - m_next);
        *l = ca::fma_rn(*l, shrink, l_next);
        for (size_t i = 0; i < head_dim; i += 16)
            vstore(o + i, vfma(vload(o + i), vset(shrink), vload(o_next + i)));
        *m = m_next;
    } else {
        const float shrink = ca::exp2c(m_next - *m);
        *l = ca::fma_rn(l_next, shrink, *l);
        for (size_t i = 0; i < head_dim; i += 16)
            vstore(o + i, vfma(vload(o_next + i), vset(shrink), vload(o + i)));
    }
}

void finish(float l, const float* o, size_t head_dim, float* out) {
    if (!ca::is_finite(l)) {
        for (size_t i = 0; i < head_dim; i++) out[i] = ca::canonical_nan();
        return;
    }
    const V16 r = vset(1.0f / l);
    for (size_t i = 0; i < head_dim; i += 16) vstore(out + i, vload(o + i) * r);
}

bool largest(const float* x, size_t n, float* value, size_t* index) {
    const float lowest = -0x1.fffffep127f;
    V16 top = vset(lowest);
    bool finite = true;
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const V16 v = vload(x + i);
        finite = finite && !vany_nonfinite(v);
        top = vmax(top, v);
    }
    float m = vreduce_max(top);
    for (; i < n; i++) {
        finite = finite && ca::is_finite(x[i]);
        if (x[i] > m) m = x[i];
    }
    if (!finite) return false;
    size_t first = 0;
    for (; first + 64 <= n; first += 64) {
        int found = 0;
        for (size_t j = 0; j < 64; j++) found |= x[first + j] == m;
        if (found) break;
    }
    while (first < n && !(x[first] == m)) first++;
    *value = m;
    *index = first;
    return first < n;
}

// The weights of n values, n a multiple of 16. A temperature of 1 divides nothing: x / 1 = x.
template <bool divide>
SIMD_FN void weigh_whole(const float* x, size_t n, float shift, float temperature, int32_t* w) {
    for (size_t i = 0; i < n; i += 16) {
        V16 v = vload(x + i) - vset(shift);
        if (divide) v = v / vset(temperature);
        vstore_i32(w + i, vexpc(v) * vset(0x1p30f));
    }
}

int64_t weigh(const float* x, size_t n, float shift, float temperature, int32_t* w) {
    const size_t whole = n / 16 * 16;
    if (temperature == 1.0f)
        weigh_whole<false>(x, whole, shift, temperature, w);
    else
        weigh_whole<true>(x, whole, shift, temperature, w);
    for (size_t i = whole; i < n; i++)
        w[i] = ca::integer_weight(ca::weight_of(x[i], shift, temperature));
    int64_t sum = 0;
    for (size_t i = 0; i < n; i++) sum += w[i];
    return sum;
}

int64_t keep(const float* x, size_t n, float value, size_t ties, int32_t least, int32_t* w) {
    const int32_t end = static_cast<int32_t>(ties);
    int64_t sum = 0;
    for (int32_t i = 0; i < static_cast<int32_t>(n); i++) {
        const bool kept = (x[i] > value) | ((x[i] == value) & (i < end));
        w[i] = kept & (w[i] >= least) ? w[i] : 0;
        sum += w[i];
    }
    return sum;
}

void gate(const float* gate, size_t n, float* y) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) vstore(y + i, vload(y + i) * vsigmoid(vload(gate + i)));
    for (; i < n; i++) y[i] = ca::gate_value(y[i], gate[i]);
}

void add_share(const float* x, size_t n, float share, float* y) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) vstore(y + i, vload(y + i) + vset(share) * vload(x + i));
    for (; i < n; i++) y[i] = ca::add_share(y[i], share, x[i]);
}

void scale(const float* x, size_t n, float factor, float* y) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) vstore(y + i, vload(x + i) * vset(factor));
    for (; i < n; i++) y[i] = ca::mul_rn(x[i], factor);
}

void scaled_add(const float* x, size_t n, float factor, float* y) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) vstore(y + i, vfma(vload(x + i), vset(factor), vload(y + i)));
    for (; i < n; i++) y[i] = ca::fma_rn(x[i], factor, y[i]);
}

SIMD_FN V16 vtanhc(V16 x) {
    const V16 a = vabs(x), z = x * x;
    V16 p = vset(-5.70498872745e-3f);
    p = vfma(p, z, vset(2.06390887954e-2f));
    p = vfma(p, z, vset(-5.37397155531e-2f));
    p = vfma(p, z, vset(1.33314422036e-1f));
    p = vfma(p, z, vset(-3.33332819422e-1f));
    const V16 small = vfma(p * z, x, x), t = vexpc(a * vset(-2.0f));
    const V16 large = (vset(1.0f) - t) / (vset(1.0f) + t);
    return vselect_ge(a, ca::TANH_SMALL, vselect_ge(x, 0.0f, large, vneg(large)), small);
}

void cap(float* x, size_t n, float cap) {
    const float inverse = ca::div_rn(1.0f, cap);
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const V16 v = vload(x + i);
        vstore(x + i, vfma(v, vzero(), vset(cap) * vtanhc(v * vset(inverse))));
    }
    for (; i < n; i++) x[i] = ca::capped(x[i], inverse, cap);
}

void gelu(const float* factors, size_t n, float* y) {
    size_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const V16 v = vload(y + i);
        const V16 slope = vfma(v * v, vset(ca::GELU_CUBIC), vset(ca::GELU_LINEAR));
        vstore(y + i, vsigmoid_times(v, v * slope) * vload(factors + i));
    }
    for (; i < n; i++) y[i] = ca::gated(ca::Activation::gelu, y[i], factors[i]);
}

void v_of_k(const int8_t* k, size_t tiles, size_t head_dim, int8_t* v) {
    typedef int8_t Bytes16 __attribute__((vector_size(16)));
    for (size_t tile = 0; tile < tiles; tile++, v += 16 * head_dim)
        for (size_t d = 0; d < head_dim; d += 4, k += 64)
            for (size_t quad = 0; quad < 4; quad++) {
                Bytes16 x;  // [4 tokens][4 dims]
                __builtin_memcpy(&x, k + 16 * quad, 16);
                x = __builtin_shufflevector(x, x, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
                __builtin_memcpy(v + 4 * (quad * head_dim + d), &x, 16);
            }
}

#define ROWOPS_TABLE                                                                               \
    { norm<false>, norm<true>, rope, hadamard, quantise_query, quantise_kv8, v_of_k, fold, finish, \
      largest, weigh, keep, gate, add_share, scale, scaled_add, cap, gelu }

}  // namespace
