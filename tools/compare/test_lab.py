"""Tests of the comparison between hosts. Tests that make a network are skipped, with a message, if this user may not make one."""

import json
import pathlib
import subprocess
import tempfile
import types
import unittest
import xml.dom.minidom

import lab
import peers
import plot
import processes
import report
from test_compare import Fake, FakeCongestion

TWO = lab.Lab(2, "1gbit")


def iperf_json(congestion="cubic", forward=900e6, reverse=None):
    end = {"sender_tcp_congestion": congestion, "sum_received": {"bits_per_second": forward}}
    if reverse:
        end["sum_received_bidir_reverse"] = {"bits_per_second": reverse}
    return json.dumps({"start": {"version": "iperf 3.12"}, "end": end})


class FakeLine(lab.Line):
    """Carries 800 Mbit/s one way, 780 and 760 both ways at once, or fails."""

    def __init__(self, fails=False):
        super().__init__(TWO, None)
        self.fails = fails

    def mbit_per_s(self, control, seconds, both_ways, stall_s):
        if self.fails:
            raise peers.Failed("iperf3: no route to host")
        return [780.0, 760.0] if both_ways else [800.0], "iperf 3.12"


def measured(line):
    """The result of three rounds in which 1 MiB takes 20 ms, and the messages."""
    options = {"rounds": 3, "congestion": ["bbr", "cubic"], "wait_idle": 0, "timeout": 1, "cpu": False, "ours": lab.OURS}
    args, said = types.SimpleNamespace(**options), []
    taken = lab.Rounds(args, lambda text, kept=True: said.append(text) if kept else None)
    programs = [line, Fake(lab.OURS, 20_000.0), Fake("gloo", 40_000.0)]
    taken.measure_all(programs, [peers.Case("all_reduce", "f32", 2)], [(1 << 20, 0)], FakeCongestion())
    names = {program.key: program.name for program in programs}
    rows = report.results(taken, lab.OURS, names)
    lab.beside_the_line(rows, taken.lines())
    host = {"cpu": "one", "processors": 2, "kernel": "Linux 6", "congestion_control_default": "bbr", "network": str(TWO)}
    return report.document(host, taken, rows, names, said, args), said


class Labs(unittest.TestCase):
    def test_hosts_and_rate(self):
        self.assertEqual(lab.Lab.from_text("4:1gbit"), lab.Lab(4, "1gbit"))
        for wrong in ("4", "4:", "1:1gbit", "201:1gbit", "4:fast", "four:1gbit", "4:1gbit; true"):
            self.assertRaises(ValueError, lab.Lab.from_text, wrong)

    def test_without_root_everything_is_left_out_with_the_reason(self):
        args = types.SimpleNamespace(lab=types.SimpleNamespace(lacks=lambda: "only root may"))
        programs, absent = lab.find(args, None)
        self.assertEqual((programs, absent), ([], [(key, "only root may") for key in lab.EXPECTED]))


class Lines(unittest.TestCase):
    def test_rates_are_those_that_arrive(self):
        self.assertEqual(lab.line_rates(iperf_json(), "cubic", False), ([900.0], "iperf 3.12"))
        self.assertEqual(lab.line_rates(iperf_json(reverse=850e6), "cubic", True)[0], [900.0, 850.0])

    def test_what_is_no_figure_is_a_failure_with_its_reason(self):
        for output, reason in (
            ('{"start": {}, "end": {}, "error": "unable to connect"}', "unable to connect"),
            (iperf_json("bbr"), "use bbr, not cubic"),
            ("", "no JSON of a test"),
            ("[]", "no JSON of a test"),
            (iperf_json(), "sum_received_bidir_reverse"),
        ):
            self.assertRaisesRegex(peers.Failed, reason, lab.line_rates, output, "cubic", True)

    def test_bus_bandwidth_is_shown_as_a_part_of_the_line(self):
        told, _ = measured(FakeLine())
        self.assertEqual(told["lines"]["bbr"]["rounds_both_ways_mbit_per_s"], [770.0] * 3)
        self.assertEqual(told["versions"]["iperf3"], "iperf 3.12")
        text = report.tables(told, False)
        self.assertIn("800 Mbit/s (800 - 800) one way and 770 Mbit/s (770 - 770) each way with both at once", text)
        # 1 MiB in 20 ms are 419 Mbit/s.
        self.assertIn("**1.00** 52.4% |", text)
        self.assertIn("**2.00** 26.2% |", text)
        drawn = xml.dom.minidom.parseString(plot.svg(told))
        self.assertIn("iperf3, one way", [node.firstChild.data for node in drawn.getElementsByTagName("text")])
        self.assertIn(str(TWO), report.heading(told["machine"], {}, 3))

    def test_without_iperf_there_are_times_and_no_parts(self):
        told, said = measured(FakeLine(fails=True))
        self.assertEqual(said, ["LEFT OUT: iperf3: no route to host"])
        self.assertIn("**2.00** |", report.tables(told, False))


@unittest.skipIf(TWO.lacks(), f"no network can be made here: {TWO.lacks()}")
class Networks(unittest.TestCase):
    def run_in_lab(self, command, stall_s=60):
        """What the shell's command prints on both hosts, and the lab's exit code; nothing of the lab may remain."""
        processes.adopt_orphans()
        with tempfile.TemporaryDirectory() as scratch:
            ended = TWO.run(["sh", "-c", f"echo {{host}} $(ip netns identify) {command}"], stall_s, pathlib.Path(scratch))
        lines = sorted(line.split() for line in ended.output.splitlines())
        self.assertEqual([line[0] for line in lines], ["0", "1"])
        left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
        for _, namespace, *_ in lines:
            self.assertRegex(namespace, "^nl[0-9]+-[01]$")
            self.assertNotIn(namespace, left)
        return [line[2:] for line in lines], ended.code

    def test_every_host_runs_the_command(self):
        [first, second], code = self.run_in_lab("{rank} {first} {address}")
        self.assertEqual((code, first[0], second[0]), (0, "0", "1"))
        self.assertEqual((first[1], second[1]), (first[2], first[2]))

    def test_nothing_is_left_of_one_that_hangs(self):
        self.assertIsNone(self.run_in_lab("; sleep 60", stall_s=3)[1])

    def test_ranks_are_counted_host_by_host(self):
        said = 'echo {rank} {host} {local} $(sed "s/.*://" {peers})'
        command = [lab.NETLAB, "-n", "2", "--per-host", "2", "--", "sh", "-c", said]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        ports = "7000 7001 7000 7001"
        self.assertEqual(sorted(told.splitlines()), [f"{rank} {rank // 2} {rank % 2} {ports}" for rank in range(4)])


if __name__ == "__main__":
    unittest.main()
