"""Child processes of engines as clones of a process that has imported their modules.

Most of the start of a worker or text process is importing. `Clones` starts, once for each module
that is run by `python -m`, a template that imports what the module needs. It clones the processes
that a test wants as children of the process of the tests (CLONE_PARENT), so that death signals,
exit statuses and parents are those of processes started by exec. A clone runs the module from its
first line, with the arguments, descriptors, folder and environment of the start that it stands for.

What clones do not show is that a new interpreter finds the module, that each worker tests its
kernels (`_test_kernels`), and that the interpreter ends: tests of daemons do, and those that ask
for the fixture `started_by_exec`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import kernels
from batchengine.child.command import FOLDER, python_command
from bench.processes.zygote import (
    CLONE_PARENT,
    SYS_CLONE,
    close_files,
    number_of_thread,
    receive,
    send,
)

# Modules that a process of the key imports after its start, and those of no key.
LATER = {
    "batchengine.text.process": ("service.protocols.reading",),
    "batchengine.grammar.process": (),
}
OF_WORKERS = ("batchengine.lanes.cpu",)
INTERPRETER = python_command("")[0]
ROOMS = ("batchengine.", "tests.")  # of modules that are run as children


class _Start(NamedTuple):
    """What two processes must have in common to be clones of one template."""

    module: str
    environment: tuple[tuple[str, str], ...]


class Template:
    """The side of the tests of one template; it ends with the process that started it."""

    def __init__(self, start: _Start) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                python_command(__name__, start.module, str(os.getpid()), str(number)),
                env=dict(start.environment),
                cwd=FOLDER,
                process_group=0,
                pass_fds=(number,),
                stdin=subprocess.DEVNULL,
            )
        self._sock = ours

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it can make clones."""
        return self._process.poll() is None

    def clone(self, arguments: Sequence[str], files: Mapping[int, int]) -> int:
        """The pid of a new child of this process; `files`: its descriptors, and which of this
        process they are. Raises OSError."""
        send(self._sock, [list(arguments), list(files)], list(files.values()))
        pid, _ = receive(self._sock)
        if not isinstance(pid, int) or pid <= 0:
            raise OSError(f"the template has ended or cannot clone: {pid!r}")
        return pid

    def close(self) -> None:
        """End the template; its clones go on."""
        self._sock.close()
        self._process.wait(30)


class Clones:
    """The templates of a run of tests. `popen` stands in for subprocess.Popen."""

    def __init__(self) -> None:
        self.is_used = True  # otherwise processes are started by exec
        self.n_started = 0
        self._templates: dict[_Start, Template] = {}

    def popen(
        self, words: Sequence[str], *, env: Mapping[str, str], **options: Any
    ) -> subprocess.Popen[Any]:
        """A clone, or a process started by exec if `words` run no module of this repository."""
        place = words.index("-m") if "-m" in words[:3] else 0
        is_known = words[0] == INTERPRETER and place and words[place + 1].startswith(ROOMS)
        if not is_known or not self.is_used:
            return subprocess.Popen(words, env=env, **options)
        start = _Start(words[place + 1], tuple(sorted(env.items())))
        template = self._templates.get(start)
        if template is None or not template.is_running:
            if template is not None:
                template.close()
            template = self._templates[start] = Template(start)
        self.n_started += 1
        return _Clone(words, template, words[place + 2 :], env=env, **options)

    @property
    def templates(self) -> list[Template]:
        """Those that were started and not replaced."""
        return list(self._templates.values())

    def close(self) -> None:
        """End all templates."""
        for template in self.templates:
            template.close()


class _Clone(subprocess.Popen[bytes]):
    """A Popen whose process is made by a template, with the descriptors that Popen has opened."""

    def __init__(
        self, words: Sequence[str], template: Template, arguments: Sequence[str], **options: Any
    ) -> None:
        self._template = template
        self._arguments = arguments
        super().__init__(words, **options)

    def _execute_child(self, *given: Any) -> None:
        """As the method of Popen that this overrides, which CPython calls by position."""
        pass_fds, cwd, process_group = given[4], given[5], given[-1]
        assert (cwd, process_group) == (FOLDER, 0), "a clone has the folder and group of a child"
        pipes = given[10:16]  # both ends for descriptors 0, 1 and 2; -1: inherited
        standard = (pipes[0], pipes[3], pipes[5])
        files = {at: at if fd == -1 else fd for at, fd in enumerate(standard)}
        try:
            self.pid = self._template.clone(self._arguments, files | {fd: fd for fd in pass_fds})
            self._child_created = True
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]  # of CPython's Popen


# ---------------------------------------------------------------------------------- the template


def main(module: str, parent: int, number: int) -> None:
    """Import what `module` needs; each request becomes a clone that runs it."""
    libc = ctypes.CDLL(None)
    libc.prctl(1, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        return
    for needed in (module, *LATER.get(module, OF_WORKERS)):
        importlib.import_module(needed)
    if module not in LATER:
        _test_kernels()
    sys.modules.pop(module)  # a clone runs it as the main module, as `python -m` does
    gc.collect()
    gc.freeze()  # a collection in a clone would copy the memory of all objects
    sock = socket.socket(fileno=number)
    tid = number_of_thread(libc)
    while True:
        asked, fds = receive(sock)
        if asked is None:
            return
        pid = libc.syscall(SYS_CLONE, CLONE_PARENT | int(signal.SIGCHLD), 0, 0, 0, 0)
        if pid == 0:
            tid.value = threading.get_native_id()
            _become(module, asked[0], dict(zip(asked[1], fds, strict=True)))
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(OSError):  # it has ended already
            os.setpgid(pid, pid)
        send(sock, pid)


def _test_kernels() -> None:
    """Run the test of the kernels here, once for all clones: it is half of what a worker does when
    it loads a small model. Workers started by exec run it each time."""
    pool = kernels.Pool(1)
    identity, faults = kernels.arith_id(pool), kernels.arithmetic_faults(pool)
    pool.close()
    if not faults:
        kernels.arith_id = lambda pool=None: identity
        kernels.arithmetic_faults = lambda pool, head_dim=0: []


def _become(module: str, arguments: Sequence[str], files: Mapping[int, int]) -> NoReturn:
    code = 1
    try:
        os.setpgid(0, 0)
        above = max((*files, *files.values())) + 1
        moved = {at: fcntl.fcntl(fd, fcntl.F_DUPFD, above) for at, fd in files.items()}
        for at, fd in moved.items():
            os.dup2(fd, at)
        close_files(tuple(files))
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
