"""Tests of `ringtrain --tensorboard`: TensorBoard reads the curves, and they have the values of the report."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

# Importing TensorBoard takes seconds.
pytestmark = pytest.mark.full


def train(folder: Path, *arguments: object) -> dict:
    """Trains on the digits, and returns the report."""
    ringrun = Path(os.environ.get("RINGRUN") or shutil.which("ringrun") or pytest.fail("ringrun is not on PATH"))
    report = folder / "report.json"
    command = [ringrun, "-n", 2, "ringtrain", "--report", report, "--tensorboard", folder / "runs", *arguments]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(report.read_text())


def test_tensorboard_reads_the_curves_of_a_resumed_run(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    options = ["--checkpoint", tmp_path, "--resume", "--log-interval", 4, "--patience", 9]
    train(tmp_path, *options, "--epochs", 2)
    checkpoint = tmp_path / "checkpoint.safetensors"
    saved = checkpoint.read_bytes()
    train(tmp_path, *options, "--epochs", 3)
    # The next run repeats the steps of the third epoch, as if kill -9 had ended the previous run before its last
    # checkpoint. Regression test: TensorBoard showed these steps twice.
    checkpoint.write_bytes(saved)
    report = train(tmp_path, *options, "--epochs", 3)
    events = event_accumulator.EventAccumulator(str(tmp_path / "runs"))
    events.Reload()

    history, steps = report["history"], report["steps"] // 3
    for tag, values in {
        "loss/train": [record["train_loss"] for record in history],
        "loss/test": [record["test_loss"] for record in history],
        "loss/validation": [record["validation_loss"] for record in history],
        "test/accuracy": [record["test_accuracy"] for record in history],
        "samples_per_second": [record["samples_per_second"] for record in history],
        "step_seconds/compute": [record["step_times"]["compute_seconds"] / steps for record in history],
        "epoch": [1, 2, 3],
    }.items():
        found = events.Scalars(tag)
        assert [value.step for value in found] == [steps, 2 * steps, 3 * steps], tag
        assert [value.value for value in found] == pytest.approx(values, rel=1e-6), tag
    assert all(value.value == pytest.approx(0.001) for value in events.Scalars("learning_rate"))
    # The resumed run counts the 4 steps of --log-interval anew.
    expected = [*range(4, 2 * steps + 1, 4), *range(2 * steps + 4, 3 * steps + 1, 4)]
    assert [value.step for value in events.Scalars("loss/steps")] == expected
    assert all(0 < value.value < 3 for value in events.Scalars("loss/steps"))
