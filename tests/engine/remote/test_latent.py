"""Linked daemons with a model of latent attention, whose pages have one KV head for all queries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from batchengine.engine.linked import routes
from batchengine.engine.linked.holds import HoldRefused, _shape
from batchengine.engine.linked.routes import why_unheld
from batchengine.policy.linked.layouts import Rejected
from batchengine.policy.linked.routes import GrowthPolicy
from bench.models.shapes import PRESETS
from bench.models.synthetic import write_synthetic
from kv_store.layout import Descriptor, KvHeads, PageLayout
from tests.engine.linked import daemons, test_daemons
from tests.engine.linked.daemons import daemon
from tests.engine.linked.pipelines import test_pipelines
from tests.support.engines import Reference, Site, read, request, unread, until, words

SHAPE = replace(PRESETS["deepseek2-tiny"], n_vocab=2000)
PAGE_BYTES = 196_608  # of its pages
# The attention of DeepSeek V2 and V3, in one layer.
WIDE = replace(
    SHAPE, n_layer=1, n_dense=0, n_head=128, head_dim=576, n_rot=64, kv_rank=512, context=1 << 15
)
WIDE_PAGE_BYTES = PageLayout.uniform(1, 1, 576, 64).page_bytes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    write_synthetic(path, SHAPE)
    return path


@pytest.fixture
def site(model: Path, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setattr(daemons, "PAGE_BYTES", PAGE_BYTES)
    return Site(model, tmp_path, cache_dir)


@pytest.fixture(scope="module")
def reference(model: Path, cache_dir: Path) -> Iterator[Reference]:
    made = Reference(model, cache_dir)
    yield made
    made.close()


@pytest.mark.slow
async def test_pages_may_lie_with_a_peer(site: Site, reference: Reference) -> None:
    await test_daemons.test_a_context_larger_than_one_budget(site, reference)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "wide.gguf"
    write_synthetic(path, WIDE)
    return path


@pytest.fixture(scope="module")
def wide_reference(wide: Path, cache_dir: Path) -> Iterator[Reference]:
    """Answers of that model when it computes one timeline alone."""
    made = Reference(wide, cache_dir)
    yield made
    made.close()


@pytest.mark.parametrize(
    "is_same",
    [
        pytest.param(True, id="of the same model"),
        pytest.param(False, id="of another model", marks=pytest.mark.slow),
    ],
)
async def test_128_heads_attend_to_pages_at_a_peer(
    site: Site,
    wide: Path,
    wide_reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_same: bool,
) -> None:
    """In decodes and in a chunk of a prompt: of 200 tokens, what all heads accumulate in a layer
    takes 50 MiB, more than may be under way."""
    monkeypatch.setattr(daemons, "PAGE_BYTES", WIDE_PAGE_BYTES)
    monkeypatch.setattr(routes, "GROWING", GrowthPolicy(tail_pages=0))  # a shorter prompt does
    monkeypatch.setattr(routes.RouteKeeper, "why_slow", lambda *_: "")  # on a busy machine
    own = Site(wide, site.folder, site.cache_dir)
    async with daemon(own if is_same else site, "a", 24) as a, daemon(own, "b", 24) as b:
        a.knows(b)
        b.knows(a)
        await until(lambda: b.beyond() >= 8 and b.is_linked(a))
        prompt, keeper = words(5, 256 * 4 + 9), b.linked.keeper
        generation = await unread(b.engine, request(prompt, 520, session="s"), 5)
        session = b.state.sessions["", "s"]
        keeper.want(session, 4)
        await until(lambda: session.kv.n_held >= 4 and not keeper.moves)
        generation.cancel()
        await until(lambda: not b.state.turns)
        longer = [*prompt, *words(7, 200)]
        answer = await read(b.engine.submit(request(longer, 10, session="s")))
        assert {peer for peer, _ in test_daemons.holders(b, "s")} == {"a"}
        assert answer.tokens == wide_reference.tokens(longer, 10)  # which keeps the links waiting
        await b.engine.drop("", "s")
        await test_daemons.nothing_is_held(a, b)
        assert b.engine.info.fingerprint.endswith("-kv8-mla-v1")


def test_heads_of_other_models_are_computed_up_to_a_bound() -> None:
    """Buffers of workers grow with them."""
    descriptor = Descriptor("", "", "deepseek2", PageLayout.uniform(61, 1, 576, 64))
    assert _shape(descriptor, 128).n_head == 128
    for n_head in (228, 1 << 40):
        with pytest.raises(HoldRefused, match="is not computed here"):
            _shape(descriptor, n_head)


async def test_prompts_go_through_a_pipeline(site: Site, reference: Reference) -> None:
    await test_pipelines.test_a_lost_stage_costs_time_only(site, reference)


@pytest.mark.parametrize(
    ("layout", "n_head", "tokens", "expected"),
    [
        (PageLayout.uniform(47, 1, 576, 64), 20, 640, None),  # GLM-4.7-Flash
        (PageLayout.uniform(61, 1, 576, 64), 128, 640, None),  # DeepSeek V3
        (PageLayout.uniform(61, 1, 576, 64), 128, 32_000, None),  # 63 MiB for each head
        (PageLayout.uniform(61, 1, 576, 64), 128, 33_000, Rejected.LONG_STEPS),
        (PageLayout.uniform(80, 8, 128), 64, 640, None),
        (PageLayout((KvHeads(1, 32), KvHeads(1, 64))), 1, 32, Rejected.OWN_HEADS),
        (PageLayout.uniform(45, 8, 128), 0, 32, Rejected.OWN_HEADS),  # query heads by layer
    ],
)
def test_pages_of_models_whose_steps_are_no_message_stay(
    layout: PageLayout, n_head: int, tokens: int, expected: Rejected | None
) -> None:
    assert why_unheld(layout, n_head, tokens) == expected
