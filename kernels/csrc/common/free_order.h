// AVX-512 arithmetic without the order of CA-3: included only when BATCHENGINE_FREE_ORDER is defined,
// which only the free-order build of `python -m bench canonical` does. The product never loads it.
//
// Free here means: the compiler may reassociate and fuse; a row of a product is one running sum, not
// sums of 1024 k; probabilities are summed as floats; norms reduce in any order; divisions and exp
// take the approximate instructions; pages fold straight into the total. The rest is the same in both
// builds, as it is also the fastest: int8 dots need a scale per block in any order, and
// probabilities times V as integers take two instructions per 64 products, as floats twelve.
#pragma once

SIMD_FN V16 vround(V16 a) { return {_mm512_roundscale_ps(a.v, 8)}; }
SIMD_FN V16 vscale_by_power(V16 p, V16 n) { return {_mm512_scalef_ps(p.v, n.v)}; }

// 1/a from the 14-bit estimate and one step of Newton.
SIMD_FN V16 vreciprocal(V16 a) {
    const V16 r = {_mm512_rcp14_ps(a.v)};
    return vfma(r, vfma(vneg(a), r, vset(1.0f)), r);
}

SIMD_FN V16 vexp2c(V16 x) {
    const V16 n = vround(x);
    const V16 r = x - n;
    V16 p = vset(1.535336188e-4f);
    p = vfma(p, r, vset(1.339887440e-3f));
    p = vfma(p, r, vset(9.618437357e-3f));
    p = vfma(p, r, vset(5.550332471e-2f));
    p = vfma(p, r, vset(2.402264791e-1f));
    p = vfma(p, r, vset(6.931472028e-1f));
    return vscale_by_power(vfma(p, r, vset(1.0f)), n);
}

SIMD_FN V16 vexpc(V16 x) { return vexp2c(x * vset(ca::LOG2_E)); }
SIMD_FN V16 vsigmoid_times(V16 x, V16 w) {
    return x * vreciprocal(vset(1.0f) + vexpc(vneg(w)));
}
