"""A grammar process in which a regular expression HANG hangs, and CRASH ends the process."""

from __future__ import annotations

import signal
import sys
import threading

from batchengine.core import Constraint
from batchengine.grammar import process
from batchengine.text.grammar import GrammarCompiler, GrammarMatcher

HANG, CRASH = Constraint("regex", "HANG"), Constraint("regex", "CRASH")


class HostileCompiler(GrammarCompiler):
    def matcher(self, constraint: Constraint) -> GrammarMatcher:
        if constraint == HANG:
            threading.Event().wait()
        if constraint == CRASH:
            signal.raise_signal(signal.SIGSEGV)
        return super().matcher(constraint)


if __name__ == "__main__":
    process.GrammarCompiler = HostileCompiler  # type: ignore[misc]
    process.main(int(sys.argv[1]))
