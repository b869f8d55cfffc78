"""Tests of `ringtrain.torch` in several processes. Each test starts one job; the checks are in `programs/`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

Launch = Callable[..., object]

# Texts that show that compiled code has crashed.
CRASHES = ("Fatal Python error", "terminate called", "panicked", "Segmentation fault", "core dumped", "SIGABRT")


def check_output(job) -> str:
    """Checks that the job succeeded, and returns its output."""
    assert job.returncode == 0, f"exit code {job.returncode}\n{job.stdout}\n{job.stderr}"
    require_no_crash(job)
    return job.stdout


def require_no_crash(job) -> None:
    """Checks that the job's output contains no text that a crash prints."""
    found = [crash for crash in CRASHES if crash in job.stdout + job.stderr]
    assert not found, f"{found}\n{job.stdout}\n{job.stderr}"


FULL = pytest.mark.full


def test_collectives_data_parallel_and_horovod(launch: Launch) -> None:
    assert check_output(launch(2, "together.py")).count("checks passed") == 3 * 2


@FULL
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_collectives(launch: Launch, n: int) -> None:
    assert check_output(launch(n, "collectives.py")).count("checks passed") == n


@FULL
@pytest.mark.parametrize("n", [2, 3])
def test_data_parallel_and_sharded(launch: Launch, n: int) -> None:
    assert check_output(launch(n, "ddp.py")).count("checks passed") == n


@FULL
@pytest.mark.parametrize("n", [2, 3])
def test_compression(launch: Launch, n: int) -> None:
    assert check_output(launch(n, "compression.py")).count("checks passed") == n


@FULL
@pytest.mark.parametrize("n", [2, 4])
def test_divided_models(launch: Launch, n: int) -> None:
    assert check_output(launch(n, "model_parallel.py")).count("checks passed") == n


@FULL
@pytest.mark.parametrize("n", [1, 2, 3])
def test_horovod(launch: Launch, n: int) -> None:
    assert check_output(launch(n, "horovod.py")).count("checks passed") == n


def test_ranks_connect_under_torchrun(torchrun: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # The ranks of torchrun use the secret of their user, in the home directory.
    monkeypatch.setenv("HOME", str(tmp_path))
    output = check_output(torchrun(2, "connect.py"))
    assert output.count("connected") == 2


@FULL
def test_ranks_connect_by_address(run_by_address: Launch) -> None:
    for job in run_by_address(2, "connect.py"):
        assert "connected" in check_output(job)


@pytest.mark.parametrize(
    ("n", "failure"),
    [
        pytest.param(2, "kill_last_rank", marks=FULL),
        pytest.param(3, "kill_last_rank", marks=FULL),
        pytest.param(2, "kill_last_rank_with_hook", marks=FULL),
        pytest.param(3, "kill_last_rank_in_distributed_optimizer", marks=FULL),
        pytest.param(3, "kill_last_rank_in_allreduce", marks=FULL),
    ],
)
def test_a_killed_rank_is_named_within_two_seconds(launch: Launch, n: int, failure: str) -> None:
    job = launch(n, "failures.py", "--only", failure, options=["--grace", "100"])
    require_no_crash(job)
    killed = float(re.search(r"killed at (\d+\.\d+)", job.stdout)[1])
    raised = re.findall(r"rank (\d) raised at (\d+\.\d+) in step 5: .*rank (\d) .*lost", job.stdout)
    assert {int(rank) for rank, _, _ in raised} == set(range(n - 1)), job.stdout + job.stderr
    assert all(int(named) == n - 1 for _, _, named in raised), job.stdout
    assert all(float(when) - killed < 2 for _, when, _ in raised), job.stdout
    # A rank that catches the error continues and succeeds.
    assert job.returncode == 128 + 9
    assert "exited with code 0" in job.stderr, job.stderr


@FULL
def test_a_call_has_its_own_timeout(launch: Launch) -> None:
    output = check_output(launch(2, "failures.py", "--only", "give_barrier_its_own_timeout"))
    assert "timed out: an operation did not end within 1000 ms" in output
    assert "all other ranks wait for rank 1" in output


@FULL
def test_an_uncaught_exception_reaches_the_other_ranks(launch: Launch) -> None:
    job = launch(2, "failures.py", "--only", "raise_exception_on_rank_1", options=["--grace", "100"])
    require_no_crash(job)
    assert job.returncode == 1
    assert "rank 0 raised: rank 1 on" in job.stdout and "ValueError: the data of this rank is broken" in job.stdout, job.stdout


@FULL
def test_a_rank_that_leaves_during_training_is_named(launch: Launch) -> None:
    assert "rank 1 raised the error" in check_output(launch(2, "failures.py", "--only", "leave_during_training"))


@FULL
def test_errors_of_a_subgroup_name_global_ranks(launch: Launch) -> None:
    job = launch(3, "failures.py", "--only", "kill_rank_of_subgroup", options=["--grace", "100"])
    require_no_crash(job)
    assert re.search(r"rank 1 raised: .* \(global rank 2; ", job.stdout), job.stdout + job.stderr


@FULL
def test_the_benchmark_runs(launch: Launch) -> None:
    """Runs every measurement of the benchmark `torch_compare.py` for one round. The benchmark also checks
    that training with ringtrain and training with Gloo give the same losses."""
    output = check_output(launch(2, "../../../benchmarks/torch_compare.py", "--smoke"))
    assert output.count("ratio") == 5


@FULL
def test_the_benchmark_of_blocking_calls_runs(launch: Launch) -> None:
    output = check_output(launch(2, "../../../benchmarks/horovod_latency.py", "--smoke"))
    assert output.count(" us") == 5


@FULL
def test_the_benchmark_of_models_runs(run_benchmark: Launch) -> None:
    """Trains each model for a few steps with ringtrain and with PyTorch."""
    output = check_output(run_benchmark("torch_models.py", "--smoke"))
    assert output.count("ratio") == 2


@FULL
def test_the_benchmark_of_parameter_servers_runs(run_benchmark: Launch) -> None:
    """Runs two short jobs for each system that is installed: one that computes gradients, and one that pauses. The program
    `ringtrain` always computes."""
    sizes = ("--counts", "1000", "--batches", "32", "--pauses", "0.005")
    output = check_output(run_benchmark("compare_parameter_servers.py", "--smoke", *sizes))
    skipped = [line for line in output.splitlines() if line.startswith("SKIPPED")]
    assert output.count("updates/s") == 2 * (4 - len(skipped)) + 1, output
    if skipped:
        pytest.skip(f"NOT TESTED: a part of the comparison of parameter servers. {'; '.join(skipped)}")


@FULL
def test_ctrl_c_ends_all_ranks(run_and_interrupt: Launch) -> None:
    job, seconds = run_and_interrupt(2, "failures.py", "--only", "run_until_interrupt")
    require_no_crash(job)
    assert job.returncode == 128 + 2, job.stderr
    assert seconds < 10, f"{seconds} s\n{job.stderr}"
