"""Linked daemons with a model of latent attention, whose pages have one KV head for all queries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from batchengine.engine.linked.routes import why_unheld
from batchengine.policy.linked.layouts import Rejected
from bench.models.shapes import PRESETS
from bench.models.synthetic import write_synthetic
from kv_store.layout import KvHeads, PageLayout
from tests.engine.linked import daemons, test_daemons, test_pipelines
from tests.support.engines import Reference, Site

SHAPE = replace(PRESETS["deepseek2-tiny"], n_vocab=2000)
PAGE_BYTES = 196_608  # of its pages


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


async def test_pages_may_lie_with_a_peer(site: Site, reference: Reference) -> None:
    await test_daemons.test_a_context_larger_than_one_budget(site, reference)


async def test_prompts_go_through_a_pipeline(site: Site, reference: Reference) -> None:
    await test_pipelines.test_a_lost_stage_costs_time_only(site, reference)


@pytest.mark.parametrize(
    ("layout", "n_head", "tokens", "expected"),
    [
        (PageLayout.uniform(47, 1, 576, 64), 20, 640, None),  # GLM-4.7-Flash
        (PageLayout.uniform(61, 1, 576, 64), 64, 640, Rejected.LONG_STEPS),  # Kimi K2: 90 MiB
        (PageLayout.uniform(61, 1, 576, 64), 64, 400, None),
        (PageLayout.uniform(80, 8, 128), 64, 640, None),
        (PageLayout((KvHeads(1, 32), KvHeads(1, 64))), 1, 32, Rejected.OWN_HEADS),
        (PageLayout.uniform(45, 8, 128), 0, 32, Rejected.OWN_HEADS),  # query heads by layer
    ],
)
def test_pages_of_models_whose_steps_are_no_message_stay(
    layout: PageLayout, n_head: int, tokens: int, expected: Rejected | None
) -> None:
    assert why_unheld(layout, n_head, tokens) == expected
