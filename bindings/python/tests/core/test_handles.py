"""Tests of asynchronous operations and their handles."""

import gc
import math
import threading
import time
import weakref

import numpy as np

import ringtrain as ring
from ranks import Cases, raised, wait_until

cases = Cases(__file__)


def send_awaited_message(world) -> None:
    """Sends a message with tag 77 from the last rank to rank 0, which waits for this message. In a job of one rank,
    rank 0 sends the message to itself."""
    if world.rank == world.size - 1:
        world.send(np.arange(3), 0, tag=77)


@cases
def a_wait_that_timed_out_can_be_repeated(world):
    buffer = np.zeros(3, np.int64)
    if world.rank == 0:
        handle = world.receive_async(buffer, tag=77)
        for timeout in (0, 0.0, 0.01, 0.1):
            started = time.monotonic()
            error = raised(ring.StillRunning, handle.wait, timeout)
            assert isinstance(error, TimeoutError) and timeout <= time.monotonic() - started < timeout + 1
        assert not handle.test()
        assert ring.wait_any([handle], 0.01) is None
    world.barrier()
    send_awaited_message(world)
    if world.rank == 0:
        assert handle.wait() == (world.size - 1, 77, 3)
        assert handle.wait(0) == handle.wait(math.inf) == ring.Status(world.size - 1, 77, 3), "later waits differ"
        assert handle.test() and buffer.tolist() == [0, 1, 2]
        assert ring.wait_any([handle]) == 0
        assert not handle.cancel(), "a receive that has ended was cancelled"


@cases
def a_wait_times_out_while_another_rank_is_late(world):
    """Rank 1 begins the collective only after the first wait of rank 0 has timed out."""
    if world.rank == 0 and world.size > 1:
        handle = world.all_reduce_async(np.ones(5))
        raised(ring.StillRunning, handle.wait, 0.05)
        world.send(np.zeros(1), 1)
        assert handle.wait().tolist() == [world.size] * 5
    elif world.size > 1:
        if world.rank == 1:
            world.receive(np.zeros(1), 0)
        assert world.all_reduce_async(np.ones(5)).wait(math.inf).tolist() == [world.size] * 5


@cases
def invalid_timeouts_are_refused(world):
    handle = world.barrier_async()
    for wrong in (-1, -0.001, math.nan, -math.inf):
        raised(ring.InvalidArgument, handle.wait, wrong)
        raised(ring.InvalidArgument, ring.wait_any, [handle], wrong)
    raised(TypeError, handle.wait, "1")
    assert handle.wait(1e300) is None


@cases
def many_operations_run_at_the_same_time(world):
    n = world.size
    handles = [world.all_reduce_async(np.full(count % 50 + 1, world.rank + count)) for count in range(300)]
    handles += [world.all_gather_async(np.full(3, world.rank)) for _ in range(50)]
    handles += [world.barrier_async() for _ in range(50)]
    results = ring.wait_all(handles[::-1])[::-1]
    for count in range(300):
        assert results[count].tolist() == [sum(range(n)) + n * count] * (count % 50 + 1)
    assert all(result[:, 0].tolist() == list(range(n)) for result in results[300:350])
    assert results[350:] == [None] * 50


@cases
def wait_any_returns_an_operation_that_has_ended(world):
    assert ring.wait_any([]) is None and ring.wait_any([], 0) is None
    handles = {k: world.all_reduce_async(np.full(4, k)) for k in range(20)}
    seen = set()
    while handles:
        keys = list(handles)
        index = ring.wait_any([handles[key] for key in keys], 20)
        key = keys[index]
        assert handles.pop(key).wait(0).tolist() == [key * world.size] * 4
        seen.add(key)
    assert seen == set(range(20))
    ended = world.all_reduce_async(1)
    ended.wait()
    buffer = np.zeros(3, np.int64)
    never = world.receive_async(buffer, source=world.rank, tag=5)
    assert ring.wait_any([never, ended]) == 1
    assert ring.wait_any([never, never], 0.01) is None
    assert never.cancel()


