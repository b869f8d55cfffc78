"""Completes futures in the order of the operations, on threads that a continuation may block."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

# Threads kept for the next operation when nothing is under way: one to wait, one to run what follows.
_IDLE_MAX = 2


class Waitable(Protocol):
    """What a completer waits for."""

    def settle(self, keep_waiting: Callable[[], bool]) -> None:
        """Waits for the end, well or not, or until `keep_waiting` says no. Does not raise."""


class Completer:
    """Waits for operations one after the other, and runs what was asked for after each.

    One thread, the leader, waits for the oldest operation. Before it runs what follows, it gives the lead to another, because
    what follows may wait for a later operation itself. Threads are started when an operation comes and
    nobody is there to wait for it; they sleep on a condition otherwise.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._state = threading.Condition()
        self._queue: deque[tuple[Waitable, Callable[[], None]]] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._led = False
        self._closing = False

    def add(self, operation: Waitable, then: Callable[[], None]) -> None:
        """Runs `then` on a thread of the completer once `operation` has ended."""
        with self._state:
            if not self._closing:
                self._queue.append((operation, then))
                self._appoint()
                return
        # Too late for the threads: the group has been closed, so that there is nothing to wait for.
        operation.settle(lambda: False)
        then()

    def close(self, timeout: float) -> None:
        """Lets the threads run out, waiting `timeout` seconds for them at most. Operations must have been ended before."""
        with self._state:
            self._closing = True
            self._state.notify_all()
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout)

    def _appoint(self) -> None:
        """Sees to it that somebody waits for the oldest operation. Called with the lock held."""
        if self._led or not self._queue:
            return
        if self._idle:
            self._state.notify()
        elif not self._closing:
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._threads.add(thread)
            # Counted as idle until it runs, so that nobody starts a second one meanwhile.
            self._idle += 1
            thread.start()

    def _serve(self) -> None:
        try:
            while (found := self._lead()) is not None:
                operation, then = found
                operation.settle(lambda: not self._closing)
                with self._state:
                    self._led = False
                    self._appoint()
                    if self._closing:
                        self._state.notify_all()
                then()
                del found, operation, then
                with self._state:
                    if self._idle >= _IDLE_MAX:
                        break
                    self._idle += 1
        finally:
            with self._state:
                self._threads.discard(threading.current_thread())

    def _lead(self) -> tuple[Waitable, Callable[[], None]] | None:
        """The operation to wait for, once this thread leads; `None` at the end."""
        with self._state:
            while self._led or not self._queue:
                if self._closing and not self._queue:
                    self._idle -= 1
                    return None
                self._state.wait()
            self._idle -= 1
            self._led = True
            return self._queue.popleft()
