"""Tests of `ringtrain.Gossip` on numpy arrays."""

import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

import ringtrain as ring
from ranks import (
    Launcher,
    raised,
    run_in_threads,
    threads_of_process,
    wait_and_read,
    wait_until,
    wait_until_asleep,
    write_atomically,
)

SEED = 30
TRUTH = np.arange(1.0, 11.0, dtype=np.float32)


def run_without_errors(n: int, work) -> list:
    results = run_in_threads(n, work)
    assert not any(isinstance(result, BaseException) for result in results), results
    return results


def gradient(w: np.ndarray, rank: int, step: int) -> np.ndarray:
    """Returns the gradient of a least-squares problem whose solution is `TRUTH`, on random samples."""
    features = np.random.default_rng([SEED, rank, step]).standard_normal((16, 10)).astype(np.float32)
    return features.T @ (features @ (w - TRUTH)) / 16


@pytest.mark.parametrize("n", (1, 2, 4))
def test_the_ranks_find_the_common_solution(n: int):
    """Each rank has samples of its own."""

    def work(group: ring.Group):
        steps = 150
        w = np.full(10, group.rank, np.float32)
        with ring.Gossip(w, every=3, group=group) as gossip:
            assert not w.any(), "the parameters of rank 0 are the initial parameters"
            for step in range(steps):
                # Without the barrier, a rank takes many steps during one average, and its result is too old.
                group.barrier()
                w -= np.float32(0.1) * gradient(w, group.rank, step)
                gossip.step()
        assert gossip.is_closed and gossip.lost_ranks == []
        done, skipped = gossip.averages
        assert done + skipped == steps // 3 and (done > 0) == (n > 1), (done, skipped)
        return w

    before = threads_of_process()
    results = run_without_errors(n, work)
    for w in results:
        assert np.array_equal(w, results[0]) and np.abs(w - TRUTH).max() < 0.05, results
    wait_until("the threads of the ranks end", lambda: threads_of_process() <= before)


def test_a_single_rank_computes_the_same_bits_as_without_gossip():
    expected, w = np.zeros(10, np.float32), np.zeros(10, np.float32)
    with ring.Gossip(w, group=ring.solo()) as gossip:
        for step in range(10):
            expected -= np.float32(0.05) * gradient(expected, 0, step)
            w -= np.float32(0.05) * gradient(w, 0, step)
            assert gossip.step() is False
    assert np.array_equal(w, expected)


@pytest.mark.parametrize("form", ("list", "dict"))
def test_averages_reach_all_arrays(form: str):
    def work(group: ring.Group):
        arrays = {"table": np.zeros((2, 3), np.float32), "bias": np.zeros((), np.float32)}
        with ring.Gossip(arrays if form == "dict" else list(arrays.values()), group=group) as gossip:
            arrays["table"][1] = 2 * group.rank
            arrays["bias"][...] = group.rank
            while not gossip.averages.done:
                gossip.step()
        return arrays

    for arrays in run_without_errors(2, work):
        assert np.allclose(arrays["table"], [[0, 0, 0], [1, 1, 1]]) and np.allclose(arrays["bias"], 0.5), arrays


def test_a_rank_that_fails_does_not_affect_the_others():
    def work(group: ring.Group):
        w = np.zeros(3, np.float32)
        try:
            with ring.Gossip(w, group=group) as gossip:
                if group.rank == 0:
                    raise KeyError("label")
                w += 2
                while not gossip.lost_ranks:
                    gossip.step()
        except KeyError:
            return None
        return w, gossip.lost_ranks

    _, *others = run_without_errors(3, work)
    for w, [(rank, reason)] in others:
        assert np.array_equal(w, others[0][0]), others
        assert rank == 0 and reason.startswith("on ") and reason.endswith(": its program raised KeyError: 'label'"), reason


def test_wrong_arguments_and_calls_after_the_end_raise_an_error():
    def work(group: ring.Group) -> None:
        w = np.zeros(5, np.float32)
        for wrong, options, text in (
            (3, {}, "int"),
            (np.zeros(3), {}, "the parameter is float64, not float32"),
            ({"w": np.zeros((4, 4), np.float32)[:, 1]}, {}, "parameter 'w' is not contiguous"),
            ([w, w], {}, "the same memory"),
            (w, {"every": 0}, "every is 0"),
            (w, {"every": 2**32}, "below 2^32"),
        ):
            error = raised(ring.InvalidArgument, ring.Gossip, wrong, group=group, **options)
            assert text in str(error), (wrong, error)
        raised(TypeError, ring.Gossip, w, every=1.5, group=group)
        gossip = ring.Gossip(w, group=group)
        raised(ring.InvalidArgument, gossip.finish, -1)
        raised(ring.InvalidArgument, gossip._core.step, np.zeros(5))
        raised(ring.InvalidArgument, gossip._core.step, np.zeros(4, np.float32))
        gossip.step()
        gossip.finish()
        assert gossip.is_closed and gossip.averages.done <= 1
        for call in (gossip.step, gossip.finish):
            assert "the gossip has been closed" in str(raised(ring.Error, call))
        gossip.close()

    assert run_without_errors(2, work) == [None, None]


