#!/usr/bin/env python3
"""Trains models with each compression of gradients, and prints a Markdown table with accuracy and bytes.

Each rank is on a host of its own, because the ranks of one host send exact gradients. All runs of a seed start with the same
parameters and use the same batches. The loss of accuracy is that of the run without compression minus that of the run with
compression of the same seed, in points (hundredths). Its bound is the upper end of the one-sided 95% interval of the mean by
Student's t distribution. The bytes are all that rank 0 wrote to its sockets, divided by those of the run without compression. They
contain the training data, which the ranks exchange in each epoch: 9 MB of Fashion-MNIST. With the large model of --bytes, nearly all
bytes are those of gradients.

    cargo build --release
    tools/compare/compression.py --file runs.jsonl                           # accuracy: about an hour on 2 processors
    tools/compare/compression.py --bytes                                     # bytes: an MLP of 4.9 million parameters, one seed

A run that is in the file of --file is not repeated. If the runs with and without compression compute the same parameters, nothing
was compressed, and the script fails.
"""

import argparse
import json
import math
import shlex
import statistics
import sys
from pathlib import Path

import strategies

# Gives each rank a host of its own.
OWN_HOST = ("sh", "-c", 'exec "$0" "$@" --host-id "host$RANK"')
# The models, and their options without compression.
FASHION = "--data /usr/share/datasets/fashion-mnist --batch-size 256 --optimizer momentum --schedule cosine"
MODELS = [
    f"mlp:128,64 {FASHION} --lr 0.1 --epochs 6",
    f"cnn:conv8x5,pool4,dense64 {FASHION} --lr 0.1 --epochs 2 --compression-min 100",
]
BYTES_MODELS = ["mlp:2048,2304 --data digits --batch-size 144 --optimizer sgd --lr 0.001 --epochs 1"]
# The compressions, and the options that differ from those of the model. SGD with the learning rate 1 takes steps as long as
# momentum 0.9 with 0.1. Momentum would multiply late gradients, which error feedback adds up. Clipping keeps the first steps short.
# The votes of signSGD need larger batches, because each one counts as much as a clear majority, and more epochs.
COMPRESSIONS = [
    "bf16",
    "fp16",
    "fp8-e4m3",
    "fp8-e5m2",
    "int8",
    "int8-stochastic",
    "int4",
    "int4-stochastic",
    "qsgd:4",
    "onebit --optimizer sgd --lr 0.5",
    "signsgd --batch-size 1024 --epochs 18 --lr 0.0001 --compression-min 0",
    "topk:0.01 --optimizer sgd --lr 1 --clip-norm 1 --compression-warmup 1e",
    "randomk:0.01 --optimizer sgd --lr 1 --clip-norm 1 --compression-warmup 1e",
    "powersgd:4",
    "ef21:int4",
    "ef21:topk:0.1",
]
# The factor of the standard error for a one-sided interval of 95%, for 2, 3, ... values.
STUDENT_T = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)
# What a run without compression is called.
NONE = "none"
# The numbers of a report that the tables need.
KEPT = ("test_accuracy", "train_loss", "bytes_sent", "steps", "parameters", "parameters_hash", "seconds")


class RunFailed(Exception):
    """A run failed or compressed nothing, or its options are wrong."""


def parse_options(text: str) -> tuple[str, dict[str, list[str]]]:
    """Parses `NAME --option value --flag ...`."""
    name, *words = shlex.split(text)
    found = {}
    for word in words:
        if word.startswith("--"):
            found[word] = []
        elif found and not list(found.values())[-1]:
            list(found.values())[-1].append(word)
        else:
            raise RunFailed(f"`{text}` is not a name and options with at most one value each")
    return name, found


def run_arguments(model: str, compression: str, seed: int) -> tuple[str, ...]:
    """Returns the arguments of ringtrain."""
    (model_name, model_options), (name, own_options) = parse_options(model), parse_options(compression)
    merged = {"--model": [model_name], **model_options, **own_options, "--compression": [name], "--seed": [str(seed)]}
    return tuple(word for option, values in merged.items() for word in (option, *values))


