#!/usr/bin/env python3
"""Compares training with compressed gradients between simulated hosts: ringtrain, and PyTorch's DistributedDataParallel with Gloo
and its own hooks, or with the backend "ring" and the hooks of ringtrain.

A program is LIBRARY/CODEC or LIBRARY/CODEC/STRATEGY. LIBRARY is `ringtrain` (the program), `gloo` (DistributedDataParallel with
Gloo) or `ring` (DistributedDataParallel with ringtrain.torch). CODEC is none, fp16, bf16 or powersgd:RANK; with ringtrain and
ring, it may also be every other --compression. STRATEGY is a --strategy of ringtrain.

    tools/compare/training.py steps --python VENV/bin/python --lab 4:100mbit --model mlp:256,128 --rounds 5 --json steps.json
    tools/compare/training.py accuracy --python VENV/bin/python --lab 4:1gbit --seeds 5 --json accuracy.json --plot accuracy.svg
    tools/compare/training.py report accuracy.json --steps-from steps.json --plot accuracy-100.svg

`steps` measures the mean time of a step on a small part of the data. `accuracy` measures when the test accuracy of a seed reaches
the target: the time of all steps up to the end of this epoch, without the tests. `report --steps-from` replaces the times of the
steps by those that `steps` measured in another network, because the accuracy after a step does not depend on the network. Rounds
and seeds are interleaved: each one runs every program once. See docs/comparing-training.md. The script needs Linux, root's rights and
iproute2; gloo and ring need torch.
"""

import argparse
import dataclasses
import gzip
import json
import math
import pathlib
import statistics
import struct
import sys
import tempfile

import curves
import lab
import machine
import processes
import report
from peers import MeasurementFailed

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DATA = pathlib.Path("/usr/share/datasets/fashion-mnist")
CODECS = ("none", "fp16", "bf16", "powersgd:4")
STEP_PROGRAMS = tuple(f"{library}/{codec}" for codec in CODECS for library in ("gloo", "ringtrain", "ring"))
ACCURACY_PROGRAMS = (
    *(f"gloo/{codec}" for codec in CODECS),
    *("ringtrain/none", "ringtrain/fp16", "ringtrain/int8", "ringtrain/powersgd:4", "ringtrain/topk:0.01"),
    *("ringtrain/none/local-sgd:8", "ringtrain/none/diloco:50"),
)
# How long a run may print nothing. Programs print only at the end.
STALL_S = 3600


@dataclasses.dataclass(frozen=True)
class Program:
    library: str
    codec: str
    strategy: str

    @staticmethod
    def from_text(text):
        library, _, rest = text.partition("/")
        codec, _, strategy = rest.partition("/")
        if library not in ("ringtrain", "gloo", "ring") or not codec:
            raise ValueError(f"{text}: a program is LIBRARY/CODEC[/STRATEGY] with the library ringtrain, gloo or ring")
        if library == "gloo" and codec.split(":")[0] not in ("none", "fp16", "bf16", "powersgd"):
            raise ValueError(f"{text}: gloo has the codecs none, fp16, bf16 and powersgd:RANK")
        if strategy and library != "ringtrain":
            raise ValueError(f"{text}: only ringtrain has strategies")
        return Program(library, codec, strategy or "allreduce")

    def __str__(self):
        more = f"/{self.strategy}" if self.strategy != "allreduce" else ""
        return f"{self.library}/{self.codec}{more}"


def libraries(programs):
    """Groups the programs: those that run in the same process, and each program that has processes of its own."""
    groups = {}
    for program in programs:
        groups.setdefault(str(program) if program.library == "ringtrain" else program.library, []).append(program)
    return list(groups.values())


def command(args, programs, data, epochs, seed, report_path):
    """Returns the command for every host, for a group of `libraries`. tools/netlab replaces the words in braces."""
    recipe = ["--data", data, "--model", args.model, "--batch-size", args.batch_size, "--epochs", epochs]
    recipe += ["--optimizer", args.optimizer, "--lr", args.lr, "--schedule", args.schedule, "--seed", seed]
    first = programs[0]
    if first.library == "ringtrain":
        place = ["--peers", "{peers}", "--rank", "{rank}", "--secret-file", "{secret}", "--quiet", "--report", report_path]
        # The ranks of ddp_train.py hold all samples too.
        how = ["--compression", first.codec, "--strategy", first.strategy, "--replicate-data"]
        return [args.programs / "ringtrain", *recipe, *how, *place]
    place = ["RANK={rank}", f"WORLD_SIZE={args.lab.hosts}", "MASTER_ADDR={first}", f"MASTER_PORT={lab.GLOO_PORT}"]
    codecs = [word for program in programs for word in ("--codec", program.codec)]
    worker = [args.python, HERE / "ddp_train.py", "--backend", first.library, *codecs, *recipe]
    return ["env", *place, "GLOO_SOCKET_IFNAME=eth0", *worker]


