"""The pocket model: its training data, its file, its oracle, and the programs that made it."""

from __future__ import annotations

import datetime
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from batchengine.text.frontend import TextFrontend
from batchengine.text.messages import prepare_messages
from batchengine.text.renderer import Renderer
from batchengine.text.vocab import Tokenizer
from pocket import evaluate, export, generate, oracle, stories, tools, words
from pocket.generate import Turn, render
from pocket.reference import Reference


@pytest.fixture(scope="module")
def tokenizer(pocket_path: Path) -> Iterator[Tokenizer]:
    tokenizer = Tokenizer(pocket_path)
    yield tokenizer
    tokenizer.close()


# --- training data -----------------------------------------------------------------------------


def rngs(count: int) -> Iterator[random.Random]:
    return (random.Random(f"test {index}") for index in range(count))


def test_every_word_is_one_token(tokenizer: Tokenizer) -> None:
    listed = {*words.LISTED, *words.NAMES, *words.CITIES, *words.DAYS}
    assert [word for word in listed if len(tokenizer.encode(" " + word)) != 1] == []


def test_conversations_are_a_function_of_the_seed() -> None:
    first, again = (generate.conversation(random.Random("a"), 800) for _ in range(2))
    assert first == again
    assert first != generate.conversation(random.Random("b"), 800)


def test_conversations_alternate_turns_and_ask_only_stated_facts() -> None:
    recalled = 0
    for rng in rngs(60):
        turns = generate.conversation(rng, 600)
        spoken = [turn for turn in turns if turn.role != "system"]
        assert {turn.role for turn in turns[1:]} <= {"user", "assistant", "tool"}
        assert [turn.role == "assistant" for turn in spoken] == [False, True] * (len(spoken) // 2)
        for slot, turn in enumerate(turns):
            if turn.kind == "recall" and turn.role == "assistant":
                recalled += 1
                assert any(turn.text in before.text for before in turns[: slot - 1])
    assert recalled > 50


def test_conversations_have_about_the_wanted_length(tokenizer: Tokenizer) -> None:
    sizes = [
        len(tokenizer.encode(render(generate.conversation(rng, 1000)), special=True))
        for rng in rngs(10)
    ]
    assert 950 < sorted(sizes)[5] < 1500


def test_sum_tasks_have_the_right_answer() -> None:
    for rng in rngs(300):
        answer = generate.arithmetic(rng)[1][1]
        a, sign, b, result = re.match(r"(\d+) ([-+*]) (\d+) = (\d+)\.", answer).groups()  # type: ignore[union-attr]
        known = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}
        assert known[sign] == int(result)


def test_list_tasks_answer_with_the_whole_list() -> None:
    for rng in rngs(100):
        (_, asked), (_, answer) = generate.reverse(rng)
        items = asked.split(": ")[1].rstrip(".").split(", ")
        assert answer == ", ".join(items[::-1]) + "."
    for rng in rngs(100):
        (_, asked), (_, answer) = generate.copy(rng)
        assert asked.endswith(answer)


def test_story_questions_are_answered_from_the_story() -> None:
    for rng in rngs(100):
        story = stories.tell(rng)
        for _, answer in story.questions:
            said = set(re.findall(r"\w+", story.text.lower()))
            missing = set(re.findall(r"\w+", answer.lower())) - said
            grammar = {"the", "was", "it", "happened", "on", "is", "of", "friend", "in", "a", "an"}
            assert missing <= {*grammar, "gave", "had", "to", "some", "at", "named"}, answer


def test_tool_calls_fit_their_schema() -> None:
    for name, tool in tools.TOOLS.items():
        for rng in rngs(20):
            use = tool.use(rng)
            body = use.call.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
            call = json.loads(body)
            assert call["name"] == name
            assert list(call["arguments"]) == list(tool.parameters)
            kinds = {"string": str, "integer": int}
            for key, value in call["arguments"].items():
                assert isinstance(value, kinds[tool.parameters[key]])
            json.loads(use.result)


