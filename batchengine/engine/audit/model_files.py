"""Compares the model's files on disk with what was loaded.

Owns the identities of the files when they were read. `look` compares them, once a minute and before
a session is read from the ledger; `decide` reads the model file again if only its times differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from pathlib import Path

from batchengine import errors
from batchengine.core import BatchEngineError
from batchengine.engine.state import EngineState
from batchengine.gguf import Identity, model_identity
from batchengine.weights import read_fingerprint
from batchengine.weights.cache import CacheMismatch, cache_path, verify_cache

log = logging.getLogger("batchengine.audit")


class ModelFiles:
    """Identities of the model file and of the packed weights, as they were when loaded.

    Lanes map the packed weights only. If that file is replaced, they keep what they mapped; if it
    is written in place, they compute with the new bytes at once, so its checksums are verified. No
    lane reads the model file itself, and a worker that starts checks its fingerprint: when only its
    times differ (a link, chmod, touch, or a write in place), requests go on while a thread computes
    its fingerprint again. Both files are read, never mapped: one that is cut short meanwhile would
    end the engine.
    """

    def __init__(self, state: EngineState, model_hash: str) -> None:
        self._state = state
        self._model_hash = model_hash
        self._touched = asyncio.Event()
        self._foreign: Identity | None = None  # packed weights of another model
        config = state.config
        self._model = Path(config.model.path)
        self._packed = cache_path(Path(config.cache_dir or ".").absolute(), self._model.absolute())
        self._identity = state.model_identity or identity_of(self._model)
        self._mapped = identity_of(self._packed)

    async def look(self) -> None:
        """Compare both files with what was loaded, and record changes in the state."""
        state = self._state
        if state.model_changed:
            return
        model, packed = await asyncio.to_thread(
            lambda: (identity_of(self._model), identity_of(self._packed))
        )
        if model is None:
            state.troubles["model"] = f"{self._model.name} is gone: no worker can start again"
        elif self._identity is None or model[:3] != self._identity[:3]:
            self._change(f"{self._model.name} was written or replaced since it was loaded")
        elif model != self._identity:
            self._touched.set()
        else:
            state.troubles.pop("model", None)
        if packed == self._mapped or self._mapped is None:
            return
        if packed is None or packed[:2] != self._mapped[:2]:
            await self._replaced(packed)
            return
        try:
            await asyncio.to_thread(_verify, self._packed)
        except CacheMismatch as error:
            why = f"the packed weights were overwritten while lanes compute with them: {error}"
            self._change(why)
            for loop in state.lanes:  # emit no more tokens from these weights
                loop.drain(why)
            for generation in list(state.turns):
                generation.abort(errors.MODEL_CHANGED(why=why))
        else:
            self._mapped = packed  # only the times of the file changed

    async def _replaced(self, packed: Identity | None) -> None:
        """Report replaced weights, unless a starting worker has packed the same model again."""
        if packed is not None and packed != self._foreign:
            with contextlib.suppress(CacheMismatch):
                if await asyncio.to_thread(_verify, self._packed) == self._model_hash:
                    log.info("the packed weights were made again from the same model")
                    self._mapped = packed
                    self._state.troubles.pop("weights", None)
                    return
            self._foreign = packed
        text = "the packed weights were replaced: lanes keep the old ones"
        self._state.troubles["weights"] = text

    async def decide(self) -> None:
        """Wait until only the times of the model file differ; then compare its fingerprint."""
        await self._touched.wait()
        self._touched.clear()
        cancelled, name = threading.Event(), self._model.name
        try:
            found = await asyncio.to_thread(read_fingerprint, self._model, cancelled.is_set)
        except BatchEngineError as error:
            if error.code == errors.MODEL_UNREADABLE.code:  # for example by its permissions
                why = f"{name} cannot be read again: no worker can start"
                self._state.troubles["model"] = why
                return
            self._change(f"{name} was overwritten since it was loaded: {error.what}")
            return
        finally:
            cancelled.set()  # a stopping daemon does not wait until the whole file is read
        if found is None:
            return  # being written: the next `look` sets `_touched` again
        identity, fingerprint = found
        if fingerprint.hex() == self._model_hash:
            log.info("%s was touched; it is still the model that was loaded: serving on", name)
            self._identity = identity
            if identity_of(self._model) == identity:
                self._touched.clear()  # set by a look at the file while it was read
            self._state.troubles.pop("model", None)
        else:
            self._change(f"{name} was overwritten since it was loaded")

    def _change(self, why: str) -> None:
        self._state.model_changed = why
        self._state.troubles["model"] = why
        log.critical("model changed: %s; new requests are refused until the daemon restarts", why)


def identity_of(path: Path) -> Identity | None:
    """Return values that change when the file is replaced or written; None = no such file."""
    try:
        return model_identity(path)
    except OSError:
        return None


def _verify(path: Path) -> str:
    """Return the fingerprint (hex) of the packed file's model. Raises CacheMismatch."""
    return verify_cache(path).fingerprint.hex()
