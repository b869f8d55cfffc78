"""Completes futures in the order of their operations, in threads that continuations may block."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

# Threads that stay when there is no operation: one to wait for the next, one to run its continuation.
_IDLE_MAX = 2


class Waitable(Protocol):
    """An operation that a completer can wait for."""

    def settle(self, keep_waiting: Callable[[], bool]) -> None:
        """Waits until the operation has ended or `keep_waiting` returns False. Does not raise."""


class Completer:
    """Waits for operations one after the other, and calls a function after each.

    One thread, the leader, waits for the oldest operation. Before it calls the function, another thread becomes the leader,
    because the function may wait for a later operation. A thread starts when an operation is added and no thread is idle; idle
    threads sleep on a condition.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._state = threading.Condition()
        self._queue: deque[tuple[Waitable, Callable[[], None]]] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._has_leader = False
        self._closing = False

    def add(self, operation: Waitable, then: Callable[[], None]) -> None:
        """Runs `then` on a thread of the completer once `operation` has ended."""
        with self._state:
            if not self._closing:
                self._queue.append((operation, then))
                self._ensure_leader()
                return
        # The group has been closed, so that its operations have ended and the threads exit.
        operation.settle(lambda: False)
        then()

    def close(self, timeout: float) -> None:
        """Ends the threads, and waits for each at most `timeout` seconds. All operations must have ended."""
        with self._state:
            self._closing = True
            self._state.notify_all()
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout)

    def _ensure_leader(self) -> None:
        """Makes a thread wait for the oldest operation. Called with the lock held."""
        if self._has_leader or not self._queue:
            return
        if self._idle:
            self._state.notify()
        elif not self._closing:
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._threads.add(thread)
            # Counted as idle until it runs, so that no second thread is started meanwhile.
            self._idle += 1
            thread.start()

    def _serve(self) -> None:
        try:
            while (found := self._lead()) is not None:
                operation, then = found
                operation.settle(lambda: not self._closing)
                with self._state:
                    self._has_leader = False
                    self._ensure_leader()
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
        """Waits until this thread is the leader and returns the oldest operation, or `None` when the completer is closed."""
        with self._state:
            while self._has_leader or not self._queue:
                if self._closing and not self._queue:
                    self._idle -= 1
                    return None
                self._state.wait()
            self._idle -= 1
            self._has_leader = True
            return self._queue.popleft()
