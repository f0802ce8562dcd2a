"""Crash marker: a file in the store to which a fatal signal writes a traceback, SIGKILL nothing.

Owns that file. With it, a session that crashed the engine is distinguished from one that was
computing when the engine was killed. Writes none if another fault handler is enabled.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import stat

NAME = "CRASH"  # `kv_store.fsck` allows a file of this name
BYTES_MAX = 4096

log = logging.getLogger("batchengine.sessions")


class CrashMarker:
    """The marker of the last run, and of this one. `text`: traceback of the last run; "" = none."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._path = os.path.join(folder, NAME)
        self._fd = -1
        self.text = ""
        with contextlib.suppress(OSError):  # there is no such file, or it cannot be read
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    self.text = os.read(fd, BYTES_MAX).decode(errors="replace").strip()
            finally:
                os.close(fd)

    def listen(self) -> None:
        """Log the traceback of the last run, and have fatal signals write one from now on."""
        if self.text:
            log.error("the last run of the engine crashed: %s", " | ".join(self.text.split("\n")))
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
        """Remove the file: the engine exits without a crash."""
        if self._fd >= 0:
            faulthandler.disable()
            self._let_go()

    def _let_go(self) -> None:
        os.close(self._fd)
        self._fd = -1
        with contextlib.suppress(OSError):
            os.unlink(self._path)
