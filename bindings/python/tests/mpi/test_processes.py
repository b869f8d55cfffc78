"""Tests of the ways in which jobs end, and of the package `mpi4py` that scripts import."""

import os
import subprocess
import sys

import pytest

from mpi_jobs import launch
from ringtrain.mpi.path import directory

FROM = "from ringtrain.mpi import MPI; comm = MPI.COMM_WORLD\n"


def test_an_uncaught_exception_ends_the_job_and_names_the_rank() -> None:
    done = launch(3, "-c", FROM + "if comm.rank == 1: raise ValueError('boom')\ncomm.recv(source=0, tag=1)")
    assert done.returncode == 1
    assert "rank 1" in done.stderr
    assert "stopped the job: its program ended with ValueError: boom" in done.stderr


def test_other_ranks_get_an_exception_even_if_sys_excepthook_was_replaced() -> None:
    code = FROM + "import sys\nif comm.rank == 1: sys.excepthook = print; raise ValueError('boom')\ncomm.recv(source=0, tag=1)"
    done = launch(2, "-c", code)
    assert "its program ended with ValueError: boom" in done.stderr


def test_abort_ends_the_job_with_its_code() -> None:
    done = launch(3, "-c", FROM + "comm.Abort(7) if comm.rank == 2 else comm.Barrier()")
    assert done.returncode == 7
    assert "called MPI.Comm.Abort(7)" in done.stderr


def test_other_ranks_raise_an_exception_when_a_rank_dies() -> None:
    code = FROM + (
        "import os\n"
        "if comm.rank == 1: os.kill(os.getpid(), 9)\n"
        "try: comm.recv(source=1)\n"
        "except MPI.Exception as error:\n"
        "  print(error.Get_error_class() == MPI.ERR_PROC_FAILED, 'rank 1' in str(error), error.__cause__.rank)"
    )
    done = launch(2, "-c", code)
    assert "True True 1" in done.stdout, done.stdout + done.stderr


def test_messages_arrive_from_ranks_that_have_left() -> None:
    code = FROM + (
        "import os, select\n"
        "if comm.rank == 0: comm.send(os.getpid(), 1, tag=1); comm.recv(source=1, tag=2)\n"
        "if comm.rank == 0: comm.send('x' * 100, 1); comm.isend('y', 1)\n"
        "else:\n"
        "  ended = select.poll()\n"
        "  ended.register(os.pidfd_open(comm.recv(source=0, tag=1)), select.POLLIN)\n"
        "  comm.send(None, 0, tag=2)\n"
        "  assert ended.poll(30_000), 'rank 0 has not ended'\n"
        "  print(len(comm.recv(source=0)), comm.recv(source=0))"
    )
    done = launch(2, "-c", code)
    assert (done.returncode, done.stdout) == (0, "100 y\n"), done.stderr


def test_mpi_is_not_initialised_if_rc_initialize_is_false() -> None:
    code = (
        "import ringtrain.mpi; ringtrain.mpi.rc.initialize = False\n"
        "from ringtrain.mpi import MPI\n"
        "assert not MPI.Is_initialized()\n"
        "try: MPI.COMM_WORLD.Get_rank()\n"
        "except MPI.Exception as error: assert 'MPI_Init' in str(error)\n"
        "MPI.Init(); assert MPI.Is_initialized(); assert MPI.COMM_WORLD.allreduce(1) == 2\n"
        "MPI.Finalize(); assert MPI.Is_finalized()\n"
        "try: MPI.COMM_WORLD.Barrier()\n"
        "except MPI.Exception as error: print('finalised' if 'MPI_Finalize' in str(error) else error)"
    )
    done = launch(2, "-c", code)
    assert done.stdout == "finalised\n" * 2, done.stderr


def test_a_process_without_a_launcher_is_the_only_rank() -> None:
    code = FROM + "print(comm.size, comm.allreduce(3), comm.bcast('x'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "1 3 x\n"


def test_the_directory_of_the_alias_is_printed_without_joining_a_job() -> None:
    done = subprocess.run([sys.executable, "-m", "ringtrain.mpi.path"], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == directory()
    assert os.path.isfile(os.path.join(directory(), "mpi4py", "__init__.py"))


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("import mpi4py.MPI, ringtrain.mpi.MPI; from mpi4py import MPI; print(MPI is mpi4py.MPI is ringtrain.mpi.MPI)", "True"),
        ("import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Is_initialized())", "False"),
        ("import mpi4py.rc, ringtrain.mpi; print(mpi4py.rc is ringtrain.mpi.rc)", "True"),
        ("import mpi4py; print(mpi4py.__version__.split('.')[0])", "4"),
        ("import pickle; from mpi4py import MPI; print(pickle.loads(pickle.dumps(MPI.DOUBLE)) is MPI.DOUBLE)", "True"),
    ],
)
def test_the_package_mpi4py_is_an_alias(code: str, printed: str) -> None:
    done = run_with_mpi4py_alias("-c", code)
    assert done.stdout.strip() == printed, done.stderr


@pytest.mark.parametrize("name", ["mpi4py.futures", "mpi4py.util", "mpi4py.util.pkl5"])
def test_unsupported_modules_of_mpi4py_raise_an_error(name: str) -> None:
    done = run_with_mpi4py_alias(
        "-c", f"try: import {name}\nexcept ImportError as error: print(error, isinstance(error, NotImplementedError))"
    )
    assert done.stdout.strip().endswith("is not supported by ringtrain.mpi True"), done.stderr


def test_python_m_mpi4py_runs_a_script(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text("from mpi4py import MPI; import sys; print(MPI.COMM_WORLD.size, sys.argv[1:], __name__)")
    assert run_with_mpi4py_alias("-m", "mpi4py", str(script), "a", "b").stdout == "1 ['a', 'b'] __main__\n"


def run_with_mpi4py_alias(*arguments: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([directory(), os.path.dirname(__import__("ringtrain").__path__[0]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=60, check=False)
