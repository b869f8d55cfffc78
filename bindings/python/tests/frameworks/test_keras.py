"""Tests of `ringtrain.keras` and `ringtrain.tensorflow` in several processes. The checks are in `programs/`."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ranks import FinishedProgram, RunningProgram

Launch = Callable[..., FinishedProgram]
FULL = pytest.mark.full
pytestmark = pytest.mark.timeout(420)

JAX = pytest.param("jax", marks=pytest.mark.needs("keras", "jax"))
TORCH = pytest.param("torch", marks=pytest.mark.needs("keras", "torch"))
TENSORFLOW = pytest.param("tensorflow", marks=pytest.mark.needs("keras", "tensorflow"))
BACKENDS = pytest.mark.parametrize("backend", [JAX, TORCH, TENSORFLOW])


@pytest.mark.parametrize("n", [pytest.param(1, marks=FULL), 2, pytest.param(3, marks=FULL)])
def test_shared_functions(launch: Launch, n: int) -> None:
    assert launch(n, "core_checks.py").stdout.count("5 checks passed") == n


@pytest.mark.needs("keras", "jax")
def test_keras_with_jax(launch: Launch) -> None:
    """Trains, saves and loads a model, and passes bad input."""
    done = launch(2, "keras_checks.py", "saved_model,bad_input")
    assert done.stdout.count("2 checks passed") == 2, done


@FULL
@BACKENDS
@pytest.mark.parametrize("n", [1, 2, 4])
def test_keras(launch: Launch, n: int, backend: str) -> None:
    assert launch(n, "keras_checks.py", backend=backend).stdout.count("11 checks passed") == n


@FULL
@BACKENDS
def test_compiled_training(launch: Launch, backend: str) -> None:
    """torch.compile takes minutes. XLA of TensorFlow cannot call Python, so the callbacks turn it off."""
    done = launch(2, "keras_compiled.py", backend=backend)
    assert done.stdout.count(f"the same training, compiled: {backend != 'tensorflow'}") == 2, done


@FULL
@pytest.mark.needs("keras", "tensorflow")
@pytest.mark.parametrize("n", [1, 2, 4])
def test_tensorflow(launch: Launch, n: int) -> None:
    assert launch(n, "tensorflow_checks.py", backend="tensorflow").stdout.count("5 checks passed") == n


@FULL
@pytest.mark.needs("tensorflow")
def test_the_benchmark_runs(launch: Launch) -> None:
    """The benchmark also checks that both ways of training have the same losses."""
    done = launch(2, "../../../benchmarks/tf_compare.py", "--rounds", "1", backend="tensorflow")
    assert done.stdout.count("2 ranks, ") == 4, done


@FULL
@BACKENDS
def test_a_killed_rank_is_named_within_two_seconds(launch: Launch, backend: str) -> None:
    done = launch(3, "keras_failures.py", "kill", backend=backend, code=137, flags=["--grace", "100"])
    killed = float(re.search(r"killed at (\d+\.\d+)", done.stdout)[1])
    raised = re.findall(r"rank (\d) raised at (\d+\.\d+): .*rank 2", done.stdout)
    assert {rank for rank, _ in raised} == {"0", "1"}, done
    assert all(float(when) - killed < 2 for _, when in raised), done


@FULL
@BACKENDS
def test_an_exception_in_a_callback_reaches_all_ranks(launch: Launch, backend: str) -> None:
    done = launch(2, "keras_failures.py", "callback", backend=backend, code=1, flags=["--grace", "100"])
    assert re.search(r"rank 0 raised at .*rank 1 .*KeyError: 'a broken callback'", done.stdout), done


@FULL
@BACKENDS
def test_a_forked_child_gets_an_error(launch: Launch, backend: str) -> None:
    done = launch(2, "keras_failures.py", "fork", backend=backend)
    assert done.stdout.count("the child raised Forked") == 2, done


@FULL
@BACKENDS
def test_ctrl_c_ends_all_ranks(start: Callable[..., RunningProgram], backend: str) -> None:
    running = start(2, "keras_failures.py", "interrupt", backend=backend)
    ready = 0
    for line in running.process.stdout:
        ready += b"ready" in line
        if ready == 2:
            break
    interrupted = time.monotonic()
    running.signal(signal.SIGINT)
    done = running.finish()
    assert done.code == 128 + signal.SIGINT and time.monotonic() - interrupted < 10, done


@pytest.mark.parametrize(
    ("module", "stub", "message"),
    [
        ("keras", "raise ImportError('no keras')", "ringtrain.keras needs Keras 3"),
        ("keras", "__version__ = '2.15.0'", "ringtrain.keras needs Keras 3.0.5 or later, and not 2.15.0"),
        ("torch", "__version__ = '2.7.1+cpu'", "ringtrain.torch needs PyTorch 2.8 or later, and not 2.7.1+cpu"),
        ("tensorflow", "raise ImportError('no tensorflow')", "ringtrain.tensorflow needs TensorFlow 2.16 or later"),
        ("tensorflow", "__version__ = '2.15.1'", "ringtrain.tensorflow needs TensorFlow 2.16 or later, and not 2.15.1"),
    ],
)
def test_a_missing_or_old_framework(tmp_path: Path, module: str, stub: str, message: str) -> None:
    (tmp_path / f"{module}.py").write_text(stub)
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, *{sys.path!r}]; import ringtrain.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"ImportError: {message}" in done.stderr, done.stderr