@cases
def an_operation_goes_on_when_its_handle_is_dropped(world):
    """The ranks that keep their handles get their results, and the group can still be used. The result of the rank that drops
    its handle is unspecified."""
    n, rank = world.size, world.rank
    for k in range(50):
        handle = world.all_reduce_async(np.full(k * 600 + 1, k), out=np.zeros(k * 600 + 1, np.int64))
        if rank == k % n:
            del handle
        else:
            assert np.all(handle.wait() == k * n)
    for _ in range(20):
        world.all_gather_async(np.ones(1000))
    gc.collect()
    assert world.all_reduce(1) == n


@cases
def the_result_is_in_the_array_when_test_returns_true(world):
    n, rank = world.size, world.rank
    for count in (1, 1000, 100_000):
        x = np.full(count, float(rank))
        total, parts, got = np.zeros(count), np.zeros((n, count)), np.zeros(count)
        mine, exchanged, first = np.zeros(1), np.zeros(n), np.zeros((n, count))
        each = np.full(n, float(rank))
        checks = [
            (world.all_reduce_async(x, out=total), total, np.full(count, sum(range(n)))),
            (world.all_gather_async(x, out=parts), parts, np.repeat(np.arange(n), count).reshape(n, count)),
            (world.reduce_scatter_async(each, out=mine), mine, np.full(1, sum(range(n)))),
            (world.all_to_all_async(each, out=exchanged), exchanged, np.arange(n)),
            (
                world.all_to_all_async(each, out=(uneven := np.zeros(n)), send_counts=[1] * n, receive_counts=[1] * n),
                uneven,
                np.arange(n),
            ),
            (world.scan_async(x, out=(scanned := np.zeros(count))), scanned, np.full(count, sum(range(rank + 1)))),
            (world.scatter_async(each if rank == 0 else None, out=(part := np.ones(1))), part, np.zeros(1)),
            (world.receive_async(got, (rank - 1) % n, 2), got, np.full(count, (rank - 1) % n)),
        ]
        if rank == 0:
            checks.append((world.gather_async(x, out=first), first, np.repeat(np.arange(n), count).reshape(n, count)))
        else:
            world.gather_async(x)
        world.send(x, (rank + 1) % n, 2)
        for k, (handle, out, expected) in enumerate(checks):
            wait_until("the operation ends", handle.test)
            assert np.array_equal(out, expected), (count, k)


@cases
def arrays_live_as_long_as_their_operations(world):
    n = world.size
    for dtype in ("float32", "complex64", "bool"):
        handles = []
        for k in range(30):
            handles.append(world.all_reduce_async(np.full(30_000, k % 2, dtype)))
            # If the input had been freed, this array would overwrite it, and the results would be wrong.
            np.full(30_000, 9).sum()
        gc.collect()
        for k, handle in enumerate(handles):
            expected = bool(k % 2) if dtype == "bool" else k % 2 * n
            assert np.all(handle.wait() == expected)
    sent = [world.send_async(np.full(50_000, k), (world.rank + 1) % n, k) for k in range(10)]
    gc.collect()
    for k in range(10):
        got = np.zeros(50_000, np.int64)
        world.receive(got, (world.rank - 1) % n, k)
        assert np.all(got == k)
    ring.wait_all(sent)


@cases
def an_array_is_freed_after_its_operation_has_ended(world):
    class Array(np.ndarray):
        """An array that supports weak references."""

    def begin():
        array = np.ones(1000).view(Array)
        return world.all_reduce_async(array, out=array), weakref.ref(array)

    handle, reference = begin()
    handle.wait()
    world.barrier()
    del handle
    world.barrier()
    gc.collect()
    assert reference() is None
    for end in (
        lambda handle: handle.wait(),
        lambda handle: wait_until("the operation ends", handle.test),
        lambda handle: ring.wait_any([handle]),
    ):
        handle, reference = begin()
        end(handle)
        # The call in which the operation ended has freed its array, so the program need not call the library again.
        del handle
        assert reference() is None


