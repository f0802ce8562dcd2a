"""A daemon that its operator drained: sessions in memory go on, new ones go elsewhere."""

from __future__ import annotations

import pytest

from batchengine import errors
from batchengine.core import BatchEngineError, Kind
from tests.support.engines import Reference, Site, read, request, running_engine, started, words


async def test_sessions_in_memory_go_on_and_new_ones_are_refused(
    site: Site, reference: Reference
) -> None:
    prompt = words(31, 40)
    async with running_engine(site) as engine:
        assert engine.remains() == {
            "leaving": False,
            "requests": [],
            "given": [],
            "stages": [],
            "over": True,
        }
        generation, reading = await started(engine, request(prompt, 400, session="old"), 3)
        engine.leave()
        engine.leave()
        assert (engine.phase, engine.state.peer_load.leaves) == ("leaving", True)
        found = engine.remains()
        assert [row["request_id"] for row in found["requests"]] == [generation.request_id]
        assert not found["over"]
        for session in (None, "new"):
            with pytest.raises(BatchEngineError) as caught:
                engine.submit(request(words(32, 20), 4, session=session))
            assert caught.value.code == errors.LEAVING.code
            assert caught.value.kind is Kind.UNAVAILABLE
            assert caught.value.retry_ms is not None
        assert ("", "new") not in engine.state.sessions
        answer = await reading
        assert answer.tokens == reference.tokens(prompt, 400)
        assert engine.remains()["over"]
        more = [*prompt, *answer.tokens, *words(33, 5)]
        again = await read(engine.submit(request(more, 8, session="old")))
        assert again.tokens == reference.tokens(more, 8)
        engine.leave(undo=True)
        assert (engine.phase, engine.state.peer_load.leaves) == ("ready", False)
        other = await read(engine.submit(request(words(32, 20), 4)))
        assert len(other.tokens) == 4
