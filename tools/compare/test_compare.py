"""Tests the comparison with fake programs, so the tests need neither other libraries nor an idle machine. To run the tests:
`tools/compare/run --self-test`.
"""

import contextlib
import os
import pathlib
import sys
import tempfile
import time
import types
import unittest
import xml.dom.minidom

import machine
import peers
import plot
import processes
import ratios
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


class FakeProgram(peers.ComparedProgram):
    """A fake program: takes a mean time of `time_us` and a median time of half of it for every size, but does not finish sizes of
    `hangs_from` bytes or more."""

    def __init__(self, key, time_us=10.0, wrong=0, hangs_from=None):
        self.key = self.name = key
        self.time_us, self.wrong, self.hangs_from, self.calls = time_us, wrong, hangs_from, 0

    def measure(self, case, sizes, stall_s, cpu):
        self.calls += 1
        done = [pair for pair in sizes if self.hangs_from is None or pair[0] < self.hangs_from]
        times = {"time_us_mean": self.time_us, "time_us_median": self.time_us / 2}
        rows = {
            size: {**times, "iterations": count, "wrong": self.wrong, "cpu_s": 2e-6 * self.time_us * count} for size, count in done
        }
        return peers.Measurement(f"{self.key} 1.0", rows, len(done) == len(sizes))


class FakeCongestionControl:
    set_to = ()

    def find_settable(self, wanted):
        return list(wanted)

    def set(self, name):
        self.set_to += (name,)


def measure_fakes(programs, sizes=((64, 0), (1 << 20, 0)), case=peers.BenchmarkCase("all_reduce", "f32", 2), **more):
    """Measures fake programs. Returns the rounds, and all messages except those that show only the progress."""
    options = {"rounds": 3, "congestion": ["bbr", "cubic"], "wait_idle": 0, "timeout": 1, "cpu": True, "statistic": "mean", **more}
    said = []
    args = types.SimpleNamespace(**options)
    results = rounds.ComparisonRounds(args, lambda text, keep=True: said.append(text) if keep else None)
    results.measure_all(programs, [case], list(sizes), FakeCongestionControl())
    return results, said


def make_document(results, programs, rounds_taken=3):
    names = {program.key: program.name for program in programs}
    host = {"cpu": "A <fast> & wide one", "processors": 2, "kernel": "Linux 6", "congestion_control_default": "bbr"}
    args = types.SimpleNamespace(rounds=rounds_taken, statistic="mean", input="rewritten", ours="ringbench")
    return report.json_document(host, results, report.result_rows(results, "ringbench", names), names, [], args)


class SizeTests(unittest.TestCase):
    def test_sizes_with_units_and_ranges_are_parsed(self):
        self.assertEqual(rounds.size_bytes("64K"), 65536)
        self.assertEqual(rounds.size_bytes("4"), 4)
        self.assertEqual(rounds.size_range("4:1K:4"), [4, 16, 64, 256, 1024])
        for wrong in ("4:64", "0:64:2", "4:64:1", "a:64:2"):
            self.assertRaises(ValueError, rounds.size_range, wrong)

    def test_the_number_of_iterations_fills_the_time_within_limits(self):
        self.assertEqual(rounds.iterations_for(1000), 400)
        self.assertEqual(rounds.iterations_for(10_000_000), rounds.ITERATIONS_MIN)
        self.assertEqual(rounds.iterations_for(0.0), rounds.ITERATIONS_MAX)

    def test_sizes_and_times_are_formatted(self):
        self.assertEqual([report.size_text(size) for size in (4, 1000, 65536, 64 << 20)], ["4", "1000", "64K", "64M"])
        self.assertEqual([report.time_text(us) for us in (0.361, 7.25, 130, 21_800, 2e6)],
                         ["0.36 µs", "7.2 µs", "130 µs", "21.8 ms", "2.0 s"])


