"""Tests the comparison between hosts. Tests that need a network are skipped, with a message, if this user may not create one."""

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
from test_compare import FakeProgram, FakeCongestionControl

TWO_HOSTS = lab.SimulatedLab(2, "1gbit")


def iperf_json(congestion="cubic", forward=900e6, reverse=None):
    end = {"sender_tcp_congestion": congestion, "sum_received": {"bits_per_second": forward}}
    if reverse:
        end["sum_received_bidir_reverse"] = {"bits_per_second": reverse}
    return json.dumps({"start": {"version": "iperf 3.12"}, "end": end})


class FakeNetworkLine(lab.NetworkLine):
    """A fake network line. The rate is 800 Mbit/s if data flow in one direction. If data flow in both directions, the
    rates are 780 and 760 Mbit/s. If `fails`, iperf3 fails.
    """

    def __init__(self, fails=False):
        super().__init__(TWO_HOSTS, None)
        self.fails = fails

    def measure_mbit_per_s(self, control, seconds, both_ways, stall_s):
        if self.fails:
            raise peers.MeasurementFailed("iperf3: no route to host")
        return [780.0, 760.0] if both_ways else [800.0], "iperf 3.12"


def measure_fakes(line):
    """Measures fake programs in three rounds: ringbench takes 20 ms for 1 MiB, and Gloo takes 40 ms. Returns the report, and
    the messages that the report contains."""
    options = {"rounds": 3, "congestion": ["bbr", "cubic"], "wait_idle": 0, "timeout": 1, "cpu": False, "ours": lab.OURS}
    options |= {"statistic": "mean", "input": "rewritten"}
    args, said = types.SimpleNamespace(**options), []
    results = lab.LabRounds(args, lambda text, keep=True: said.append(text) if keep else None)
    programs = [line, FakeProgram(lab.OURS, 20_000.0), FakeProgram("gloo", 40_000.0)]
    results.measure_all(programs, [peers.BenchmarkCase("all_reduce", "f32", 2)], [(1 << 20, 0)], FakeCongestionControl())
    names = {program.key: program.name for program in programs}
    rows = report.result_rows(results, lab.OURS, names)
    lab.add_line_rates(rows, results.measured_line_rates())
    host = {"cpu": "one", "processors": 2, "kernel": "Linux 6", "congestion_control_default": "bbr", "network": str(TWO_HOSTS)}
    return report.json_document(host, results, rows, names, said, args), said


class LabTests(unittest.TestCase):
    def test_from_text_reads_hosts_and_rate(self):
        self.assertEqual(lab.SimulatedLab.from_text("4:1gbit"), lab.SimulatedLab(4, "1gbit"))
        for wrong in ("4", "4:", "1:1gbit", "201:1gbit", "4:fast", "four:1gbit", "4:1gbit; true"):
            self.assertRaises(ValueError, lab.SimulatedLab.from_text, wrong)

    def test_without_root_every_program_is_absent_with_the_reason(self):
        args = types.SimpleNamespace(lab=types.SimpleNamespace(unavailable_reason=lambda: "only root may"))
        programs, absent = lab.find_programs(args, None)
        self.assertEqual((programs, absent), ([], [(key, "only root may") for key in lab.EXPECTED]))


class NetworkLineTests(unittest.TestCase):
    def test_rates_are_those_of_the_receiver(self):
        self.assertEqual(lab.parse_iperf_rates(iperf_json(), "cubic", False), ([900.0], "iperf 3.12"))
        self.assertEqual(lab.parse_iperf_rates(iperf_json(reverse=850e6), "cubic", True)[0], [900.0, 850.0])

    def test_output_without_a_rate_is_a_failure_with_its_reason(self):
        for output, reason in (
            ('{"start": {}, "end": {}, "error": "unable to connect"}', "unable to connect"),
            (iperf_json("bbr"), "use bbr, not cubic"),
            ("", "no JSON of a test"),
            ("[]", "no JSON of a test"),
            (iperf_json(), "sum_received_bidir_reverse"),
        ):
            self.assertRaisesRegex(peers.MeasurementFailed, reason, lab.parse_iperf_rates, output, "cubic", True)

    def test_bus_bandwidth_is_shown_as_a_percentage_of_the_line(self):
        data, _ = measure_fakes(FakeNetworkLine())
        self.assertEqual(data["lines"]["bbr"]["rounds_both_ways_mbit_per_s"], [770.0] * 3)
        self.assertEqual(data["versions"]["iperf3"], "iperf 3.12")
        text = report.markdown_tables(data, False)
        self.assertIn("800 Mbit/s (800 - 800) in one direction and 770 Mbit/s (770 - 770) in each direction", text)
        # 1 MiB in 20 ms is 419 Mbit/s, which is 52.4% of 800 Mbit/s.
        self.assertIn("**1.00** 52.4% |", text)
        self.assertIn("**2.00** 26.2% |", text)
        drawn = xml.dom.minidom.parseString(plot.draw_svg(data))
        self.assertIn("iperf3, one direction", [node.firstChild.data for node in drawn.getElementsByTagName("text")])
        self.assertIn(str(TWO_HOSTS), report.report_heading(data["machine"], {}, 3))

    def test_without_iperf_there_are_times_and_no_percentages(self):
        data, said = measure_fakes(FakeNetworkLine(fails=True))
        self.assertEqual(said, ["LEFT OUT: iperf3: no route to host"])
        self.assertIn("**2.00** |", report.markdown_tables(data, False))


@unittest.skipIf(TWO_HOSTS.unavailable_reason(), f"this user cannot create a network: {TWO_HOSTS.unavailable_reason()}")
class NetworkTests(unittest.TestCase):
    def run_in_lab(self, command, stall_s=60):
        """Runs a shell command on both hosts, and checks that the lab is removed. Returns the printed words and the exit code."""
        processes.adopt_orphans()
        with tempfile.TemporaryDirectory() as scratch:
            result = TWO_HOSTS.run(["sh", "-c", f"echo {{host}} $(ip netns identify) {command}"], stall_s, pathlib.Path(scratch))
        lines = sorted(line.split() for line in result.output.splitlines())
        self.assertEqual([line[0] for line in lines], ["0", "1"])
        left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
        for _, namespace, *_ in lines:
            self.assertRegex(namespace, "^nl[0-9]+-[01]$")
            self.assertNotIn(namespace, left)
        return [line[2:] for line in lines], result.code

    def test_every_host_runs_the_command(self):
        [first, second], code = self.run_in_lab("{rank} {first} {address}")
        self.assertEqual((code, first[0], second[0]), (0, "0", "1"))
        self.assertEqual((first[1], second[1]), (first[2], first[2]))

    def test_a_lab_whose_command_hangs_is_removed(self):
        self.assertIsNone(self.run_in_lab("; sleep 60", stall_s=3)[1])

    def test_ranks_are_numbered_host_by_host(self):
        script = 'echo {rank} {host} {local} $(sed "s/.*://" {peers})'
        command = [lab.NETLAB, "-n", "2", "--per-host", "2", "--", "sh", "-c", script]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        ports = "7000 7001 7000 7001"
        self.assertEqual(sorted(output.splitlines()), [f"{rank} {rank // 2} {rank % 2} {ports}" for rank in range(4)])


if __name__ == "__main__":
    unittest.main()