def test_recall_items_have_the_wanted_distance(tokenizer: Tokenizer) -> None:
    def measure(exchange: generate.Exchange) -> int:
        return len(tokenizer.encode(render([Turn(*turn) for turn in exchange]), special=True)) - 3

    for distance in (64, 512, 2048):
        item = generate.recall_item(random.Random(distance), distance, measure)
        between = measure([(turn.role, turn.text) for turn in item.turns[2:-1]])
        assert distance - 40 <= between <= distance + 60


# --- the file ------------------------------------------------------------------------------------


def test_the_shipped_file_has_the_shape_and_types_of_an_export(
    pocket_path: Path, tokenizer: Tokenizer
) -> None:
    reader = gguf.GGUFReader(pocket_path)
    shape = export.Shape()
    assert pocket_path.stat().st_size < 3_000_000
    assert reader.fields["general.architecture"].contents() == "qwen3"
    assert tokenizer.vocab_size == shape.vocab
    held = {tensor.name: tensor for tensor in reader.tensors}
    wanted = export.tensor_shapes(shape)
    assert set(held) == set(wanted)
    for name, size in wanted.items():
        assert tuple(int(n) for n in held[name].shape[::-1]) == size
        assert held[name].tensor_type.name == ("Q4_0" if len(size) == 2 else "F32")


def test_the_template_of_the_trainer_renders_as_the_shipped_one(tokenizer: Tokenizer) -> None:
    today = datetime.date(2026, 2, 3)
    ours = Renderer(export.CHAT_TEMPLATE, today, 1 << 20)
    shipped = Renderer(tokenizer.chat_template, today, 1 << 20)
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    chats = [(list(case.messages), list(case.tools)) for case in oracle.load()[::7]]
    chats.append(
        (
            [
                {"role": "user", "content": "Add 1 and 2 with the tool."},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": '{"result": 3}'},
            ],
            [tools.TOOLS["add"].schema()],
        )
    )
    for messages, listed in chats:
        chat = {"messages": prepare_messages(messages), "tools": listed or None}
        assert ours.render(chat) == shipped.render(chat)
    assert '{"name": "add", "arguments": {"a": 1, "b": 2}}' in ours.render(chat)


blocks = arrays.arrays(
    np.float32,
    (3, 64),
    elements=st.one_of(
        # Below that, the inverse of a scale is infinite and the reference is undefined.
        st.floats(-10, 10, width=32).filter(lambda value: value == 0 or abs(value) > 1e-30),
        st.sampled_from([0.0, -0.0, 1e-8, -8.0, 8.0, 0.5, -0.5, 1.0]),
    ),
)


@settings(max_examples=80, deadline=None)
@given(blocks)
def test_quantiser_writes_the_reference_bytes(matrix: np.ndarray) -> None:
    wanted = gguf.quants.quantize(matrix, gguf.GGMLQuantizationType.Q4_0)
    assert np.array_equal(export.quantise_q4_0(matrix), wanted)


def test_an_exported_file_runs(tmp_path: Path, pocket_path: Path) -> None:
    """Random weights, two layers: the file loads in llama.cpp and generates text."""
    fields = gguf.GGUFReader(pocket_path).fields
    texts, kinds, merges = (
        fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "token_type", "merges")
    )
    shape = export.Shape(layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32, ffn=96)
    rng = np.random.default_rng(1)
    weights = {
        name: rng.normal(0, 0.1, size).astype(np.float32)
        for name, size in export.tensor_shapes(shape).items()
    }
    for quantised in (True, False):
        path = tmp_path / f"{quantised}.gguf"
        export.write(path, shape, weights, texts, kinds, merges, quantised=quantised)
        reference = Reference(path, context_tokens=64)
        answer = reference.greedy(reference.encode(render([Turn("user", "Hello!")])), 4)
        assert np.isfinite(answer.gap_min)
        reference.close()
    surplus = {**weights, "extra": weights["output_norm.weight"]}
    with pytest.raises(ValueError, match="extra"):
        export.write(tmp_path / "x", shape, surplus, texts, kinds, merges)
    weights["output_norm.weight"] = weights["output_norm.weight"][:-1]
    with pytest.raises(ValueError, match=r"output_norm\.weight is \(63,\)"):
        export.write(tmp_path / "x", shape, weights, texts, kinds, merges)


