"""A model whose queries see a window, and which has sinks: pages of its sessions at peers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.models.synthetic import PRESETS, write_synthetic
from tests.engine.linked.test_daemons import holders, nothing_is_held
from tests.engine.remote.test_other_models import pair
from tests.support.engines import Reference, Site, read, request, unread, until, words


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gpt-oss in small: of four layers two have a window of 40 positions."""
    path = tmp_path_factory.mktemp("model") / "windowed.gguf"
    write_synthetic(path, replace(PRESETS["gpt-oss-tiny"], n_vocab=2000))
    return path


@pytest.fixture(scope="module")
def windowed_reference(windowed: Path, cache_dir: Path) -> Iterator[Reference]:
    """Answers of that model when it computes one timeline alone."""
    made = Reference(windowed, cache_dir)
    yield made
    made.close()


async def test_a_peer_attends_for_the_layers_that_see_its_pages(
    site: Site, windowed: Path, windowed_reference: Reference
) -> None:
    """The peer serves another model, so it knows of windows and sinks what a query says."""
    async with pair(site, windowed) as (a, b):
        prompt = words(5, 256 * 12)
        answer = await read(b.engine.submit(request(prompt, 5, session="s")))
        assert answer.tokens == windowed_reference.tokens(prompt, 5)
        session, keeper = b.state.sessions["", "s"], b.linked.keeper
        more = [*prompt, *answer.tokens, 7]
        generation = await unread(b.engine, request(more, 520, session="s"), 5)
        keeper.want(session, 8)
        await until(lambda: session.kv.n_held >= 8 and not keeper.moves)
        answer = await read(generation)
        assert answer.tokens == windowed_reference.tokens(more, 520)
        assert {peer for peer, _ in holders(b, "s")} == {"a"}
        assert b.linked.taken.n_pages >= 8
        longer = [*more, *answer.tokens, *words(6, 700)]
        answer = await read(b.engine.submit(request(longer, 40, session="s")))
        assert answer.tokens == windowed_reference.tokens(longer, 40)
        await b.engine.drop("", "s")
        await nothing_is_held(a, b)
