"""Operations that go on by themselves."""

import gc
import math
import threading
import time
import weakref

import numpy as np

import ringtrain as ring
from ranks import Cases, raised, wait_until

cases = Cases(__file__)


def release(world) -> None:
    """Lets rank 0 go on in what it waits for: a message from the last rank, to oneself in a world of one."""
    if world.rank == world.size - 1:
        world.send(np.arange(3), 0, tag=77)


@cases
def a_wait_that_is_too_short_can_be_repeated(world):
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
    release(world)
    if world.rank == 0:
        assert handle.wait() == (world.size - 1, 77, 3)
        assert handle.wait(0) == handle.wait(math.inf) == ring.Status(world.size - 1, 77, 3), "the same answer again"
        assert handle.test() and buffer.tolist() == [0, 1, 2]
        assert ring.wait_any([handle]) == 0
        assert not handle.cancel(), "it has ended"


@cases
def a_late_rank_is_waited_for(world):
    """A collective of which one rank knows that it has not ended, for another has not begun it."""
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
def wrong_times_are_refused(world):
    handle = world.barrier_async()
    for wrong in (-1, -0.001, math.nan, -math.inf):
        raised(ring.InvalidArgument, handle.wait, wrong)
        raised(ring.InvalidArgument, ring.wait_any, [handle], wrong)
    raised(TypeError, handle.wait, "1")
    assert handle.wait(1e300) is None


@cases
def many_at_a_time(world):
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
def any_of_several(world):
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
def dropped_handles_let_the_operation_go_on(world):
    """What comes of it on the rank that does not wait is not said; the others have their results, and the group goes on."""
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
def what_has_ended_is_there(world):
    """Who asks `test` until it says so finds the result in the array."""
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
            wait_until("it ends", handle.test)
            assert np.array_equal(out, expected), (count, k)


@cases
def arrays_live_as_long_as_their_operations(world):
    n = world.size
    for dtype in ("float32", "complex64", "bool"):
        handles = []
        for k in range(30):
            handles.append(world.all_reduce_async(np.full(30_000, k % 2, dtype)))
            # What takes the place of memory that has been given back would be seen in the results.
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
def arrays_are_let_go_of_when_their_operation_has_ended(world):
    class Array(np.ndarray):
        """One that can be referred to weakly."""

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


@cases
def a_handle_is_waited_for_by_several_threads(world):
    buffer = np.zeros(3, np.int64)
    results = []
    if world.rank == 0:
        handle = world.receive_async(buffer, tag=77)
        threads = [threading.Thread(target=lambda: results.append(handle.wait())) for _ in range(4)]
        threads += [threading.Thread(target=lambda: results.append((ring.wait_any([handle, handle]), handle.wait())[1]))]
        for thread in threads:
            thread.start()
        # Others wait without an end; that must not keep who has little time.
        for _ in range(3):
            started = time.monotonic()
            raised(ring.StillRunning, handle.wait, 0.05)
            assert time.monotonic() - started < 2
            started = time.monotonic()
            assert not handle.test()
            assert ring.wait_any([handle], 0.02) is None
            assert time.monotonic() - started < 2
    world.barrier()
    release(world)
    if world.rank == 0:
        for thread in threads:
            thread.join(20)
        assert results == [(world.size - 1, 77, 3)] * 5


@cases
def a_cancelled_receive_takes_nothing(world):
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
    assert not world.all_reduce_async(np.ones(3)).cancel(), "only receives can be withdrawn"
    objects = world.receive_object_async(tag=9)
    assert objects.cancel()


@cases
def a_handle_cancelled_by_another_thread_ends_the_wait(world):
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
def threads_begin_and_wait_at_once(world):
    """Collectives have to be begun in one order everywhere; who waits for them, and in which order, is free."""
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
def results_of_every_asynchronous_form(world):
    n = world.size
    assert world.all_reduce_async(2.5).wait() == 2.5 * n
    assert isinstance(world.all_reduce_async(2.5).wait(), np.floating)
    place = np.ones(4)
    assert world.all_reduce_async(place, out=place).wait() is place
    assert place.tolist() == [n] * 4
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
