"""Canonical CPU kernels (CA-3): the only importer of the native module.

Owns packed weights, quantised activations, attention over KV pages and sampling: pure functions
over flat buffers, independent of requests, sessions and files. Every instruction-set level gives
the same bits, which `arith_id` identifies.
"""

from __future__ import annotations

import hashlib

from kernels._native import (
    PACK_VERSION,
    PAGE_TOKENS,
    SUPERPAGE_TOKENS,
    Activations,
    Batch,
    ExpertPairs,
    HeadActivations,
    KvRows,
    LayerShape,
    Matrix,
    PageShape,
    Partials,
    Pool,
    Queries,
    RopeTable,
    Rows,
    Sampled,
    SampleSpec,
    Sinks,
    StateShape,
    Vector,
    address_of,
    attend,
    attend_partials,
    cap_rows,
    copy_heads,
    delta_net,
    embed,
    finish,
    fold,
    fused_binary32,
    fused_binary64,
    gate_add,
    gate_rows,
    gather_pairs,
    gelu_rows,
    golden_records,
    golden_records_of,
    isa,
    isa_levels,
    linear,
    linear_add,
    linear_gated,
    linear_heads,
    mamba2,
    mix_inputs,
    multiply_then_add,
    nonfinite_rows,
    norm_add,
    norm_columns,
    norm_quantise,
    pack,
    packed_bytes,
    pairs_add,
    pairs_gated,
    peak_float_gops,
    peak_int8_gops,
    peak_read_gbps,
    philox,
    place_kv,
    quantise,
    quantise_heads,
    quantise_pairs,
    rmsnorm,
    row_digests,
    sample,
    scale_rows,
    scaled_add,
    select_experts,
    set_isa,
    short_conv,
    step_digests,
    store_rows,
    take_rows,
    transform_heads,
    xxh3_64,
    zero_rows,
)

KINDS = (
    "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "iq4_nl", "q4_k", "q5_k", "q6_k", "mxfp4",
    "iq4_xs", "q3_k", "q2_k", "iq3_xxs", "iq3_s", "iq2_xxs", "iq2_xs", "iq2_s", "iq1_s", "iq1_m",
    "f16", "bf16", "f32",
)  # fmt: skip

__all__ = [
    "KINDS",
    "PACK_VERSION",
    "PAGE_TOKENS",
    "SUPERPAGE_TOKENS",
    "Activations",
    "Batch",
    "ExpertPairs",
    "HeadActivations",
    "KvRows",
    "LayerShape",
    "Matrix",
    "PageShape",
    "Partials",
    "Pool",
    "Queries",
    "RopeTable",
    "Rows",
    "SampleSpec",
    "Sampled",
    "Sinks",
    "StateShape",
    "Vector",
    "address_of",
    "arith_id",
    "arithmetic_faults",
    "attend",
    "attend_partials",
    "cap_rows",
    "copy_heads",
    "delta_net",
    "embed",
    "finish",
    "fold",
    "fused_binary32",
    "fused_binary64",
    "gate_add",
    "gate_rows",
    "gather_pairs",
    "gelu_rows",
    "golden_records",
    "golden_records_of",
    "isa",
    "isa_levels",
    "linear",
    "linear_add",
    "linear_gated",
    "linear_heads",
    "mamba2",
    "mix_inputs",
    "multiply_then_add",
    "nonfinite_rows",
    "norm_add",
    "norm_columns",
    "norm_quantise",
    "pack",
    "packed_bytes",
    "pairs_add",
    "pairs_gated",
    "peak_float_gops",
    "peak_int8_gops",
    "peak_read_gbps",
    "philox",
    "place_kv",
    "quantise",
    "quantise_heads",
    "quantise_pairs",
    "rmsnorm",
    "row_digests",
    "sample",
    "scale_rows",
    "scaled_add",
    "select_experts",
    "set_isa",
    "short_conv",
    "step_digests",
    "store_rows",
    "take_rows",
    "transform_heads",
    "xxh3_64",
    "zero_rows",
]


