"""Tests of failures: different calls on different ranks, deadlines, and ranks that leave or die. All ranks get the same error,
which names the rank at fault."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import ringtrain as ring
from ranks import (
    Launcher,
    is_alive,
    raised,
    run_in_threads,
    wait_and_read,
    wait_until,
    wait_until_asleep,
    write_atomically,
)

HERE = Path(__file__)


def check_all_ranks_raised(results, kind) -> list:
    """Checks that every rank raised an exception of this kind. Returns the exceptions."""
    assert all(isinstance(result, kind) for result in results), results
    return results


# Mismatches and deadlines. All ranks are threads of this process.

MISMATCHES = {
    "types": lambda g: g.all_reduce(np.zeros(4, np.float32 if g.rank else np.float64)),
    "bits of the same size": lambda g: g.all_reduce(np.zeros(4, np.int32 if g.rank else np.uint32)),
    "counts": lambda g: g.all_reduce(np.zeros(4 + (g.rank == 1))),
    "large counts": lambda g: g.all_reduce(np.zeros(100_000 + (g.rank == 1))),
    "reductions": lambda g: g.all_reduce(np.zeros(4), "max" if g.rank else "min"),
    "compression": lambda g: g.all_reduce(np.zeros(4, np.float32), compression="fp16" if g.rank else None),
    "operations": lambda g: g.all_reduce(np.zeros(4)) if g.rank else g.broadcast(np.zeros(4)),
    "asynchronous operations": lambda g: (g.all_reduce_async(np.zeros(4)) if g.rank else g.all_gather_async(np.zeros(4))).wait(),
    "roots": lambda g: g.broadcast(np.zeros(4), root=g.rank),
    "roots of reductions": lambda g: g.reduce(np.zeros(4), root=g.rank),
    "counts of parts": lambda g: g.all_gather(np.zeros(2), counts=[2] * g.size if g.rank else [2] + [3] * (g.size - 1)),
    "the order": lambda g: [g.all_reduce(np.zeros(n)) for n in ((3, 4) if g.rank else (4, 3))],
    "objects and arrays": lambda g: g.all_gather_object(1) if g.rank else g.all_reduce(1.0),
    "a barrier": lambda g: g.barrier() if g.rank else g.all_reduce(1.0),
    "byte orders": lambda g: g.broadcast(np.zeros(4, ">f4" if g.rank else "<f4")),
    "a scan": lambda g: g.scan(1.0) if g.rank else g.exscan(1.0),
    "lists of a subgroup": lambda g: g.subgroup([0, 1] if g.rank else [1, 0]),
}


@pytest.mark.parametrize("n", (2, 3))
@pytest.mark.parametrize("what", MISMATCHES)
def test_a_mismatch_names_the_two_ranks(what, n):
    def work(group):
        MISMATCHES[what](group)
        # A rank that only sends may complete the operation without an error. Then the barrier raises the error.
        group.barrier()

    errors = check_all_ranks_raised(run_in_threads(n, work), ring.Mismatch)
    for error in errors:
        first, second = error.ranks
        assert first != second and {first, second} <= set(range(n))
        assert f"rank {first}" in str(error) and f"rank {second}" in str(error)
    assert len({str(error).split(" (reported by")[0] for error in errors}) == 1, errors


def test_an_error_names_the_lines_of_calls_that_earlier_rounds_have_made():
    def work(group):
        x = np.zeros(4)
        for k in range(3):
            if group.rank == 0 or k < 2:
                group.all_reduce(x, out=x)
            if group.rank == 1 or k < 2:
                group.broadcast(x, out=x)

    first = work.__code__.co_firstlineno
    for error in check_all_ranks_raised(run_in_threads(2, work), ring.Mismatch):
        for line in (first + 4, first + 6):
            assert f"{HERE.name}:{line}" in str(error), error


def test_a_failed_job_stays_failed_in_every_call():
    def work(group):
        twin = group.duplicate()
        group.timeout = 5
        first = raised(ring.Mismatch, group.all_reduce, np.zeros(3 + group.rank))
        handle_errors = []
        calls = (
            lambda: group.all_reduce(1),
            lambda: group.barrier(),
            lambda: group.all_reduce_async(np.zeros(3)).wait(),
            lambda: group.send_async(np.zeros(3), 0).wait(),
            lambda: group.receive(np.zeros(3)),
            lambda: group.receive_async(np.zeros(3)).wait(),
            lambda: group.probe(timeout=1),
            lambda: group.all_gather_object(1),
            lambda: group.receive_object(),
            lambda: group.split(0),
            lambda: group.duplicate(),
            lambda: group.alloc(3),
            lambda: twin.all_reduce(1),
            lambda: twin.barrier_async().wait(),
        )
        for call in calls:
            handle_errors.append(raised(ring.Mismatch, call))
        assert {error.ranks for error in handle_errors} == {first.ranks}
        assert isinstance(group.statistics(), dict) and group.timeout == 5
        assert isinstance(raised(ring.Error, group.abort, "once more"), ring.Mismatch), "the first cause must remain the cause"

    assert run_in_threads(2, work) == [None, None]


def test_a_timeout_names_the_late_rank():
    def work(group):
        if group.rank == 2:
            # This rank never calls the collective.
            return raised(ring.JobFailed, lambda: group.receive(np.zeros(1), 0))
        if group.rank == 1:
            handle = group.all_reduce_async(np.zeros(5))
            # The message follows the data of the collective, so rank 0 knows that this rank has called it.
            group.send(np.zeros(1), 0)
            return raised(ring.Timeout, handle.wait)
        group.receive(np.zeros(1), 1)
        group.timeout = 0.5
        started = time.monotonic()
        error = raised(ring.Timeout, group.all_reduce, np.zeros(5))
        # The deadline of rank 0 also ends the wait of rank 1.
        assert time.monotonic() - started < 5
        return error

    errors = check_all_ranks_raised(run_in_threads(3, work), ring.Timeout)
    for error in errors:
        assert isinstance(error, TimeoutError)
        assert error.rank == 2 and error.host
        assert "rank 2" in str(error) and "raise the argument timeout of ringtrain.init" in str(error)


def test_a_receive_without_a_message_times_out():
    def work(group):
        if group.rank == 0:
            group.timeout = 0.3
            return raised(ring.Timeout, lambda: group.receive_object(source=1, tag=3))
        return raised(ring.JobFailed, group.barrier)

    errors = check_all_ranks_raised(run_in_threads(2, work), ring.Timeout)
    assert errors[0].rank in (1, None)


@pytest.mark.parametrize("call", ("barrier", "receive", "receive_object", "wait", "probe"))
def test_all_ranks_get_the_message_of_an_abort(call):
    def work(group):
        if group.rank == 1:
            error = raised(ring.Aborted, group.abort, "there is no more paper")
        else:
            waiting = {
                "barrier": group.barrier,
                "receive": lambda: group.receive(np.zeros(3)),
                "receive_object": group.receive_object,
                "wait": lambda: group.all_reduce_async(1).wait(),
                "probe": lambda: group.probe(timeout=20),
            }[call]
            error = raised(ring.Aborted, waiting)
        assert error.rank == 1 and error.host and "there is no more paper" in str(error)
        return error

    errors = check_all_ranks_raised(run_in_threads(3, work), ring.Aborted)
    assert {error.reported_by for error in errors} <= {None, 0, 1, 2}


def test_a_rank_that_leaves_is_named():
    def work(group):
        if group.rank == 1:
            group.close()
            return None
        return raised(ring.PeerLeft, group.all_reduce, np.zeros(3))

    results = run_in_threads(3, work)
    assert results[0].rank == results[2].rank == 1 and results[0].host


def test_a_thread_that_leaves_a_closed_group_drops_the_group():
    """Closes a group while a thread is in a collective, and another thread waits for the group. The collective goes on, and the
    waiting thread gets an error at once. At the end of the collective, the rank leaves the job."""
    is_closed = threading.Event()

    def work(group: ring.Group) -> object:
        if group.rank == 1:
            assert is_closed.wait(60) and group.all_reduce(1) == 2
            return raised(ring.PeerLeft, group.barrier).rank
        results: list = []
        inside = threading.Thread(target=lambda: results.append(group.all_reduce(1)))
        inside.start()
        wait_until_asleep(inside.native_id)
        waiting = threading.Thread(target=lambda: results.append(raised(ring.Error, group.barrier)))
        waiting.start()
        wait_until_asleep(waiting.native_id)
        group.close()
        waiting.join(20)
        assert not waiting.is_alive() and inside.is_alive()
        for error in (results.pop(), raised(ring.Error, setattr, group, "timeout", 3.0), raised(ring.Error, group.barrier)):
            assert type(error) is ring.Error and "the group has been closed" in str(error)
        assert group.core.is_closed
        is_closed.set()
        inside.join(20)
        assert group.core.is_closed
        return results

    assert run_in_threads(2, work) == [[2], 0]


def test_a_receive_from_a_rank_that_has_left_fails():
    def work(group):
        if group.rank == 1:
            return None
        return raised(ring.PeerLeft, group.receive, np.zeros(3), 1)

    assert run_in_threads(2, work)[0].rank == 1


def test_abort_from_another_thread_ends_a_collective():
    import threading

    def work(group):
        if group.rank:
            return raised(ring.Aborted, group.receive_object)
        thread = threading.Thread(target=lambda: raised(ring.Aborted, group.abort, "enough"))
        thread.start()
        error = raised(ring.Aborted, group.barrier)
        thread.join()
        return error

    assert all("enough" in str(error) for error in check_all_ranks_raised(run_in_threads(2, work), ring.Aborted))


def test_a_failed_join_names_the_missing_rank_or_the_wrong_argument():
    from ringtrain import _core

    server = _core.Rendezvous(2, "a secret of tests", "0" * 32)
    options = {"rank": 0, "size": 2, "rendezvous": server.address, "job_id": "0" * 32}
    error = raised(ring.StartError, _core.join, **options, secret="a secret of tests", start_timeout=0.3)
    assert "1" in str(error)
    assert isinstance(raised(ring.StartError, _core.join, **options, secret="another secret!!", start_timeout=2), ring.Error)
    for wrong in (
        {"rank": 0},
        {"size": 2, "rank": 0},
        {"peers": "hosts.txt"},
        {"peers": "hosts.txt", "rendezvous": server.address, "rank": 0},
        {"rendezvous": "nowhere", "rank": 0, "size": 2, "job_id": "0" * 32},
        {"rendezvous": server.address, "rank": 0, "size": 2, "job_id": "xyz"},
        {"rendezvous": server.address, "rank": 0, "size": 0, "job_id": "0" * 32},
        {"transport": "smoke"},
        {"algorithm": "smoke"},
        {"streams": "0"},
        {"congestion": ""},
        {"timeout": -1.0},
        {"start_timeout": float("nan")},
        {"secret": ""},
    ):
        raised(ring.InvalidArgument, _core.join, **wrong)
    raised(ring.StartError, _core.join, peers="/nonexistent/hosts.txt", rank=0, secret="a secret of tests")
    raised(ring.StartError, _core.join, **{**options, "rank": 2}, secret="a secret of tests")


# Tests in which a rank ends. Each rank is a process, which writes the error that it raises to a file.

LARGE_COUNT = 4_000_000
"""The number of elements of a long collective. The collective is still running when rank 1 is killed."""


def run_rank(directory: Path, how: str) -> None:
    """Runs one rank of `test_all_ranks_raise_an_error_when_a_rank_ends`. Rank 1 ends in the way that `how` names,
    while the other ranks are in a collective.
    """
    world = ring.init(timeout=30, transport=os.environ.get("TEST_TRANSPORT"))
    if world.rank == 1:
        write_atomically(directory / "pid", os.getpid())
    try:
        # Rank 1 may end while the other ranks are still in this barrier.
        world.barrier()
        if world.rank == 1:
            {
                "killed": lambda: wait_until("the process is killed", lambda: False),
                "killed in a collective": lambda: [
                    world.all_reduce(x, out=x) for x in [np.zeros(LARGE_COUNT, np.float32)] for _ in range(10**6)
                ],
                "exits": lambda: sys.exit(3),
                "exits with 0": lambda: sys.exit(0),
                "raises": lambda: {}["a key that is not there"],
                "raises in a thread": lambda: None,
                "unpicklable": lambda: world.all_gather_object(lambda: 0),
                "os._exit": lambda: os._exit(9),
                "segmentation fault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
            }[how]()
        elif how == "killed in a collective":
            x = np.zeros(LARGE_COUNT, np.float32)
            for k in range(10**6):
                world.all_reduce(x, out=x)
                if k == 2 and world.rank == 0:
                    write_atomically(directory / "in-collective", "")
        elif how == "unpicklable":
            error = raised(ring.Error, world.all_gather_object, 1)
            assert error.rank == 1 and "pickle" in str(error), error
            world.barrier()
        else:
            write_atomically(directory / f"waits-{world.rank}", "")
            world.all_reduce(np.zeros(1000))
    except ring.JobFailed as error:
        when = time.monotonic()
        again = raised(ring.JobFailed, world.barrier)
        same = type(again) is type(error) and again.rank == error.rank
        write_atomically(
            directory / f"saw-{world.rank}", f"{when}\n{type(error).__name__}\n{error.rank}\n{error.host}\n{same}\n{error}"
        )


ENDS = {
    # The class of the error that the other ranks raise, and a part of the error's message.
    "killed": ("PeerLost", ""),
    "killed in a collective": ("PeerLost", ""),
    "exits": ("PeerLeft", ""),
    "exits with 0": ("PeerLeft", ""),
    "raises": ("Aborted", "KeyError: 'a key that is not there'"),
    "unpicklable": ("Aborted", "pickle"),
    "os._exit": ("PeerLost", ""),
    "segmentation fault": ("PeerLost", ""),
}
# Other ranks see the same as after another end above, so the gate does not run these ends.
SIMILAR_TO_OTHERS = ("exits", "exits with 0", "killed", "os._exit", "segmentation fault", "unpicklable")


@pytest.mark.parametrize("transport", ("auto", pytest.param("tcp", marks=pytest.mark.full)))
@pytest.mark.parametrize("how", [pytest.param(how, marks=[pytest.mark.full] if how in SIMILAR_TO_OTHERS else []) for how in ENDS])
def test_all_ranks_raise_an_error_when_a_rank_ends(ringrun: Launcher, tmp_path: Path, how: str, transport: str):
    kind, text = ENDS[how]
    n = 3
    job = ringrun.start(n, HERE, "run_rank", tmp_path, how, env={"TEST_TRANSPORT": transport}, flags=("--grace", "10"))
    pid = int(wait_and_read(tmp_path / "pid"))
    if how.startswith("killed"):
        for rank in (0, 2) if how == "killed" else ():
            wait_and_read(tmp_path / f"waits-{rank}")
        if how == "killed in a collective":
            wait_and_read(tmp_path / "in-collective")
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
    done = job.finish()
    assert done.code != 0 or how == "exits with 0", done
    for rank in (0, 2):
        path = tmp_path / f"saw-{rank}"
        assert path.exists(), done
        when, name, culprit, host, same, *message = path.read_text().split("\n")
        assert (name, culprit, same) == (kind, "1", "True"), (message, str(done))
        assert host not in ("", "None") and text in "\n".join(message), message
        if how.startswith("killed"):
            assert float(when) - killed < 2, "peers must raise an error within 2 s"
    assert not is_alive(pid)


def run_quiet_rank(directory: Path) -> None:
    """Runs one rank of `test_ringrun_blames_the_rank_at_fault_although_no_rank_prints_its_error`."""
    world = ring.init(timeout=30)
    write_atomically(directory / f"pid-{world.rank}", os.getpid())
    world.barrier()
    if world.rank == 3:
        raised(ring.Aborted, world.abort, "there is no more paper")
        for rank in range(3):
            pid = int((directory / f"pid-{rank}").read_text())
            wait_until(f"rank {rank} has ended", lambda pid=pid: not is_alive(pid))
        os._exit(7)
    try:
        world.barrier()
    except ring.JobFailed:
        if world.rank == 0:
            os._exit(9)
        if world.rank == 1:
            sys.exit(9)
        raise ValueError("an error of the program") from None


def test_ringrun_blames_the_rank_at_fault_although_no_rank_prints_its_error(ringrun: Launcher, tmp_path: Path):
    """Rank 3 ends last, so only the exit records of the other ranks say that rank 3 is at fault."""
    done = ringrun(4, HERE, "run_quiet_rank", tmp_path, code=7, flags=("--grace", "30"))
    assert "ringrun: rank 3 (pid " in done.stderr, done
    assert "ringrun: rank 3 reported: a rank stopped the job: rank 3 on " in done.stderr, done


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