class Runs:
    """The reports of all runs, and the file that keeps them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.reports = {}
        if options.file and options.file.exists():
            for line in options.file.read_text().splitlines():
                found = json.loads(line)
                self.reports[tuple(found["arguments"])] = found["report"]

    def report(self, model: str, compression: str, seed: int) -> dict:
        """Returns the report of a run. Trains only if the file has no report of this run."""
        arguments = run_arguments(model, compression, seed)
        if arguments not in self.reports:
            found = strategies.run(self.options, self.options.ranks, list(arguments), OWN_HOST)
            if isinstance(found, str):
                raise RunFailed(f"{shlex.join(arguments)}: {found}")
            self.reports[arguments] = {key: found[key] for key in KEPT}
            if self.options.file:
                with self.options.file.open("a") as file:
                    file.write(json.dumps({"arguments": arguments, "report": self.reports[arguments]}) + "\n")
        return self.reports[arguments]

    def pairs(self, model: str, compression: str) -> list[tuple[dict, dict]]:
        """Returns for each seed the reports of the runs without and with compression.

        Raises:
            RunFailed: If both have the same parameters, or nearly as many bytes.
        """
        pairs = [(self.report(model, NONE, seed), self.report(model, compression, seed)) for seed in range(self.options.seeds)]
        for exact, found in pairs:
            fraction = found["bytes_sent"] / found["steps"] / (exact["bytes_sent"] / exact["steps"])
            is_void = exact["parameters_hash"] == found["parameters_hash"] or fraction > 0.9
            if is_void and compression != NONE:
                raise RunFailed(f"{model}: {compression} compressed nothing")
        return pairs


def mean_and_bound(values: list[float]) -> tuple[float, float]:
    """Returns the mean, and the upper end of its one-sided 95% interval. With one value, the end is infinite."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, math.inf
    return mean, mean + STUDENT_T[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))


def accuracy_cells(pairs: list[tuple[dict, dict]]) -> list[str]:
    """Returns the mean accuracy, the mean loss of accuracy with its range, and the bound of the mean."""
    losses = [100 * (exact["test_accuracy"] - found["test_accuracy"]) for exact, found in pairs]
    mean, bound = mean_and_bound(losses)
    accuracy = statistics.fmean(found["test_accuracy"] for _, found in pairs)
    return [f"{100 * accuracy:.2f}", f"{mean:.2f} ({min(losses):.2f} to {max(losses):.2f})", f"{bound:.2f}"]


def bytes_cells(pairs: list[tuple[dict, dict]]) -> list[str]:
    """Returns the bytes for each step, and divided by those without compression."""
    sent = statistics.fmean(found["bytes_sent"] / found["steps"] for _, found in pairs)
    exact = statistics.fmean(exact["bytes_sent"] / exact["steps"] for exact, _ in pairs)
    return [strategies.describe_number(sent / 1e6), f"{sent / exact:.4f}"]


def print_table(runs: Runs, models: list[str], are_bytes_only: bool) -> None:
    """Prints a row for each compression, with the cells of each model."""
    heads = ["MB of a step", "bytes / bytes without"]
    heads += [] if are_bytes_only else ["accuracy, %", "loss of accuracy, points", "its 95% bound"]
    titles = [f"{parse_options(model)[0]}: {head}" for model in models for head in heads]
    for model in models:
        print(f"- `--model {model}`")
    print("\n| compression | options | " + " | ".join(titles) + " |\n" + "|---" * (2 + len(titles)) + "|", flush=True)
    for compression in [NONE, *runs.options.compression]:
        name, _, own_options = compression.partition(" ")
        row = [f"`{name}`", f"`{own_options}`" if own_options else ""]
        for model in models:
            pairs = runs.pairs(model, compression)
            row += bytes_cells(pairs) + ([] if are_bytes_only else accuracy_cells(pairs))
        print("| " + " | ".join(row) + " |", flush=True)


def main() -> int:
    """Runs all compressions. Returns 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=Path, default=Path("target/release"), help="directory of ringrun and ringtrain")
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks")
    parser.add_argument("--seeds", type=int, choices=range(1, 11), help="number of runs of each compression, with the seeds 0, 1 "
                        "and so on [5; with --bytes 1]")
    parser.add_argument("--model", action="append", metavar="'MODEL --option value ...'", help="a model and its options")
    parser.add_argument("--compression", action="append", metavar="'CODEC --option value ...'",
                        help="a compression, and options that replace those of the model")
    parser.add_argument("--bytes", action="store_true", help="compare only the bytes, by default those of a large model")
    parser.add_argument("--file", type=Path, help="keep the results of all runs in this file")
    parser.add_argument("--timeout", type=float, default=1800, help="limit for one run in seconds")
    options = parser.parse_args()
    options.arguments = []
    # For the bytes, every compression has the options of the model.
    default = [compression.split()[0] for compression in COMPRESSIONS] if options.bytes else COMPRESSIONS
    options.compression = options.compression or default
    options.seeds = options.seeds or (1 if options.bytes else 5)
    try:
        print_table(Runs(options), options.model or (BYTES_MODELS if options.bytes else MODELS), options.bytes)
    except RunFailed as error:
        print(f"compression: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
