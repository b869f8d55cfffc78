#!/usr/bin/env python3
"""Compares the speed of training with `ringtrain` and with PyTorch, for the same models, on one thread.

    python benchmarks/torch_models.py [--ringtrain PATH] [--data DIR] [--rounds 5] [--smoke]

Both programs train `mlp:256,128` and `cnn` on the first 12,000 images of Fashion-MNIST with Adam and batches of 128, alternately.
Prints the samples per second of processor time: the median and the range of the rounds, and the median of the ratios of the
rounds. Processor time is used because other programs on the machine change it less than the wall time. The time of
`ringtrain` is the difference between a run with additional epochs and a run with one epoch, so that the start of the program and
the reading of data do not count. `--smoke` takes one round with a few random images, to check that the program works.
"""

from __future__ import annotations

import argparse
import gzip
import os
import resource
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

BATCH = 128
IMAGES = 12_000
SMOKE_IMAGES = 128
# For each model, the number of epochs that a round measures.
EPOCHS = {"mlp:256,128": 8, "cnn": 1}


def create_torch_model(name: str) -> nn.Sequential:
    """Returns the model of `--model NAME` in PyTorch."""
    if name.startswith("mlp"):
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1568, 128), nn.ReLU(), nn.Linear(128, 10)),
    )


def read_idx_file(folder: Path, name: str, header: int) -> np.ndarray:
    with gzip.open(folder / name) as file:
        return np.frombuffer(file.read(), np.uint8, offset=header)


def read_images_and_labels(options: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    if options.smoke:
        random = np.random.default_rng(1)
        return random.integers(0, 256, (SMOKE_IMAGES, 28, 28), np.uint8), np.arange(SMOKE_IMAGES, dtype=np.int64) % 10
    images = read_idx_file(options.data, "train-images-idx3-ubyte.gz", 16).reshape(-1, 28, 28)[:IMAGES]
    return images, read_idx_file(options.data, "train-labels-idx1-ubyte.gz", 8).astype(np.int64)[:IMAGES]


def measure_torch_speed(name: str, x: torch.Tensor, y: torch.Tensor, epochs: int) -> float:
    """Trains in PyTorch, and returns the samples per second of processor time."""
    torch.manual_seed(1)
    model = create_torch_model(name)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss = nn.CrossEntropyLoss()
    start = time.process_time()
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            loss(model(x[rows]), y[rows]).backward()
            optimizer.step()
    return epochs * len(x) / (time.process_time() - start)


def measure_ringtrain_speed(program: str, name: str, data: str, epochs: int) -> float:
    """Returns the seconds of processor time of a run of `ringtrain`."""
    options = ["--task", "classification", "--test-fraction", 0, "--batch-size", BATCH, "--epochs", epochs]
    command = [program, "--data", data, "--model", name, *options]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ringtrain", default="ringtrain")
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="take one short round, to check that the program works")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    images, labels = read_images_and_labels(options)
    x, y = torch.from_numpy(images.copy()).unsqueeze(1).float() / 255, torch.from_numpy(labels)
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/x.npy", images)
        np.save(f"{folder}/y.npy", labels)
        print_comparison(options, f"{folder}/x.npy,{folder}/y.npy", x, y)


def print_comparison(options: argparse.Namespace, data: str, x: torch.Tensor, y: torch.Tensor) -> None:
    for name, epochs in EPOCHS.items():
        rows = []
        for _ in range(1 if options.smoke else options.rounds):
            first = measure_ringtrain_speed(options.ringtrain, name, data, 1)
            more = measure_ringtrain_speed(options.ringtrain, name, data, epochs + 1)
            rows.append((epochs * len(x) / (more - first), measure_torch_speed(name, x, y, epochs)))
        for program, speeds in zip(("ringtrain", "PyTorch"), zip(*rows, strict=True), strict=True):
            middle = statistics.median(speeds)
            print(f"{name}: {program} {middle:.0f} samples/s ({min(speeds):.0f} - {max(speeds):.0f})")
        ratios = [ours / theirs for ours, theirs in rows]
        print(f"{name}: ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})", flush=True)


if __name__ == "__main__":
    main()
