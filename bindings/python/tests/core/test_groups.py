"""Tests of groups: their properties, subgroups, and shared memory from `alloc`."""

import gc
import math
import os
import threading
import weakref

import numpy as np

import ringtrain as ring
from ranks import Cases, file_descriptors, raised, resident_bytes, threads_of_process
from ringtrain import _core

cases = Cases(__file__)


@cases
def a_group_has_the_documented_properties(world):
    n = world.size
    assert world is ring.world() is ring.init() and ring.is_initialized()
    assert (ring.rank(), ring.size(), ring.local_rank(), ring.local_size()) == (world.rank, n, world.rank, n)
    assert world.members == list(range(n)) == world.all_gather_object(world.rank)
    assert world.transport == ("none" if n == 1 else os.environ.get("TEST_TRANSPORT", "shm"))
    assert repr(world) == f"<ringtrain.Group: rank {world.rank} of {n}, {world.transport}>"
    raised(ring.InvalidArgument, ring.init, timeout=5.0)
    assert ring.all_reduce(1) == n
    raised(AttributeError, getattr, ring, "all_reduc")
    for operation in ("all_reduce", "broadcast", "reduce_scatter", "all_gather", "barrier"):
        assert world.algorithm(operation, 1024)
    assert world.all_gather_object(world.algorithm("all_reduce", 1 << 20)).count(world.algorithm("all_reduce", 1 << 20)) == n


@cases
def split_makes_one_group_for_each_colour(world):
    n, rank = world.size, world.rank
    group = world.split(rank % 2, key=-rank)
    expected = sorted((r for r in range(n) if r % 2 == rank % 2), reverse=True)
    assert group.members == expected
    assert (group.rank, group.size) == (expected.index(rank), len(expected))
    assert (group.local_rank, group.local_size) == (group.rank, group.size)
    assert group.all_reduce(rank) == sum(expected)
    assert group.all_gather_object(rank) == expected
    own = world.split(None if rank else 5)
    assert (own is None) == (rank != 0)
    assert own is None or (own.size, own.members, own.all_reduce(3)) == (1, [0], 3)
    group.close()


@cases
def a_subgroup_has_the_listed_ranks(world):
    n, rank = world.size, world.rank
    ranks = list(reversed(range(n)))
    group = world.subgroup(ranks)
    assert group.members == ranks and group.rank == n - 1 - rank
    for root in range(n):
        assert group.broadcast(rank, root) == ranks[root]
    assert group.scan(1) == group.rank + 1
    first = world.subgroup([0])
    assert (first is None) == (rank != 0)
    assert first is None or first.all_reduce(7) == 7
    assert world.subgroup(np.array(ranks)).members == ranks
    assert world.subgroup([]) is None, "no rank must be in an empty group"
    assert world.all_reduce(1) == n