class ProgramTests(unittest.TestCase):
    def test_a_transport_is_known_if_the_usage_lists_it(self):
        self.assertTrue(peers.usage_lists_transport(HELP, "auto"))
        self.assertTrue(peers.usage_lists_transport(HELP, "tcp"))
        self.assertFalse(peers.usage_lists_transport(HELP, "shm"))
        self.assertFalse(peers.usage_lists_transport("", "auto"))

    def test_rows_and_version_are_read_among_other_output(self):
        rows, version = peers.parse_rows_and_version(
            'a warning\n{"version": "MPICH Version:      5.0.2"}\n{"bytes": 4, "time_us": 1, "wrong": 0}\n{"bytes": 8, "ti'
        )
        self.assertEqual((rows, version), ({4: {"time_us": 1, "wrong": 0}}, "MPICH 5.0.2"))

    def test_a_program_gives_the_reason_why_it_cannot_measure_a_case(self):
        mpi = peers.Mpi("openmpi5", "", None, None, [], {}, None)
        self.assertIn("f16", mpi.unsupported_reason(peers.BenchmarkCase("all_reduce", "f16", 2)))
        self.assertIsNone(mpi.unsupported_reason(peers.BenchmarkCase("all_reduce", "f64", 2)))
        gloo = peers.Gloo(None, None)
        self.assertIsNotNone(gloo.unsupported_reason(peers.BenchmarkCase("all_reduce", "bf16", 17)))
        self.assertIn("all_to_all", gloo.unsupported_reason(peers.BenchmarkCase("all_to_all", "f32", 2)))
        older = peers.Ringbench("ringbench-before", "", None, [], "", None, can_rewrite=False)
        self.assertIn("--input unchanged", older.unsupported_reason(peers.BenchmarkCase("all_reduce", "f32", 2)))
        self.assertIsNone(older.unsupported_reason(peers.BenchmarkCase("all_reduce", "f32", 2, "unchanged")))
        reasons = [mpi.unsupported_reason(peers.BenchmarkCase("ping_pong", "f32", world)) for world in (2, 4)]
        self.assertEqual(reasons, [None, "ping_pong is measured with 2 ranks"])


