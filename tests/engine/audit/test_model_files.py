"""The model's files on disk change under a running engine: who is served, and what is said."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from batchengine import errors
from batchengine.core import BatchEngineError, Kind
from batchengine.engine.audit import model_files, scrub
from batchengine.engine.audit.model_files import identity_of
from batchengine.weights import read_fingerprint
from tests.support.engines import Reference, read, request, run, running_engine, until, words


@pytest.fixture(scope="module")
def reference(pocket_path: Path, cache_dir: Path) -> Iterator[Reference]:
    made = Reference(pocket_path, cache_dir)
    yield made
    made.close()


def overwrite(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


def test_a_replaced_model_file_ends_admission_not_running_turns(
    pocket_path: Path, tmp_path: Path, cache_dir: Path, reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """F11: another file under the name it was loaded from."""
    model, prompt = tmp_path / "model.gguf", words(31, 40)
    shutil.copyfile(pocket_path, model)
    monkeypatch.setattr(scrub, "WATCH_S", 0.05)

    async def work() -> None:
        async with running_engine(model, tmp_path, cache_dir) as engine:
            generation = engine.submit(request(prompt, 300))
            task = asyncio.ensure_future(read(generation))
            await until(lambda: generation.completion_tokens > 2)
            shutil.copyfile(pocket_path, tmp_path / "new")
            (tmp_path / "new").rename(model)
            await until(lambda: engine.phase == "degraded")
            assert not generation.finished
            with pytest.raises(BatchEngineError) as caught:
                engine.submit(request(prompt, 5))
            assert caught.value.name == "model_changed"
            assert caught.value.kind is Kind.UNAVAILABLE
            assert "restart" in caught.value.fix
            assert (await task).tokens == reference.tokens(prompt, 300)

    run(work())


def test_a_session_that_reopens_asks_for_the_model_at_once(
    pocket_path: Path, tmp_path: Path, cache_dir: Path
) -> None:
    """Not only once a minute."""
    model = tmp_path / "model.gguf"
    shutil.copyfile(pocket_path, model)

    async def work() -> None:
        async with running_engine(model, tmp_path, cache_dir) as engine:
            overwrite(model, model.stat().st_size, b"more")
            answer = await read(engine.submit(request(words(32, 20), 5, session="s")))
            assert answer.error is not None
            assert answer.error.name == "model_changed"

    run(work())


def hard_link(model: Path) -> None:
    os.link(model, model.with_name("link"))


def make_private(model: Path) -> None:
    model.chmod(0o400)


def write_the_same(model: Path) -> None:
    overwrite(model, 0, b"GGUF")


@pytest.mark.parametrize("touch", [hard_link, Path.touch, make_private, write_the_same])
def test_a_model_file_that_was_only_touched_changes_nothing(
    pocket_path: Path, tmp_path: Path, reference: Reference, touch: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Its times differ, its bytes do not: requests go on, also on a worker that starts again."""
    model, prompt = tmp_path / "model.gguf", words(34, 20)
    shutil.copyfile(pocket_path, model)
    monkeypatch.setattr(scrub, "WATCH_S", 0.05)
    caplog.set_level(logging.INFO, "batchengine.engine")

    async def work() -> None:
        async with running_engine(model, tmp_path, tmp_path / "cache") as engine:
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

    run(work())


@pytest.mark.parametrize("at", [8, -1000])
def test_a_model_file_overwritten_in_place_ends_admission_once_it_was_read(
    pocket_path: Path, tmp_path: Path, cache_dir: Path, at: int, reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of the same size, in its header or its last tensor. No lane computes from it meanwhile."""
    model, prompt = tmp_path / "model.gguf", words(35, 20)
    shutil.copyfile(pocket_path, model)
    monkeypatch.setattr(scrub, "WATCH_S", 0.05)

    async def work() -> None:
        async with running_engine(model, tmp_path, cache_dir) as engine:
            generation = engine.submit(request(prompt, 300))
            where = at % model.stat().st_size
            byte = model.read_bytes()[where]
            overwrite(model, where, bytes([byte ^ 1]))
            await until(lambda: engine.phase == "degraded")
            with pytest.raises(BatchEngineError) as caught:
                engine.submit(request(prompt, 5))
            assert caught.value.name == "model_changed"
            assert "overwritten" in caught.value.why
            assert (await read(generation)).tokens == reference.tokens(prompt, 300)

    run(work())


def test_a_model_file_that_cannot_be_read_is_reported_until_it_can_be(
    pocket_path: Path, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A root user opens what it likes, so the rights are taken away by hand."""
    model = tmp_path / "model.gguf"
    shutil.copyfile(pocket_path, model)
    monkeypatch.setattr(scrub, "WATCH_S", 0.05)
    refused = [True]

    def read_again(path: Path, is_cancelled: Callable[[], bool]) -> object:
        if refused:
            raise errors.MODEL_UNREADABLE(path="model", why="permission denied")
        return read_fingerprint(path, is_cancelled)

    monkeypatch.setattr(model_files, "read_fingerprint", read_again)

    async def work() -> None:
        async with running_engine(model, tmp_path, cache_dir) as engine:
            model.touch()
            await until(lambda: "cannot be read" in str(engine.stats()["troubles"]))
            assert (await read(engine.submit(request(words(36, 20), 5)))).done is not None
            refused.clear()
            await until(lambda: engine.phase == "ready")

    run(work())


def test_reading_a_model_again_ends_when_it_is_asked_to(pocket_path: Path) -> None:
    assert read_fingerprint(pocket_path, lambda: True) is None
    assert read_fingerprint(pocket_path, lambda: False) is not None


def test_weights_overwritten_in_place_end_everything_touched_ones_nothing(
    pocket_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes compute with the very bytes of the packed file: what is written there is seen."""
    monkeypatch.setattr(scrub, "WATCH_S", 0.05)

    async def work() -> None:
        async with running_engine(pocket_path, tmp_path, tmp_path / "cache") as engine:
            (packed,) = (tmp_path / "cache").glob("*.weights")
            packed.touch()
            await asyncio.sleep(0.5)
            assert engine.phase == "ready"
            generation = engine.submit(request(words(33, 20), 2000))
            task = asyncio.ensure_future(read(generation))
            await until(lambda: generation.completion_tokens > 2)
            overwrite(packed, 4096, bytes(64))
            answer = await task
            assert answer.error is not None
            assert answer.error.name == "model_changed"
            assert engine.lanes()[0]["state"] == "drained"

    run(work())
