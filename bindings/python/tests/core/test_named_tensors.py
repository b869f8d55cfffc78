"""Tests of `_core.NamedTensors`: the ranks submit tensors by name, in any order and from several threads."""

import contextlib
import os
import random
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import ringtrain as ring
from ranks import Launcher, raised, run_in_threads, threads_of_process, wait_until, write_atomically
from ringtrain import _core

HERE = Path(__file__)
SEED = 41


def run_with_named_tensors(n: int, work, **options) -> list:
    """Runs `work(tensors, group)` on `n` ranks, closes the named tensors, and returns the results of `work`."""

    def run_rank(group: ring.Group):
        tensors = _core.NamedTensors(group.core, **options)
        try:
            result = work(tensors, group)
        except BaseException as error:
            tensors.abort(str(error))
            raise
        tensors.close()
        assert tensors.is_closed and "has been closed" in str(raised(ring.Error, tensors.join))
        return result

    results = run_in_threads(n, run_rank)
    assert not any(isinstance(result, BaseException) for result in results), results
    return results


@pytest.mark.parametrize("n", (1, 2, 3))
def test_threads_of_each_rank_submit_tensors_in_different_orders(n: int):
    counts = [0, 1, 5, 1000, 70_000] * 8

    def work(tensors: _core.NamedTensors, group: ring.Group) -> None:
        def run_thread(part: int) -> None:
            order = list(range(part, len(counts), 2))
            random.Random(SEED + 10 * group.rank + part).shuffle(order)
            for step in range(3):
                arrays = {index: np.full(counts[index], index + step + group.rank, np.float32) for index in order}
                handles = {index: tensors.all_reduce(f"t{index}", array) for index, array in arrays.items()}
                for index, handle in handles.items():
                    handle.wait()
                    expected = n * (index + step) + sum(range(n))
                    if not np.all(arrays[index] == expected):
                        wrong.append((index, step, arrays[index]))

        wrong: list = []
        threads = [threading.Thread(target=run_thread, args=(part,)) for part in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong, wrong[0]
        statistics = tensors.statistics()
        assert statistics["tensors"] == 3 * len(counts) >= statistics["operations"] > 0

    before = threads_of_process()
    run_with_named_tensors(n, work)
    wait_until("the threads to end", lambda: threads_of_process() <= before)


def test_every_operation_and_type():
    def work(tensors: _core.NamedTensors, group: ring.Group) -> None:
        n, rank = group.size, group.rank

        def check_sum(array: np.ndarray, expected: list | None) -> None:
            output = np.zeros_like(array)
            submit = lambda: tensors.all_reduce(f"sum of {array.dtype}", output, "sum", array)  # noqa: E731
            if expected is None:
                assert "not defined" in str(raised(ring.Unsupported, submit))
            else:
                submit().wait()
                assert output.tolist() == expected

        def check_others() -> None:
            copied = np.array([(rank, rank + 1)], dtype="i4,i8")
            tensors.broadcast("records", copied, n - 1).wait()
            assert copied.tolist() == [(n - 1, n)]
            part = np.zeros(2 if rank == 0 else 1, np.int32)
            tensors.reduce_scatter("part", part, np.arange(n + 1, dtype=np.int32), "max").wait()
            assert part.tolist() == ([0, 1] if rank == 0 else [rank + 1])
            gathered = tensors.all_gather_bytes("bytes", bytes([rank]) * rank).wait()
            assert gathered == b"".join(bytes([other]) * other for other in range(n))

        calls = [
            lambda: check_sum(np.array([True, rank == 0, False]), [True, True, False]),
            lambda: check_sum(np.array([1 + 1j, rank]), None),
            lambda: check_sum(np.array([rank, 3], np.int64), [sum(range(n)), 3 * n]),
            lambda: check_sum(np.array([rank, 3], np.float16), [sum(range(n)), 3 * n]),
            check_others,
        ]

        # Rank 0 waits for the results in the opposite order, so each of its calls needs a thread of its own.
        threads = [threading.Thread(target=call) for call in calls]
        for thread in threads if rank == 0 else threads[::-1]:
            thread.start()
            if rank > 0:
                thread.join()
        for thread in threads:
            thread.join()

    with pytest.MonkeyPatch.context() as patch:
        failures: list = []
        patch.setattr(threading, "excepthook", failures.append)
        run_with_named_tensors(3, work)
    assert not failures, failures


def test_ranks_that_have_joined_contribute_zeros():
    steps = (1, 4, 2)

    def work(tensors: _core.NamedTensors, group: ring.Group) -> list:
        for round_number in range(2):
            for step in range(steps[group.rank]):
                loss, gradient = np.array([1.0]), np.full(1000, 6, np.float32)
                handles = [tensors.all_reduce("loss", loss), tensors.all_reduce("gradient", gradient, "avg")]
                for handle in handles:
                    handle.wait()
                active = sum(count > step for count in steps)
                assert loss[0] == active and np.all(gradient == 2 * active), (round_number, step, loss)
            if group.rank == 1:
                error = raised(ring.Error, tensors.all_reduce("maximum", np.ones(3), "max").wait)
                assert "`maximum`" in str(error) and "ranks 0 and 2" in str(error), error
            handle = tensors.join()
            if group.rank != 1:
                assert "has joined" in str(raised(ring.Error, tensors.all_reduce, "late", np.ones(1)))
            assert handle.wait() == 1 == handle.wait()
        return [group.rank]

    run_with_named_tensors(3, work)


def test_a_disagreement_fails_only_its_tensor():
    def work(tensors: _core.NamedTensors, group: ring.Group) -> None:
        for _ in range(2):
            handle = tensors.all_reduce("odd", np.ones(3 + group.rank))
            error = raised(ring.InvalidArgument, handle.wait)
            assert "`odd`" in str(error) and "rank 1: all_reduce(sum, 4 x f64)" in str(error), error
        for name in ("", "x" * 300):
            raised(ring.InvalidArgument, tensors.all_reduce, name, np.ones(1))
        raised(ring.InvalidArgument, tensors.broadcast, "x", np.ones(1), 2)
        if group.rank == 0:
            waiting = tensors.all_reduce("twice", np.ones(1))
            assert "already in flight" in str(raised(ring.InvalidArgument, tensors.all_reduce, "twice", np.ones(1)))
            raised(ring.StillRunning, waiting.wait, 0.01)
            assert not waiting.test() and not waiting.cancel()
        group.barrier()
        if group.rank == 1:
            waiting = tensors.all_reduce("twice", np.ones(1))
        else:
            raised(ring.StillRunning, tensors.close, 0.01)
        group.barrier()
        assert _core.wait_any([waiting]) == 0 and waiting.test()
        waiting.wait()

    run_with_named_tensors(2, work)


def test_a_stall_is_reported_until_it_ends():
    def work(tensors: _core.NamedTensors, group: ring.Group) -> None:
        if group.rank == 0:
            handle = tensors.all_reduce("late", np.ones(1))
            wait_until("the stall", lambda: tensors.stalls)
            [(name, missing, seconds)] = tensors.stalls
            assert (name, missing) == ("late", [1]) and seconds >= 0.02
        group.barrier()
        if group.rank == 1:
            handle = tensors.all_reduce("late", np.ones(1))
        handle.wait()
        wait_until("the end of the stall", lambda: not tensors.stalls)

    run_with_named_tensors(2, work, stall_warning=0.02)


def test_a_stall_that_lasts_too_long_ends_the_job():
    """Rank 1 has joined, so rank 0 waits only for rank 2."""

    def work(group: ring.Group) -> Exception:
        tensors = _core.NamedTensors(group.core, stall_abort=0.05)
        if group.rank == 2:
            return raised(ring.JobFailed, group.receive, np.zeros(1), 0)
        if group.rank == 1:
            return raised(ring.JobFailed, tensors.join().wait)
        error = raised(ring.JobFailed, tensors.all_reduce("missing", np.ones(1)).wait)
        assert error.__notes__ == ["in the all-reduce of tensor `missing`"]
        raised(ring.JobFailed, tensors.all_reduce, "later", np.ones(1))
        return error

    for result in run_in_threads(3, work):
        assert "`missing`" in str(result) and "rank 2" in str(result), result


def test_every_waiting_tensor_gets_the_error_of_a_rank_that_aborts():
    def work(group: ring.Group) -> None:
        tensors = _core.NamedTensors(group.core)
        if group.rank == 1:
            # The other ranks have submitted their tensors when they send.
            for other in (0, 2):
                group.receive(np.zeros(1), other)
            tensors.abort("the disk is full")
            return
        handles = [tensors.all_reduce(f"t{index}", np.ones(index)) for index in range(3)]
        # On a busy machine, the job may have ended before the send returns.
        with contextlib.suppress(ring.Aborted):
            group.send(np.ones(1), 1)
        for index, handle in enumerate(handles):
            error = raised(ring.Aborted, handle.wait)
            assert error.rank == 1 and "the disk is full" in str(error)
            assert error.__notes__ == [f"in the all-reduce of tensor `t{index}`"]
        tensors.close()

    results = run_in_threads(3, work)
    assert not any(isinstance(result, BaseException) for result in results), results


def test_an_operation_keeps_its_array_alive_without_its_handle():
    def work(tensors: _core.NamedTensors, group: ring.Group) -> None:
        array = np.ones(100_000)
        before = sys.getrefcount(array)
        tensors.all_reduce("array", array)  # The handle is dropped at once.
        # The wait for a later tensor drops the reference that the operation had.
        wait_until(
            "the array to be released",
            lambda: tensors.all_reduce("next", np.ones(1)).wait() is None and sys.getrefcount(array) == before,
        )

    run_with_named_tensors(1, work)


def run_rank(directory: Path) -> None:
    """Runs one rank of `test_the_error_after_a_killed_rank_names_the_rank_and_the_tensor`."""
    world = ring.init(timeout=30)
    tensors = _core.NamedTensors(world.core)
    if os.fork() == 0:
        raised(ring.Forked, tensors.all_reduce, "child", np.ones(1))
        raised(ring.Forked, tensors.close)
        os._exit(0)
    assert os.wait()[1] == 0
    handle = tensors.all_reduce(f"tensor {world.rank}", np.ones(1))
    world.barrier()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    error = raised(ring.PeerLost, handle.wait)
    assert error.rank == 1 and error.__notes__ == [f"in the all-reduce of tensor `tensor {world.rank}`"]
    write_atomically(directory / f"saw-{world.rank}", "")


def test_the_error_after_a_killed_rank_names_the_rank_and_the_tensor(ringrun: Launcher, tmp_path: Path):
    done = ringrun(3, HERE, "run_rank", tmp_path, code=128 + 9, flags=("--grace", "10"))
    assert all((tmp_path / f"saw-{rank}").exists() for rank in (0, 2)), done


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
