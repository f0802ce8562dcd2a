"""What the name of an architecture says of a model, as the spec has it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValueType as T

import kernels
from batchengine.core import BatchEngineError
from batchengine.gguf import GgufFile
from batchengine.weights import DeltaNetSpec, Mamba2Spec, ShortConvSpec, open_weights
from batchengine.weights.architectures import ARCHITECTURES
from batchengine.weights.spec import ModelSpec, read_spec
from batchengine.weights.tensors import plan_tensors
from bench.models.synthetic import PRESETS, Shape, write_synthetic
from tests.hostile.rewrite import edited

HUNYUAN = "hunyuan-dense"
TINY = Shape(n_layer=5, n_embd=64, n_ff=96, n_head=2, n_kv_head=1, head_dim=32, n_vocab=288)


def spec_of(path: Path, shape: Shape) -> ModelSpec:
    write_synthetic(path, shape)
    with GgufFile(path) as file:
        spec = read_spec(file)
        plan_tensors(file, spec)
        return spec


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_is_read(arch: str, tmp_path: Path) -> None:
    row = ARCHITECTURES[arch]
    mixture = {"n_expert": 4, "n_used": 2} if row.experts == "all" else {}
    if row.full_every:
        mixture |= {"n_k_head": 1, "n_v_head": 2, "n_rot": 16, "n_ff_shared": 32 * len(mixture)}
    elif row.shared_expert == "weighted":
        mixture["n_ff_shared"] = 32
    if row.recurrent in ("mamba2", "conv"):
        mixture |= {
            "n_k_head": 1,
            "n_v_head": 2,
            "pattern": "M*EM*" if row.splits_layers else "MM*MM",
        }
    if row.has_mla:
        mixture |= {"head_dim": 96, "n_rot": 32, "kv_rank": 64, "nope_dim": 32}
    has_windows = row.window_every > 0 or row.windows == "flagged"
    window = 40 if has_windows and arch != "exaone4" else 0
    every = 5 if arch == "gemma4" else 0
    shape = replace(TINY, arch=arch, window=window, full_every=every, **mixture)
    spec = spec_of(tmp_path / "m.gguf", shape)
    assert spec.arch == arch
    assert (spec.experts is not None) == (row.experts == "all")
    assert spec.attention.has_qk_norm == bool(row.has_qk_norm)
    assert spec.attention.rope.style == row.pairs
    without = [i for i, mixer in enumerate(spec.attentions) if not mixer.has_rope]
    n_kv = {"none": 5, "delta": 1, "mamba2": 2 if row.splits_layers else 1, "conv": 1}[
        row.recurrent
    ]
    rotates_none = row.splits_layers or arch == "granitehybrid"
    some = {"granite_swa": [2]} | {name: [3] for name in ("smollm3", "exaone-moe", "afmoe")}
    assert without == ([*range(n_kv)] if rotates_none else some.get(arch, []))
    assert spec.n_layer_kv == n_kv
    kinds = {"delta": DeltaNetSpec, "mamba2": Mamba2Spec, "conv": ShortConvSpec}
    assert type(spec.recurrent) is kinds.get(row.recurrent, type(None))
    windows = [mixer.window for mixer in spec.attentions]
    expected = {"gpt-oss": [40, 0, 40, 0, 40], "gemma3": [40] * 5, "gemma4": [40] * 4 + [0]}
    expected |= {name: [40, 40, 40, 0, 40] for name in ("olmo2", "exaone-moe", "mellum", "afmoe")}
    expected |= {name: [0, 40, 40, 40, 0] for name in ("granite_swa", "step35", "spark2_5")}
    assert windows == expected.get(arch, [0] * spec.n_layer_kv)
    assert spec.attention.has_sinks == (arch in ("gpt-oss", "granite_swa"))
    assert (spec.embed_scale == 8.0) == (arch in ("gemma3", "gemma4", "afmoe"))
    only_post = arch in ("olmo2", "exaone4")
    with_post = "gemma3", "gemma4", "glm4", "afmoe"
    assert spec.attention.has_post_norm == (arch in with_post or only_post)
    assert spec.attention.has_pre_norm == (not only_post)
    assert spec.attention.norms_whole_qk == (arch in ("minimax-m2", "olmo2", "olmoe"))
    assert (spec.attention.mla is not None) == (arch in ("deepseek2", "mistral4"))


def test_layers_with_a_window_may_have_another_rope(tmp_path: Path) -> None:
    """Of seven layers of gemma3 the sixth sees all positions, which are scaled."""
    shape = replace(TINY, arch="gemma3", n_layer=7, window=40, rope_base=1e6, linear_factor=8.0)
    spec = spec_of(tmp_path / "m.gguf", shape)
    assert [mixer.window for mixer in spec.attentions] == [40, 40, 40, 40, 40, 0, 40]
    ropes = [(mixer.rope.base, mixer.rope.position_scale) for mixer in spec.attentions]
    assert ropes == [(10000.0, 1.0)] * 5 + [(1e6, 0.125), (10000.0, 1.0)]
    assert spec.n_layer_whole == 1


def test_windows_of_olmo_are_those_of_the_key_and_scale_no_position(tmp_path: Path) -> None:
    shape = replace(TINY, arch="olmo2", yarn_factor=4.0, rope_base=5e5)
    spec = spec_of(tmp_path / "m.gguf", shape)
    assert [mixer.window for mixer in spec.attentions] == [0] * 5
    assert all(mixer.rope.factors for mixer in spec.attentions)
    spec = spec_of(tmp_path / "w.gguf", replace(shape, window=40))
    assert [bool(mixer.rope.factors) for mixer in spec.attentions] == [False] * 3 + [True, False]
    assert {mixer.rope.base for mixer in spec.attentions} == {5e5}


def test_of_exaone_4_the_model_of_64_layers_has_windows(tmp_path: Path) -> None:
    """There the layers that see everything turn nothing."""
    shape = replace(TINY, arch="exaone4", n_layer=64)
    spec = spec_of(tmp_path / "m.gguf", shape)
    assert [mixer.window for mixer in spec.attentions] == [4096, 4096, 4096, 0] * 16
    assert [mixer.has_rope for mixer in spec.attentions] == [True, True, True, False] * 16
    spec = spec_of(tmp_path / "s.gguf", replace(shape, n_layer=3))
    assert {(mixer.window, mixer.has_rope) for mixer in spec.attentions} == {(0, True)}


def test_of_granite_swa_a_key_lists_the_layers_with_rope(tmp_path: Path) -> None:
    """Without the key all have it."""
    key = "granite_swa.attention.rope_pattern"
    shape = replace(TINY, arch="granite_swa", window=40)
    path = tmp_path / "m.gguf"
    write_synthetic(path, shape)
    for flags, expected in (([0, 1, 1, 0, 1], [0, 1, 1, 0, 1]), (None, [1] * 5)):

        def edit(values: dict[str, Any], _: object, flags: list[int] | None = flags) -> None:
            values.pop(key)
            if flags:
                values[key] = flags, [T.ARRAY, T.UINT32]

        with GgufFile(edited(path, edit)) as file:
            spec = read_spec(file)
        assert [mixer.has_rope for mixer in spec.attentions] == [bool(flag) for flag in expected]
    short = edited(path, lambda values, _: values.update({key: ([1], [T.ARRAY, T.UINT32])}))
    with GgufFile(short) as file, pytest.raises(BatchEngineError, match="rope_pattern"):
        read_spec(file)


def test_a_file_of_hunyuan_may_count_one_expert_and_has_no_alpha(tmp_path: Path) -> None:
    """Another key would make RoPE's base larger than it says."""
    path = tmp_path / "m.gguf"
    write_synthetic(path, replace(TINY, arch=HUNYUAN))
    count = {f"{HUNYUAN}.expert_count": (1, [T.UINT32])}
    one = edited(path, lambda values, _: values.update(count))
    with GgufFile(one) as file:
        spec = read_spec(file)
    assert spec.experts is None
    assert spec.attention.norms_rotated
    alpha = {f"{HUNYUAN}.rope.scaling.alpha": (50.0, [T.FLOAT32])}
    grown = edited(path, lambda values, _: values.update(alpha))
    with GgufFile(grown) as file, pytest.raises(BatchEngineError, match="must be the whole base"):
        read_spec(file)


