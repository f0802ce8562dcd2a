"""How the last life of the engine ended: a fatal signal leaves a traceback, SIGKILL nothing.

Owns that one file in the store: it tells a session that crashes the engine from one that was merely
computing when it was killed. Refuses to speak where another fault handler is in charge.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import stat

NAME = "CRASH"  # `kv_store.fsck` knows it
BYTES_MAX = 4096

log = logging.getLogger("batchengine.engine")


class CrashMarker:
    """Of the life before this one, and of this one. `text` "" = it was killed, or ended well."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._path = os.path.join(folder, NAME)
        self._fd = -1
        self.text = ""
        with contextlib.suppress(OSError):  # there is none, or nothing that can be read
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    self.text = os.read(fd, BYTES_MAX).decode(errors="replace").strip()
            finally:
                os.close(fd)

    def listen(self) -> None:
        """From here on a fatal signal leaves its traceback; that of the last run is logged."""
        if self.text:
            log.error("the last life of the engine crashed: %s", " | ".join(self.text.split("\n")))
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(self._path, flags | os.O_NONBLOCK, 0o600)
        except OSError as error:
            log.warning("a crash of the engine will leave no trace in the store: %s", error)
            return
        if not faulthandler.is_enabled():
            faulthandler.enable(file=self._fd, all_threads=False)
        else:
            self._let_go()

    def close(self) -> None:
        """A life that ends well leaves nothing."""
        if self._fd >= 0:
            faulthandler.disable()
            self._let_go()

    def _let_go(self) -> None:
        os.close(self._fd)
        self._fd = -1
        with contextlib.suppress(OSError):
            os.unlink(self._path)