def train(args, programs, network, data, epochs, seed, scratch):
    """Trains with each program of a group in the network. Returns for each program the steps, the seconds and the test accuracy
    of each epoch."""
    report_path = scratch / "report.json"
    report_path.unlink(missing_ok=True)
    result = network.run(command(args, programs, data, epochs, seed, report_path), STALL_S, scratch)
    if result.code != 0:
        why = "did not end" if result.code is None else f"ended with {result.code}"
        names = ", ".join(map(str, programs))
        raise MeasurementFailed(f"{names} {why}: {f'{result.output} {result.errors}'.strip()[-800:]}")
    if programs[0].library != "ringtrain":
        found = [json.loads(line) for line in result.output.splitlines() if line.startswith("{")]
        return {str(program): row["history"] for program, row in zip(programs, found, strict=True)}
    history = json.loads(report_path.read_text())["history"]
    kept = ("seconds", "test_accuracy")
    return {str(programs[0]): [{"steps": row["step_times"]["steps"], **{name: row[name] for name in kept}} for row in history]}


def write_part(source, directory, samples):
    """Writes the first samples of the training set and of the test set as IDX files."""
    for name in ("train", "t10k"):
        for kind, dims in (("images", 3), ("labels", 1)):
            path = source / f"{name}-{kind}-idx{dims}-ubyte"
            content = path.read_bytes() if path.exists() else gzip.decompress(path.with_name(path.name + ".gz").read_bytes())
            head = 4 + 4 * dims
            count, *shape = struct.unpack_from(f">{dims}I", content, 4)
            kept = min(samples, count)
            body = content[head : head + kept * math.prod(shape)]
            (directory / path.name).write_bytes(content[:4] + struct.pack(f">{dims}I", kept, *shape) + body)


def measure_steps(args, programs, scratch, say, earlier, save):
    """Returns for each program a list with the mean time of a step in each round, in seconds. The first epoch is a warm-up. The
    rounds follow those in `earlier`. `save` writes the results after each round."""
    part = scratch / "part"
    part.mkdir()
    write_part(args.data, part, args.batch_size * args.steps)
    times = {str(program): list(earlier.get(str(program), [])) for program in programs}
    done = min(map(len, times.values()))
    groups = libraries(programs)
    for number in range(done, done + args.rounds):
        # The program that runs first changes from round to round.
        first = number % len(groups)
        for group in groups[first:] + groups[:first]:
            say(f"round {number + 1} of {done + args.rounds}, {', '.join(map(str, group))}")
            machine.wait_until_idle(args.wait_idle, say)
            for name, history in train(args, group, args.lab, part, args.epochs + 1, number, scratch).items():
                measured = history[1:]
                times[name].append(sum(row["seconds"] for row in measured) / sum(row["steps"] for row in measured))
        save(times)
    return times


def measure_accuracy(args, programs, scratch, say, earlier, save):
    """Returns for each program a list with the epochs of each seed, as `train` returns them. The seeds follow those in
    `earlier`. `save` writes the results after each seed."""
    found = {str(program): list(earlier.get(str(program), [])) for program in programs}
    done = min(map(len, found.values()))
    for seed in range(done, done + args.seeds):
        for group in libraries(programs):
            say(f"seed {seed}, {', '.join(map(str, group))}")
            machine.wait_until_idle(args.wait_idle, say)
            for name, history in train(args, group, args.lab, args.data, args.epochs, seed, scratch).items():
                found[name].append(history)
        save(found)
    return found


def accuracy_points(history, step_s=None):
    """Returns the seconds since the start and the test accuracy at the end of each epoch. With `step_s`, a step takes `step_s`
    seconds instead of the measured time."""
    points, seconds = [], 0.0
    for epoch in history:
        seconds += epoch["steps"] * step_s if step_s else epoch["seconds"]
        points.append([seconds, epoch["test_accuracy"]])
    return points