class RoundTests(unittest.TestCase):
    def test_every_program_measures_in_every_round_under_each_congestion_control(self):
        programs = [FakeProgram("ringbench"), FakeProgram("gloo", 30.0)]
        results, _ = measure_fakes(programs)
        self.assertEqual({len(rows) for rows in results.rows.values()}, {3})
        self.assertEqual(len(results.rows), 2 * 2 * 2)
        # Each program measures in one trial, and in three rounds under two congestion controls.
        self.assertEqual([program.calls for program in programs], [7, 7])
        rows = report.result_rows(results, "ringbench", {"ringbench": "", "gloo": ""})
        ratios = {row["program"]: row["times_ours"] for row in rows}
        self.assertEqual(ratios, {"ringbench": 1.0, "gloo": 3.0})

    def test_the_statistic_selects_a_time_that_the_program_must_report(self):
        for statistic, time_us in (("mean", 10.0), ("median", 5.0)):
            results, _ = measure_fakes([FakeProgram("ringbench")], statistic=statistic)
            self.assertEqual({row["time_us"] for rows in results.rows.values() for row in rows}, {time_us})
        old = FakeProgram("ringbench-before")
        old.measure = lambda *anything: peers.Measurement("", {64: {"time_us_median": 5.0, "wrong": 0}}, True)
        self.assertRaisesRegex(peers.MeasurementFailed, "too old.*--statistic median", measure_fakes, [old])

    def test_a_slow_trial_does_not_limit_the_iterations_of_later_rounds(self):
        program = FakeProgram("ringbench", time_us=10_000.0)
        measure = program.measure

        def fast_after_the_trial(*anything):
            measurement = measure(*anything)
            program.time_us = 100.0
            return measurement

        program.measure = fast_after_the_trial
        results, _ = measure_fakes([program], sizes=[(64, 0), (128, 7)], congestion=["bbr"])
        counts = {key.bytes: [row["iterations"] for row in rows] for key, rows in results.rows.items()}
        self.assertEqual(counts, {64: [40, 4000, 4000], 128: [7, 7, 7]})

    def test_each_round_begins_with_another_program(self):
        self.assertEqual([rounds.rotate_programs(list("abc"), number)[0] for number in range(4)], list("abca"))
        self.assertEqual(rounds.rotate_programs([], 1), [])

    def test_a_size_that_did_not_finish_is_not_measured_again(self):
        hanging = FakeProgram("mpich5", hangs_from=1 << 20)
        programs = [FakeProgram("ringbench"), hanging]
        results, said = measure_fakes(programs)
        self.assertEqual([key.bytes for key in results.rows if key.program == "mpich5"], [64, 64])
        self.assertTrue(any(text.startswith("DID NOT FINISH: mpich5") for text in said))
        self.assertIn("| did not finish |", report.markdown_tables(make_document(results, programs), False))

    def test_one_stall_after_a_successful_trial_is_accepted(self):
        for bad_rounds, left in (1, 2), (2, 0):
            program = FakeProgram("gloo")
            measure = program.measure

            def hang_in_bad_rounds(*anything):
                program.hangs_from = 64 if 1 <= program.calls <= bad_rounds else None
                return measure(*anything)

            program.measure = hang_in_bad_rounds
            results, said = measure_fakes([program], sizes=[(64, 0)], congestion=["bbr"])
            self.assertEqual(sum(text.startswith("STALLED") for text in said), bad_rounds)
            self.assertEqual(sum(map(len, results.rows.values())), left)

    def test_a_wrong_result_ends_the_comparison(self):
        programs = [FakeProgram("ringbench"), FakeProgram("gloo", wrong=2)]
        self.assertRaisesRegex(peers.MeasurementFailed, "2 wrong elements", measure_fakes, programs)

    def test_sizes_with_less_than_an_element_for_each_rank_are_left_out_with_a_message(self):
        self.assertEqual(peers.BenchmarkCase("all_gather", "f64", 4).smallest_size(), 32)
        results, said = measure_fakes([FakeProgram("ringbench")], sizes=((2, 0), (64, 0)))
        self.assertEqual({key.bytes for key in results.rows}, {64})
        self.assertTrue(any(text.startswith("LEFT OUT: 2 bytes") for text in said))


class ReportTests(unittest.TestCase):
    def test_tables_have_a_column_for_each_program(self):
        programs = [FakeProgram("ringbench"), FakeProgram("gloo", 30.0)]
        text = report.markdown_tables(make_document(measure_fakes(programs)[0], programs), True)
        self.assertIn("| bytes | ringbench | gloo |", text)
        self.assertIn("| 64 | 10.0 µs (10.0 µs - 10.0 µs) **1.00** | 30.0 µs (30.0 µs - 30.0 µs) **3.00** |", text)
        # 20 µs of processor time for each operation of 1 MiB are 0.0205 s for each GiB.
        self.assertIn("| 1M | 0.0205 | 0.0614 |", text)

    def test_bus_bandwidth_is_defined_as_in_ringbench(self):
        programs = [FakeProgram("ringbench")]
        [row, *_] = [row for row in make_document(measure_fakes(programs)[0], programs)["results"] if row["bytes"] == 1 << 20]
        self.assertAlmostEqual(row["busbw_gb_per_s"], (1 << 20) / 10 / 1e3)
        self.assertEqual(rounds.busbw_factor("all_reduce", 4), 1.5)
        self.assertEqual(rounds.busbw_factor("all_gather", 4), 0.75)
        self.assertEqual(rounds.busbw_factor("all_to_all", 4), 0.75)
        self.assertEqual(rounds.busbw_factor("broadcast", 4), 1)
        self.assertEqual(rounds.busbw_factor("ping_pong", 2), 1)

    def test_tables_of_messages_say_what_a_time_is(self):
        programs = [FakeProgram("ringbench")]
        results, _ = measure_fakes(programs, case=peers.BenchmarkCase("ping_pong", "f32", 2))
        document = make_document(results, programs)
        self.assertIn("A time is half of a round trip", report.markdown_tables(document, False))
        self.assertTrue(all(row["time_is"].startswith("half of a round trip") for row in document["results"]))


