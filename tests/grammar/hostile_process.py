"""A grammar process in which a regular expression HANG hangs, and CRASH ends the process. Under
HANGS_AT_DRAFTS a draft hangs; under FAILS_AT_DRAFTS the library gives up with one."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Sequence

from batchengine import errors
from batchengine.core import Constraint
from batchengine.grammar import process
from batchengine.text.grammar import GrammarCompiler, GrammarMatcher

HANG, CRASH = Constraint("regex", "HANG"), Constraint("regex", "CRASH")
HANGS_AT_DRAFTS = Constraint("regex", "(abc ){9}|HANGS")
FAILS_AT_DRAFTS = Constraint("regex", "(abc ){9}|FAILS")


class HangingMatcher(GrammarMatcher):
    def follow(self, draft: Sequence[int], is_in_time: Callable[[], bool]) -> list[bytes]:
        threading.Event().wait()
        return super().follow(draft, is_in_time)


class FailingMatcher(GrammarMatcher):
    def follow(self, draft: Sequence[int], is_in_time: Callable[[], bool]) -> list[bytes]:
        super().follow(draft, is_in_time)
        raise errors.GRAMMAR_REFUSED(why="its drafts have used up its limits")


class HostileCompiler(GrammarCompiler):
    def matcher(self, constraint: Constraint) -> GrammarMatcher:
        if constraint == HANG:
            threading.Event().wait()
        if constraint == CRASH:
            signal.raise_signal(signal.SIGSEGV)
        made = super().matcher(constraint)
        if constraint == HANGS_AT_DRAFTS:
            made.__class__ = HangingMatcher
        elif constraint == FAILS_AT_DRAFTS:
            made.__class__ = FailingMatcher
        return made


if __name__ == "__main__":
    process.GrammarCompiler = HostileCompiler  # type: ignore[misc]
    process.main(int(sys.argv[1]))
