"""Tests the comparison of training without torch and without a network. To run the tests: `tools/compare/run --self-test`."""

import dataclasses
import json
import math
import pathlib
import struct
import tempfile
import unittest
import xml.dom.minidom

import curves
import training
from peers import MeasurementFailed
from processes import RunResult


@dataclasses.dataclass
class FakeNetwork:
    """Plays the programs. A step takes `step_s`, and the accuracy rises by 0.1 in each epoch."""

    step_s: float
    code: int = 0
    hosts: int = 4
    commands: list = dataclasses.field(default_factory=list)

    def __str__(self):
        return "4 fake hosts"

    def unavailable_reason(self):
        return None

    def run(self, command, stall_s, scratch):
        words = [str(word) for word in command]
        self.commands.append(words)
        epochs = int(words[words.index("--epochs") + 1])
        rows = [{"seconds": 2 * self.step_s, "test_accuracy": 0.5 + 0.1 * epoch} for epoch in range(epochs)]
        if "--report" in words:
            history = [{**row, "step_times": {"steps": 2}} for row in rows]
            pathlib.Path(words[words.index("--report") + 1]).write_text(json.dumps({"history": history}))
            return RunResult("", "no route", self.code, 0)
        codecs = [words[index + 1] for index, word in enumerate(words) if word == "--codec"]
        lines = [json.dumps({"codec": codec, "history": [{**row, "steps": 2} for row in rows]}) for codec in codecs]
        return RunResult("\n".join(["a warning", *lines]), "no route", self.code, 0)


def run(what, network, *words):
    """Measures in a fake network. Returns the JSON document."""
    with tempfile.TemporaryDirectory() as directory:
        data = pathlib.Path(directory)
        write_idx(data, 6)
        common = ["--lab", "4:100mbit", "--python", "python", "--data", directory, "--batch-size", "2", "--wait-idle", "0"]
        args = training.argument_parser().parse_args([what, *common, *words])
        args.lab = network
        return training.measure(args, lambda text: None)


def write_idx(directory, samples):
    for name in ("train", "t10k"):
        images, labels = directory / f"{name}-images-idx3-ubyte", directory / f"{name}-labels-idx1-ubyte"
        images.write_bytes(b"\0\0\x08\x03" + struct.pack(">3I", samples, 1, 2) + bytes(range(2 * samples)))
        labels.write_bytes(b"\0\0\x08\x01" + struct.pack(">I", samples) + bytes(range(samples)))


class ProgramTests(unittest.TestCase):
    def test_programs_are_read_and_written(self):
        for text in ("ringtrain/int8", "ringtrain/none/local-sgd:8", "gloo/powersgd:4", "ring/topk:0.01"):
            self.assertEqual(str(training.Program.from_text(text)), text)
        for wrong in ("ringtrain", "mpi/none", "gloo/int8", "gloo/fp16/local-sgd:8"):
            self.assertRaises(ValueError, training.Program.from_text, wrong)

    def test_the_default_programs_are_valid(self):
        for text in (*training.STEP_PROGRAMS, *training.ACCURACY_PROGRAMS):
            training.Program.from_text(text)

    def test_part_of_the_data_has_the_first_samples(self):
        with tempfile.TemporaryDirectory() as directory:
            source, part = pathlib.Path(directory, "source"), pathlib.Path(directory, "part")
            source.mkdir()
            part.mkdir()
            write_idx(source, 6)
            training.write_part(source, part, 4)
            images, labels = ((part / f"train-{kind}-ubyte").read_bytes() for kind in ("images-idx3", "labels-idx1"))
            self.assertEqual((images[4:16], images[16:]), (struct.pack(">3I", 4, 1, 2), bytes(range(8))))
            self.assertEqual((labels[4:8], labels[8:]), (struct.pack(">I", 4), bytes(range(4))))


