"""Tests of compression.py: `tools/compare/run --self-test` runs them."""

import argparse
import json
import math
import pathlib
import tempfile
import unittest

import compression


def options_with(file, seeds):
    return argparse.Namespace(file=file, seeds=seeds)


class CompressionTest(unittest.TestCase):
    def test_the_bound_is_that_of_students_t_distribution(self):
        mean, bound = compression.mean_and_bound([1.0, 2.0, 3.0, 4.0, 5.0])
        self.assertEqual(mean, 3.0)
        self.assertAlmostEqual(bound, 3.0 + 2.132 * math.sqrt(2.5 / 5))
        self.assertEqual(compression.mean_and_bound([1.0]), (1.0, math.inf))
        self.assertEqual(compression.mean_and_bound([2.0, 2.0]), (2.0, 2.0))

    def test_options_of_a_compression_replace_those_of_the_model(self):
        self.assertEqual(compression.parse_options("int8"), ("int8", {}))
        self.assertEqual(compression.parse_options("topk:0.1 --lr 1"), ("topk:0.1", {"--lr": ["1"]}))
        self.assertEqual(compression.parse_options("topk --lr"), ("topk", {"--lr": []}))
        for wrong in ("topk lr 1", "topk --lr 1 2"):
            with self.assertRaises(compression.RunFailed):
                compression.parse_options(wrong)
        found = compression.run_arguments("mlp:8 --lr 0.1 --epochs 2", "topk --lr 1", 3)
        self.assertEqual(" ".join(found), "--model mlp:8 --lr 1 --epochs 2 --compression topk --seed 3")

    def test_runs_that_compressed_nothing_fail(self):
        exact = {"parameters_hash": "a", "bytes_sent": 100, "steps": 1}
        for found, is_void in [
            ({"parameters_hash": "b", "bytes_sent": 102, "steps": 2}, False),
            ({"parameters_hash": "a", "bytes_sent": 102, "steps": 2}, True),
            ({"parameters_hash": "b", "bytes_sent": 99, "steps": 1}, True),
        ]:
            with tempfile.TemporaryDirectory() as directory:
                file = pathlib.Path(directory, "runs.jsonl")
                lines = [
                    json.dumps({"arguments": compression.run_arguments("mlp:8", name, 0), "report": report})
                    for name, report in (("none", exact), ("bf16", found))
                ]
                file.write_text("\n".join(lines) + "\n")
                runs = compression.Runs(options_with(file, 1))
                if is_void:
                    with self.assertRaises(compression.RunFailed):
                        runs.pairs("mlp:8", "bf16")
                else:
                    self.assertEqual(runs.pairs("mlp:8", "bf16"), [(exact, found)])


if __name__ == "__main__":
    unittest.main()