@cases
def subgroups_can_be_split_again(world):
    group, depth = world, 0
    while group.size > 1:
        half = group.split(int(group.rank >= (group.size + 1) // 2))
        assert half.all_reduce(1) == half.size < group.size
        assert set(half.members) < set(group.members)
        group, depth = half, depth + 1
    twin = group.duplicate().duplicate()
    assert twin.size == 1 and twin.members == [world.rank]
    assert world.all_reduce(1) == world.size


@cases
def duplicates_of_a_group_are_independent(world):
    n, rank = world.size, world.rank
    groups = [world.duplicate() for _ in range(4)]
    # Each rank begins the operations of the groups in a different order.
    handles = {k: groups[k].all_reduce_async(np.full(1000, k)) for k in np.roll(range(4), rank)}
    for k in range(4):
        assert np.all(handles[k].wait() == k * n)
    wrong = []

    def work(k) -> None:
        for i in range(100):
            if groups[k].all_reduce(i) != i * n:
                wrong.append((k, i))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
    right, left = (rank + 1) % n, (rank - 1) % n
    for k in range(4):
        groups[k].send_async(np.array([k]), right, 1)
    for k in reversed(range(4)):
        assert groups[k].probe(left, 1, 20) is not None
        got = np.array([0])
        groups[k].receive(got, left, 1)
        assert got[0] == k, "a message reached another group"


@cases
def calls_on_a_closed_group_raise_an_error(world):
    group = world.duplicate()
    with group as same:
        assert same is group and group.all_reduce(1) == world.size
    group.close()
    assert group.core.is_closed
    x = np.ones(3)
    for call in (
        lambda: group.all_reduce(x),
        lambda: group.all_reduce_async(x),
        lambda: group.barrier(),
        lambda: group.send(x, 0),
        lambda: group.receive(x),
        lambda: group.receive_async(x),
        lambda: group.probe(),
        lambda: group.all_gather_object(1),
        lambda: group.send_object(1, 0),
        lambda: group.receive_object(),
        lambda: group.split(0),
        lambda: group.duplicate(),
        lambda: group.subgroup([0]),
        lambda: group.alloc(3),
        lambda: group.statistics(),
        lambda: group.timeout,
        lambda: group.algorithm("all_reduce", 8),
    ):
        assert "closed" in str(raised(ring.Error, call))
    assert (group.rank, group.size, group.members) == (world.rank, world.size, world.members)
    assert repr(group)
    assert world.all_reduce(1) == world.size


@cases
def operations_complete_after_their_group_is_closed(world):
    group = world.duplicate()
    handles = [group.all_reduce_async(np.full(5000, k)) for k in range(10)]
    group.close()
    for k, handle in enumerate(handles):
        assert np.all(handle.wait() == k * world.size)


@cases
def a_group_can_be_closed_after_another_thread_used_it(world):
    group = world.duplicate()
    if world.size > 1 and world.rank == 0:
        inside = threading.Event()
        results = []

        def first() -> None:
            inside.set()
            results.append(group.all_reduce(1))

        thread = threading.Thread(target=first)
        thread.start()
        inside.wait()
        world.send(np.ones(1), 1)
        thread.join(20)
        group.close()
        assert results == [world.size]
    elif world.size > 1:
        if world.rank == 1:
            world.receive(np.ones(1), 0)
        assert group.all_reduce(1) == world.size
        group.close()
    world.barrier()


@cases
def a_closed_group_stays_closed_while_a_thread_sets_its_timeout(world):
    for _ in range(30):
        group = ring.solo()
        started = threading.Event()

        def set_timeouts() -> None:
            while True:
                group.timeout = 5.0
                started.set()

        thread = threading.Thread(target=lambda: raised(ring.Error, set_timeouts))
        thread.start()
        started.wait()
        group.close()
        thread.join(20)
        assert not thread.is_alive() and group.core.is_closed
        assert "has been closed" in str(raised(ring.Error, lambda: group.timeout))


@cases
def timeouts_can_be_set_and_read(world):
    group = world.duplicate()
    assert world.timeout == group.timeout == 20.0
    group.timeout = 3.5
    assert (group.timeout, world.timeout) == (3.5, 20.0)
    group.timeout = 7
    assert group.timeout == 7.0 and group.duplicate().timeout == 7.0
    group.timeout = math.inf
    assert group.timeout > 1e8, "an infinite timeout must become many years"
    assert group.all_reduce(1) == world.size
    for wrong in (-1, math.nan, -math.inf):
        raised(ring.InvalidArgument, setattr, group, "timeout", wrong)
    raised(TypeError, setattr, group, "timeout", "long")
    assert group.timeout > 1e8


@cases
def alloc_returns_zeros_in_shared_memory(world):
    n = world.size
    for dtype in ("float32", "float64", "float16", "int8", "uint64", "int16", "bool"):
        for shape in (1, 7, (3, 5), 100_003, np.int64(5), (2, np.int32(4))):
            array = world.alloc(shape, dtype)
            assert array.shape == np.empty(shape).shape and array.dtype == dtype and not array.any()
            assert array.flags.c_contiguous and array.flags.writeable and array.flags.aligned
            array[...] = 1
            assert world.all_reduce(array, out=array) is array
            assert np.all(array == (True if dtype == "bool" else n))
    shared = world.core.alloc(100, "f32")
    assert shared.is_shared == (n > 1 and world.transport == "shm")
    view = memoryview(shared)
    assert (view.format, view.shape, view.readonly, view.nbytes, len(shared)) == ("f", (100,), False, 400, 100)
    assert world.core.alloc(4, "bf16") is not None
    raised(ring.Unsupported, world.alloc, 3, "complex64")
    raised(ring.InvalidArgument, world.core.alloc, 4, "f31")
    raised(ring.InvalidArgument, world.alloc, (3, -1))
    assert world.alloc(0).shape == (0,) and world.alloc((3, 0)).shape == (3, 0) and world.alloc(()).shape == ()
    assert world.alloc(3 + world.rank).shape == (3 + world.rank,), "shapes must be allowed to differ between ranks"


@cases
def parts_of_shared_memory_are_reduced_in_place(world):
    n, rank = world.size, world.rank
    array = world.alloc(10_000, "int64")
    for part in (slice(0, 10), slice(5, 1005), slice(1, 9_999), slice(9_999, 10_000), slice(3, 3)):
        array[...] = rank
        got = world.all_reduce(array[part], out=array[part])
        assert np.all(got == sum(range(n)))
        outside = np.ones(10_000, bool)
        outside[part] = False
        assert np.all(array[outside] == rank)
    array[...] = rank
    matrix = array.reshape(100, 100)
    world.all_reduce(matrix[10:20], out=matrix[10:20])
    assert np.all(array[1000:2000] == sum(range(n))) and array[999] == rank == array[2000]
    handle = world.all_reduce_async(array[:500], out=array[:500])
    handle.wait()
    assert np.all(array[:500] == sum(range(n)))
    # Use shared memory as the input of one operation and as the output of another operation.
    array[...] = rank
    assert np.all(world.all_reduce(array) == sum(range(n))) and np.all(array == rank)
    world.broadcast(array, root=n - 1, out=array)
    assert np.all(array == n - 1)
    # Each rank reduces a different part of its memory.
    array[...] = 1
    start = rank * 7
    part = array[start : start + 50]
    assert np.all(world.all_reduce(part, out=part) == n)


@cases
def shared_memory_stays_valid_after_its_group_is_closed(world):
    group = world.duplicate()
    array = group.alloc(1000)
    part = array[10:20]
    group.close()
    del array, group
    gc.collect()
    part[...] = 3
    assert part.sum() == 30
    owner = weakref.ref(part)
    del part
    gc.collect()
    assert owner() is None


@cases(sizes=(1, 3))
def shared_memory_is_freed(world):
    def use() -> None:
        array = world.alloc(1 << 18)
        array[...] = 1
        world.all_reduce(array, out=array)

    for _ in range(5):
        use()
    world.barrier()
    before, files = resident_bytes(), file_descriptors()
    for _ in range(40):
        use()
    world.barrier()
    assert resident_bytes() - before < 8 << 20, "the 40 MiB that were allocated must have been freed"
    assert file_descriptors() <= files + 2


@cases(sizes=(1, 2, 3))
def closed_groups_leave_no_memory_files_or_threads(world):
    def use() -> None:
        with world.duplicate() as twin:
            assert twin.all_reduce(1) == world.size
        part = world.split(world.rank % 2)
        part.barrier()
        del part

    for _ in range(30):
        use()
    gc.collect()
    before, files, threads = resident_bytes(), file_descriptors(), threads_of_process()
    for _ in range(500 if os.environ.get("TEST_FULL") else 100):
        use()
    gc.collect()
    world.barrier()
    assert resident_bytes() - before < 4 << 20
    assert file_descriptors() <= files + 1 and threads_of_process() <= threads


@cases
def operations_accept_memory_at_an_address(world):
    owner = np.ones(10, np.float32)
    memory = _core.Memory(owner, owner.ctypes.data, 10, "f32")
    assert repr(memory)
    world.core.all_reduce(memory)
    assert owner.tolist() == [world.size] * 10
    handle = world.core.all_reduce(_core.Memory(owner, owner.ctypes.data, 5, "f32"), "max", async_op=True)
    assert handle.wait() is None
    words = np.full(4, 0x3F80, np.uint16)  # 1.0 as bf16
    world.core.all_reduce(_core.Memory(words, words.ctypes.data, 4, "bf16"))
    assert (words.astype(np.uint32) << 16).view(np.float32).tolist() == [world.size] * 4
    read_only = _core.Memory(owner, owner.ctypes.data, 10, "f32", writable=False)
    raised(ring.InvalidArgument, world.core.all_reduce, read_only)
    world.core.all_reduce(memory, "max", read_only)
    raised(ring.InvalidArgument, _core.Memory, owner, owner.ctypes.data, 10, "f33")
    raised(ring.InvalidArgument, _core.Memory, owner, owner.ctypes.data, 2**62, "f64")
    raised(ring.InvalidArgument, world.core.all_reduce, _core.Memory(owner, owner.ctypes.data + 1, 5, "f32"))
    for weird in (None, 5, "text", object(), [1.0], (1.0,)):
        raised(ring.InvalidArgument, world.core.all_reduce, weird)
    raised(ring.InvalidArgument, world.core.all_reduce, b"read only")
    raised(ring.InvalidArgument, world.core.all_reduce, owner, "sum", np.ones(9, np.float32))
    raised(ring.InvalidArgument, world.core.all_reduce, owner, "sum", np.ones(10))
    released = memoryview(bytearray(8))
    released.release()
    raised(ring.InvalidArgument, world.core.all_reduce, released)


@cases
def a_buffer_can_be_resized_after_a_call(world):
    """An object cannot be resized as long as there is a view of its memory. A call releases its views before it returns."""
    core, n, rank = world.core, world.size, world.rank
    part = bytearray(4)
    for call in (
        lambda buffer: core.all_reduce(buffer),
        lambda buffer: core.all_reduce(buffer, "max", bytes(4 * n)),
        lambda buffer: core.broadcast(buffer, 0),
        lambda buffer: core.all_gather(buffer, part),
        lambda buffer: core.all_to_all(bytearray(4 * n), buffer),
        lambda buffer: core.all_gather_bytes(buffer),
        lambda buffer: (core.send(buffer, (rank + 1) % n), core.receive(buffer, (rank - 1) % n)),
        lambda buffer: core.all_reduce(buffer, async_op=True).wait(),
        lambda buffer: raised(ring.InvalidArgument, core.all_reduce, buffer, "median"),
        lambda buffer: raised(ring.InvalidArgument, core.all_reduce, buffer, "sum", bytes(1)),
    ):
        buffer = bytearray(4 * n)
        call(buffer)
        buffer.append(1)
        part.append(1)
        part.pop()
        buffer = bytearray(4 * n)
        view = memoryview(buffer)
        call(view)
        view.release()
        buffer.append(1)


test_groups = cases.tests()

if __name__ == "__main__":
    cases.main()
