"""Failures: ranks that disagree, deadlines, ranks that leave or die. All ranks get the same error, which names the culprit."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import ringtrain as ring
from ranks import Launcher, in_threads, is_alive, leave, raised, read_when_there, wait_until

HERE = Path(__file__)


def all_raise(results, kind) -> list:
    """Every rank got an exception of this kind; gives them."""
    assert all(isinstance(result, kind) for result in results), results
    return results


# Disagreement and deadlines: all ranks in this process

DISAGREEMENTS = {
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
    "lists of a group": lambda g: g.subgroup([0, 1] if g.rank else [1, 0]),
}


@pytest.mark.parametrize("n", (2, 3))
@pytest.mark.parametrize("what", DISAGREEMENTS)
def test_ranks_that_disagree_are_told_by_whom(what, n):
    def work(group):
        DISAGREEMENTS[what](group)
        # Who has only sent may be done by then.
        group.barrier()

    errors = all_raise(in_threads(n, work), ring.Mismatch)
    for error in errors:
        first, second = error.ranks
        assert first != second and {first, second} <= set(range(n))
        assert f"rank {first}" in str(error) and f"rank {second}" in str(error)
    assert len({str(error).split(" (reported by")[0] for error in errors}) == 1, errors


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
        assert isinstance(raised(ring.Error, group.abort, "once more"), ring.Mismatch), "the first cause stays"

    assert in_threads(2, work) == [None, None]


def test_who_is_late_is_named():
    def work(group):
        if group.rank == 2:
            # Late: it comes when the others have given up.
            return raised(ring.JobFailed, lambda: group.receive(np.zeros(1), 0))
        group.timeout = 0.5
        started = time.monotonic()
        error = raised(ring.Timeout, group.all_reduce, np.zeros(5))
        # The rank that came first has told this one.
        assert time.monotonic() - started < 5
        return error

    errors = all_raise(in_threads(3, work), ring.Timeout)
    for error in errors:
        assert isinstance(error, TimeoutError)
        assert error.rank == 2 and error.host
        assert "rank 2" in str(error)


def test_a_message_that_does_not_come():
    def work(group):
        if group.rank == 0:
            group.timeout = 0.3
            return raised(ring.Timeout, lambda: group.receive_object(source=1, tag=3))
        return raised(ring.JobFailed, group.barrier)

    errors = all_raise(in_threads(2, work), ring.Timeout)
    assert errors[0].rank in (1, None)


@pytest.mark.parametrize("call", ("barrier", "receive", "receive_object", "wait", "probe"))
def test_a_rank_that_aborts_says_why_to_all(call):
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

    errors = all_raise(in_threads(3, work), ring.Aborted)
    assert {error.reported_by for error in errors} <= {None, 0, 1, 2}


def test_a_rank_that_leaves_is_named():
    def work(group):
        if group.rank == 1:
            group.close()
            return None
        return raised(ring.PeerLeft, group.all_reduce, np.zeros(3))

    results = in_threads(3, work)
    assert results[0].rank == results[2].rank == 1 and results[0].host


def test_a_message_to_who_has_left():
    def work(group):
        if group.rank == 1:
            return None
        return raised(ring.PeerLeft, group.receive, np.zeros(3), 1)

    assert in_threads(2, work)[0].rank == 1


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

    assert all("enough" in str(error) for error in all_raise(in_threads(2, work), ring.Aborted))


def test_starting_fails_with_who_is_missing():
    from ringtrain import _core

    place = _core.Rendezvous(2, "a secret of tests", "0" * 32)
    options = {"rank": 0, "size": 2, "rendezvous": place.address, "job_id": "0" * 32}
    error = raised(ring.StartError, _core.join, **options, secret="a secret of tests", start_timeout=0.3)
    assert "1" in str(error)
    assert isinstance(raised(ring.StartError, _core.join, **options, secret="another secret!!", start_timeout=2), ring.Error)
    for wrong in (
        {"rank": 0},
        {"size": 2, "rank": 0},
        {"peers": "hosts.txt"},
        {"peers": "hosts.txt", "rendezvous": place.address, "rank": 0},
        {"rendezvous": "nowhere", "rank": 0, "size": 2, "job_id": "0" * 32},
        {"rendezvous": place.address, "rank": 0, "size": 2, "job_id": "xyz"},
        {"rendezvous": place.address, "rank": 0, "size": 0, "job_id": "0" * 32},
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


# Deaths and ends: each rank a process. What a rank sees it leaves in a file.

FAR = 4_000_000
"""Elements of a collective that takes a while."""


def end_of_rank(directory: Path, how: str) -> None:
    """What the ranks of the tests below do: rank 1 ends somehow while the others are in a collective, or wait for one."""
    world = ring.init(timeout=30, transport=os.environ.get("TEST_TRANSPORT"))
    if world.rank == 1:
        leave(directory / "pid", os.getpid())
    world.barrier()
    try:
        if world.rank == 1:
            {
                "killed": lambda: wait_until("death", lambda: False),
                "killed at work": lambda: [world.all_reduce(x, out=x) for x in [np.zeros(FAR, np.float32)] for _ in range(10**6)],
                "exits": lambda: sys.exit(3),
                "exits with 0": lambda: sys.exit(0),
                "raises": lambda: {}["a key that is not there"],
                "raises in a thread": lambda: None,
                "unpicklable": lambda: world.all_gather_object(lambda: 0),
                "exits hard": lambda: os._exit(9),
                "segmentation fault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
            }[how]()
        elif how == "killed at work":
            x = np.zeros(FAR, np.float32)
            for k in range(10**6):
                world.all_reduce(x, out=x)
                if k == 2 and world.rank == 0:
                    leave(directory / "at-work", "")
        elif how == "unpicklable":
            error = raised(ring.Error, world.all_gather_object, 1)
            assert error.rank == 1 and "pickle" in str(error), error
            world.barrier()
        else:
            leave(directory / f"waits-{world.rank}", "")
            world.all_reduce(np.zeros(1000))
    except ring.JobFailed as error:
        when = time.monotonic()
        again = raised(ring.JobFailed, world.barrier)
        same = type(again) is type(error) and again.rank == error.rank
        leave(directory / f"saw-{world.rank}", f"{when}\n{type(error).__name__}\n{error.rank}\n{error.host}\n{same}\n{error}")


ENDS = {
    # What the others raise, and what they say.
    "killed": ("PeerLost", ""),
    "killed at work": ("PeerLost", ""),
    "exits": ("PeerLeft", ""),
    "exits with 0": ("PeerLeft", ""),
    "raises": ("Aborted", "KeyError: 'a key that is not there'"),
    "unpicklable": ("Aborted", "pickle"),
    "exits hard": ("PeerLost", ""),
    "segmentation fault": ("PeerLost", ""),
}


@pytest.mark.parametrize("transport", ("auto", "tcp"))
@pytest.mark.parametrize("how", ENDS)
def test_the_end_of_a_rank_is_told_to_all(ringrun: Launcher, tmp_path: Path, how: str, transport: str):
    kind, text = ENDS[how]
    n = 3
    job = ringrun.start(n, HERE, "end_of_rank", tmp_path, how, env={"TEST_TRANSPORT": transport}, flags=("--grace", "10"))
    pid = int(read_when_there(tmp_path / "pid"))
    if how.startswith("killed"):
        for rank in (0, 2) if how == "killed" else ():
            read_when_there(tmp_path / f"waits-{rank}")
        if how == "killed at work":
            read_when_there(tmp_path / "at-work")
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
            assert float(when) - killed < 2, "peers notice within 2 s"
    assert not is_alive(pid)


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
