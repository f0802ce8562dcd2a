"""Standard input, output and error of a command: opened where the caller has closed them, and
dropped where the reader has gone."""

from __future__ import annotations

import os
import sys

STREAMS = (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w"))


def open_streams() -> None:
    """Opens the null device in place of each stream that the caller has closed.

    Else a file that this process opens next, of the store perhaps, has the stream's number, and
    what a library prints is written into it.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name, number, mode in STREAMS:
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def drop_output() -> None:
    """What is left in the buffer of standard output has no place to go to."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
