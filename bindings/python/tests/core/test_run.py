"""Tests of `ringtrain.run`, which starts ranks from a notebook or another program."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import ringtrain as ring
from ranks import Launcher, is_alive, raised, wait_and_read, wait_until


@pytest.fixture(autouse=True)
def launcher(ringrun: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the folder of the `ringrun` under test first on PATH, so that `ringtrain.run` starts this `ringrun`."""
    monkeypatch.setenv("PATH", str(Path(ringrun.program).parent), prepend=os.pathsep)


def rank_pids() -> list[str]:
    """Returns the process ids of the ranks of `ringtrain.run` that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"ringtrain._rank" in words and is_alive(int(path.parent.name)):
            found.append(path.parent.name)
    return found


def test_run_returns_the_results_in_rank_order(capfd: pytest.CaptureFixture):
    offset = 10

    def nested(factor, *, shift=0):
        def inner(value):
            return value * factor + shift + offset

        world = ring.init()
        print(f"hello from {world.rank}")
        total = world.all_reduce(np.full(3, world.rank))
        return inner(world.rank), total, os.environ["A_VARIABLE"], world.size

    results = ring.run(nested, 3, args=(2,), kwargs={"shift": 1}, env={"A_VARIABLE": "yes"})
    for rank, (value, total, variable, size) in enumerate(results):
        assert (value, total.tolist(), variable, size) == (rank * 2 + 11, [3] * 3, "yes", 3)
    out = capfd.readouterr().out
    assert all(f"[{rank}]<stdout>:hello from {rank}" in out for rank in range(3))
    assert not rank_pids()


@pytest.mark.full
def test_functions_need_not_join_a_job():
    assert ring.run(lambda: ring.init().size, 1) == [1]
    assert ring.run(os.getppid, 1) != [os.getpid()], "the parent process of a rank must be ringrun"
    assert ring.run(max, 1, args=([3, 1],)) == [3]
    assert len(set(ring.run(os.getpid, 2))) == 2


def test_invalid_arguments_are_refused():
    for wrong in (0, -1):
        raised(ring.InvalidArgument, ring.run, os.getpid, wrong)
    raised(TypeError, ring.run, 5, 1, args=5)
    assert raised(ring.RunError, ring.run, 5, 1).rank == 0


def test_the_error_names_the_rank_that_raised_an_exception():
    def fails():
        world = ring.init()
        if world.rank == 1:
            raise KeyError("what is missing")
        world.barrier()

    error = raised(ring.RunError, ring.run, fails, 3)
    assert error.rank == 1
    assert isinstance(error.__cause__, KeyError) and error.__cause__.args == ("what is missing",)
    assert "in fails" in str(error) and "what is missing" in str(error)
    assert isinstance(error, ring.Error) and not rank_pids()


def test_the_error_has_the_text_of_an_exception_that_cannot_be_pickled():
    def fails():
        class Local(Exception):
            def __init__(self, one, two):
                super().__init__("something local")
                self.lock = threading.Lock()

        raise Local(1, 2)

    error = raised(ring.RunError, ring.run, fails, 1)
    assert error.rank == 0 and "something local" in str(error)


def test_a_result_that_cannot_be_pickled_is_an_error():
    error = raised(ring.RunError, ring.run, lambda: threading.Lock(), 2)
    assert error.rank in (0, 1) and "pickle" in str(error)


def test_an_argument_that_cannot_be_pickled_is_an_error():
    raised(TypeError, ring.run, lambda lock: 0, 1, args=(threading.Lock(),))


def test_a_rank_that_exits_or_dies_is_an_error():
    error = raised(ring.RunError, ring.run, lambda: sys.exit(4), 1)
    assert error.rank == 0 and "SystemExit" in str(error)

    def dies():
        world = ring.init()
        if world.rank == 1:
            os._exit(9)
        world.barrier()

    error = raised(ring.RunError, ring.run, dies, 2)
    assert "rank 1" in str(error)
    assert not rank_pids()


def test_the_timeout_ends_the_job():
    def waits():
        ring.init().receive(np.zeros(1))

    started = time.monotonic()
    error = raised(ring.RunError, ring.run, waits, 2, timeout=1.5)
    assert time.monotonic() - started < 15
    assert "124" in str(error) or "time" in str(error)
    assert not rank_pids()


def test_env_overrides_variables_of_the_ranks():
    found = ring.run(
        lambda: (os.environ["PYTHONPATH"], os.environ["OMP_NUM_THREADS"]),
        1,
        env={"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry) + ":/mine", "OMP_NUM_THREADS": "7"},
    )
    assert found[0][0].endswith(":/mine") and found[0][1] == "7"


def test_several_threads_can_call_run():
    results: list = []
    threads = [threading.Thread(target=lambda k=k: results.append(ring.run(lambda: (k, ring.init().size), 2))) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(results) == [[(0, 2)] * 2, [(1, 2)] * 2]


PROGRAM = """
import sys
import numpy as np
import ringtrain as ring