@pytest.mark.parametrize("arch", ["hunyuan-moe", "maincoder", "llama"])
def test_alpha_is_of_no_effect_in_other_architectures(tmp_path: Path, arch: str) -> None:
    path = tmp_path / "m.gguf"
    experts = {"n_expert": 4, "n_used": 2, "n_ff_shared": 64} if arch == "hunyuan-moe" else {}
    write_synthetic(path, replace(TINY, arch=arch, **experts))
    alpha = {f"{arch}.rope.scaling.alpha": (50.0, [T.FLOAT32])}
    with GgufFile(path) as file:
        plain = read_spec(file)
    with GgufFile(edited(path, lambda values, _: values.update(alpha))) as file:
        assert read_spec(file) == plain


def test_queries_are_scaled_by_the_first_context(tmp_path: Path) -> None:
    shape = replace(TINY, arch="mistral3", yarn_factor=16.0, yarn_trained=512, temperature=0.1)
    spec = spec_of(tmp_path / "m.gguf", shape)
    rope = spec.attention.rope
    assert (rope.query_log, rope.query_span) == (pytest.approx(0.1), 512)
    assert spec.context_trained == shape.context
    others = replace(shape, arch="llama")
    assert spec_of(tmp_path / "l.gguf", others).attention.rope.query_log == 0.0


