"""Tests of messages and of collectives of Python objects."""

import pickle
import threading

import numpy as np

import ringtrain as ring
from ranks import Cases, raised

cases = Cases(__file__)


@cases
def each_rank_sends_to_the_next(world):
    n, rank = world.size, world.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    for dtype in ("float32", "uint8", "int16", "bool", "complex128", "datetime64[ns]", ">i4", "U4"):
        for shape in ((), (0,), (5,), (3, 4), (70_001,)):
            own = np.full(shape, 1).astype("i8").astype(dtype) if dtype != "U4" else np.full(shape, f"r{rank}", dtype)
            got = np.zeros_like(own)
            status = world.send_receive(own, right, got, left, send_tag=4, receive_tag=4)
            assert status == ring.Status(left, 4, own.size)
            assert np.array_equal(got, np.full(shape, f"r{left}", dtype) if dtype == "U4" else own)
    token = np.array([0])
    if rank == 0:
        world.send(token, right)
        world.receive(token, left)
        assert token[0] == n - 1
    else:
        world.receive(token, left)
        world.send(token + 1, right)


@cases
def a_synchronous_send_completes_only_when_a_receive_has_matched_it(world):
    n, rank = world.size, world.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    for count in (0, 1, 100_000):
        array = np.full(count, float(rank))
        sent = [world.send_async(array, right, 1, synchronous=True), world.send_object_async(rank, right, 2, synchronous=True)]
        for tag in (1, 2):
            assert world.probe(left, tag, timeout=60.0)
        world.barrier()
        assert not any(handle.test() for handle in sent)
        world.barrier()
        got = np.empty(count)
        world.receive(got, left, 1)
        assert (got == left).all()
        assert world.receive_object(left, 2) == (left, left, 2)
        ring.wait_all(sent)
        received = [world.receive_async(got, left, 3), world.receive_object_async(left, 4)]
        world.send(array, right, 3, synchronous=True)
        world.send_object("here", right, 4, synchronous=True)
        assert ring.wait_all(received) == [(left, 3, count), ("here", left, 4)]


@cases
def a_receive_matches_its_source_and_tag(world):
    n, rank = world.size, world.rank
    for to in range(n):
        for tag in (5, 6, 2**32 - 2):
            world.send_async(np.array([rank, tag]), to, tag)
    got = np.zeros(2, np.int64)
    for tag in (2**32 - 2, 6, 5):
        for source in reversed(range(n)):
            assert world.receive(got, source, tag) == (source, tag, 2)
            assert got.tolist() == [source, tag]
    world.barrier()
    for to in range(n):
        world.send(np.array([rank]), to, 3)
    seen = set()
    for _ in range(n):
        status = world.receive(got)
        assert got[0] == status.source and status.tag == 3 and status.count == 1
        seen.add(status.source)
    assert seen == set(range(n))


@cases
def each_receive_returns_its_own_status(world):
    n, rank = world.size, world.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    got = np.empty(3)
    # A group keeps the last status, so each of these differs from the previous one in one value, and some are the same.
    kept = []
    for tag, count in ((1, 3), (1, 3), (2, 3), (2, 2), (2, 2), (1, 3)):
        world.send(np.full(count, float(tag)), right, tag)
        status = world.receive(got, left)
        assert type(status) is ring.Status and status == ring.Status(left, tag, count)
        assert (got[:count] == tag).all()
        kept.append(status)
    assert [status[1:] for status in kept] == [(1, 3), (1, 3), (2, 3), (2, 2), (2, 2), (1, 3)]


@cases
def messages_of_a_source_and_tag_stay_in_order(world):
    n, rank = world.size, world.rank
    for k in range(200):
        world.send_async(np.full(k % 7, k), (rank + 1) % n, 1)
    got = np.zeros(7, np.int64)
    for k in range(200):
        assert world.receive(got, (rank - 1) % n, 1).count == k % 7
        assert np.all(got[: k % 7] == k)


