"""Tests that need no peer and no idle machine: `tools/compare/run --self-test`."""

import contextlib
import os
import pathlib
import sys
import tempfile
import time
import types
import unittest
import xml.dom.minidom

import before_after
import machine
import peers
import plot
import processes
import report
import rounds

HELP = """\
      --root <R>
          The rank from which broadcast sends

      --transport <NAME>
          How bytes travel between ranks

          Possible values:
          - auto: shared memory where it can be
          - tcp:  TCP between all ranks

          [default: auto]

      --json <FILE>
          - shm: not a transport
"""


class Fake(peers.Program):
    """Takes 10 µs for every size, unless a test says otherwise."""

    def __init__(self, key, time_us=10.0, wrong=0, hangs_from=None):
        self.key = self.name = key
        self.time_us, self.wrong, self.hangs_from, self.calls = time_us, wrong, hangs_from, 0

    def measure(self, case, sizes, stall_s, cpu):
        self.calls += 1
        done = [pair for pair in sizes if self.hangs_from is None or pair[0] < self.hangs_from]
        rows = {
            size: {"time_us": self.time_us, "iterations": count, "wrong": self.wrong, "cpu_s": 2e-6 * self.time_us * count}
            for size, count in done
        }
        return peers.Figures(f"{self.key} 1.0", rows, len(done) == len(sizes))


class FakeCongestion:
    set_to = ()

    def names(self, wanted):
        return list(wanted)

    def set(self, name):
        self.set_to += (name,)


def measured(programs, sizes=((64, 0), (1 << 20, 0)), **more):
    """Rounds of fake programs, and the messages about them."""
    options = {"rounds": 3, "congestion": ["bbr", "cubic"], "wait_idle": 0, "timeout": 1, "cpu": True, **more}
    said = []
    taken = rounds.Rounds(types.SimpleNamespace(**options), lambda text, kept=True: said.append(text) if kept else None)
    taken.measure_all(programs, [peers.Case("all_reduce", "f32", 2)], list(sizes), FakeCongestion())
    return taken, said


def told(taken, programs, rounds_taken=3):
    names = {program.key: program.name for program in programs}
    host = {"cpu": "A <fast> & wide one", "processors": 2, "kernel": "Linux 6", "congestion_control_default": "bbr"}
    args = types.SimpleNamespace(rounds=rounds_taken, ours="ringbench")
    return report.document(host, taken, report.results(taken, "ringbench", names), names, [], args)


class Sizes(unittest.TestCase):
    def test_units_and_ranges(self):
        self.assertEqual(rounds.size_bytes("64K"), 65536)
        self.assertEqual(rounds.size_bytes("4"), 4)
        self.assertEqual(rounds.size_range("4:1K:4"), [4, 16, 64, 256, 1024])
        for wrong in ("4:64", "0:64:2", "4:64:1", "a:64:2"):
            self.assertRaises(ValueError, rounds.size_range, wrong)

    def test_iterations_fill_the_time_within_limits(self):
        self.assertEqual(rounds.iterations_for(1000), 400)
        self.assertEqual(rounds.iterations_for(10_000_000), rounds.ITERATIONS_MIN)
        self.assertEqual(rounds.iterations_for(0.0), rounds.ITERATIONS_MAX)

    def test_texts(self):
        self.assertEqual([report.size_text(size) for size in (4, 1000, 65536, 64 << 20)], ["4", "1000", "64K", "64M"])
        self.assertEqual([report.time_text(us) for us in (0.361, 7.25, 130, 21_800, 2e6)],
                         ["0.36 µs", "7.2 µs", "130 µs", "21.8 ms", "2.0 s"])


class Programs(unittest.TestCase):
    def test_a_transport_is_known_if_the_usage_lists_it(self):
        self.assertTrue(peers.knows_transport(HELP, "auto"))
        self.assertTrue(peers.knows_transport(HELP, "tcp"))
        self.assertFalse(peers.knows_transport(HELP, "shm"))
        self.assertFalse(peers.knows_transport("", "auto"))

    def test_rows_and_version_are_read_among_other_output(self):
        rows, version = peers.from_lines(
            'a warning\n{"version": "MPICH Version:      5.0.2"}\n{"bytes": 4, "time_us": 1, "wrong": 0}\n{"bytes": 8, "ti'
        )
        self.assertEqual((rows, version), ({4: {"time_us": 1, "wrong": 0}}, "MPICH 5.0.2"))

    def test_what_a_peer_has_not(self):
        mpi = peers.Mpi("openmpi5", "", None, None, [], {}, None)
        self.assertIn("f16", mpi.lacks(peers.Case("all_reduce", "f16", 2)))
        self.assertIsNone(mpi.lacks(peers.Case("all_reduce", "f64", 2)))
        self.assertIsNotNone(peers.Gloo(None, None).lacks(peers.Case("all_reduce", "bf16", 17)))