def points_of(data, steps=None):
    """Returns for each program the `accuracy_points` of each seed. `steps` is a document of `steps`: if it is given, its median
    times of a step replace those of `data`, and programs that it lacks are left out."""
    if steps is None:
        return {name: [accuracy_points(history) for history in runs] for name, runs in data["runs"].items()}
    if different := [name for name in ("model", "batch_size", "optimizer") if data[name] != steps[name]]:
        raise MeasurementFailed(f"the two measurements differ in their {different[0]}")
    medians = {name: statistics.median(times) for name, times in steps["step_seconds"].items()}
    known = {name: runs for name, runs in data["runs"].items() if name in medians}
    return {name: [accuracy_points(history, medians[name]) for history in runs] for name, runs in known.items()}


def seconds_to(points, target):
    """Returns the time of the first point that has the target accuracy, or infinity."""
    return next((seconds for seconds, accuracy in points if accuracy >= target), math.inf)


def baseline_of(program, names):
    """Returns the program of Gloo with which the program is compared: that with the same codec, or without a codec."""
    codec = program.split("/")[1]
    same = f"gloo/{codec}"
    return same if same in names else "gloo/none"


def ratio_cell(times, others):
    """Returns the median of the ratios of each round and their range."""
    ratios = [time / other for time, other in zip(times, others) if math.isfinite(time) or math.isfinite(other)]
    if not ratios:
        return "-"
    return f"**{statistics.median(ratios):.2f}** ({min(ratios):.2f} to {max(ratios):.2f})"


def time_cell(times):
    reached = [time for time in times if math.isfinite(time)]
    if not reached or not math.isfinite(statistics.median(times)):
        return f"not reached by {len(times) - len(reached)} of {len(times)}"
    text = f"{report.time_text(statistics.median(times) * 1e6)}"
    last = report.time_text(max(times) * 1e6) if len(reached) == len(times) else "not reached"
    return f"{text} ({report.time_text(min(times) * 1e6)} to {last})"


def steps_table(times):
    """Returns a Markdown table of the times of a step, and their ratios to the times of Gloo in the same rounds."""
    lines = ["| program | time of a step: median (range) | time / Gloo's with the same codec | time / that of `gloo/none` |"]
    lines.append("|---" * 4 + "|")
    for name, own in times.items():
        cells = []
        for other in (baseline_of(name, times), "gloo/none"):
            cells.append(ratio_cell(own, times[other]) if other in times and other != name else "-")
        lines.append(f"| `{name}` | {time_cell(own)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def accuracy_table(found, target):
    """Returns a Markdown table of the times to the target accuracy, and their ratios to the times of Gloo with the same seed:
    without a codec, and with its fastest codec."""
    times = {name: [seconds_to(points, target) for points in runs] for name, runs in found.items()}
    gloo = sorted((name for name in times if name.startswith("gloo/")), key=lambda name: statistics.median(times[name]))
    others = [name for name in dict.fromkeys(("gloo/none", *gloo[:1])) if name in times]
    columns = [f"time to a test accuracy of {target}: median (range)", *(f"time / `{other}`" for other in others)]
    lines = [f"| program | {' | '.join(columns)} | last test accuracy |", "|---" * (len(columns) + 2) + "|"]
    for name, own in times.items():
        last = statistics.median(points[-1][1] for points in found[name])
        cells = [time_cell(own), *(ratio_cell(own, times[other]) if other != name else "-" for other in others)]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {last:.4f} |")
    return "\n".join(lines)


def argument_parser():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="what")
    for name in ("steps", "accuracy"):
        command = commands.add_parser(name)
        command.add_argument("--lab", type=lab.SimulatedLab.from_text, required=True, metavar="HOSTS:RATE", help="4:100mbit")
        command.add_argument("--program", action="append", type=Program.from_text, metavar="PROGRAM", help="may be repeated")
        command.add_argument("--python", help="a Python that has torch, and ringtrain for the library `ring`")
        command.add_argument("--programs", type=pathlib.Path, default=ROOT / "target/release", help="the directory of ringtrain")
        command.add_argument("--data", type=pathlib.Path, default=DATA, help=f"a directory of IDX files [{DATA}]")
        command.add_argument("--model", default="mlp:1024,1024", help="mlp:WIDTH,WIDTH,... [mlp:1024,1024]")
        command.add_argument("--batch-size", type=int, default=256, help="samples of all ranks in a step [256]")
        command.add_argument("--optimizer", default="adam", help="adam, sgd or momentum [adam]")
        command.add_argument("--lr", type=float, default=0.001, help="the learning rate [0.001]")
        command.add_argument("--schedule", default="constant", help="constant or cosine [constant]")
        command.add_argument("--wait-idle", type=float, default=120, metavar="SECONDS",
                             help="the longest time to wait until the machine is idle [120]")
        command.add_argument("--json", type=pathlib.Path, help="write the results to this file")
        command.add_argument("--append", action="store_true", help="add to the rounds or seeds that the --json file already has")
        if name == "steps":
            command.add_argument("--rounds", type=int, default=5, help="runs of each program [5]")
            command.add_argument("--steps", type=int, default=10, help="steps of an epoch [10]")
            command.add_argument("--epochs", type=int, default=2, help="epochs to measure, after one warm-up epoch [2]")
        else:
            command.add_argument("--seeds", type=int, default=5, help="runs of each program, with the seeds 0, 1 and so on [5]")
            command.add_argument("--epochs", type=int, default=4, help="epochs of a run [4]")
            add_report_arguments(command)
    reporting = commands.add_parser("report")
    reporting.add_argument("results", type=pathlib.Path, help="the JSON file of `accuracy`")
    reporting.add_argument("--steps-from", type=pathlib.Path, metavar="FILE", help="a JSON file of `steps`")
    add_report_arguments(reporting)
    return parser