class RatioTests(unittest.TestCase):
    def test_the_confidence_interval_is_that_of_the_sign_test(self):
        # For 15 values, the 4th and the 12th miss the true median with a probability of 2 * (1 + 15 + 105 + 455) / 2^15 = 3.5%.
        self.assertEqual(ratios.median_and_confidence_interval(range(1, 16)), (8, (4, 12)))
        self.assertEqual(ratios.median_and_confidence_interval(range(1, 7)), (3.5, (1, 6)))
        self.assertEqual(ratios.median_and_confidence_interval([2, 1, 3]), (2, None))

    def test_each_case_is_compared_with_the_same_case_of_the_build_before(self):
        programs = [FakeProgram("ringbench", 30.0), FakeProgram("ringbench-before", 20.0), FakeProgram("gloo")]
        rows = ratios.compare_builds(measure_fakes(programs, rounds=6)[0])
        self.assertEqual([row["program"] for row in rows], ["ringbench"] * 4)
        self.assertTrue(all(row["ratio"] == 1.5 and row["interval"] == (1.5, 1.5) for row in rows))
        self.assertAlmostEqual(ratios.geometric_mean_ratio(rows), 1.5)
        self.assertIn("| ringbench | all_reduce | f32 | bbr | 2 | 64 | 1.500 | 1.500 - 1.500 |", ratios.ratio_table(rows))
        self.assertEqual(ratios.compare_builds(measure_fakes([FakeProgram("ringbench")])[0]), [])


    def test_a_summary_names_the_sizes_at_which_the_program_is_slower(self):
        ours, peer = FakeProgram("ringbench", 10.0), FakeProgram("mpich5", 10.0)
        measure = peer.measure

        def fast_at_1_mib(*anything):
            measurement = measure(*anything)
            measurement.rows[1 << 20]["time_us_mean"] = 8.0
            return measurement

        peer.measure = fast_at_1_mib
        rows = ratios.compare_with_peers(measure_fakes([ours, peer], rounds=6, congestion=["bbr"])[0], "ringbench")
        self.assertEqual([(row["bytes"], row["ratio"]) for row in rows], [(64, 1.0), (1 << 20, 1.25)])
        self.assertIn("| mpich5 | all_reduce | f32 | bbr | 2 | 2 | 1.12 | 1.25 (1M) | 1M |", ratios.summary_table(rows))
        rows = ratios.compare_with_peers(measure_fakes([ours, peer], rounds=5, congestion=["bbr"])[0], "ringbench")
        self.assertIn("| 1.25 (1M) | - |", ratios.summary_table(rows))

    def test_a_round_in_which_a_program_failed_has_no_ratio(self):
        results, _ = measure_fakes([FakeProgram("ringbench", 30.0), FakeProgram("gloo", 10.0)], rounds=3)
        for key in results.rows:
            if key.program == "gloo":
                del results.rows[key][1]
        self.assertTrue(all(row["rounds_ratio"] == [3.0, 3.0] for row in ratios.compare_with_peers(results, "ringbench")))


class PlotTests(unittest.TestCase):
    def test_the_svg_is_well_formed_and_has_a_line_for_each_program_and_panel(self):
        programs = [FakeProgram("ringbench"), FakeProgram("openmpi4-tcp", 30.0), FakeProgram("openmpi9", 0.02)]
        drawn = plot.draw_svg(make_document(measure_fakes(programs)[0], programs))
        parsed = xml.dom.minidom.parseString(drawn)
        self.assertEqual(len(parsed.getElementsByTagName("polyline")), 3 * 2 * 2)
        self.assertNotIn("nan", drawn)

    def test_a_single_size_can_be_drawn(self):
        programs = [FakeProgram("ringbench")]
        xml.dom.minidom.parseString(plot.draw_svg(make_document(measure_fakes(programs, sizes=[(64, 5)])[0], programs)))

    def test_ticks_have_round_values_and_short_labels(self):
        self.assertEqual(plot.decade_ticks(7, 130), [1, 10, 100, 1000])
        self.assertEqual(plot.decade_ticks(10, 10), [10, 100])
        self.assertEqual(plot.linear_ticks(4.3), [0, 1, 2, 3, 4, 5])
        self.assertEqual(plot.tick_text(0.1), "0.1 µs")
        self.assertEqual(plot.tick_text(1000), "1 ms")