class TheRounds(unittest.TestCase):
    def test_every_program_measures_in_every_round_under_each_congestion_control(self):
        programs = [Fake("ringbench"), Fake("gloo", 30.0)]
        taken, _ = measured(programs)
        self.assertEqual({len(rows) for rows in taken.rows.values()}, {3})
        self.assertEqual(len(taken.rows), 2 * 2 * 2)
        # A trial, and three rounds under two congestion controls.
        self.assertEqual([program.calls for program in programs], [7, 7])
        ratios = {row["program"]: row["times_ours"] for row in report.results(taken, "ringbench", {"ringbench": "", "gloo": ""})}
        self.assertEqual(ratios, {"ringbench": 1.0, "gloo": 3.0})

    def test_a_trial_in_a_bad_moment_does_not_count_for_ever(self):
        program = Fake("ringbench", time_us=10_000.0)
        measure = program.measure

        def quick_after_the_trial(*anything):
            figures = measure(*anything)
            program.time_us = 100.0
            return figures

        program.measure = quick_after_the_trial
        taken, _ = measured([program], sizes=[(64, 0), (128, 7)], congestion=["bbr"])
        counts = {key.bytes: [row["iterations"] for row in rows] for key, rows in taken.rows.items()}
        self.assertEqual(counts, {64: [40, 4000, 4000], 128: [7, 7, 7]})

    def test_another_one_begins_each_time(self):
        self.assertEqual([rounds.rotated(list("abc"), number)[0] for number in range(4)], list("abca"))
        self.assertEqual(rounds.rotated([], 1), [])

    def test_who_does_not_finish_is_not_asked_again_for_that_size(self):
        hanging = Fake("mpich5", hangs_from=1 << 20)
        programs = [Fake("ringbench"), hanging]
        taken, said = measured(programs)
        self.assertEqual([key.bytes for key in taken.rows if key.program == "mpich5"], [64, 64])
        self.assertTrue(any(text.startswith("DID NOT FINISH: mpich5") for text in said))
        self.assertIn("| did not finish |", report.tables(told(taken, programs), False))

    def test_a_stall_after_a_good_trial_is_forgiven_once(self):
        for bad_rounds, left in (1, 2), (2, 0):
            program = Fake("gloo")
            measure = program.measure

            def bad(*anything):
                program.hangs_from = 64 if 1 <= program.calls <= bad_rounds else None
                return measure(*anything)

            program.measure = bad
            taken, said = measured([program], sizes=[(64, 0)], congestion=["bbr"])
            self.assertEqual(sum(text.startswith("STALLED") for text in said), bad_rounds)
            self.assertEqual(sum(map(len, taken.rows.values())), left)

    def test_a_wrong_result_ends_it(self):
        self.assertRaisesRegex(peers.Failed, "2 wrong elements", measured, [Fake("ringbench"), Fake("gloo", wrong=2)])

    def test_sizes_without_an_element_for_each_rank_are_left_out_aloud(self):
        self.assertEqual(peers.Case("all_gather", "f64", 4).smallest(), 32)
        taken, said = measured([Fake("ringbench")], sizes=((2, 0), (64, 0)))
        self.assertEqual({key.bytes for key in taken.rows}, {64})
        self.assertTrue(any(text.startswith("LEFT OUT: 2 bytes") for text in said))


class Reports(unittest.TestCase):
    def test_tables_have_a_column_for_each_program(self):
        programs = [Fake("ringbench"), Fake("gloo", 30.0)]
        text = report.tables(told(measured(programs)[0], programs), True)
        self.assertIn("| bytes | ringbench | gloo |", text)
        self.assertIn("| 64 | 10.0 µs (10.0 µs - 10.0 µs) **1.00** | 30.0 µs (30.0 µs - 30.0 µs) **3.00** |", text)
        # 20 µs of processors' time for each operation of 1 MiB.
        self.assertIn("| 1M | 0.0205 | 0.0614 |", text)

    def test_bus_bandwidth_is_as_ringbench_says_it(self):
        programs = [Fake("ringbench")]
        [row, *_] = [row for row in told(measured(programs)[0], programs)["results"] if row["bytes"] == 1 << 20]
        self.assertAlmostEqual(row["busbw_gb_per_s"], (1 << 20) / 10 / 1e3)
        self.assertEqual(rounds.busbw_factor("all_reduce", 4), 1.5)
        self.assertEqual(rounds.busbw_factor("all_gather", 4), 0.75)
        self.assertEqual(rounds.busbw_factor("broadcast", 4), 1)


class BeforeAndAfter(unittest.TestCase):
    def test_the_interval_is_that_of_the_sign_test(self):
        # With 15 values the 4th and the 12th: 2 * (1 + 15 + 105 + 455) / 2^15 = 3.5%.
        self.assertEqual(before_after.median_interval(range(1, 16)), (8, (4, 12)))
        self.assertEqual(before_after.median_interval(range(1, 7)), (3.5, (1, 6)))
        self.assertEqual(before_after.median_interval([2, 1, 3]), (2, None))

    def test_each_case_is_compared_with_the_same_case_of_the_build_before(self):
        programs = [Fake("ringbench", 30.0), Fake("ringbench-before", 20.0), Fake("gloo")]
        rows = before_after.comparison(measured(programs, rounds=6)[0])
        self.assertEqual([row["program"] for row in rows], ["ringbench"] * 4)
        self.assertTrue(all(row["ratio"] == 1.5 and row["interval"] == (1.5, 1.5) for row in rows))
        self.assertAlmostEqual(before_after.geometric_mean(rows), 1.5)
        self.assertIn("| ringbench | all_reduce | f32 | bbr | 2 | 64 | 1.500 | 1.500 - 1.500 |", before_after.table(rows))
        self.assertEqual(before_after.comparison(measured([Fake("ringbench")])[0]), [])


