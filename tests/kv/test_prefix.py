"""Published pages of a prefix: matching, pinning, and the effect of an invalid page."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from batchengine.session import Loss, Session
from kv_store import keys
from kv_store.layout import PAGE_TOKENS
from kv_store.pages import load
from tests.kv import scene as lane_scene
from tests.kv.scene import Scene
from tests.support import kv_scene

tmp_path, scene = kv_scene.tmp_path, lane_scene.scene


def pinned(scene: Scene) -> int:
    return int(scene.store.stat()["pages_pinned"])


def extend(scene: Scene, session: Session) -> None:
    assert scene.pages.prefix.extend(session, session.salt, 0) is None
    session.check()


@pytest.mark.parametrize(("n_tokens", "n_pages"), [(700, 2), (513, 2), (512, 1), (256, 0)])
def test_matched_pages_never_cover_the_last_token(
    scene: Scene, n_tokens: int, n_pages: int
) -> None:
    scene.seal(2)
    other = scene.member(2, n_tokens)
    extend(scene, other)
    assert other.kv.sealed == scene.session.kv.sealed[:n_pages]
    assert other.kv.keys == scene.session.kv.keys[:n_pages]
    assert other.frontier == n_pages * PAGE_TOKENS


def test_pages_that_were_found_are_not_hashed_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the event loop, of a prompt of 100,000 tokens; nor is there a future for each page."""
    scene.seal(3)
    hashed = list[object]()
    content_key = keys.content_key

    def counted(*args: Any) -> bytes:
        hashed.append(args)
        return content_key(*args)

    monkeypatch.setattr(keys, "content_key", counted)
    monkeypatch.setattr(load, "new_future", lambda: hashed.append("future") or Future())
    other = scene.member(2, 800)
    assert scene.pages.prefix.stored_tokens(other.tokens, other.salt) == 3 * PAGE_TOKENS
    extend(scene, other)
    assert len(other.kv.sealed) == 3
    assert len(hashed) == 3  # the first page by both, and the future of all pages
    monkeypatch.undo()
    assert other.kv.keys == scene.pages.prefix.page_keys(other.tokens, other.salt)


def test_pages_of_another_tenant_are_not_matched(scene: Scene) -> None:
    scene.seal(1)
    other = scene.member(2, 700)
    assert scene.pages.prefix.extend(other, b"stranger", 0) is None
    assert not other.kv.sealed


def test_own_rows_that_cover_the_prefix_stay_and_no_page_is_pinned(scene: Scene) -> None:
    scene.seal(2)
    other = scene.member(2, 700)
    assert scene.pages.slots.ensure(other, 600)
    other.frontier = 600
    before, slots = pinned(scene), list(other.kv.open)
    extend(scene, other)
    assert (other.frontier, other.kv.open, pinned(scene)) == (600, slots, before)


@pytest.mark.parametrize("is_worth", [False, True])
def test_pages_on_disk_are_matched_where_reading_beats_computing(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, is_worth: bool
) -> None:
    scene.seal(3)
    asked = list[tuple[int, int]]()

    def is_worth_reading(tokens: int, cold_tokens: int, cold_bytes: int) -> bool:
        assert cold_bytes == scene.store.pages.layout.page_bytes
        asked.append((tokens, cold_tokens))
        return is_worth

    monkeypatch.setattr(scene.store.pages, "cold", lambda refs: [False, True, False])
    other = scene.member(2, 800)
    scene.pages.prefix.extend(other, other.salt, 0, is_worth_reading)
    assert asked == [(768, 512)]
    assert len(other.kv.sealed) == (3 if is_worth else 1)
    assert scene.store.pages.index.get(scene.session.kv.sealed[2]).pins == 1 + is_worth


@pytest.mark.parametrize("fault", ["it does not verify", "it is invalid since", "it is gone"])
def test_the_frontier_ends_before_an_invalid_page(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    scene.seal(3)
    other, reading = scene.member(2, 800), Future[list[bool]]()
    monkeypatch.setattr(scene.store.pages, "load", lambda refs: reading)
    assert scene.pages.prefix.extend(other, other.salt, 0) is reading
    good = [True, True, True]
    if fault == "it does not verify":
        good[1] = False
    elif fault == "it is invalid since":
        scene.store.pages.invalidate(other.kv.sealed[1])
    else:
        scene.pages.slots.truncate(other, 1)
    scene.pages.prefix.loaded(other, good)
    other.check()
    assert len(other.kv.sealed) == 1
    assert other.frontier == PAGE_TOKENS
    assert other.loss is (None if fault == "it is gone" else Loss.CHECKSUM)
