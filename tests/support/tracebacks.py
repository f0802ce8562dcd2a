"""Line numbers for tracebacks that lack them.

CPython 3.11 gives the jump at the end of some loops no line. A signal that is handled there, such
as the one that ends a test after its timeout, leaves a traceback entry whose `tb_lineno` is None.
Pytest ends on it with an internal error, which hides this test and all later ones.
"""

from __future__ import annotations

import types


def give_lines(error: BaseException | None) -> None:
    """Give each traceback entry without a line the first line of its function, causes included."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = _with_lines(error.__traceback__)
        error = error.__cause__ or error.__context__


def _with_lines(entry: types.TracebackType | None) -> types.TracebackType | None:
    entries = list[types.TracebackType]()
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    for one in reversed(entries):
        line: int | None = one.tb_lineno
        if line is None:
            line = one.tb_frame.f_code.co_firstlineno
        entry = types.TracebackType(entry, one.tb_frame, one.tb_lasti, line)
    return entry