class Plots(unittest.TestCase):
    def test_it_is_well_formed_with_a_line_for_each_program_and_panel(self):
        programs = [Fake("ringbench"), Fake("openmpi4-tcp", 30.0), Fake("openmpi9", 0.02)]
        drawn = plot.svg(told(measured(programs)[0], programs))
        document = xml.dom.minidom.parseString(drawn)
        self.assertEqual(len(document.getElementsByTagName("polyline")), 3 * 2 * 2)
        self.assertNotIn("nan", drawn)

    def test_a_single_size_can_be_drawn(self):
        programs = [Fake("ringbench")]
        xml.dom.minidom.parseString(plot.svg(told(measured(programs, sizes=[(64, 5)])[0], programs)))

    def test_ticks(self):
        self.assertEqual(plot.decades(7, 130), [1, 10, 100, 1000])
        self.assertEqual(plot.decades(10, 10), [10, 100])
        self.assertEqual(plot.steps(4.3), [0, 1, 2, 3, 4, 5])
        self.assertEqual(plot.tick_text(0.1), "0.1 µs")
        self.assertEqual(plot.tick_text(1000), "1 ms")


class Processes(unittest.TestCase):
    @contextlib.contextmanager
    def python(self):
        """Runs programs of Python, with 20 s for each."""
        processes.adopt_orphans()
        with tempfile.TemporaryDirectory() as scratch:
            yield lambda *programs, stall_s=20, ending_s=0: processes.run(
                [[sys.executable, "-c", text] for text in programs], stall_s, scratch, ending_s=ending_s
            )

    def test_the_output_of_the_first_and_the_time_of_all_count(self):
        with self.python() as run:
            ended = run("print('here')", "print('there')")
        self.assertEqual((ended.output, ended.code), ("here\n", 0))
        self.assertGreater(ended.cpu_s, 0)

    def test_one_that_fails_ends_all_and_its_errors_are_told(self):
        with self.python() as run:
            began = time.monotonic()
            ended = run("import time; time.sleep(60)", "raise SystemExit('no')")
        self.assertEqual((ended.code, ended.errors), (1, "no\n"))
        self.assertLess(time.monotonic() - began, 20)

    def test_one_that_says_nothing_is_ended_with_what_it_has_started_and_what_it_said_is_kept(self):
        orphan = "import os, sys; os.fork() or (os.setsid(), os.fork() and os._exit(0)); print('row', flush=True); "
        with self.python() as run:
            ended = run(orphan + "import time; time.sleep(60)", stall_s=1)
        self.assertIsNone(ended.code)
        self.assertIn("row", ended.output)
        self.assertEqual(processes.descendants(processes._parents(), os.getpid()), [])

    def test_one_that_is_asked_first_takes_down_what_it_has_put_up(self):
        with self.python() as run, tempfile.TemporaryDirectory() as directory:
            up = pathlib.Path(directory) / "up"
            text = f"import pathlib, signal, time; up = pathlib.Path({str(up)!r}); "
            text += "signal.signal(signal.SIGTERM, lambda *_: exit()); up.touch()\ntry: time.sleep(60)\nfinally: time.sleep(0.3); up.unlink()"
            self.assertIsNone(run(text, stall_s=1, ending_s=20).code)
            self.assertFalse(up.exists())
            # A process that ignores the signal is killed.
            deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
            began = time.monotonic()
            self.assertIsNone(run(deaf, stall_s=1, ending_s=0.5).code)
            self.assertLess(time.monotonic() - began, 20)

    def test_descendants_are_found_at_every_depth(self):
        self.assertEqual(sorted(processes.descendants({2: 1, 3: 2, 4: 3, 5: 9, 9: 8}, 1)), [2, 3, 4])


class Machine(unittest.TestCase):
    def test_congestion_is_always_restored(self):
        with tempfile.TemporaryDirectory() as directory, contextlib.suppress(KeyboardInterrupt):
            file = machine.CONGESTION
            machine.CONGESTION = pathlib.Path(directory) / "congestion"
            machine.CONGESTION.write_text("bbr\n")
            try:
                with machine.Congestion(print) as congestion:
                    self.assertEqual(congestion.names(["host", "cubic", "bbr"]), ["bbr", "cubic"])
                    congestion.set("cubic")
                    raise KeyboardInterrupt
            finally:
                self.assertEqual(machine.CONGESTION.read_text().strip(), "bbr")
                machine.CONGESTION = file


if __name__ == "__main__":
    unittest.main()