class ProcessTests(unittest.TestCase):
    @contextlib.contextmanager
    def python_runner(self):
        """Returns a function `run(*programs)`, which runs Python programs until they end, or until they print nothing
        for `stall_s` seconds (20 by default).
        """
        processes.adopt_orphans()
        with tempfile.TemporaryDirectory() as scratch:
            yield lambda *programs, stall_s=20, ending_s=0: processes.run_commands(
                [[sys.executable, "-c", text] for text in programs], stall_s, scratch, ending_s=ending_s
            )

    def test_the_result_has_the_output_of_the_first_command_and_the_processor_time_of_all_commands(self):
        with self.python_runner() as run:
            result = run("print('here')", "print('there')")
        self.assertEqual((result.output, result.code), ("here\n", 0))
        self.assertGreater(result.cpu_s, 0)

    def test_a_command_that_fails_ends_all_commands_and_its_errors_are_returned(self):
        with self.python_runner() as run:
            began = time.monotonic()
            result = run("import time; time.sleep(60)", "raise SystemExit('no')")
        self.assertEqual((result.code, result.errors), (1, "no\n"))
        self.assertLess(time.monotonic() - began, 20)

    def test_a_silent_command_is_killed_with_its_descendants_and_its_output_is_returned(self):
        orphan = "import os, sys; os.fork() or (os.setsid(), os.fork() and os._exit(0)); print('row', flush=True); "
        with self.python_runner() as run:
            result = run(orphan + "import time; time.sleep(60)", stall_s=1)
        self.assertIsNone(result.code)
        self.assertIn("row", result.output)
        self.assertEqual(processes.find_descendants(processes._read_parents(), os.getpid()), [])

    def test_a_command_that_gets_sigterm_can_clean_up(self):
        with self.python_runner() as run, tempfile.TemporaryDirectory() as directory:
            file = pathlib.Path(directory) / "file"
            text = f"import pathlib, signal, time; file = pathlib.Path({str(file)!r}); "
            text += "signal.signal(signal.SIGTERM, lambda *_: exit()); file.touch()\n"
            text += "try: time.sleep(60)\nfinally: time.sleep(0.3); file.unlink()"
            self.assertIsNone(run(text, stall_s=1, ending_s=20).code)
            self.assertFalse(file.exists())
            # A process that ignores the signal is killed.
            ignoring = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
            began = time.monotonic()
            self.assertIsNone(run(ignoring, stall_s=1, ending_s=0.5).code)
            self.assertLess(time.monotonic() - began, 20)

    def test_descendants_are_found_at_every_depth(self):
        self.assertEqual(sorted(processes.find_descendants({2: 1, 3: 2, 4: 3, 5: 9, 9: 8}, 1)), [2, 3, 4])


class MachineTests(unittest.TestCase):
    def test_congestion_is_always_restored(self):
        with tempfile.TemporaryDirectory() as directory, contextlib.suppress(KeyboardInterrupt):
            file = machine.CONGESTION
            machine.CONGESTION = pathlib.Path(directory) / "congestion"
            machine.CONGESTION.write_text("bbr\n")
            try:
                with machine.CongestionControl(print) as congestion:
                    self.assertEqual(congestion.find_settable(["host", "cubic", "bbr"]), ["bbr", "cubic"])
                    congestion.set("cubic")
                    raise KeyboardInterrupt
            finally:
                self.assertEqual(machine.CONGESTION.read_text().strip(), "bbr")
                machine.CONGESTION = file


if __name__ == "__main__":
    unittest.main()