@cases
def several_threads_can_wait_for_one_handle(world):
    buffer = np.zeros(3, np.int64)
    results = []
    if world.rank == 0:
        handle = world.receive_async(buffer, tag=77)
        threads = [threading.Thread(target=lambda: results.append(handle.wait())) for _ in range(4)]
        threads += [threading.Thread(target=lambda: results.append((ring.wait_any([handle, handle]), handle.wait())[1]))]
        for thread in threads:
            thread.start()
        # Other threads wait without a limit. A wait with a short timeout must still end when the timeout has passed.
        for _ in range(3):
            started = time.monotonic()
            raised(ring.StillRunning, handle.wait, 0.05)
            assert time.monotonic() - started < 2
            started = time.monotonic()
            assert not handle.test()
            assert ring.wait_any([handle], 0.02) is None
            assert time.monotonic() - started < 2
    world.barrier()
    send_awaited_message(world)
    if world.rank == 0:
        for thread in threads:
            thread.join(20)
        assert results == [(world.size - 1, 77, 3)] * 5


@cases
def a_cancelled_receive_matches_no_message(world):
    n, rank = world.size, world.rank
    before = np.full(3, -1)
    handle = world.receive_async(before, source=(rank - 1) % n, tag=3)
    world.barrier()
    assert handle.cancel() and not handle.cancel() and handle.test()
    assert "cancel" in str(raised(ring.Error, handle.wait))
    world.barrier()
    world.send(np.arange(3), (rank + 1) % n, 3)
    after = np.zeros(3, np.int64)
    world.receive(after, (rank - 1) % n, 3)
    assert after.tolist() == [0, 1, 2] and before.tolist() == [-1] * 3
    assert not world.all_reduce_async(np.ones(3)).cancel(), "a collective was cancelled"
    objects = world.receive_object_async(tag=9)
    assert objects.cancel()


@cases
def a_wait_ends_when_another_thread_cancels_the_handle(world):
    handle = world.receive_async(np.zeros(3), tag=4)
    outcome = []

    def wait() -> None:
        outcome.append(raised(ring.Error, handle.wait))

    thread = threading.Thread(target=wait)
    thread.start()
    assert handle.cancel()
    thread.join(20)
    assert not thread.is_alive() and type(outcome[0]) is ring.Error


@cases
def threads_can_wait_in_any_order(world):
    """All ranks must begin collectives in the same order, but any thread may wait for them in any order."""
    handles = [world.all_reduce_async(np.full(2000, k)) for k in range(60)]
    wrong = []

    def wait(own) -> None:
        for k in own:
            if not np.all(handles[k].wait(20) == k * world.size):
                wrong.append(k)

    threads = [threading.Thread(target=wait, args=(range(59 - t, -1, -3),)) for t in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not wrong


@cases
def every_asynchronous_operation_returns_its_result(world):
    n = world.size
    assert world.all_reduce_async(2.5).wait() == 2.5 * n
    assert isinstance(world.all_reduce_async(2.5).wait(), np.floating)
    array = np.ones(4)
    assert world.all_reduce_async(array, out=array).wait() is array
    assert array.tolist() == [n] * 4
    out = np.zeros(4)
    assert world.all_reduce_async(np.ones(4), "max", out=out).wait() is out
    assert world.barrier_async().wait() is None
    assert world.send_async(np.ones(1), world.rank, 8).wait() is None
    assert world.receive_async(np.ones(1), world.rank, 8).wait() == ring.Status(world.rank, 8, 1)
    assert world.send_object_async({"a": 1}, world.rank, 8).wait() is None
    assert world.receive_object_async(world.rank, 8).wait() == ({"a": 1}, world.rank, 8)


test_handles = cases.tests()

if __name__ == "__main__":
    cases.main()
