"""Tests of `ringtrain.ParameterServer` on numpy arrays."""

import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import ringtrain as ring
from ranks import Launcher, raised, run_in_threads, wait_and_read, write_atomically

SEED = 20
TRUTH = np.arange(1.0, 11.0, dtype=np.float32)


def run_on_ranks(n: int, run_worker, parameters=lambda: np.zeros(10, np.float32), **options) -> list:
    """Runs a job of `n` ranks. Servers wait for the workers, and workers call `run_worker(server, parameters)`.
    Returns the results of all ranks. The result of a server is the number of its updates and their staleness."""

    def run_rank(group: ring.Group):
        values = parameters()
        with ring.ParameterServer(values, group=group, **{"lr": 0.1, **options}) as server:
            if server.is_server:
                assert server.wait_for_workers(30) and server.lost_workers == []
                return server.state_dict()["steps"], server.staleness
            return run_worker(server, values)

    results = run_in_threads(n, run_rank)
    assert not any(isinstance(result, BaseException) for result in results), results
    return results


def draw_sample(worker: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a random sample of a least-squares problem whose solution is `TRUTH`."""
    features = np.random.default_rng([SEED, worker, step]).standard_normal((16, 10)).astype(np.float32)
    return features, features @ TRUTH


def least_squares_gradient(w: np.ndarray, features: np.ndarray, targets: np.ndarray) -> np.ndarray:
    return features.T @ (features @ w - targets) / len(targets)


@pytest.mark.full
def test_asynchronous_workers_solve_a_least_squares_problem():
    steps = 80

    def run_worker(server: ring.ParameterServer, w: np.ndarray) -> np.ndarray:
        for step in range(steps):
            server.pull()
            assert server.push(least_squares_gradient(w, *draw_sample(server.worker_index, step)))
        server.pull()
        return w

    results = run_on_ranks(5, run_worker, servers=2, lr=0.05, weight_decay=0.0)
    for updates, staleness in results[:2]:
        assert updates == sum(staleness.counts) == 3 * steps and staleness.dropped == 0
    # The final parameters of a worker may lack the last gradients of the other workers.
    for w in results[2:]:
        assert np.abs(w - TRUTH).max() < 1, w


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("servers", [1, 2])
def test_long_gradients_and_parameters_arrive_whole(servers: int, synchronous: bool):
    """Up to 8,171 parameters travel with the header of their message, and more as a message of their own."""
    for count in (8171 * servers, 8171 * servers + 1, 40_000):
        gradient = np.arange(count, dtype=np.float32) % 1000

        def run_worker(server: ring.ParameterServer, values: np.ndarray, gradient: np.ndarray = gradient) -> None:
            expected = np.ones_like(values)
            server.pull()
            assert np.array_equal(values, expected)
            assert server.push(gradient) == (True, 0)
            server.pull()
            expected -= np.float32(0.5) * gradient
            assert np.array_equal(values, expected)
            assert server.push_pull(-gradient) == (True, 0)
            expected += np.float32(0.5) * gradient
            assert np.array_equal(values, expected)
            if not synchronous:
                rows = np.arange(0, values.size, 2)
                assert server.push_rows(0, rows, gradient[rows])
                server.pull_rows(0, rows)
                expected[rows] -= np.float32(0.5) * gradient[rows]
                assert np.array_equal(values, expected)

        ones = partial(np.ones, count, np.float32)
        run_on_ranks(servers + 1, run_worker, ones, servers=servers, synchronous=synchronous, lr=0.5, weight_decay=0.0)


def test_synchronous_workers_compute_what_one_process_computes():
    def run_worker(server: ring.ParameterServer, w: list[np.ndarray]) -> np.ndarray:
        server.pull()
        for step in range(10):
            flat = np.concatenate([w[0].reshape(-1), w[1]])
            values = least_squares_gradient(flat, *draw_sample(server.worker_index, step))
            assert server.push_pull([values[:6].reshape(2, 3), values[6:]]) == (True, 0)
        return np.concatenate([w[0].reshape(-1), w[1]])

    results = run_on_ranks(
        5,
        run_worker,
        lambda: [np.zeros((2, 3), np.float32), np.zeros(4, np.float32)],
        servers=2,
        synchronous=True,
        optimizer="nesterov",
    )
    w, velocity, momentum = np.zeros(10, np.float32), np.zeros(10, np.float32), 0.9
    for step in range(10):
        mean = sum(least_squares_gradient(w, *draw_sample(worker, step)) for worker in range(3)) / np.float32(3)
        velocity = momentum * velocity + mean
        w = w - np.float32(0.1) * (mean + momentum * velocity)
    for found in results[2:]:
        assert np.array_equal(found, results[2]) and np.allclose(found, w, rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ("lamb", "lars"))
def test_several_servers_hold_whole_arrays(optimizer: str):
    """The steps of lamb and lars depend on the norms of whole arrays. The worker sets the learning rate of each step."""
    start = [np.linspace(-1, 2, 12, dtype=np.float32).reshape(3, 4), np.zeros(0, np.float32), np.ones((), np.float32), TRUTH]
    found = []
    for servers in (1, 2, 3):

        def run_worker(server: ring.ParameterServer, w: list[np.ndarray]) -> list[np.ndarray]:
            server.pull()
            for step in range(6):
                server.set_learning_rate(0.3 / (1 + step))
                assert server.push_pull([np.sin(value + step) for value in w])
            return w

        def parameters() -> list[np.ndarray]:
            return [value.copy() for value in start]

        found.append(run_on_ranks(servers + 1, run_worker, parameters, servers=servers, optimizer=optimizer)[-1])
    assert not any(np.array_equal(a, b) for a, b in zip(found[0], start, strict=True) if a.size)
    for other in found[1:]:
        assert all(map(np.array_equal, other, found[0]))


def test_a_new_learning_rate_applies_to_the_gradients_of_all_workers():
    order = threading.Barrier(2, timeout=30)

    def run_worker(server: ring.ParameterServer, w: np.ndarray) -> None:
        for step, rate in enumerate((0.5, 0.25)):
            order.wait()
            if server.worker_index == step:
                server.set_learning_rate(rate)
            order.wait()
            assert server.push(np.ones(10))
        order.wait()
        server.pull()
        assert (w == -2 * 0.5 - 2 * 0.25).all(), w
        for lr in (-1, float("nan"), float("inf"), 1e39):
            assert "lr is" in str(raised(ring.InvalidArgument, server.set_learning_rate, lr))

    run_on_ranks(4, run_worker, servers=2)


def test_sparse_rows_equal_dense_gradients():
    """`push_rows` has the same effect as `push` with a gradient whose other rows are zero."""
    start = {"bias": np.ones(2, np.float32), "table": np.arange(33, dtype=np.float32).reshape(11, 3)}

    def run_worker(server: ring.ParameterServer, w: dict) -> None:
        generator = np.random.default_rng(SEED)
        expected = start["table"].copy()
        for rows in ([7, 2, 7, 0, 3], [0, 2, 4, 6, 8, 10], [3, 3], list(range(11)), []):
            values = generator.standard_normal((len(rows), 3))
            dense = np.zeros((11, 3), np.float32)
            np.add.at(dense, rows, values)
            expected -= 0.1 * dense
            assert server.push_rows("table", rows, values).applied
            w["table"][...] = -1
            server.pull_rows("table", rows)
            rest = [row for row in range(11) if row not in rows]
            assert np.allclose(w["table"][rows], expected[rows], atol=1e-5) and (w["table"][rest] == -1).all()
        server.pull()
        assert np.allclose(w["table"], expected, atol=1e-5) and (w["bias"] == 1).all()

    run_on_ranks(3, run_worker, lambda: {name: value.copy() for name, value in start.items()}, servers=2)


@pytest.mark.parametrize("servers", [1, 2])
def test_all_layouts_and_types_of_a_gradient_have_the_same_effect(servers):
    """A contiguous gradient of float32 is not copied before it is sent. With one server, the parameters are received in the
    program's array."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    read_only = values.copy()
    read_only.flags.writeable = False
    unaligned = np.frombuffer(b"x" + values.tobytes(), np.float32, offset=1).reshape(2, 3)
    layouts = [values, read_only, unaligned, values.astype(np.float64), values.T.copy().T, np.repeat(values, 2, 1)[:, ::2]]

    def run_worker(server: ring.ParameterServer, w: np.ndarray) -> None:
        expected = np.ones((2, 3), np.float32)
        for gradient in layouts:
            expected -= np.float32(0.5) * values
            assert server.push_pull(gradient) and np.array_equal(w, expected)
        # The gradient is the array to which the same call writes the new parameters.
        assert server.push_pull(w) and np.array_equal(w, expected * np.float32(0.5))
        for wrong in (values[:1], values.T, "text"):
            with pytest.raises(ring.InvalidArgument):
                server.push_pull(wrong)
        assert np.array_equal(w, expected * np.float32(0.5))

    run_on_ranks(servers + 1, run_worker, lambda: np.ones((2, 3), np.float32), servers=servers, lr=0.5)


def test_rows_without_a_gradient_keep_their_momentum():
    """Regression test: before the fix, a push of very many rows was sent as a dense push, which also moved the other rows."""

    def run_worker(server: ring.ParameterServer, w: np.ndarray) -> None:
        server.push(np.ones((1000, 1)))
        rows = [*range(0, 1000, 2), 999]
        server.push_rows(0, rows, np.ones((501, 1)))
        server.pull()
        expected = np.full(1000, -0.1)
        expected[rows] = -0.29
        assert np.allclose(w[:, 0], expected), w

    run_on_ranks(2, run_worker, lambda: np.zeros((1000, 1), np.float32), optimizer="momentum")


def test_old_gradients_are_dropped_and_the_worker_pulls_again():
    """With `staleness=0`, a server drops a gradient if another worker has pushed since the pull. A dropped gradient changes
    nothing."""
    order = threading.Barrier(2, timeout=30)

    def run_worker(server: ring.ParameterServer, w: np.ndarray) -> list:
        results = []
        for first in (1, 0):
            server.pull()
            order.wait()
            if server.worker_index == first:
                results.append(server.push(np.ones(10)))
            order.wait()
            if server.worker_index != first:
                results.append(server.push(np.full(10, 100.0)))
                server.pull()
                results.append(server.push(np.ones(10)))
            order.wait()
        server.pull()
        assert np.allclose(w, -0.4), w
        return results

    results = run_on_ranks(3, run_worker, staleness=0)
    assert results[0] == (4, ring.Staleness([4], 2))
    for pushes in results[1:]:
        assert sorted(pushes) == [(False, 1), (True, 0), (True, 0)] and sum(map(bool, pushes)) == 2


def test_a_pull_of_rows_makes_the_next_push_fresh():
    """Regression test: before the fix, the staleness of a worker that only pulled rows grew with each update."""

    def run_worker(server: ring.ParameterServer, w: np.ndarray) -> list:
        pushes = []
        for _ in range(4):
            server.pull_rows(0, [1])
            pushes.append(server.push_rows(0, [1], [1.0]))
        return pushes

    assert run_on_ranks(2, run_worker, staleness=0)[1] == [(True, 0)] * 4


@pytest.mark.parametrize(
    "optimizer", [pytest.param("momentum", marks=pytest.mark.full), "lamb", pytest.param("lars", marks=pytest.mark.full)]
)
def test_a_state_can_be_saved_and_loaded(optimizer: str, tmp_path: Path):
    """A job that loads the state of another job continues as the other job does."""
    servers = 2
    start = {"a": np.linspace(1, 2, 6, dtype=np.float32), "b": np.ones((2, 2), np.float32)}

    def run_rank(group: ring.Group, is_resumed: bool):
        w = {name: value.copy() for name, value in start.items()}
        file = tmp_path / f"{group.rank}.npz"
        with ring.ParameterServer(w, 0.1, optimizer=optimizer, servers=servers, group=group) as server:
            if server.is_server and is_resumed:
                with np.load(file) as state:
                    server.load_state_dict(state)
                raised(ring.InvalidArgument, server.load_state_dict, {})
                raised(ring.InvalidArgument, server.load_state_dict, {**server.state_dict(), "parameters": np.zeros(3)})
                raised(ring.InvalidArgument, server.load_state_dict, {**server.state_dict(), "optimizer": "adam"})
            group.barrier()
            for steps in (2,) if is_resumed else (4, 2):
                if not server.is_server:
                    server.pull()
                    for _ in range(steps):
                        assert server.push_pull({name: np.sin(value) for name, value in w.items()})
                group.barrier()
                if server.is_server and steps == 4:
                    np.savez(file, **server.state_dict())
                group.barrier()
            return server.state_dict()["steps"] if server.is_server else w

    whole = run_in_threads(servers + 1, lambda group: run_rank(group, False))
    resumed = run_in_threads(servers + 1, lambda group: run_rank(group, True))
    assert resumed[:servers] == whole[:servers] == [6] * servers, (whole, resumed)
    for name in start:
        assert np.array_equal(resumed[-1][name], whole[-1][name]), (whole, resumed)


def test_wrong_arguments_raise_an_error_and_send_nothing():
    wrong = (
        ({"parameters": 3}, "int"),
        ({"parameters": [1.0, 2.0]}, "parameter 0 is a float"),
        ({"parameters": np.zeros(3)}, "the parameter is float64, not float32"),
        ({"parameters": {"w": np.zeros((4, 4), np.float32)[:, 1]}}, "parameter 'w' is not contiguous"),
        ({"parameters": [TRUTH, TRUTH]}, "the same memory"),
        ({"lr": 0}, "lr is 0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"optimizer": "sgdd"}, "`sgdd` is not an optimizer"),
        ({"momentum": 0.9}, "use momentum, nesterov or lars"),
        ({"betas": (0.9, 0.99)}, "use adam"),
        ({"optimizer": "adam", "betas": (0.9, 1.0)}, "betas is 1.0"),
        ({"optimizer": "momentum", "momentum": -1}, "momentum is -1"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0"),
        ({"servers": 0}, "at least 1 server"),
        ({"servers": 3}, "the number of ranks is 3 and the number of servers is 3"),
        ({"parameters": np.zeros(1, np.float32), "servers": 2}, "2 servers are too many"),
        ({"optimizer": "lamb", "servers": 2}, "2 servers are too many for this model: it has only 1 tensors"),
        ({"optimizer": "lars", "servers": 2}, "2 servers are too many for this model: it has only 1 tensors"),
        ({"staleness": -1}, "staleness is -1"),
        ({"synchronous": True, "staleness": 3}, "no old gradients"),
    )

    def run_rank(group: ring.Group):
        for options, text in wrong:
            error = raised(
                ring.InvalidArgument,
                lambda: ring.ParameterServer(
                    **{"parameters": np.zeros(5, np.float32), "lr": 0.1, "group": group, **options},
                ),
            )
            assert text in str(error), (options, error)
        w = [np.zeros((3, 2), np.float32), np.zeros((), np.float32)]
        server = ring.ParameterServer(w, 0.1, group=group, synchronous=group.rank < 0)
        calls = (
            server.pull,
            server.push,
            lambda: server.push_pull(w),
            lambda: server.pull_rows(0, [0]),
            lambda: server.set_learning_rate(1),
        )
        if server.is_server:
            for call in calls:
                assert "this rank is a server" in str(raised(ring.Error, call))
            raised(ring.InvalidArgument, server.wait_for_workers, -1)
            assert server.wait_for_workers() and server.state_dict()["steps"] == 0
        else:
            for gradient in (None, 3, [w[0]], [np.zeros((2, 3)), 1.0], [w[0] * 1j, 1.0], ["a", 1.0]):
                raised((ring.InvalidArgument, TypeError), server.push, gradient)
            for key, rows, values in (
                (2, [0], [[0, 0]]),
                ("w", [0], [[0, 0]]),
                (1, [0], [0]),
                (0, [3], [[0, 0]]),
                (0, [-1], [[0, 0]]),
                (0, [0.5], [[0, 0]]),
                (0, [0], [0, 0]),
            ):
                raised(ring.InvalidArgument, server.push_rows, key, rows, values)
            ranges, two = np.array([[2, 1], [1, 1]]), np.zeros(2, np.float32)
            for pairs in (ranges, -ranges, ranges + 100, np.array([[0, 2**62], [2**62, 2**62]])):
                raised(ring.InvalidArgument, server._core.push_ranges, pairs, two)
            raised(ring.InvalidArgument, server._core.push, two)
            raised(ring.InvalidArgument, server._core.pull, np.zeros(7))
            raised(ring.Error, server.state_dict)
            raised(ring.Error, server.wait_for_workers)
        server.close()
        server.close()
        assert server.is_closed
        last = server.state_dict if server.is_server else server.pull
        assert "has been closed" in str(raised(ring.Error, last))

    assert run_in_threads(3, run_rank) == [None] * 3


def test_synchronous_servers_refuse_rows():
    def run_worker(server: ring.ParameterServer, w: np.ndarray) -> None:
        raised(ring.Unsupported, server.push_rows, 0, [1], [1.0])

    run_on_ranks(2, run_worker, synchronous=True)


def test_ranks_with_different_parameters_get_an_error():
    results = run_in_threads(3, lambda group: ring.ParameterServer(np.zeros(3 + group.rank, np.float32), 0.1, group=group))
    assert all(isinstance(error, ring.Mismatch) for error in results), results


def test_a_synchronous_worker_that_fails_is_named():
    def run_rank(group: ring.Group):
        try:
            with ring.ParameterServer(np.zeros(3, np.float32), 0.1, group=group, synchronous=True) as server:
                if server.is_server:
                    assert server.wait_for_workers(30)
                    return server.lost_workers
                if group.rank == 2:
                    raise KeyError("label")
                return str(raised(ring.JobFailed, lambda: [server.push_pull(np.ones(3)) for _ in range(3)]))
        except KeyError:
            return None

    lost, message, _ = run_in_threads(3, run_rank)
    assert [rank for rank, _ in lost] == [2] and "its program raised KeyError: 'label'" in lost[0][1], lost
    assert "rank 2 is lost" in message


# Jobs in which a rank ends. Each rank is a process.


def run_one_rank(directory: Path, victim: str) -> None:
    """Runs one rank of a job. The tests below start the job, and kill the rank `victim`."""
    world = ring.init(timeout=30)
    w = np.zeros(10, np.float32)
    server = ring.ParameterServer(w, lr=0.05, servers=1)
    if server.is_server:
        try:
            write_atomically(directory / f"pid-{world.rank}", os.getpid())
            server.wait_for_workers()
        except KeyboardInterrupt:
            print("interrupted")
        assert server.wait_for_workers(60)
        print("lost", [rank for rank, _ in server.lost_workers])
        return  # The end of the program closes the server.
    write_atomically(directory / f"pid-{world.rank}", os.getpid())
    try:
        for step in range(10**9):
            server.pull()
            server.push(least_squares_gradient(w, *draw_sample(server.worker_index, step)))
            if step == 50:
                write_atomically(directory / f"steps-{world.rank}", "")
            if step > 50 and (directory / "killed").exists() and victim != "0":
                break
    except ring.PeerLost as error:
        print("server", error.rank, "rank 0, a parameter server, is lost" in str(error))
        sys.exit(0)
    print("done", np.abs(w - TRUTH).max() < 0.5)


def test_the_other_ranks_finish_after_a_worker_was_killed(ringrun: Launcher, tmp_path: Path):
    """The test also interrupts the server's wait with Ctrl-C."""
    job = ringrun.start(4, Path(__file__), tmp_path, "2", flags=("--tolerate-failures",))
    for rank in (1, 2, 3):
        wait_and_read(tmp_path / f"steps-{rank}")
    server, worker = (int(wait_and_read(tmp_path / f"pid-{rank}")) for rank in (0, 2))
    os.kill(server, signal.SIGINT)
    os.kill(worker, signal.SIGKILL)
    write_atomically(tmp_path / "killed", "")
    done = job.finish()
    assert done.code == 0 and "panicked" not in str(done), done
    assert [done.lines(rank) for rank in range(4)] == [["interrupted", "lost [2]"], ["done True"], [], ["done True"]], done


@pytest.mark.full
def test_the_errors_of_all_workers_name_a_lost_server(ringrun: Launcher, tmp_path: Path):
    job = ringrun.start(3, Path(__file__), tmp_path, "0", flags=("--tolerate-failures",))
    for rank in (1, 2):
        wait_and_read(tmp_path / f"steps-{rank}")
    os.kill(int(wait_and_read(tmp_path / "pid-0")), signal.SIGKILL)
    done = job.finish()
    assert done.code == 0 and "panicked" not in str(done), done
    assert [done.lines(rank) for rank in range(3)] == [[], ["server 0 True"], ["server 0 True"]], done


if __name__ == "__main__":
    run_one_rank(Path(sys.argv[1]), sys.argv[2])