@cases
def a_probe_finds_a_message_that_has_arrived(world):
    n, rank = world.size, world.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    assert world.probe() is None and world.probe(left, 2) is None
    assert world.probe(timeout=0.01) is None
    world.barrier()
    world.send_async(np.zeros(11, np.float32), right, 2)
    assert world.probe(left, 2, timeout=20) == ring.Status(left, 2, 11)
    assert world.probe(timeout=20) == ring.Status(left, 2, 11), "a probe must not receive the message"
    assert world.core.probe(None, None, 20) == (left, 2, 11, "f32")
    assert world.probe(left, 3) is None
    assert world.receive(np.zeros(11, np.float32), left, 2).count == 11
    assert world.probe() is None
    world.barrier()


@cases
def a_rank_can_send_to_itself(world):
    got = np.zeros(100_000)
    world.send_async(np.arange(100_000.0), world.rank)
    world.receive(got, world.rank)
    assert got[-1] == 99_999
    assert world.send_receive(np.ones(3), world.rank, got[:3], world.rank) == (world.rank, 0, 3)
    world.send_object({"to": "myself"}, world.rank, tag=4)
    assert world.receive_object(world.rank, 4) == ({"to": "myself"}, world.rank, 4)


@cases
def a_message_is_received_into_the_beginning_of_a_longer_array(world):
    n, rank = world.size, world.rank
    world.send_async(np.arange(3.0), (rank + 1) % n)
    got = np.full((2, 5), -1.0)
    assert world.receive(got).count == 3
    assert got.ravel().tolist() == [0, 1, 2] + [-1] * 7
    world.send_async(np.zeros((4, 0)), (rank + 1) % n)
    assert world.receive(got).count == 0
    part = np.full(9, -1.0)
    world.send_async(np.arange(3.0), (rank + 1) % n)
    world.receive(part[3:6])
    assert part.tolist() == [-1, -1, -1, 0, 1, 2, -1, -1, -1]
    assert raised(ring.InvalidArgument, world.receive, part[::2])
    assert raised(ring.InvalidArgument, world.receive_async, [1.0])


@cases
def buffers_of_any_type_are_sent_as_bytes(world):
    n, rank = world.size, world.rank
    core, right, left = world.core, (rank + 1) % n, (rank - 1) % n
    for data in (
        b"",
        b"abc",
        bytearray(b"xyz"),
        memoryview(b"12345"),
        np.arange(4, dtype="i4"),
        np.float64(1.5),
        np.zeros((3, 0)),
    ):
        expected = bytes(memoryview(data)) if not isinstance(data, np.generic) else data.tobytes()
        core.send_bytes(data, right, 1, async_op=True)
        assert core.receive_bytes(left, 1) == (expected, left, 1)
        core.send_bytes(data, right, 1, async_op=True)
        buffer = np.zeros(40, np.uint8)
        assert core.receive_into_bytes(buffer, left, 1) == (left, 1, len(expected))
        assert buffer[: len(expected)].tobytes() == expected
        assert core.all_gather_bytes(data) == [expected] * n
        assert core.broadcast_bytes(data if rank == 0 else None, 0) == expected


@cases
def a_message_of_more_bytes_than_the_array_fails_only_the_receive(world):
    n, rank = world.size, world.rank
    core, right, left = world.core, (rank + 1) % n, (rank - 1) % n
    for length in (9, 300_000):
        core.send_bytes(b"x" * length, right, 3, async_op=True)
        core.send_bytes(b"the next", right, 3, async_op=True)
        buffer = np.zeros(2, np.float32)
        error = raised(ring.Truncated, core.receive_into_bytes, buffer, left, 3)
        assert isinstance(error, ring.InvalidArgument)
        assert (error.source, error.tag, error.count) == (left, 3, length)
        assert core.receive_into_bytes(buffer, left, 3) == (left, 3, 8) and buffer.tobytes() == b"the next"
        core.send_bytes(b"y" * length, right, 3, async_op=True)
        handle = core.receive_into_bytes(buffer, left, 3, async_op=True)
        raised(ring.Truncated, handle.wait)
        raised(ring.Truncated, handle.wait)
    assert world.all_reduce(1) == n


