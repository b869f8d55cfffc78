"""Very many operations leave nothing: memory, files and threads are after them as they were after the first few."""

import gc

import numpy as np

import ringtrain as ring
from ranks import Cases, file_descriptors, resident_bytes, threads_of_process

cases = Cases(__file__, sizes=(1, 2), timeout=40.0)

GROWTH_MAX_BYTES = 3 << 20
"""What allocators keep, and what no leak of a few dozen bytes for each of so many operations fits in."""


def flat(world, count: int, use) -> None:
    """Uses something `count` times, after a tenth as often to warm up."""
    for k in range(count // 10):
        use(k)
    gc.collect()
    world.barrier()
    before, files, threads = resident_bytes(), file_descriptors(), threads_of_process()
    for k in range(count):
        use(k)
    gc.collect()
    world.barrier()
    grown = resident_bytes() - before
    assert grown < GROWTH_MAX_BYTES, f"{grown} bytes more after {count}"
    assert file_descriptors() <= files and threads_of_process() <= threads


@cases
def small_sums(world):
    x = np.ones(4, np.float32)
    flat(world, 100_000, lambda k: world.core.all_reduce(x, "max"))
    flat(world, 10_000, lambda k: world.all_reduce(x))


@cases
def sums_that_go_on_by_themselves(world):
    pending: list = []

    def use(k) -> None:
        pending.append(world.all_reduce_async(np.full(100, k)))
        if len(pending) == 20:
            ring.wait_all(pending)
            pending.clear()

    flat(world, 10_000, use)


@cases
def handles_without_a_wait(world):
    def use(k) -> None:
        world.all_reduce_async(np.full(100, k))
        world.receive_async(np.zeros(3), tag=9)
        if k % 50 == 0:
            world.barrier()

    flat(world, 5_000, use)


@cases
def messages(world):
    n, rank = world.size, world.rank
    x, got = np.ones(50), np.zeros(50)

    def use(k) -> None:
        sent = world.send_async(x, (rank + 1) % n, k % 3)
        world.receive(got, (rank - 1) % n, k % 3)
        sent.wait()

    flat(world, 10_000, use)


@cases
def objects(world):
    flat(world, 5_000, lambda k: world.all_gather_object({"k": k, "text": "x" * (k % 500)}))
    flat(world, 5_000, lambda k: world.broadcast_object([k] * 20 if world.rank == 0 else None))


@cases
def sums_of_a_mebibyte(world):
    x = np.ones(1 << 18, np.float32)
    flat(world, 1_000, lambda k: world.all_reduce(x, "max", out=x))


@cases
def results_of_a_mebibyte(world):
    x = np.ones(1 << 18, np.float32)
    flat(world, 300, lambda k: world.all_reduce(x))
    flat(world, 300, lambda k: world.all_reduce_async(x).wait())


@cases
def failures_after_which_the_group_goes_on(world):
    x = np.ones(3)

    def use(k) -> None:
        for call in (lambda: world.all_reduce(x, "median"), lambda: world.broadcast(x, -1), lambda: world.core.all_reduce(None)):
            try:
                call()
            except ring.InvalidArgument:
                continue
            raise AssertionError

    flat(world, 3_000, use)


test_leaks = cases.tests()

if __name__ == "__main__":
    cases.main()