# SHA-256 over the golden vectors of the parts that came after CA-3 was fixed: kinds of weights,
# choices of experts by sigmoids, of groups of experts, by a softmax over all and by that and a
# bias, steps of so many tokens that a level has other code for them, heads of more than 256 dims,
# rules 13 to 16, silu within a limit and gates of whole heads, and relu2 with residual scales. As
# part of arith_id they would make the KV of models without these parts useless.
LATER_PARTS = {
    "iq4_xs": "cb6de38e6a8b65dd319237156adee82d0184342b17dab2b3bcc64700b25f81f5",
    "q3_k": "41dd1d83d395d9d380a895b9da9902b273b59a45bd33b8a5e5c52de3525a2d62",
    "q2_k": "dc35d3eb1e627e1427c097657127ead68011fa6fcb6b420e8a5daadb67d3b519",
    "codebooks": "5acb2e7e88bd6ae8d772b1877b8651c75fdcba43b33b84a08381d6aca24b0935",
    "gating": "f42103545a198f48637104999a67b17f354291c478024bc44dde8596ce9aded6",
    "choices": "10fa221b6d0ecb23f0876796a830d4875dc51dbf9939843f3643d7ea6c937ebe",
    "biased_softmax": "75a02932b70e0dc7cba8ecd2092d16372a6ac6105fa48622f885073f2eac341c",
    "heads": "ce9724bc483bcdfb1ff3f1e530044e26786291c36324cf026abc8ddd7956b76a",
    "many_tokens": "ce0e463a9898d55cccfd72c8de887a8d307817d4a15655c52141da6227a45ea4",
    "wide_heads": "889d80c52d2bf117af7cc24d12cb28fd0c13f1d67c4cbfe93bbac5dfeea04260",
    "values": "be610dea23c419eeca45cdac4cddf41e0281d1eca9df5d2d0d444f8e4b71627c",
    "limits": "42197fb7932a32f86bbf4f0cb2db72b6b33b56f579a623a426c60ff30b9faa1d",
    "branches": "4c2fea7438d67709d7611c246d23beecd8d10b5b9020e067bcb10e0c467a857e",
    "mamba2": "3837676f9fd22adee25e09437665be9fdac0c728d783f4d8f8c0c9e2f89efa63",
    "short_conv": "7b14729a2420c11916b120b87bc7a0367454f4dd948f36ea463ca85261d4b97c",
}
NARROW_HEAD_DIM_MAX, HEAD_DIM_MAX = 256, 576  # "wide_heads" has heads of more dims than the former


def arith_id(pool: Pool | None = None) -> str:
    """Hex SHA-256 over the golden vectors of every op, computed on the level in use.

    Equal on every level and machine that computes CA-3; KV pages and peers carry it.
    """
    return _hash_of(golden_records(pool or Pool(1)))


def _hash_of(records: list[tuple[str, bytes]]) -> str:
    digest = hashlib.sha256()
    for name, output in records:
        digest.update(f"{name}:{len(output)}:".encode())
        digest.update(output)
    return digest.hexdigest()


def arithmetic_faults(pool: Pool, head_dim: int = HEAD_DIM_MAX) -> list[str]:
    """Name each operation that this build, on this machine, rounds otherwise than CA-3 requires, of
    those for heads of head_dim dims at most.

    The level in use is tested, and the functions of the C library that every level calls. Both fma
    cases lie just below the middle of two numbers, where a sum that is rounded to a longer format
    first is rounded up. Parts that arith_id does not cover have a hash here.
    """
    faults: list[str] = []
    if 0 in pool.environments():
        faults.append("threads of kernels do not round to nearest, or flush subnormals")
    a = 1 + 2.0**-12  # a * a is rounded to 1 + 2^-11
    if multiply_then_add(a, a, -(1 + 2.0**-11)) != 0:
        faults.append(f"{isa()}: the compiler fused a * b + c")
    for name, fused, bits in (("fmaf", fused_binary32, 23), ("fma", fused_binary64, 52)):
        unit = 2.0**-bits
        if fused((1 + unit) * unit / 2, 1 - unit, 1 + unit) != 1 + unit:
            faults.append(f"{name} of the C library rounds twice")
    for part, expected in LATER_PARTS.items():
        if part == "wide_heads" and head_dim <= NARROW_HEAD_DIM_MAX:
            continue  # these take half as long as all others together
        if _hash_of(golden_records_of(pool, part)) != expected:
            faults.append(f"{isa()}: golden vectors of {part} have other bits")
    return faults
