"""Oracle arithmetic: binary32 fma and the exponential of docs/numerics.md, rule 5, in numpy.

numpy rounds add, subtract, multiply and divide of float32 as IEEE 754 says, but has no fma.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


def constant(bits: int) -> np.float32:
    return np.array(bits, np.uint32).view(np.float32)[()]


def fma(a: F32, b: F32 | np.float32, c: F32 | np.float32) -> F32:
    """a·b + c, rounded once. The product is exact in binary64; the sum is rounded to odd there.

    Odd rounding (the last bit is set when anything was lost) keeps what the rounding to binary32
    needs to know, since binary64 has more than two bits to spare.
    """
    product = a.astype(np.float64) * np.asarray(b, np.float64)
    addend = np.asarray(c, np.float64)
    total = product + addend
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    even = total.view(np.uint64) % 2 == 0
    odd = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
    return np.where((lost != 0) & even, odd, total).astype(np.float32)


EXP = [0x39506967, 0x3AB743CE, 0x3C088908, 0x3D2AA9C1, 0x3E2AAAAA, 0x3F000000]
MAGIC = constant(0x4B400000)


def exp(x: F32) -> F32:
    """e^x for x <= 88, by the tree of rule 5."""
    inside = np.maximum(x, np.float32(-87))
    t = fma(inside, constant(0x3FB8AA3B), MAGIC)
    n = t - MAGIC
    r = fma(n, constant(0xBF317200), inside)
    r = fma(n, constant(0xB5BFBE8E), r)
    p = np.full_like(r, constant(EXP[0]))
    for coefficient in EXP[1:]:
        p = fma(p, r, constant(coefficient))
    p = fma(p, r * r, r) + np.float32(1)
    exponent = t.view(np.int32) - MAGIC.view(np.int32)
    y = (p.view(np.int32) + (exponent << 23)).view(np.float32)
    return np.where(x < -87, np.float32(0), y)


LN = [0x3D9021BB, 0xBDEBD1B8, 0x3DEF251A, 0xBDFE5D4F, 0x3E11E9BF]
LN += [0xBE2AAE50, 0x3E4CCEAC, 0xBE7FFFFC, 0x3EAAAAAA]


def ln(x: np.float32) -> np.float32:
    """ln x for a finite, normal, positive x, by the tree of rule 5."""
    bits = np.array([x], np.float32).view(np.int32) - 0x3F3504F3
    e = (bits >> 23).astype(np.float32)
    z = ((bits & 0x7FFFFF) + 0x3F3504F3).view(np.float32) - np.float32(1)
    p = np.full_like(z, constant(LN[0]))
    for coefficient in LN[1:]:
        p = fma(p, z, constant(coefficient))
    z2 = z * z
    y = (p * z) * z2
    y = fma(e, constant(0xB95E8083), y)
    y = fma(z2, constant(0xBF000000), y)
    return fma(e, constant(0x3F318000), z + y)[0]
