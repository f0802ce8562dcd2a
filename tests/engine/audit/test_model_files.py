"""Changes of the model's files on disk under a running engine: which requests are served, and what
is reported."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from batchengine import errors
from batchengine.core import BatchEngineError, Kind
from batchengine.engine.audit import model_files, scrub
from batchengine.engine.audit.model_files import identity_of
from batchengine.weights import read_fingerprint
from tests.conftest import ROOT
from tests.support.engines import (
    Reference,
    Site,
    read,
    request,
    running_engine,
    unread,
    until,
    words,
)


def with_own_model(site: Site) -> Site:
    """The same site with a copy of the model, which the test may change."""
    model = site.folder / "model.gguf"
    shutil.copyfile(site.model, model)
    return dataclasses.replace(site, model=model)


def overwrite(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


async def test_a_replaced_model_file_ends_admission_and_no_running_turn(
    site: Site, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F11: another file under the model's name ends admission, and running turns continue."""
    own, prompt = with_own_model(site), words(31, 40)
    monkeypatch.setattr(scrub, "WATCH_S", 0.05)
    async with running_engine(own) as engine:
        generation = await unread(engine, request(prompt, 520), 2)
        shutil.copyfile(site.model, site.folder / "new")
        (site.folder / "new").rename(own.model)
        await until(lambda: engine.phase == "refusing")
        assert not generation.finished
        with pytest.raises(BatchEngineError) as caught:
            engine.submit(request(prompt, 5))
        assert caught.value.name == "model_changed"
        assert caught.value.kind is Kind.UNAVAILABLE
        assert "restart" in caught.value.fix
        await until(lambda: b"batchengine_serving 0.0" in engine.metrics.render()[0])
        assert (await read(generation)).tokens == reference.tokens(prompt, 520)


async def test_the_model_file_is_checked_when_a_session_is_reopened(site: Site) -> None:
    """Not only once a minute."""
    own = with_own_model(site)
    async with running_engine(own) as engine:
        overwrite(own.model, own.model.stat().st_size, b"more")
        answer = await read(engine.submit(request(words(32, 20), 5, session="s")))
        assert answer.error is not None
        assert answer.error.name == "model_changed"


def hard_link(model: Path) -> None:
    os.link(model, model.with_name("link"))


def make_private(model: Path) -> None:
    model.chmod(0o400)


def write_the_same(model: Path) -> None:
    overwrite(model, 0, b"GGUF")