SWA = "attention.sliding_window"
U32, F32, BOOL = [T.UINT32], [T.FLOAT32], [T.ARRAY, T.BOOL]
FLOATS = [T.ARRAY, T.FLOAT32]
# key, value, its type, code and words of the error; "" = it is read
KEYS: tuple[tuple[str, Any, list[Any], str, str], ...] = (
    (SWA, 0, U32, "BE1322", "out of range"),
    (SWA, 1, U32, "", ""),
    (SWA, 1 << 24, U32, "", ""),
    (SWA, (1 << 24) + 1, U32, "BE1322", "out of range"),
    (SWA, 40.5, F32, "BE1322", "not an integer"),
    (f"{SWA}_pattern", "every", U32, "", ""),
    (f"{SWA}_pattern", "flags", BOOL, "", ""),
    (f"{SWA}_pattern", "other flags", BOOL, "", ""),
    (f"{SWA}_pattern", 2, U32, "", ""),
    (f"{SWA}_pattern", 0, U32, "BE1322", "out of range"),
    (f"{SWA}_pattern", [True], BOOL, "BE1322", "1 flags"),
    (f"{SWA}_pattern", [0.5, 0.5], FLOATS, "BE1322", "array of flags"),
    ("rope.freq_base_swa", 0.0, F32, "BE1322", "outside"),
    ("rope.freq_base_swa", float("nan"), F32, "BE1322", "finite"),
    ("rope.freq_base_swa", 12345.0, F32, "", ""),
    ("rope.dimension_count_swa", 32, U32, "", ""),
    ("rope.dimension_count_swa", 16, U32, "BE1323", "head_dim is 32"),
    ("attention.key_length_swa", 16, U32, "BE1323", "head_dim is 32"),
    ("attention.value_length_swa", 64, U32, "BE1323", "head_dim is 32"),
    ("final_logit_softcapping", 0.0, F32, "", ""),
    ("final_logit_softcapping", 30.0, F32, "BE1323", "soft bound"),
    ("attn_logit_softcapping", 50.0, F32, "BE1323", "soft bound"),
)


@pytest.mark.parametrize("preset", ["gpt-oss-tiny", "gemma3-tiny"])
@pytest.mark.parametrize(("key", "value", "types", "code", "words"), KEYS)
def test_keys_of_windows(
    tmp_path: Path, preset: str, key: str, value: Any, types: list[Any], code: str, words: str
) -> None:
    """What a file says otherwise than its architecture is computed so, or refused with the key."""
    path, shape = tmp_path / "m.gguf", PRESETS[preset]
    write_synthetic(path, shape)
    every = ARCHITECTURES[shape.arch].window_every
    flags = [(i + 1) % every != 0 for i in range(shape.n_layer)]
    if isinstance(value, str):
        value = {"every": every, "flags": flags, "other flags": flags[::-1]}[value]
    name = f"{shape.arch}.{key}"
    changed = edited(path, lambda values, _: values.__setitem__(name, (value, types)))
    with GgufFile(changed) as file:
        if code:
            with pytest.raises(BatchEngineError) as error:
                read_spec(file)
            assert error.value.code == code
            assert name in str(error.value)
            assert words in str(error.value)
            return
        spec = read_spec(file)
    windowed = [mixer for mixer in spec.attentions if mixer.window]
    if key == f"{SWA}_pattern":
        of_number = [(i + 1) % 2 != 0 for i in range(shape.n_layer)]
        wanted = of_number if value == 2 else value
        wanted = flags if isinstance(wanted, int) else wanted
        assert [mixer.window > 0 for mixer in spec.attentions] == wanted
    if key == SWA:
        assert {mixer.window for mixer in windowed} == {value}
    if key == "rope.freq_base_swa":
        assert {mixer.rope.base for mixer in windowed} == {value}


def test_the_attention_factor_of_a_file_counts_in_all_layers(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_synthetic(path, PRESETS["gemma3-tiny"])
    name = "gemma3.rope.scaling.attn_factor"
    changed = edited(path, lambda values, _: values.__setitem__(name, (1.5, F32)))
    with GgufFile(changed) as file:
        assert {mixer.rope.attn_factor for mixer in read_spec(file).attentions} == {1.5}


@pytest.mark.parametrize(
    ("value", "words"), [(float("nan"), "not finite"), (3e38, "not finite in base 2")]
)
def test_sinks_that_are_no_numbers_are_refused(
    tmp_path: Path, cache_dir: Path, value: float, words: str
) -> None:
    path = tmp_path / "m.gguf"
    write_synthetic(path, PRESETS["gpt-oss-tiny"])

    def edit(_: Any, tensors: dict[str, Any]) -> None:
        tensors["blk.1.attn_sinks.weight"][0][2] = value

    with GgufFile(edited(path, edit)) as file, pytest.raises(BatchEngineError) as error:
        open_weights(file, kernels.Pool(1), cache_dir=cache_dir)
    assert error.value.code == "BE1327"
    assert "blk.1.attn_sinks.weight" in str(error.value)
    assert words in str(error.value)