# --- evaluation and oracle ------------------------------------------------------------------------


def test_score_counts_whole_answers() -> None:
    items = [generate.task_item(random.Random(n), task) for task in evaluate.TASKS for n in (1, 2)]
    known = {item.turns: item.answer for item in items}
    perfect = evaluate.score(items, lambda turns: known[turns])
    assert {row["percent"] for row in perfect.values()} == {100.0}
    assert {row["n"] for row in perfect.values()} == {2}
    wrong = evaluate.score(items, lambda turns: known[turns] + "!")
    assert {row["right"] for row in wrong.values()} == {0}


def test_the_cases_of_the_oracle_file_are_valid(tokenizer: Tokenizer) -> None:
    cases = oracle.load()
    assert oracle.PATH.stat().st_size < 1_500_000
    assert len(cases) >= 60
    assert {case.distance for case in cases} >= {0, 64, 256, 1024, 2048, 4096}
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert case.gap_min >= oracle.GAP_MIN
        assert len(tokenizer.encode(case.prompt, special=True)) == case.prompt_tokens
        assert b"".join(map(tokenizer.piece, case.answer_tokens)).decode() == case.answer


async def test_oracle_prompts_equal_those_of_the_daemon(pocket_path: Path) -> None:
    text = await TextFrontend.open(pocket_path)
    for case in oracle.load():
        tokens = await text.encode_chat(case.messages, case.tools or None)
        assert tokens == await text.encode(case.prompt, special=True)
    await text.close()


def test_oracle_answers_are_those_of_llama_cpp(pocket_path: Path) -> None:
    reference = Reference(pocket_path, context_tokens=1536)
    checked = [case for case in oracle.load() if case.prompt_tokens < 1300][::2]
    assert len(checked) > 20
    for case in checked:
        answer = reference.greedy(reference.encode(case.prompt))
        assert (answer.text, answer.tokens) == (case.answer, case.answer_tokens), case.name
        assert answer.gap_min == pytest.approx(case.gap_min, abs=0.25)
    reference.close()


# --- the trainer (torch is an optional extra) ---------------------------------------------------


def test_the_trainer_reduces_the_loss_resumes_and_exports(
    tmp_path: Path, pocket_path: Path
) -> None:
    torch = pytest.importorskip("torch", reason="the train extra is not installed")
    pytest.importorskip("tokenizers", reason="the train extra is not installed")
    from pocket.bpe import Vocabulary
    from pocket.net import round_to_q4_0
    from pocket.train import PLANS, load_weights, train

    torch.set_num_threads(1)
    vocabulary, plan = Vocabulary.load(pocket_path), PLANS["tiny"]
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    losses = train(whole, plan, vocabulary, dtype=torch.float32)
    assert sum(losses[-5:]) / 5 < 0.6 * losses[0]
    resumed = train(parts, plan, vocabulary, stop_after=23, dtype=torch.float32)
    resumed += train(parts, plan, vocabulary, dtype=torch.float32)
    assert resumed == losses

    shape, weights, _ = load_weights(whole)
    path = tmp_path / "tiny.gguf"
    export.write(path, shape, weights, vocabulary.tokens, vocabulary.kinds, vocabulary.merges)
    held = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for name, array in weights.items():
        if array.ndim == 2:
            decoded = gguf.quants.dequantize(held[name].data, gguf.GGMLQuantizationType.Q4_0)
            assert np.array_equal(decoded, round_to_q4_0(torch.from_numpy(array)).numpy())
    reference = Reference(path, context_tokens=64)
    assert len(reference.greedy(reference.encode(render([Turn("user", "Hello!")])), 8).tokens) > 0
    reference.close()