@pytest.mark.parametrize("touch", [hard_link, Path.touch, make_private, write_the_same])
async def test_a_model_file_with_new_times_and_equal_bytes_is_accepted(
    site: Site,
    reference: Reference,
    touch: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Also by the next worker."""
    own, prompt = with_own_model(site), words(34, 20)
    own, model = dataclasses.replace(own, cache_dir=site.folder / "cache"), own.model
    monkeypatch.setattr(scrub, "WATCH_S", 0.05)
    caplog.set_level(logging.INFO, "batchengine.audit")

    async with running_engine(own) as engine:
        before = identity_of(model)
        touch(model)
        assert identity_of(model) != before
        answer = await read(engine.submit(request(prompt, 5, session="s")))
        assert answer.tokens == reference.tokens(prompt, 5)
        files = engine.running.maintenance._files
        await until(lambda: files._identity == identity_of(model))
        assert engine.phase == "ready"
        assert caplog.text.count("still the model that was loaded") == 1
        os.kill(int(engine.lanes()[0]["pid"]), signal.SIGKILL)
        await until(lambda: engine.lanes()[0]["incarnation"] == 2)
        await until(lambda: "made again from the same model" in caplog.text)
        await until(lambda: engine.phase == "ready")
        answer = await read(engine.submit(request(prompt, 5, session="t")))
        assert answer.tokens == reference.tokens(prompt, 5)


@pytest.mark.parametrize("at", [8, -1000])
async def test_a_model_file_overwritten_in_place_ends_admission_when_read_again(
    site: Site, at: int, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of the header or the last tensor, of the same size, is detected; no lane uses it."""
    own, prompt = with_own_model(site), words(35, 20)
    model = own.model
    monkeypatch.setattr(scrub, "WATCH_S", 0.05)
    async with running_engine(own) as engine:
        generation = engine.submit(request(prompt, 300))
        where = at % model.stat().st_size
        byte = model.read_bytes()[where]
        overwrite(model, where, bytes([byte ^ 1]))
        await until(lambda: engine.phase == "refusing")
        with pytest.raises(BatchEngineError) as caught:
            engine.submit(request(prompt, 5))
        assert caught.value.name == "model_changed"
        assert "overwritten" in caught.value.why
        assert (await read(generation)).tokens == reference.tokens(prompt, 300)


async def test_a_model_file_that_cannot_be_read_is_reported_until_it_can_be(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The read error is simulated, because root can read any file."""
    own = with_own_model(site)
    monkeypatch.setattr(scrub, "WATCH_S", 0.05)
    refused = [True]

    def read_again(path: Path, is_cancelled: Callable[[], bool]) -> object:
        if refused:
            raise errors.MODEL_UNREADABLE(path="model", why="permission denied")
        return read_fingerprint(path, is_cancelled)

    monkeypatch.setattr(model_files, "read_fingerprint", read_again)

    async with running_engine(own) as engine:
        own.model.touch()
        await until(lambda: "cannot be read" in str(engine.stats()["troubles"]))
        assert (await read(engine.submit(request(words(36, 20), 5)))).done is not None
        refused.clear()
        await until(lambda: engine.phase == "ready")


def test_reading_a_model_again_can_be_stopped(pocket_path: Path) -> None:
    assert read_fingerprint(pocket_path, lambda: True) is None
    assert read_fingerprint(pocket_path, lambda: False) is not None


async def test_weights_overwritten_in_place_drain_lanes_and_touched_ones_do_not(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write into the packed file, which lanes map, drains them; other times change nothing."""
    monkeypatch.setattr(scrub, "WATCH_S", 0.05)

    own = dataclasses.replace(site, cache_dir=site.folder / "cache")
    async with running_engine(own) as engine:
        (packed,) = own.cache_dir.glob("*.weights")
        packed.touch()
        await asyncio.sleep(0.5)
        assert engine.phase == "ready"
        generation = await unread(engine, request(words(33, 20), 2000), 2)
        overwrite(packed, 4096, bytes(64))
        await until(lambda: generation.finished)
        answer = await read(generation)
        assert answer.error is not None
        assert answer.error.name == "model_changed"
        assert engine.lanes()[0]["state"] == "drained"


CUT_WHILE_HASHED = """
import asyncio, os, sys
from pathlib import Path
import xxhash
from batchengine.weights import cache
from tests.support.engines import Site, read, request, running_engine, words

folder = Path(sys.argv[2])

class Cutting:
    def __init__(self):
        hashed = xxhash.xxh3_128()
        os.truncate(packed, 4096)
        self.update, self.digest = hashed.update, hashed.digest

async def main():
    global packed
    async with running_engine(Site(Path(sys.argv[1]), folder, folder / "cache")) as engine:
        (packed,) = (folder / "cache").glob("*.weights")
        packed.touch()
        cache.xxhash = type("Hashes", (), {"xxh3_128": Cutting})
        answer = await read(engine.submit(request(words(37, 20), 5, session="s")))
        print(answer.error.name)

asyncio.run(main())
"""


def test_weights_cut_short_while_they_are_hashed_do_not_end_the_engine(site: Site) -> None:
    """In a process of its own, which a SIGBUS would end."""
    command = [sys.executable, "-c", CUT_WHILE_HASHED, str(site.model), str(site.folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout) == (0, "model_changed\n"), done.stderr[-2000:]