@cases(sizes=(2, 3, 4))
def threads_can_send_and_receive_while_another_thread_is_in_a_collective(world):
    n, rank = world.size, world.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    wrong: list = []

    def start_thread(function) -> threading.Thread:
        def run_and_record_error() -> None:
            try:
                function()
            except BaseException as error:  # noqa: BLE001  (it is reported)
                wrong.append(repr(error))

        thread = threading.Thread(target=run_and_record_error)
        thread.start()
        return thread

    def send_with_tag(tag):
        for k in range(150):
            world.send(np.full(k * 7 % 300, k), right, tag)

    def receive_with_tag(tag):
        for k in range(150):
            got = np.zeros(300, np.int64)
            assert world.receive(got, left, tag) == (left, tag, k * 7 % 300)
            assert np.all(got[: k * 7 % 300] == k)

    def exchange_objects():
        for k in range(100):
            world.send_object_async((rank, k), right, 50)
            assert world.receive_object(left, 50)[0] == (left, k)

    def run_all_reduces():
        for k in range(300):
            assert np.all(world.all_reduce(np.full(k * 31 % 2000, k)) == k * n)

    threads = [start_thread(lambda tag=tag: call(tag)) for tag in range(3) for call in (send_with_tag, receive_with_tag)]
    threads += [start_thread(exchange_objects), start_thread(run_all_reduces)]
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert not wrong, wrong
    # Rank 0 can send and receive messages while another thread of rank 0 is in a collective.
    if rank == 0:
        entered = start_thread(world.barrier)
        for peer in range(1, n):
            world.send(np.ones(2), peer, 60)
            world.receive(np.ones(2), peer, 61)
    else:
        world.receive(np.ones(2), 0, 60)
        world.send(np.ones(2), 0, 61)
        world.barrier()
    if rank == 0:
        entered.join(20)


# Objects


class Pair:
    def __init__(self, left, right) -> None:
        self.left, self.right = left, right

    def __eq__(self, other) -> bool:
        return (self.left, self.right) == (other.left, other.right)


@cases
def objects_of_any_type_can_be_sent(world):
    n, rank = world.size, world.rank
    for value in (None, 0, "text", b"", [1, [2, {"three": 4.0}]], {1, 2}, np.arange(5), Pair(1, "x"), ring.Error, range(10**6)):
        same = np.array_equal if isinstance(value, np.ndarray) else lambda a, b: a == b
        for root in range(n):
            assert same(world.broadcast_object(value if rank == root else None, root), value)
            gathered = world.gather_object((rank, value), root)
            assert gathered is None if rank != root else all(g[0] == r and same(g[1], value) for r, g in enumerate(gathered))
            assert same(world.scatter_object([value] * n if rank == root else None, root), value)
        assert all(same(got, value) for got in world.all_gather_object(value))
    assert world.all_to_all_object([(rank, to) for to in range(n)]) == [(source, rank) for source in range(n)]
    assert world.scatter_object(tuple(range(n))) == rank
    assert world.scatter_object(np.arange(n)) == rank


@cases
def objects_may_have_different_sizes(world):
    n, rank = world.size, world.rank
    sizes = [0, 1, 1000, 300_000]
    value = bytes([rank]) * sizes[rank % 4]
    assert [len(got) for got in world.all_gather_object(value)] == [sizes[r % 4] for r in range(n)]
    got = world.gather_object(value, root=n - 1)
    assert got is None or [len(one) for one in got] == [sizes[r % 4] for r in range(n)]