SHIFT = 5

def helper(rank):
    return rank + SHIFT

def work(world_size):
    world = ring.init()
    assert world.size == world_size
    return helper(world.rank), world.all_reduce(1)

{guard}print(ring.run(work, 2, args=(2,)))
"""


@pytest.mark.parametrize(
    "how",
    (
        "file",
        "notebook",
        *(pytest.param(how, marks=pytest.mark.full) for how in ("file without a guard", "standard input", "-c")),
    ),
)
def test_functions_of_the_main_module_can_run(tmp_path: Path, how: str):
    """The module `__main__` of a notebook has no file, so the ranks cannot import functions from this module."""
    guard = "if __name__ == '__main__':\n    " if how == "file" else ""
    text = PROGRAM.format(guard=guard)
    if how == "notebook":
        made = "import types, sys\nmain = types.ModuleType('__main__')\nsys.modules['__main__'] = main\n"
        text = f"{made}exec({text!r}, main.__dict__)"
    path = tmp_path / "program.py"
    path.write_text(text)
    command = {"standard input": [sys.executable, "-"], "-c": [sys.executable, "-c", text]}.get(how, [sys.executable, str(path)])
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(entry for entry in sys.path if entry))
    done = subprocess.run(command, input=text, env=env, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "[(5, 2), (6, 2)]" in done.stdout.replace("np.int64(2)", "2"), done.stdout


INTERRUPTED = """
import os, sys
import numpy as np
import ringtrain as ring
from ranks import write_atomically

def waits(directory):
    world = ring.init()
    world.barrier()
    write_atomically(f"{directory}/rank-{world.rank}", os.getpid())
    world.receive(np.zeros(1))

try:
    ring.run(waits, 2, args=(sys.argv[1],))
except KeyboardInterrupt:
    write_atomically(f"{sys.argv[1]}/interrupted", "")
    raise
"""


@pytest.mark.parametrize("name", ("SIGINT", pytest.param("SIGKILL", marks=pytest.mark.full)))
def test_an_interrupted_run_ends_its_ranks(tmp_path: Path, name: str):
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(entry for entry in sys.path if entry))
    # As in a notebook, only this process gets the signal. In a terminal its children would get the signal too.
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    ranks = [int(wait_and_read(tmp_path / f"rank-{rank}")) for rank in range(2)]
    started = time.monotonic()
    process.send_signal(getattr(signal, name))
    process.communicate(timeout=40)
    print(f"ended after {time.monotonic() - started:.1f} s")
    if name == "SIGINT":
        assert (tmp_path / "interrupted").exists()
        assert not any(is_alive(rank) for rank in ranks), "the ranks must end before `run` returns"
        assert time.monotonic() - started < 10
    wait_until("the ranks end", lambda: not any(is_alive(rank) for rank in ranks), 40)
