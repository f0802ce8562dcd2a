"""The forward pass: equal bits for every batch, chunk, thread count, level and layer split.

Tests compare bits, without tolerances: logits and KV pages of two ways to compute the same
timeline must be the same bytes. (Tolerances against llama.cpp: test_llama_agreement.py.)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFValueType
from msgspec import structs

import kernels
from batchengine.core import Sampling
from bench.models.local_runner import LocalRunner, LocalSequence, RunnerError
from bench.models.synthetic import PRESETS, Shape, write_synthetic
from tests.hostile.rewrite import edited
from tests.support.engines import Reference, words

MIXED = Shape(
    arch="qwen3",
    n_layer=3,
    n_embd=96,
    n_ff=160,
    n_head=6,
    n_kv_head=2,
    head_dim=32,
    n_vocab=333,
    tied=False,
    kinds={"attn_k": "q8_0", "attn_v": "f16", "ffn_up": "q4_1", "ffn_down": "bf16"},
)
LLAMA = Shape(
    arch="llama", n_layer=2, n_embd=256, n_ff=320, n_head=4, n_kv_head=4, head_dim=64,
    tied=False, rope_factors=True, fused=True, bias=0.3, k_bias=2.0,
)  # fmt: skip
EXPERTS = PRESETS["moe-tiny"]
# Eight experts of llama, of float and quantised banks.
LLAMA_EXPERTS = replace(
    EXPERTS, arch="llama", n_layer=2, n_embd=64, n_expert=8, n_used=2, n_ff=96, tied=True,
    kinds={"ffn_gate_inp": "bf16", "ffn_gate": "f16", "ffn_up": "q8_0", "ffn_down": "bf16"},
)  # fmt: skip
# Dense matrices, banks of experts and embeddings of superblocks.
SUPERBLOCKS = replace(
    EXPERTS, n_layer=2, n_embd=256, n_ff=256, head_dim=64, base="iq4_xs",
    kinds={
        "token_embd": "q3_k", "attn_v": "q5_k", "attn_output": "q2_k", "ffn_up": "q3_k",
        "ffn_down": "q2_k",
    },
)  # fmt: skip
SHAPES = {
    "mixed": MIXED,
    "llama": LLAMA,
    "experts": EXPERTS,
    "llama_experts": LLAMA_EXPERTS,
    "superblocks": SUPERBLOCKS,
    "gpt_oss": PRESETS["gpt-oss-tiny"],
    "gemma3": PRESETS["gemma3-tiny"],
    "gemma4": PRESETS["gemma4-tiny"],
    "qwen35": PRESETS["qwen35-tiny"],
    "glm4moe": PRESETS["glm4moe-tiny"],
    "deepseek2": PRESETS["deepseek2-tiny"],
    "olmo2": PRESETS["olmo2-tiny"],
    "bailingmoe2": PRESETS["bailingmoe2-tiny"],
    "qwen3next": PRESETS["qwen3next-tiny"],
    "minimax_m2": PRESETS["minimax-m2-tiny"],
    "glm4": PRESETS["glm4-tiny"],
    "phi3": PRESETS["phi3-tiny"],
    "qwen35moe": PRESETS["qwen35moe-tiny"],  # its last layer is recurrent
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, pocket_path: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    paths = {"pocket": pocket_path}
    for name, shape in SHAPES.items():
        paths[name] = folder / f"{name}.gguf"
        write_synthetic(paths[name], shape)
    return paths


@pytest.fixture(params=["pocket", *SHAPES])
def model(request: pytest.FixtureRequest, models: dict[str, Path]) -> Path:
    return models[request.param]


@pytest.fixture
def level() -> Iterator[None]:
    """Restores the instruction set that was in use."""
    before = kernels.isa()
    yield
    kernels.set_isa(before)


def tokens_of(runner: LocalRunner, count: int, seed: int = 0) -> list[int]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, runner.spec.n_vocab, count).tolist()


def digest(runner: LocalRunner, prompt: list[int], chunk: int) -> tuple[bytes, list[bytes]]:
    """Logits after the prompt, and the KV pages and recurrent state it left."""
    sequence = LocalSequence()
    logits = runner.prefill(sequence, prompt, chunk)
    pages = [runner.page(sequence, i) for i in range(len(sequence.pages))]
    if sequence.state is not None:
        pages.append(sequence.state[:])
    runner.release(sequence)
    return logits.tobytes(), pages


@pytest.fixture(scope="module")
def expected(models: dict[str, Path], cache_dir: Path) -> dict[str, tuple[bytes, list[bytes]]]:
    """The reference arrangement: one thread, one chunk of 37 tokens at a time, default level."""
    found: dict[str, tuple[bytes, list[bytes]]] = {}
    for name, path in models.items():
        with LocalRunner(path, cache_dir=cache_dir, n_pages=8) as runner:
            found[name] = digest(runner, tokens_of(runner, 300), 37)
    return found


def reference_of(
    expected: dict[str, tuple[bytes, list[bytes]]], models: dict[str, Path], path: Path
) -> tuple[bytes, list[bytes]]:
    return next(expected[name] for name, value in models.items() if value == path)


@pytest.mark.parametrize("chunk", [1, 16, 64, 100, 256, 300])
def test_chunk_size_changes_no_bit(
    chunk: int, model: Path, models: dict[str, Path], expected: Any, cache_dir: Path
) -> None:
    with LocalRunner(model, cache_dir=cache_dir, n_pages=8) as runner:
        ours = digest(runner, tokens_of(runner, 300), chunk)
    assert ours == reference_of(expected, models, model)


def test_two_threads_change_no_bit(
    model: Path, models: dict[str, Path], expected: Any, cache_dir: Path
) -> None:
    with LocalRunner(model, threads=2, cache_dir=cache_dir, n_pages=8) as runner:
        for chunk in (64, 300):
            ours = digest(runner, tokens_of(runner, 300), chunk)
            assert ours == reference_of(expected, models, model)


@pytest.mark.parametrize("isa", kernels.isa_levels())
def test_instruction_sets_give_equal_bits(
    isa: str, level: None, model: Path, models: dict[str, Path], expected: Any, cache_dir: Path
) -> None:
    kernels.set_isa(isa)
    with LocalRunner(model, cache_dir=cache_dir, n_pages=8) as runner:
        ours = digest(runner, tokens_of(runner, 300), 100)
    assert ours == reference_of(expected, models, model)


def test_a_batch_of_sixteen_changes_no_bit(model: Path, cache_dir: Path) -> None:
    """Sixteen timelines of different lengths, decoded together and alone; logits and pages."""
    with LocalRunner(model, cache_dir=cache_dir, n_pages=64) as runner:
        prompts = [tokens_of(runner, 3 + 19 * i, seed=i) for i in range(16)]
        extra = [tokens_of(runner, 6, seed=100 + i) for i in range(16)]

        def run(group: list[int]) -> dict[int, tuple[list[bytes], list[bytes]]]:
            timelines = {i: LocalSequence() for i in group}
            rows: dict[int, list[bytes]] = {i: [] for i in group}
            for i in group:
                runner.prefill(timelines[i], prompts[i])
            for position in range(6):
                entries = [(timelines[i], [extra[i][position]]) for i in group]
                for i, row in zip(group, runner.step(entries), strict=True):
                    rows[i].append(row.tobytes())
            result = {}
            for i, timeline in timelines.items():
                pages = [runner.page(timeline, p) for p in range(len(timeline.pages))]
                result[i] = rows[i], pages
                runner.release(timeline)
            return result

        together = run(list(range(16)))
        for i in range(16):
            assert run([i])[i] == together[i], i


def test_prefill_and_decode_in_one_step_change_no_bit(model: Path, cache_dir: Path) -> None:
    """A step with a chunk of one timeline and single tokens of others changes neither."""
    with LocalRunner(model, cache_dir=cache_dir, n_pages=32) as runner:
        long, short = tokens_of(runner, 280, 1), tokens_of(runner, 40, 2)

        def alone(tokens: list[int]) -> bytes:
            sequence = LocalSequence()
            logits = runner.prefill(sequence, tokens).tobytes()
            runner.release(sequence)
            return logits

        a, b = LocalSequence(), LocalSequence()
        runner.prefill(a, long[:250])
        runner.prefill(b, short[:-1])
        rows = runner.step([(b, short[-1:]), (a, long[250:])])
        assert rows[0].tobytes() == alone(short)
        assert rows[1].tobytes() == alone(long)


def test_a_forward_pass_split_by_layers_changes_no_bit(model: Path, cache_dir: Path) -> None:
    """The residual stream is read after layer 1 and passed to the second part (a pipeline)."""
    with LocalRunner(model, cache_dir=cache_dir, n_pages=8) as runner:
        tokens = tokens_of(runner, 50)
        whole = runner.all_logits(tokens).tobytes()
        n_layer = runner.spec.n_layer
        for cut in range(1, n_layer):
            sequence = LocalSequence()
            runner.set_step([(sequence, tokens)])
            stepper = runner.stepper
            stepper.embed()
            stepper.forward(range(cut))
            carried = stepper.hidden.view(50).copy()
            stepper.hidden.view(50)[:] = np.nan  # nothing of the first stage may remain
            stepper.hidden.view(50)[:] = carried
            stepper.forward(range(cut, n_layer))
            parts: list[bytes] = []
            for start in range(0, 50, 10):
                stepper.take(np.arange(start, start + 10, dtype=np.int32))
                parts.append(stepper.logits(10).view(10).tobytes())
            runner.release(sequence)
            assert b"".join(parts) == whole


def test_fused_qkv_equals_separate_matrices(tmp_path: Path, cache_dir: Path) -> None:
    """The rows of q, k and v in one matrix, with their biases in one vector: the same bits."""
    path = tmp_path / "m.gguf"
    write_synthetic(path, replace(LLAMA, fused=False))

    def fuse(_: Any, tensors: dict[str, Any]) -> None:
        for i in range(LLAMA.n_layer):
            for kind in ("weight", "bias"):
                parts = [tensors.pop(f"blk.{i}.attn_{letter}.{kind}") for letter in "qkv"]
                joined = np.concatenate([data for data, _ in parts])
                tensors[f"blk.{i}.attn_qkv.{kind}"] = (joined, parts[0][1])

    results: list[bytes] = []
    for file in (path, edited(path, fuse)):
        with LocalRunner(file, cache_dir=cache_dir, n_pages=8) as runner:
            results.append(runner.all_logits(tokens_of(runner, 40)).tobytes())
    assert results[0] == results[1]


def test_a_scale_of_two_equals_experts_twice_as_large(tmp_path: Path, cache_dir: Path) -> None:
    """Weights of experts times 2, or every scale of the down banks: both are exact."""
    path = tmp_path / "m.gguf"
    write_synthetic(path, EXPERTS)
    types = [GGUFValueType.FLOAT32]

    def scale(values: dict[str, Any], _: Any) -> None:
        values["qwen3moe.expert_weights_scale"] = (2.0, types)

    def enlarge(_: Any, tensors: dict[str, Any]) -> None:
        for i in range(EXPERTS.n_layer):
            data = tensors[f"blk.{i}.ffn_down_exps.weight"][0]
            blocks = data.reshape(-1, 18)  # of Q4_0
            blocks[:, :2] = (blocks[:, :2].copy().view(np.float16) * 2).view(np.uint8)

    results: list[bytes] = []
    for edit in (scale, enlarge, lambda *_: None):
        file = edited(path, edit)
        with LocalRunner(file, cache_dir=cache_dir, n_pages=8) as runner:
            results.append(runner.all_logits(tokens_of(runner, 40)).tobytes())
    assert results[0] == results[1] != results[2]


def test_skipping_unwanted_rows_changes_no_bit_of_the_others(model: Path, cache_dir: Path) -> None:
    """The last layer computes wanted rows only; each row is the same as when all are wanted."""
    with LocalRunner(model, cache_dir=cache_dir, n_pages=8, logits_max=64) as runner:
        tokens = tokens_of(runner, 40)
        every = runner.all_logits(tokens)
        for wanted in ([39], [0, 17, 39], [5]):
            sequence = LocalSequence()
            rows = runner.step([(sequence, tokens)], wanted)
            assert rows.tobytes() == every[wanted].tobytes()
            runner.release(sequence)


def test_sampled_text_depends_on_its_timeline_only(model: Path, cache_dir: Path) -> None:
    """Temperature, seed and prompt determine it; batch, chunk and threads have no effect."""
    sampling = [
        Sampling(temperature=0.8, top_p=0.9, top_k=40, seed=7 + i, repetition_penalty=1.1)
        for i in range(5)
    ]
    with LocalRunner(model, cache_dir=cache_dir, n_pages=32) as runner:
        prompts = [tokens_of(runner, 10 + 30 * i, seed=i) for i in range(5)]
        together = runner.generate(prompts, 24, sampling=sampling)
        alone = [
            runner.generate([p], 24, sampling=s, chunk=7)[0]
            for p, s in zip(prompts, sampling, strict=True)
        ]
        other = runner.generate(prompts[:1], 24, sampling=structs.replace(sampling[0], seed=99))[0]
    with LocalRunner(model, cache_dir=cache_dir, n_pages=32, threads=2) as runner:
        assert runner.generate(prompts, 24, sampling=sampling) == together
    assert alone == together
    assert other != together[0]


def test_pages_of_earlier_prompts_change_no_answer(pocket_path: Path, cache_dir: Path) -> None:
    """Those that reference answers of engines go on behind: shared ones, none, all but the end."""
    answers = Reference(pocket_path, cache_dir)
    with LocalRunner(pocket_path, cache_dir=cache_dir) as fresh:
        first, other = words(1, 700, 300), words(2, 300, 300)
        for prompt in (first, other, [*first[:600], *other], [*first, 7], first[:512], first):
            for sampling in (Sampling(), Sampling(0.9, seed=3, repetition_penalty=1.3)):
                expected = fresh.generate([prompt], 6, sampling=sampling)[0]
                assert answers.tokens(prompt, 6, sampling) == expected
    answers.close()


def test_a_recomputed_page_equals_the_lost_one(model: Path, cache_dir: Path) -> None:
    """A page in the middle is overwritten, recomputed in place, and later pages stay valid."""
    with LocalRunner(model, cache_dir=cache_dir, n_pages=8, tokens_max=256) as runner:
        tokens = tokens_of(runner, 600)
        sequence = LocalSequence()
        runner.prefill(sequence, tokens[:256])
        state = runner.fork(sequence).state
        before = runner.prefill(sequence, tokens[256:-1])
        pages = [runner.page(sequence, i) for i in range(3)]
        start = sequence.pages[1] * runner.page_bytes
        runner._memory[start : start + runner.page_bytes] = b"\xff" * runner.page_bytes
        again = LocalSequence(tokens[:256], sequence.pages[:2], state)
        runner.step([(again, tokens[256:512])], rows=())
        assert [runner.page(sequence, i) for i in range(3)] == pages
        last = runner.step([(sequence, tokens[-1:])])[0].tobytes()
        fresh = LocalSequence()
        assert runner.prefill(fresh, tokens).tobytes() == last
        assert before.tobytes() != last


# -- rows that are not finite


def with_nan(path: Path, matrix: str) -> Path:
    """A model in which one matrix of layer 0 overflows for token 7 and for no other."""

    def edit(_: Any, tensors: dict[str, Any]) -> None:
        kind = GGMLQuantizationType.F32
        embedding = np.random.default_rng(3).normal(size=(333, 96)).astype(np.float32)
        embedding[:, 0] = 0.0
        embedding[7] = 0.0
        embedding[7, 0] = 1.0
        name = f"blk.0.{matrix}.weight"
        rows = 192 if matrix == "attn_q" else 64
        values = np.random.default_rng(4).normal(size=(rows, 96)).astype(np.float32)
        values[:, 0] = 3e38  # times a normed 9.8: infinite; times 0: 0
        tensors["token_embd.weight"] = (embedding, kind)
        tensors[name] = (values, kind)

    return edited(path, edit)


@pytest.mark.parametrize("matrix", ["attn_q", "attn_k", "attn_v"])
def test_nonfinite_rows_stay_in_their_entry(matrix: str, tmp_path: Path, cache_dir: Path) -> None:
    """Of three timelines in a step one overflows: it is reported, the others keep their bits."""
    path = tmp_path / "m.gguf"
    write_synthetic(path, MIXED)
    with LocalRunner(with_nan(path, matrix), cache_dir=cache_dir, n_pages=8) as runner:
        good = [[1, 2, 3], [4, 5, 6, 8]]
        expected = [runner.prefill(LocalSequence(), tokens).tobytes() for tokens in good]
        for bad in ([9, 7, 9], [7], [9, 9, 7]):
            entries = [
                (LocalSequence(), good[0]),
                (LocalSequence(), bad),
                (LocalSequence(), good[1]),
            ]
            last_rows = runner.set_step(entries)
            assert runner.stepper.run(np.array(last_rows, np.int32)) == [1]
            rows = runner.stepper.logits(3).view(3)
            assert [rows[0].tobytes(), rows[2].tobytes()] == expected
            for sequence, _ in entries:
                runner.release(sequence)
        # Rows whose logits are not wanted count too: their KV holds the NaN.
        runner.set_step([(LocalSequence(), [1, 7])])
        assert runner.stepper.run(np.array([0], np.int32)) == [0]
        with pytest.raises(RunnerError, match="nonfinite"):
            runner.step([(LocalSequence(), [7])])


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("matrix", ["attn_output", "ffn_gate", "ffn_up", "ffn_down"])
def test_an_overflow_in_any_matrix_is_reported(
    matrix: str, layer: int, tmp_path: Path, cache_dir: Path
) -> None:
    """No operation before the logits hides an infinity or a NaN."""
    path = tmp_path / "m.gguf"
    write_synthetic(path, MIXED)

    def edit(_: Any, tensors: dict[str, Any]) -> None:
        name = f"blk.{layer}.{matrix}.weight"
        rows, cols = {"attn_output": (96, 192), "ffn_down": (96, 160)}.get(matrix, (160, 96))
        values = np.full((rows, cols), 3e38, np.float32)
        tensors[name] = (values, GGMLQuantizationType.F32)

    with LocalRunner(edited(path, edit), cache_dir=cache_dir, n_pages=8) as runner:
        last_rows = runner.set_step([(LocalSequence(), [1, 2]), (LocalSequence(), [3])])
        assert runner.stepper.run(np.array(last_rows, np.int32)) == [0, 1]


@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize(
    "matrix", ["ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"]
)
def test_an_overflow_in_experts_is_reported(
    matrix: str, layer: int, tmp_path: Path, cache_dir: Path
) -> None:
    """In the selector, and in the bank of any expert that is chosen."""
    path = tmp_path / "m.gguf"
    write_synthetic(path, EXPERTS)

    def edit(_: Any, tensors: dict[str, Any]) -> None:
        rows, cols = {"ffn_gate_inp": (10, 96), "ffn_down_exps": (96, 64)}.get(matrix, (64, 96))
        dims = (rows, cols) if matrix == "ffn_gate_inp" else (10, rows, cols)
        values = np.full(dims, 3e38, np.float32), GGMLQuantizationType.F32
        tensors[f"blk.{layer}.{matrix}.weight"] = values

    with LocalRunner(edited(path, edit), cache_dir=cache_dir, n_pages=8) as runner:
        last_rows = runner.set_step([(LocalSequence(), [1, 2]), (LocalSequence(), [3])])
        assert runner.stepper.run(np.array(last_rows, np.int32)) == [0, 1]


def test_a_token_without_a_choice_of_experts_stays_in_its_entry(
    tmp_path: Path, cache_dir: Path
) -> None:
    """The selector overflows for token 7 alone: the entries without it keep their bits."""
    path = tmp_path / "m.gguf"
    write_synthetic(path, EXPERTS)

    def edit(_: Any, tensors: dict[str, Any]) -> None:
        kind = GGMLQuantizationType.F32
        embedding = np.random.default_rng(3).normal(size=(320, 96)).astype(np.float32)
        embedding[:, 0] = 0.0
        embedding[7] = 0.0
        embedding[7, 0] = 1.0
        selector = np.random.default_rng(4).normal(size=(10, 96)).astype(np.float32)
        selector[:, 0] = 3e38
        tensors["token_embd.weight"] = (embedding, kind)
        tensors["blk.0.attn_output.weight"] = (np.zeros((96, 128), np.float32), kind)
        tensors["blk.0.ffn_gate_inp.weight"] = (selector, kind)

    with LocalRunner(edited(path, edit), cache_dir=cache_dir, n_pages=11) as runner:
        good = [[1, 2, 3], [4, 5, 6, 8]]
        expected = [runner.prefill(LocalSequence(), tokens).tobytes() for tokens in good]
        for bad in ([9, 7, 9], [7], [9, 9, 7]):
            tokens = [good[0], bad, good[1]]
            last_rows = runner.set_step([(LocalSequence(), part) for part in tokens])
            assert runner.stepper.run(np.array(last_rows, np.int32)) == [1]
            rows = runner.stepper.logits(3).view(3)
            assert [rows[0].tobytes(), rows[2].tobytes()] == expected


# -- limits and cost


def test_a_step_that_does_not_fit_is_refused(models: dict[str, Path], cache_dir: Path) -> None:
    with LocalRunner(
        models["pocket"], cache_dir=cache_dir, n_pages=2, tokens_max=32, entries_max=2
    ) as runner:
        with pytest.raises(ValueError, match="tokens"):
            runner.set_step([(LocalSequence(), [1] * 33)])
        with pytest.raises(ValueError, match="entries"):
            runner.set_step([(LocalSequence(), [1])] * 3)
    with LocalRunner(models["pocket"], cache_dir=cache_dir, n_pages=2) as runner:
        sequence = LocalSequence()
        with pytest.raises(RunnerError, match="no free KV page"):
            runner.reserve(sequence, 600)


def test_a_token_outside_the_vocabulary_is_refused(
    models: dict[str, Path], cache_dir: Path
) -> None:
    with LocalRunner(models["pocket"], cache_dir=cache_dir, n_pages=2) as runner:
        for token in (-1, runner.spec.n_vocab):
            with pytest.raises(ValueError, match="token"):
                runner.step([(LocalSequence(), [token])])


@pytest.mark.parametrize("name", ["pocket", "experts"])
def test_python_time_per_layer_is_bounded(
    name: str, models: dict[str, Path], cache_dir: Path
) -> None:
    """With kernels that do nothing, 28 layers (27 with experts) take at most 0.3 ms."""
    with LocalRunner(models[name], cache_dir=cache_dir, n_pages=2) as runner:
        runner.set_step([(LocalSequence(), [1])])

        def nothing(*_: Any, **__: Any) -> None: ...

        names = ("norm_quantise", "linear", "place_kv", "attend", "quantise", "linear_add")
        names += ("linear_gated", "select_experts", "gather_pairs", "pairs_gated")
        for operation in (*names, "quantise_pairs", "pairs_add"):
            setattr(runner.stepper.ops, operation, nothing)
        n_layer = runner.spec.n_layer
        best = 1e9
        for _ in range(20):
            start = time.thread_time()
            for _ in range(28 // n_layer):
                runner.stepper.forward(range(n_layer))
            best = min(best, time.thread_time() - start)
    assert best < 0.3e-3


def test_stages_write_the_pages_of_the_whole_model(model: Path, cache_dir: Path) -> None:
    """At every cut, in chunks that end inside pages, also inside windows."""
    with (
        LocalRunner(model, cache_dir=cache_dir, n_pages=8) as whole,
        LocalRunner(model, cache_dir=cache_dir, n_pages=8) as parts,
    ):
        tokens = tokens_of(whole, 300)
        layers = list(whole.model.layers)
        once = LocalSequence()
        for low, high in ((0, 256), (256, 300)):
            whole.step([(once, tokens[low:high])])
        for cut in range(1, len(layers)):
            sequence = LocalSequence()
            for low, high in ((0, 70), (70, 256), (256, 300)):
                parts.set_step([(sequence, tokens[low:high])])
                parts.stepper.embed()
                assert parts.stepper.run_stage(layers[:cut])
                assert parts.stepper.run_stage(layers[cut:])
                parts.commit([(sequence, tokens[low:high])])
            assert [parts.page(sequence, i) for i in (0, 1)] == [
                whole.page(once, i) for i in (0, 1)
            ]
            parts.release(sequence)
