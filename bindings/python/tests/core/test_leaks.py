"""Tests that operations leak no memory, files or threads. After thousands of operations, a process must not use more memory,
files or threads than after the first few operations."""

import gc
import os

import numpy as np

import ringtrain as ring
from ranks import Cases, file_descriptors, resident_bytes, threads_of_process
from ringtrain import _core

cases = Cases(__file__, sizes=(1, 2) if os.environ.get("TEST_FULL") else (2,), timeout=40.0)

GROWTH_MAX_BYTES = 3 << 20
"""The allowed growth of a process's memory in bytes. Without a leak, the memory may grow by less than this limit,
because allocators keep some freed memory. With a leak of 32 bytes in each of 100,000 calls, the memory grows by more
than this limit.
"""


def check_no_growth(world, count: int, operation) -> None:
    """Calls `operation(k)` for each k below `count`, after a warm-up of `count // 10` calls. Checks that the calls
    after the warm-up do not increase the memory, the open files or the threads of this process. Without `tools/test
    --full`, makes only a twentieth of the calls.
    """
    if not os.environ.get("TEST_FULL"):
        count = count // 20
    for k in range(count // 10):
        operation(k)
    gc.collect()
    world.barrier()
    before, files, threads = resident_bytes(), file_descriptors(), threads_of_process()
    for k in range(count):
        operation(k)
    gc.collect()
    world.barrier()
    grown = resident_bytes() - before
    assert grown < GROWTH_MAX_BYTES, f"memory grew by {grown} bytes in {count} calls"
    assert file_descriptors() <= files and threads_of_process() <= threads


@cases
def small_all_reduces_leak_nothing(world):
    x = np.ones(4, np.float32)
    check_no_growth(world, 100_000, lambda k: world.core.all_reduce(x, "max"))
    check_no_growth(world, 10_000, lambda k: world.all_reduce(x))


@cases
def asynchronous_all_reduces_leak_nothing(world):
    pending: list = []

    def operation(k) -> None:
        pending.append(world.all_reduce_async(np.full(100, k)))
        if len(pending) == 20:
            ring.wait_all(pending)
            pending.clear()

    check_no_growth(world, 10_000, operation)


@cases
def named_tensors_leak_nothing(world):
    tensors = _core.NamedTensors(world.core)
    x = np.ones(100)

    def operation(k) -> None:
        # The handle of the second tensor is dropped before its operation ends.
        waiting = tensors.all_reduce(f"number {k}", x, "max")
        tensors.all_gather_bytes(f"bytes {k}", bytes(100))
        waiting.wait()

    check_no_growth(world, 20_000, operation)
    tensors.close()


@cases
def operations_without_a_wait_leak_nothing(world):
    def operation(k) -> None:
        world.all_reduce_async(np.full(100, k))
        world.receive_async(np.zeros(3), tag=9)
        if k % 50 == 0:
            world.barrier()

    check_no_growth(world, 5_000, operation)


@cases
def messages_leak_nothing(world):
    n, rank = world.size, world.rank
    x, got = np.ones(50), np.zeros(50)

    def operation(k) -> None:
        sent = world.send_async(x, (rank + 1) % n, k % 3)
        world.receive(got, (rank - 1) % n, k % 3)
        sent.wait()

    check_no_growth(world, 10_000, operation)


@cases
def objects_leak_nothing(world):
    check_no_growth(world, 5_000, lambda k: world.all_gather_object({"k": k, "text": "x" * (k % 500)}))
    check_no_growth(world, 5_000, lambda k: world.broadcast_object([k] * 20 if world.rank == 0 else None))


@cases
def all_reduces_of_a_mebibyte_in_place_leak_nothing(world):
    x = np.ones(1 << 18, np.float32)
    check_no_growth(world, 1_000, lambda k: world.all_reduce(x, "max", out=x))


@cases
def all_reduces_of_a_mebibyte_into_new_arrays_leak_nothing(world):
    x = np.ones(1 << 18, np.float32)
    check_no_growth(world, 300, lambda k: world.all_reduce(x))
    check_no_growth(world, 300, lambda k: world.all_reduce_async(x).wait())


@cases
def calls_with_invalid_arguments_leak_nothing(world):
    x = np.ones(3)

    def operation(k) -> None:
        for call in (lambda: world.all_reduce(x, "median"), lambda: world.broadcast(x, -1), lambda: world.core.all_reduce(None)):
            try:
                call()
            except ring.InvalidArgument:
                continue
            raise AssertionError

    check_no_growth(world, 3_000, operation)


test_leaks = cases.tests()

if __name__ == "__main__":
    cases.main()