class StepTests(unittest.TestCase):
    PROGRAMS = ("--program", "gloo/none", "--program", "gloo/fp16", "--program", "ringtrain/fp16")

    def test_codecs_of_a_library_share_a_process_and_the_first_program_changes(self):
        network = FakeNetwork(0.25)
        data = run("steps", network, "--rounds", "2", *self.PROGRAMS)
        self.assertEqual(data["step_seconds"], {name: [0.25] * 2 for name in self.PROGRAMS[1::2]})
        self.assertEqual(["--report" in words for words in network.commands], [False, True, True, False])
        self.assertEqual([words.count("--codec") for words in network.commands], [2, 0, 0, 2])

    def test_further_rounds_follow_earlier_ones(self):
        with tempfile.TemporaryDirectory() as directory:
            path = pathlib.Path(directory, "steps.json")
            more = ("--rounds", "1", "--json", str(path), "--append", *self.PROGRAMS)
            for step_s in (0.25, 0.5):
                self.assertEqual(run("steps", FakeNetwork(step_s), *more), json.loads(path.read_text()))
            data = run("steps", FakeNetwork(1), *more[:5], "--program", "ringtrain/int8")
            expected = {name: [0.25, 0.5] for name in self.PROGRAMS[1::2]}
            self.assertEqual(data["step_seconds"], {**expected, "ringtrain/int8": [1.0]})
            self.assertRaisesRegex(MeasurementFailed, "another --lr", run, "steps", FakeNetwork(1), *more, "--lr", "0.5")

    def test_a_program_that_fails_ends_the_measurement_with_its_message(self):
        self.assertRaisesRegex(MeasurementFailed, "(?s)gloo/none, gloo/fp16 ended with 3: .*no route",
                               run, "steps", FakeNetwork(1, code=3), *self.PROGRAMS)

    def test_ratios_are_those_of_the_rounds(self):
        table = training.steps_table({"gloo/none": [4.0, 2.0], "gloo/fp16": [1.0, 2.0], "ringtrain/fp16": [1.0, 2.0]})
        row = next(line for line in table.splitlines() if "ringtrain" in line)
        self.assertIn("| 1.5 s (1.0 s to 2.0 s) | **1.00** (1.00 to 1.00) | **0.62** (0.25 to 1.00) |", row)


class AccuracyTests(unittest.TestCase):
    def test_time_counts_up_to_the_first_epoch_with_the_target(self):
        points = training.accuracy_points([{"steps": 2, "seconds": 1.5, "test_accuracy": 0.8}] * 2)
        self.assertEqual(points, [[1.5, 0.8], [3.0, 0.8]])
        self.assertEqual(training.accuracy_points([{"steps": 4, "seconds": 9.0, "test_accuracy": 0.8}], 0.5), [[2.0, 0.8]])
        self.assertEqual(training.seconds_to([[1.0, 0.5], [2.0, 0.8]], 0.8), 2.0)
        self.assertEqual(training.seconds_to([[1.0, 0.5]], 0.8), math.inf)

    def test_the_time_of_a_step_can_come_from_another_network(self):
        words = ("--seeds", "2", "--epochs", "2", "--program", "gloo/none", "--program", "ringtrain/int8")
        data = run("accuracy", FakeNetwork(0.25), *words)
        self.assertEqual(training.points_of(data)["ringtrain/int8"], [[[0.5, 0.5], [1.0, 0.6]]] * 2)
        slow = {**data, "step_seconds": {"gloo/none": [5.0, 3.0, 4.0]}}
        self.assertEqual(training.points_of(data, slow), {"gloo/none": [[[8.0, 0.5], [16.0, 0.6]]] * 2})
        self.assertRaisesRegex(MeasurementFailed, "batch_size", training.points_of, data, {**slow, "batch_size": 9})

    def test_the_table_compares_with_the_fastest_hook(self):
        found = {"gloo/none": [[[8.0, 0.9]]], "gloo/fp16": [[[4.0, 0.9]]]}
        found |= {"ringtrain/int8": [[[1.0, 0.9]]], "ring/none": [[[1.0, 0.1]]]}
        table = training.accuracy_table(found, 0.87)
        self.assertIn("| time / `gloo/none` | time / `gloo/fp16` |", table)
        self.assertIn("| `ringtrain/int8` | 1.0 s (1.0 s to 1.0 s) | **0.12** (0.12 to 0.12) | **0.25** (0.25 to 0.25) |", table)
        self.assertIn("| `ring/none` | not reached by 1 of 1 |", table)
        alone = training.accuracy_table({"ringtrain/int8": [[[1.0, 0.9]]]}, 0.87)
        self.assertIn("| `ringtrain/int8` | 1.0 s (1.0 s to 1.0 s) | 0.9000 |", alone)

    def test_the_drawing_has_a_line_for_each_program(self):
        data = {"machine": {"cpu": "<one>", "processors": 2, "kernel": "Linux 6", "network": "a lab"}, "model": "mlp:8"}
        data |= {"batch_size": 2, "optimizer": "adam", "lr": 0.001, "schedule": "cosine", "target": 0.87}
        runs = [[[1.0, 0.8], [30.0, 0.88]], [[2.0, 0.81], [31.0, 0.89]]]
        data["points"] = {"gloo/none": runs, "ringtrain/none": runs}
        drawn = xml.dom.minidom.parseString(curves.draw_svg(data))
        self.assertEqual(len(drawn.getElementsByTagName("polyline")), 2)
        texts = [node.firstChild.data for node in drawn.getElementsByTagName("text")]
        self.assertTrue({"gloo/none", "ringtrain/none", "target 0.87", "0.80", "50 s"} <= set(texts), texts)


if __name__ == "__main__":
    unittest.main()
