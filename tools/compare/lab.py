"""Compares programs between several hosts, in a lab: tools/netlab simulates the hosts and their network on this machine.

Each measurement creates a new network, so that a program cannot profit from route metrics that the kernel has cached for an
earlier program. iperf3 measures the rate of a line, which is the network link between a host and the switch.
"""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import statistics

import machine
import peers
import processes
import rounds
from peers import MeasurementFailed

NETLAB = pathlib.Path(__file__).resolve().parent.parent / "netlab"
SIZES = ("64", "4K", "64K", "1M", "4M", "16M", "64M")
EXPECTED = ("iperf3", "ringbench-tcp", "gloo")
OURS = "ringbench-tcp"
# The time limit for removing a lab. Removing a lab has never taken this long.
ENDING_S = 20
LINE_S, LINE_TRIAL_S = 3, 1
# iperf3 does not count the first second, in which TCP's slow start limits the rate. A long job spends
# hardly any time in slow start.
LINE_OMIT_S = 1
# How long a program may print nothing. The limit is long, because the trial runs operations of unknown duration: on a line of
# 1 Gbit/s, an operation on 64 MiB takes a second.
TIMEOUT_S = 120
GLOO_PORT = 29500
# Host 0 runs iperf3's server for one test. Host 1 runs the client again and again until the server listens. With --json, a
# failed client also exits with 0, so the script looks for "error" in its output. The other hosts do nothing.
IPERF = """
host=$1 first=$2
shift 2
case $host in
0) exec iperf3 --server --one-off >/dev/null ;;
1)
    attempt=0
    while reply=$(iperf3 --client "$first" --json "$@"); [ $attempt -lt 50 ]; do
        case $reply in *'"error"'*) ;; *) break ;; esac
        attempt=$((attempt + 1))
        sleep 0.1
    done
    printf '%s\\n' "$reply"
    ;;
esac
"""


@dataclasses.dataclass(frozen=True)
class SimulatedLab:
    hosts: int
    rate: str

    @staticmethod
    def from_text(text):
        """Parses `4:1gbit` as four hosts with lines of 1 Gbit/s. The rate has a unit of the command `tc`."""
        found = re.fullmatch(r"(\d+):(\d+[kmgt]?bit)", text)
        if not found or not 2 <= int(found.group(1)) <= 200:
            raise ValueError(f"{text}: a lab is HOSTS:RATE with 2 to 200 hosts, for example 4:1gbit")
        return SimulatedLab(int(found.group(1)), found.group(2))

    def __str__(self):
        return f"{self.hosts} hosts on a switch with lines of {self.rate} (tools/netlab)"

    def unavailable_reason(self):
        """Returns why no lab can run here, or None."""
        if os.geteuid() != 0:
            return "only root may make network namespaces"
        missing = [name for name in ("ip", "tc") if not shutil.which(name)]
        return f"no {' and no '.join(missing)} (apt-get install iproute2)" if missing else None

    def run(self, command, stall_s, scratch):
        """Runs the command on every host."""
        started = [NETLAB, "-n", self.hosts, "--rate", self.rate, "--", *command]
        return processes.run_commands([started], stall_s, scratch, ending_s=ENDING_S)


class LabRingbench(peers.Ringbench):
    def __init__(self, lab, args, scratch):
        super().__init__(OURS, "ringbench (TCP)", args.programs, ["--transport", "tcp"], args.our_congestion, scratch)
        self.lab = lab

    def run_on_every_rank(self, case, command, stall_s):
        place = ["--peers", "{peers}", "--rank", "{rank}", "--secret-file", "{secret}"]
        return self.lab.run([*command, *place], stall_s, self.scratch)


class LabGloo(peers.Gloo):
    def __init__(self, lab, python, scratch):
        super().__init__(python, scratch)
        self.lab = lab

    def run_on_every_rank(self, case, command, stall_s):
        place = ["RANK={rank}", f"WORLD_SIZE={case.world}", "MASTER_ADDR={first}", f"MASTER_PORT={GLOO_PORT}"]
        return self.lab.run(["env", *place, "GLOO_SOCKET_IFNAME=eth0", *command], stall_s, self.scratch)


class NetworkLine(peers.ComparedProgram):
    """Measures the rate of a line with one TCP connection, or with two connections in opposite directions, as in a ring."""

    key = name = "iperf3"

    def __init__(self, lab, scratch):
        self.lab, self.scratch = lab, scratch

    def measure_mbit_per_s(self, control, seconds, both_ways, stall_s):
        """Returns two values: a list of the rates in Mbit/s, one for each direction, and iperf3's version."""
        flags = ["--time", seconds, "--omit", LINE_OMIT_S, *(["--bidir"] if both_ways else [])]
        command = ["sh", "-c", IPERF, "sh", "{host}", "{first}", *flags]
        result = self.lab.run(command, stall_s + seconds + LINE_OMIT_S, self.scratch)
        if result.code != 0:
            how = "did not end" if result.code is None else f"ended with {result.code}"
            raise MeasurementFailed(f"iperf3 {how}: {f'{result.output} {result.errors}'.strip()[-300:]}")
        return parse_iperf_rates(result.output, control, both_ways)