@cases(sizes=(1, 2, 4))
def large_objects_can_be_sent(world):
    n, rank = world.size, world.rank
    big = np.arange(50 << 17) if rank == 0 else None  # 50 MiB
    got = world.broadcast_object(big)
    assert got.nbytes == 50 << 20 and got[-1] == (50 << 17) - 1
    del got
    if n > 1:
        if rank == 0:
            world.send_object(big, 1)
        elif rank == 1:
            assert world.receive_object()[0][12345] == 12345


@cases
def all_ranks_fail_if_no_rank_can_pickle_its_object(world):
    unpicklable = threading.Lock()
    for call in (
        lambda: world.all_gather_object(unpicklable),
        lambda: world.gather_object(unpicklable),
        lambda: world.all_to_all_object([unpicklable] * world.size),
        lambda: world.send_object(unpicklable, 0),
        lambda: world.send_object_async(lambda: 0, 0),
    ):
        raised((TypeError, pickle.PicklingError, AttributeError), call)
    assert world.all_gather_object(world.rank) == list(range(world.size))


@cases
def all_ranks_fail_if_one_rank_cannot_pickle_its_object(world):
    """Regression test: before the fix, only the rank with the invalid object failed, and the other ranks waited until
    their deadline.
    """
    n, rank = world.size, world.rank
    culprit = n - 1
    is_culprit = rank == culprit
    one = threading.Lock() if is_culprit else "fine"
    for reason, call in (
        ("cannot pickle", lambda: world.all_gather_object(one)),
        ("cannot pickle", lambda: world.gather_object(one, 0)),
        ("cannot pickle", lambda: world.broadcast_object(one, culprit)),
        ("cannot pickle", lambda: world.scatter_object([one] * n, culprit)),
        ("cannot pickle", lambda: world.all_to_all_object([one] * n)),
        (f"each of {n} ranks is needed, not {n + 1}", lambda: world.scatter_object([1] * (n + 1), culprit)),
        (f"each of {n} ranks is needed, not {n - 1}", lambda: world.all_to_all_object([1] * (n - 1 if is_culprit else n))),
        (f"each of {n} ranks is needed, not 0", lambda: world.scatter_object(None, culprit)),
    ):
        error = raised(Exception, call)
        assert reason in str(error), error
        if is_culprit:
            assert isinstance(error, TypeError | ring.InvalidArgument), repr(error)
        else:
            assert type(error) is ring.Error and error.rank == culprit, repr(error)
            assert str(error).startswith(f"rank {culprit} did not contribute to this collective: "), error
        assert world.all_reduce(1) == n, "the group must still be usable"
    # Each rank that cannot pickle its object raises its own exception. The errors of the other ranks name the first such rank.
    error = raised(Exception, world.all_gather_object, threading.Lock() if rank < 2 else 0)
    assert isinstance(error, TypeError) if rank < 2 else error.rank == 0, repr(error)
    assert world.all_gather_object("x" * rank) == ["x" * r for r in range(n)]


@cases
def only_the_receiver_fails_if_an_object_cannot_be_unpickled(world):
    raised(ZeroDivisionError, world.all_gather_object, FailsToUnpickle())
    world.send_object_async(FailsToUnpickle(), world.rank)
    raised(ZeroDivisionError, world.receive_object)
    assert world.all_reduce(1) == world.size


class FailsToUnpickle:
    def __reduce__(self):
        return divmod, (1, 0)


@cases
def statistics_count_operations_and_time(world):
    before = world.statistics()
    world.all_reduce(np.ones(100_000))
    after = world.statistics()
    assert set(after) == {
        "operations",
        "bytes_sent",
        "bytes_received",
        "encoded_elements",
        "encoded_bytes",
        "communication",
        "exposed",
    }
    if world.size > 1:
        assert after["operations"] > before["operations"]
        assert after["communication"] > before["communication"]
    assert all(after[key] >= before[key] for key in after)


test_messages = cases.tests()

if __name__ == "__main__":
    cases.main()
