"""Tests of processes that are forked from a rank. The calls of forked processes raise `Forked` and do not affect the job."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import ringtrain as ring
from ranks import Launcher, is_alive, raised, wait_and_read, wait_until, write_atomically

HERE = Path(__file__)


def run_in_child(call) -> tuple[int, bytes]:
    """Runs `call` in a forked child. Returns the child's exit code, and the text of the result or of the exception."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(out)
        code = 1
        try:
            os.write(into, str(call()).encode())
            code = 0
        except BaseException as error:  # noqa: BLE001
            os.write(into, f"{type(error).__name__}: {error}".encode())
        os._exit(code)
    os.close(into)
    with open(out, "rb") as reader:
        text = reader.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text


def calls_in_children(directory: Path) -> None:
    """Forks children while operations of the parent are in progress. In a child, every call raises `Forked`. The parent's
    operations succeed."""
    world = ring.init(timeout=20)
    n, rank = world.size, world.rank
    part = world.split(0)
    x = world.alloc(1000)
    pending = world.all_reduce_async(np.ones(1000))
    receive = world.receive_async(np.zeros(3), (rank - 1) % n, 5)
    weights = np.zeros(3, np.float32)
    gossip = ring.Gossip(weights)

    def try_all_calls() -> str:
        calls = (
            lambda: world.all_reduce(1),
            lambda: world.barrier(),
            lambda: part.all_reduce(1),
            lambda: world.send(np.zeros(1), 0),
            lambda: world.receive(np.zeros(1)),
            lambda: world.probe(),
            lambda: world.all_gather_object(1),
            lambda: world.send_object(1, 0),
            lambda: world.receive_object(),
            lambda: world.split(0),
            lambda: world.alloc(3),
            lambda: world.statistics(),
            lambda: world.abort("by a child"),
            lambda: world.close(),
            lambda: pending.wait(),
            lambda: pending.test(),
            lambda: receive.cancel(),
            lambda: ring.wait_any([pending]),
            lambda: ring.solo(),
            lambda: ring.shutdown(),
            lambda: ring.init(start_timeout=1.0),
            lambda: setattr(world, "timeout", 3.0),
            lambda: gossip.step(),
            lambda: gossip.finish(),
            lambda: gossip.averages,
            lambda: gossip.close(),
        )
        assert ring.is_initialized() and not world.core.is_closed
        texts = {str(raised(ring.Forked, call)) for call in calls}
        assert texts == {
            "this process was forked from a rank and is not a rank itself: "
            "communicate in the parent, or start processes with spawn"
        }
        return "all raised Forked"

    code, text = run_in_child(try_all_calls)
    assert (code, text) == (0, b"all raised Forked"), text
    # A child may drop its copies of groups and handles, and end normally.
    pid = os.fork()
    if pid == 0:
        del world, part, pending, receive, gossip
        ring._world._world = None
        import gc

        gc.collect()
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    pid = os.fork()
    if pid == 0:
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        raise RuntimeError("this error ends only the child")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    # A child may start other programs.
    assert run_in_child(lambda: os.system("true")) == (0, b"0")
    assert np.all(pending.wait() == n)
    world.send(np.arange(3.0), (rank + 1) % n, 5)
    assert receive.wait().count == 3
    x[...] = 1
    assert np.all(world.all_reduce(x, out=x) == n)
    for _ in range(20):
        assert world.all_reduce(1) == n == part.all_reduce(1)
    weights += rank
    gossip.step()
    gossip.finish()
    assert np.allclose(weights, (n - 1) / 2) and gossip.lost_ranks == []


def square(value: int) -> int:
    return value * value


def try_to_reduce(_: int) -> str:
    try:
        return str(ring.all_reduce(1))
    except ring.Error as error:
        return type(error).__name__


class Loader:
    """Makes batches in forked worker processes, as PyTorch's data loader does."""

    def __init__(self, workers: int) -> None:
        context = multiprocessing.get_context("fork")
        self.tasks, self.batches = context.Queue(), context.Queue()
        self.workers = [context.Process(target=self.work, daemon=True) for _ in range(workers)]
        for worker in self.workers:
            worker.start()

    def work(self) -> None:
        while (index := self.tasks.get()) is not None:
            self.batches.put((index, np.full(1000, index, np.float32)))

    def close(self) -> None:
        for _ in self.workers:
            self.tasks.put(None)
        for worker in self.workers:
            worker.join(20)
            assert worker.exitcode == 0