def parse_iperf_rates(output, control, both_ways):
    """Parses the JSON output of iperf3. Returns two values: a list of the rates in Mbit/s, one for each direction, and iperf3's
    version."""
    try:
        reply = json.loads(output)
        if "error" in reply:
            raise MeasurementFailed(f"iperf3: {reply['error']}")
        end, version = reply["end"], reply["start"]["version"]
        # The hosts of a lab inherit the machine's default congestion control. Check that the hosts did.
        if (used := end["sender_tcp_congestion"]) != control:
            raise MeasurementFailed(f"the hosts of the lab use {used}, not {control}")
        names = ["sum_received", *(["sum_received_bidir_reverse"] if both_ways else [])]
        return [end[name]["bits_per_second"] / 1e6 for name in names], version
    except (ValueError, KeyError, TypeError) as error:
        raise MeasurementFailed(f"iperf3 printed no JSON of a test: {error!r}") from error


class LabRounds(rounds.ComparisonRounds):
    """Rounds in which the line is also measured, as if the line were one of the compared programs."""

    def __init__(self, args, say):
        super().__init__(args, say)
        # For each congestion control, a list with an entry for each round: the rate in one direction, and the mean of the two
        # rates when both directions are used.
        self.line_rates = {}
        self.line_failed = False

    def run_trial(self, program, case, sizes):
        if not isinstance(program, NetworkLine):
            super().run_trial(program, case, sizes)
            return
        self.say("trial of a line with iperf3", keep=False)
        try:
            default = machine.CONGESTION.read_text().strip()
            _, self.versions[program.key] = program.measure_mbit_per_s(default, LINE_TRIAL_S, True, self.args.timeout)
        except MeasurementFailed as error:
            self.say(f"LEFT OUT: {error}")
            self.line_failed = True

    def measure_in_round(self, program, case, control, number):
        if not isinstance(program, NetworkLine):
            super().measure_in_round(program, case, control, number)
            return
        if self.line_failed:
            return
        self.say(f"round {number + 1} of {self.args.rounds}, {control}, a line with iperf3", keep=False)
        machine.wait_until_idle(self.args.wait_idle, self.say)
        try:
            [one_way], _ = program.measure_mbit_per_s(control, LINE_S, False, self.args.timeout)
            both_ways, _ = program.measure_mbit_per_s(control, LINE_S, True, self.args.timeout)
        except MeasurementFailed as error:
            self.say(f"FAILED in round {number + 1} under {control}: {error}")
            return
        self.line_rates.setdefault(control, []).append((one_way, statistics.mean(both_ways)))

    def measured_line_rates(self):
        found = {}
        for control, measured in self.line_rates.items():
            one_way, both_ways = map(list, zip(*measured))
            found[control] = {
                "one_way_mbit_per_s": statistics.median(one_way),
                "both_ways_mbit_per_s": statistics.median(both_ways),
                "rounds_one_way_mbit_per_s": one_way,
                "rounds_both_ways_mbit_per_s": both_ways,
            }
        return found


def add_line_rates(rows, lines):
    """Adds two values to each row, if the rate of the line was measured: this rate, and the row's bus bandwidth as a fraction of
    the rate."""
    for row in rows:
        if line := lines.get(row["congestion_control_host"]):
            row["line_gb_per_s"] = line["one_way_mbit_per_s"] / 8e3
            row["line_both_ways_gb_per_s"] = line["both_ways_mbit_per_s"] / 8e3
            row["line_part"] = row["busbw_gb_per_s"] / row["line_gb_per_s"]


def find_programs(args, scratch):
    """Returns all programs that can run in the lab, and (key, reason) for each missing program."""
    reason = args.lab.unavailable_reason()
    if reason:
        return [], [(key, reason) for key in EXPECTED]
    programs, absent = [], []
    if shutil.which("iperf3"):
        programs.append(NetworkLine(args.lab, scratch))
    else:
        absent.append(("iperf3", "not found (apt-get install iperf3), so the rate of the lines is unknown"))
    if (args.programs / "ringbench").exists():
        programs.append(LabRingbench(args.lab, args, scratch))
    else:
        absent.append((OURS, f"no ringbench in {args.programs}; run cargo build --release"))
    found, missing = peers.Gloo.find_all(args, scratch)
    programs += [LabGloo(args.lab, gloo.python, scratch) for gloo in found]
    return programs, absent + missing