def add_report_arguments(parser):
    parser.add_argument("--target", type=float, default=0.87, help="the test accuracy to reach [0.87]")
    parser.add_argument("--plot", type=pathlib.Path, help="draw the accuracy over time into this SVG file")


def print_accuracy(args, data, steps=None):
    """Prints the table of the times to the target, and draws the accuracy over time."""
    points = points_of(data, steps)
    # The network is that in which the time of a step was measured.
    shown = {**data, "machine": (steps or data)["machine"], "points": points, "target": args.target, "from_steps": steps is not None}
    print("\n".join([curves.heading(shown), "", accuracy_table(points, args.target)]))
    if args.plot:
        args.plot.write_text(curves.draw_svg(shown))


def measure(args, say):
    """Measures, writes the --json file, and returns its contents."""
    defaults = STEP_PROGRAMS if args.what == "steps" else ACCURACY_PROGRAMS
    programs = args.program or [Program.from_text(text) for text in defaults]
    if any(program.library != "ringtrain" for program in programs) and not args.python:
        raise MeasurementFailed("gloo and ring need --python, a Python that has torch")
    if reason := args.lab.unavailable_reason():
        raise MeasurementFailed(reason)
    args.programs = args.programs.absolute()
    host = {**machine.describe_machine(), "network": str(args.lab)}
    settings = {name: getattr(args, name) for name in ("model", "batch_size", "optimizer", "lr", "schedule", "epochs")}
    earlier = json.loads(args.json.read_text()) if args.append and args.json and args.json.exists() else {}
    if different := [name for name, value in settings.items() if earlier.get(name, value) != value]:
        raise MeasurementFailed(f"{args.json} has another --{different[0].replace('_', '-')}")
    if earlier and earlier["machine"] != host:
        raise MeasurementFailed(f"{args.json} is of another machine or another --lab")
    kind, run_all = ("step_seconds", measure_steps) if args.what == "steps" else ("runs", measure_accuracy)
    known = earlier.get(kind, {})

    def document(found):
        return {"machine": host, **settings, kind: {**known, **found}}

    def save(found):
        if args.json:
            args.json.write_text(json.dumps(document(found), indent=1) + "\n")

    with tempfile.TemporaryDirectory() as directory:
        return document(run_all(args, programs, pathlib.Path(directory), say, known, save))


def main():
    args = argument_parser().parse_args()
    if args.what == "report":
        print_accuracy(args, json.loads(args.results.read_text()), args.steps_from and json.loads(args.steps_from.read_text()))
        return 0
    processes.interrupt_on_signals()
    processes.adopt_orphans()
    try:
        data = measure(args, lambda text: print(f"training: {text}", file=sys.stderr, flush=True))
    except MeasurementFailed as error:
        print(f"training: {error}", file=sys.stderr)
        return 1
    if args.what == "steps":
        print("\n".join([curves.heading(data), "", steps_table(data["step_seconds"])]))
    else:
        print_accuracy(args, data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