def process_pools(directory: Path) -> None:
    world = ring.init(timeout=20)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(square, range(20)) == [i * i for i in range(20)]
        assert set(pool.map(try_to_reduce, range(4))) == {"Forked"}
        assert world.all_reduce(1) == world.size
    loader = Loader(2)
    for step in range(20):
        loader.tasks.put(step)
        index, batch = loader.batches.get(timeout=20)
        assert np.all(world.all_reduce(batch, "avg") == step)
    loader.close()
    process = multiprocessing.get_context("fork").Process(target=sys.exit, args=(5,))
    process.start()
    process.join(20)
    assert process.exitcode == 5
    spawned = multiprocessing.get_context("spawn").Process(target=print, args=("spawned",))
    spawned.start()
    spawned.join(30)
    assert spawned.exitcode == 0
    assert world.all_reduce(1) == world.size


def forks_during_operations(directory: Path) -> None:
    """Forks while another thread of the parent runs operations. A child must not block on a lock that was held by that thread."""
    import threading

    world = ring.init(timeout=20)
    stop = False

    def reduce() -> None:
        while not world.all_reduce(stop, "lor"):
            world.send_object_async(b"x" * 100, world.rank)
            world.receive_object(world.rank)

    thread = threading.Thread(target=reduce)
    thread.start()
    for _ in range(30 if os.environ.get("TEST_FULL") else 6):
        pid = os.fork()
        if pid == 0:
            assert ring.is_initialized()
            raised(ring.Forked, world.all_reduce, 1)
            raised(ring.Forked, ring.all_reduce, 1)
            sys.exit(0)
        ended = wait_until("the child ends", lambda: [status for found, status in [os.waitpid(pid, os.WNOHANG)] if found], 10)
        assert ended == [0], "the child has failed"
    stop = True
    thread.join(20)
    assert not thread.is_alive()
    world.barrier()


def fork_from_solo_group(directory: Path) -> None:
    """Forks a child of a process that has not called `init`. The parent has only one group, and made it with `solo`."""
    group = ring.solo()
    group.send_async(np.zeros(3), 0)

    def reduce_in_child() -> str:
        return type(raised(ring.Error, group.all_reduce, 1)).__name__

    assert run_in_child(reduce_in_child) == (0, b"Forked")
    pid = os.fork()
    if pid == 0:
        del group
        sys.exit(0)
    wait_until("the child ends", lambda: os.waitpid(pid, os.WNOHANG) != (0, 0), 10)
    assert group.receive(np.zeros(3)).count == 3


def child_lives_longer_than_rank(directory: Path) -> None:
    world = ring.init(timeout=20, transport=os.environ["TEST_TRANSPORT"])
    world.barrier()
    if world.rank == 1:
        if os.fork() == 0:
            # The child is in its own session, so that a signal to the parent's process group does not end the child.
            os.setsid()
            write_atomically(directory / "child", os.getpid())
            signal.pause()
        wait_and_read(directory / "child")
        write_atomically(directory / "parent", os.getpid())
    try:
        if world.rank == 1:
            signal.pause()
        world.all_reduce(np.ones(5))
    except ring.JobFailed as error:
        write_atomically(directory / f"saw-{world.rank}", f"{time.monotonic()} {type(error).__name__} {error.rank}")


@pytest.mark.parametrize("n", (pytest.param(1, marks=pytest.mark.full), 2, pytest.param(3, marks=pytest.mark.full)))
@pytest.mark.parametrize(
    "program",
    (
        "calls_in_children",
        pytest.param("process_pools", marks=pytest.mark.full),
        *(pytest.param(program, marks=pytest.mark.full) for program in ("forks_during_operations", "fork_from_solo_group")),
    ),
)
def test_forked_processes(ringrun: Launcher, tmp_path: Path, program: str, n: int):
    if program == "fork_from_solo_group" and n > 1:
        n = 2
    ringrun(n, HERE, program, tmp_path)


@pytest.mark.parametrize("transport", ("auto", pytest.param("tcp", marks=pytest.mark.full)))
def test_peers_see_the_death_of_a_rank_whose_child_lives_on(ringrun: Launcher, tmp_path: Path, transport: str):
    """A forked child has copies of the rank's sockets. If the child kept these sockets open, peers would not notice that the
    rank has died."""
    job = ringrun.start(
        3, HERE, "child_lives_longer_than_rank", tmp_path, env={"TEST_TRANSPORT": transport}, flags=("--grace", "15")
    )
    child = int(wait_and_read(tmp_path / "child"))
    try:
        parent = int(wait_and_read(tmp_path / "parent"))
        killed = time.monotonic()
        os.kill(parent, signal.SIGKILL)
        for rank in (0, 2):
            when, name, culprit = wait_and_read(tmp_path / f"saw-{rank}").split()
            assert (name, culprit) == ("PeerLost", "1")
            print(f"rank {rank} raised its error after {1000 * (float(when) - killed):.0f} ms")
            assert float(when) - killed < 2
    finally:
        os.kill(child, signal.SIGKILL)
        job.finish()
    assert not is_alive(parent)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
