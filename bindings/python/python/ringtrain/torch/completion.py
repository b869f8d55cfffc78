"""Completes the future of each operation, in the order in which the operations were added. The continuations of a future run
in the thread that completes the future, and may block this thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

# The number of threads that stay when there are no operations: one to wait for the next operation, one to run its continuation.
_IDLE_MAX = 2


class Waitable(Protocol):
    """An operation that a completer can wait for."""

    def wait_while(self, keep_waiting: Callable[[], bool]) -> None:
        """Waits until the operation has ended or `keep_waiting` returns False. Raises no exception."""


class Completer:
    """Waits for operations one after the other, and calls a function for each operation when that operation has ended.

    One thread, the leader, waits for the oldest operation. Before the leader calls the operation's function, it makes another
    thread the leader, because the function may wait for a later operation. A thread is started when an operation is added and no
    thread is idle. Idle threads sleep on a condition variable.
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
                self._ensure_leader_thread()
                return
        # The group has been closed, so its operations have ended and the completer's threads exit.
        operation.wait_while(lambda: False)
        then()

    def close(self, timeout: float) -> None:
        """Ends the threads, and waits at most `timeout` seconds for each thread. Call this method only after all operations
        have ended."""
        with self._state:
            self._closing = True
            self._state.notify_all()
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout)

    def _ensure_leader_thread(self) -> None:
        """Wakes or starts a thread that becomes the leader, if there is no leader. The caller must hold the lock."""
        if self._has_leader or not self._queue:
            return
        if self._idle:
            self._state.notify()
        elif not self._closing:
            thread = threading.Thread(target=self._complete_operations, name=self._name, daemon=True)
            self._threads.add(thread)
            # The new thread counts as idle until it runs, so that no second thread is started in the meantime.
            self._idle += 1
            thread.start()

    def _complete_operations(self) -> None:
        try:
            while (found := self._wait_to_become_leader()) is not None:
                operation, then = found
                operation.wait_while(lambda: not self._closing)
                with self._state:
                    self._has_leader = False
                    self._ensure_leader_thread()
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

    def _wait_to_become_leader(self) -> tuple[Waitable, Callable[[], None]] | None:
        """Waits until this thread is the leader, and returns the oldest operation. Returns `None` if the completer is closed."""
        with self._state:
            while self._has_leader or not self._queue:
                if self._closing and not self._queue:
                    self._idle -= 1
                    return None
                self._state.wait()
            self._idle -= 1
            self._has_leader = True
            return self._queue.popleft()
