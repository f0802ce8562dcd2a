"""One thread that executes intents in order. An exception fails its intent, never the thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from kv_store.errors import StoreError

T = TypeVar("T")


class IntentThread:
    """A queue of callables and the only thread that runs them.

    `idle` does one small piece of background work and returns whether more is left; it runs only
    while no intent waits. `wake()` makes an idle thread call it again.
    """

    def __init__(self, name: str, idle: Callable[[], bool] = lambda: False) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = idle
        self._closed = False
        self._lock = threading.Lock()  # no intent may slip in behind the end marker
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, intent: Callable[[], T]) -> Future[T]:
        """Run `intent` after everything submitted before it."""
        future: Future[T] = new_future()

        def run() -> None:
            settle(future, intent)

        with self._lock:
            if self._closed:
                future.set_exception(StoreError("the store is closed"))
            else:
                self._queue.put(run)
        return future

    def wake(self) -> None:
        with self._lock:
            if not self._closed:
                self._queue.put(lambda: None)

    def close(self) -> None:
        """Finish what was submitted, then end the thread; idle work is left."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def backlog(self) -> int:
        return self._queue.qsize()

    def _run(self) -> None:
        more = False
        while True:
            try:
                intent = self._queue.get(block=not more)
            except queue.Empty:
                more = self._run_idle()
                continue
            if intent is None:
                return
            intent()
            more = True

    def _run_idle(self) -> bool:
        try:
            return self._idle()
        except Exception:  # background work is optional; its next round tries again
            return False


def new_future() -> Future[Any]:
    """A future that cannot be cancelled: its intent runs whether it is awaited or not."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def settle(future: Future[T], intent: Callable[[], T]) -> None:
    """Run an intent and give its outcome to its future, whatever it is."""
    try:
        result = intent()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
