"""The reserve file `BALLAST`: allocated bytes that are freed when the ledger meets a full disk.

A spent file is made again only while as many bytes again stay free. Everything except `trouble`
blocks for I/O.
"""

from __future__ import annotations

import logging
import os

from kv_store import osio
from kv_store.layout import PAGE_ALIGN_BYTES

log = logging.getLogger("batchengine.store")
RESERVE_BYTES = 64 << 20  # enough to record the end of every running turn and its reason


class ReserveFile:
    """The reserve file of one store. `spend` runs on the ledger thread, `make` on the opener's or
    the page thread; both act on the file system's state, so a race costs one attempt."""

    def __init__(self, folder: str, files: osio.Files, size: int | None, budget_bytes: int) -> None:
        """`size` None: 64 MiB, or a sixteenth of a budget below 1 GiB."""
        if size is None:
            size = min(RESERVE_BYTES, budget_bytes // 16)
        self.trouble = ""  # why the file is missing; "" = it is not, or none is wanted
        self._path = os.path.join(folder, "BALLAST")
        self._folder = folder
        self._files = files
        self._size = size // PAGE_ALIGN_BYTES * PAGE_ALIGN_BYTES

    def spend(self) -> bool:
        """Delete the file to free its bytes; False = there was none."""
        try:
            os.unlink(self._path)
        except OSError:
            return False
        self._report("the disk is full: the spare bytes in BALLAST are spent; free disk space")
        return True

    def make(self) -> None:
        """Create the file if it is missing, wanted, and there is room."""
        if not self._size or os.path.exists(self._path):
            self._report("")
            return
        free = self._files.free_bytes(self._folder)[0]
        if free >= 2 * self._size:
            try:
                os.close(osio.create_allocated(self._files, self._path, self._size))
            except OSError as error:
                self._report(f"no spare bytes are kept in BALLAST: {os.strerror(error.errno or 0)}")
            else:
                self._report("")
        elif not self.trouble:
            mib = (2 * self._size + (1 << 20) - 1) >> 20
            self._report(
                f"the disk is nearly full: {free >> 20} MiB are free, so no spare bytes are kept in"
                f" BALLAST; free disk space ({mib} MiB)"
            )

    def _report(self, trouble: str) -> None:
        """Set `trouble`; log one line when it begins, one when it ends."""
        was, self.trouble = self.trouble, trouble
        if trouble and not was:
            log.warning("store: %s", trouble)
        elif was and not trouble:
            log.warning("store: the spare bytes in BALLAST are back")
