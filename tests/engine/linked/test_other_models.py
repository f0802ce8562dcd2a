"""Pages that lie with daemons of other models: attention computed there gives the same tokens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.models.synthetic import Shape, write_synthetic
from tests.engine.linked.daemons import Daemon, daemon
from tests.engine.linked.test_daemons import OPEN_PAGES, holders, nothing_is_held
from tests.support.engines import Reference, Site, read, request, until, words

SHAPE = Shape(n_layer=2, n_embd=128, n_ff=256, n_head=6, n_kv_head=2, head_dim=64, n_vocab=2000)
N_PAGES = 24  # of the pocket model, in each store


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with other layers, heads and dimensions than the pocket model."""
    path = tmp_path_factory.mktemp("model") / "other.gguf"
    write_synthetic(path, replace(SHAPE, context=1 << 15))
    return path


@pytest.fixture(scope="module")
def other_reference(other_model: Path, cache_dir: Path) -> Iterator[Reference]:
    """Answers of that model when it computes one timeline alone."""
    made = Reference(other_model, cache_dir)
    yield made
    made.close()


@contextlib.asynccontextmanager
async def pair(
    site: Site, other_model: Path, n_pages: int = N_PAGES, **overrides: object
) -> AsyncIterator[tuple[Daemon, Daemon]]:
    """Daemon a with the pocket model, and b with another one; each knows the other."""
    other = Site(other_model, site.folder, site.cache_dir)
    async with (
        daemon(site, "a", n_pages, **overrides) as a,
        daemon(other, "b", n_pages, **overrides) as b,
    ):
        a.knows(b)
        b.knows(a)
        await until(lambda: a.is_linked(b) and b.is_linked(a))
        await until(lambda: a.beyond() >= 8 and b.beyond() >= 8)
        yield a, b


async def test_a_context_larger_than_a_store_lies_with_a_daemon_of_another_model(
    site: Site, reference: Reference, other_model: Path, other_reference: Reference
) -> None:
    """Both daemons answer meanwhile. Once its session is dropped, nothing of it is left there."""
    async with pair(site, other_model) as (a, b):
        ids, own = words(1, 256 * (a.pages() + OPEN_PAGES) + 300), words(2, 900)
        answers = await asyncio.gather(
            read(a.engine.submit(request(ids, 40, session="s"))),
            read(b.engine.submit(request(own, 40))),
        )
        for answer, prompt, right in zip(
            answers, (ids, own), (reference, other_reference), strict=True
        ):
            assert answer.error is None
            assert answer.tokens == right.tokens(prompt, 40)
        assert {peer for peer, _ in holders(a, "s")} == {"b"}
        await until(lambda: a.linked.taken.n_pages == b.linked.given.n_pages >= 8)
        b.linked.given.check()
        row = a.engine.running.peers.links["b"].row()
        assert row["differs"] == ["model", "repr_id"]
        assert not row["why"]
        more = [*ids, *answers[0].tokens, *words(3, 300)]
        answer = await read(a.engine.submit(request(more, 20, session="s")))
        assert answer.tokens == reference.tokens(more, 20)
        await a.engine.drop("", "s")
        await nothing_is_held(a, b)
        others = b.linked.formats
        await until(lambda: others.other_bytes == 0)
        await until(lambda: not b.state.lanes[0].seats.pages_lent)  # the room is b's own again