def test_ranks_with_different_parameters_get_an_error():
    results = run_in_threads(2, lambda group: ring.Gossip(np.zeros(3 + group.rank, np.float32), group=group))
    assert all(isinstance(error, ring.Mismatch) for error in results), results


def test_a_rank_that_closes_without_finishing_is_lost():
    """One of two ranks is a quorum only if it is rank 0. If each rank alone were a quorum, both ranks could finish with different
    parameters."""

    def work(group: ring.Group, closing: int):
        w = np.ones(3, np.float32)
        gossip = ring.Gossip(w, group=group)
        if group.rank == closing:
            return gossip.close()
        wait_until("the loss of the other rank is known", lambda: gossip.lost_ranks)
        if closing == 1:
            gossip.finish()
            return gossip.lost_ranks[0]
        w += 1
        error = raised(ring.JobFailed, gossip.finish)
        assert "rank 1 can only reach 1 of the 2 ranks" in str(error) and "): it closed its gossip" in str(error), error
        assert gossip.is_closed and (w == 2).all()
        return gossip.lost_ranks[0]

    for closing in (0, 1):
        rank, reason = run_without_errors(2, lambda group: work(group, closing))[1 - closing]
        assert rank == closing and reason.endswith("): it closed its gossip before it finished"), reason


# Jobs in which a rank is killed or interrupted. Each rank is a process.


def train_with_killed_rank(directory: Path, victim: int) -> None:
    """Runs one rank of a job. The test kills the rank `victim` after 50 steps of each rank."""
    world = ring.init(timeout=30)
    w = np.zeros(10, np.float32)
    with ring.Gossip(w, every=2) as gossip:
        for step in range(10**9):
            w -= np.float32(0.1) * gradient(w, world.rank, step)
            gossip.step()
            if step == 50:
                write_atomically(directory / f"pid-{world.rank}", os.getpid())
            if np.abs(w - TRUTH).max() < 0.01 and world.rank != victim and gossip.lost_ranks:
                break
    print(np.abs(w - TRUTH).max() < 1, [rank for rank, _ in gossip.lost_ranks])
    write_atomically(directory / f"hash-{world.rank}", w.tobytes().hex())


@pytest.mark.full
@pytest.mark.parametrize("victim", (0, 2))
def test_the_other_ranks_finish_after_a_rank_was_killed(ringrun: Launcher, tmp_path: Path, victim: int):
    job = ringrun.start(4, Path(__file__), "kill", tmp_path, victim, flags=("--tolerate-failures",))
    pids = [int(wait_and_read(tmp_path / f"pid-{rank}")) for rank in range(4)]
    os.kill(pids[victim], signal.SIGKILL)
    done = job.finish()
    assert done.code == 0 and "panicked" not in str(done), done
    others = [rank for rank in range(4) if rank != victim]
    assert [done.lines(rank) for rank in others] == [[f"True [{victim}]"]] * 3, done
    assert len({wait_and_read(tmp_path / f"hash-{rank}") for rank in others}) == 1


def interrupt_finish(directory: Path) -> None:
    """Runs one rank of a job. The test interrupts rank 1 while rank 1 waits for rank 0."""
    world = ring.init(timeout=30)
    w = np.full(3, world.rank, np.float32)
    gossip = ring.Gossip(w)
    w += 1 + world.rank
    if world.rank == 1:
        try:
            write_atomically(directory / "pid", os.getpid())
            gossip.finish()
        except KeyboardInterrupt:
            print("interrupted", gossip.is_closed, w.tolist(), flush=True)
    else:
        wait_until("rank 1 is lost", lambda: gossip.lost_ranks)
        gossip.finish()
        print("finished", w.tolist(), gossip.lost_ranks[0][0])


@pytest.mark.full
def test_ctrl_c_interrupts_the_wait_for_the_other_ranks(ringrun: Launcher, tmp_path: Path):
    job = ringrun.start(2, Path(__file__), "interrupt", tmp_path, flags=("--tolerate-failures",))
    pid = int(wait_and_read(tmp_path / "pid"))
    wait_until_asleep(pid, pid)
    os.kill(pid, signal.SIGINT)
    done = job.finish()
    assert [done.lines(rank) for rank in range(2)] == [["finished [1.0, 1.0, 1.0] 1"], ["interrupted True [2.0, 2.0, 2.0]"]], done


if __name__ == "__main__":
    if sys.argv[1] == "kill":
        train_with_killed_rank(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        interrupt_finish(Path(sys.argv[2]))
