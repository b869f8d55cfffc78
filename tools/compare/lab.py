"""The comparison between several hosts: tools/netlab makes a network on this machine, with lines of any rate.

Each measurement makes its own network, so that no program inherits what the kernel has learnt about a route from the
program before. iperf3 says what a line carries.
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
from peers import Failed

NETLAB = pathlib.Path(__file__).resolve().parent.parent / "netlab"
SIZES = ("64", "4K", "64K", "1M", "4M", "16M", "64M")
EXPECTED = ("iperf3", "ringbench-tcp", "gloo")
OURS = "ringbench-tcp"
# The time to remove a lab: more than it has ever taken.
ENDING_S = 20
LINE_S, LINE_TRIAL_S = 3, 1
# A connection begins with slow start, which a long job has behind it.
LINE_OMIT_S = 1
# A trial does not know how long an operation takes, and 64 MiB take a second on a line of 1 Gbit/s.
TIMEOUT_S = 120
GLOO_PORT = 29500
# Host 0 serves one test. Host 1 tries until the server listens; with --json a failure has exit code 0. The other lines
# stay idle.
IPERF = """
host=$1 first=$2
shift 2
case $host in
0) exec iperf3 --server --one-off >/dev/null ;;
1)
    attempt=0
    while told=$(iperf3 --client "$first" --json "$@"); [ $attempt -lt 50 ]; do
        case $told in *'"error"'*) ;; *) break ;; esac
        attempt=$((attempt + 1))
        sleep 0.1
    done
    printf '%s\\n' "$told"
    ;;
esac
"""


@dataclasses.dataclass(frozen=True)
class Lab:
    hosts: int
    rate: str

    @staticmethod
    def from_text(text):
        """`4:1gbit` as four hosts with lines of 1 Gbit/s, in tc's units."""
        found = re.fullmatch(r"(\d+):(\d+[kmgt]?bit)", text)
        if not found or not 2 <= int(found.group(1)) <= 200:
            raise ValueError(f"{text}: a lab is HOSTS:RATE, such as 4:1gbit, with 2 to 200 hosts")
        return Lab(int(found.group(1)), found.group(2))

    def __str__(self):
        return f"{self.hosts} hosts on a switch with lines of {self.rate} (tools/netlab)"

    def lacks(self):
        """Why no lab can run here, or None."""
        if os.geteuid() != 0:
            return "only root may make network namespaces"
        missing = [name for name in ("ip", "tc") if not shutil.which(name)]
        return f"no {' and no '.join(missing)} (apt-get install iproute2)" if missing else None

    def run(self, command, stall_s, scratch):
        """Runs the command on every host."""
        started = [NETLAB, "-n", self.hosts, "--rate", self.rate, "--", *command]
        return processes.run([started], stall_s, scratch, ending_s=ENDING_S)


class Ringbench(peers.Ringbench):
    def __init__(self, lab, args, scratch):
        super().__init__(OURS, "ringbench (TCP)", args.programs, ["--transport", "tcp"], args.our_congestion, scratch)
        self.lab = lab

    def run(self, case, command, stall_s):
        place = ["--peers", "{peers}", "--rank", "{rank}", "--secret-file", "{secret}"]
        return self.lab.run([*command, *place], stall_s, self.scratch)


class Gloo(peers.Gloo):
    def __init__(self, lab, python, scratch):
        super().__init__(python, scratch)
        self.lab = lab

    def run(self, case, command, stall_s):
        place = ["RANK={rank}", f"WORLD_SIZE={case.world}", "MASTER_ADDR={first}", f"MASTER_PORT={GLOO_PORT}"]
        return self.lab.run(["env", *place, "GLOO_SOCKET_IFNAME=eth0", *command], stall_s, self.scratch)


class Line(peers.Program):
    """What a line carries over one TCP connection, or over two in opposite directions: a ring sends and receives at once."""

    key = name = "iperf3"

    def __init__(self, lab, scratch):
        self.lab, self.scratch = lab, scratch

    def mbit_per_s(self, control, seconds, both_ways, stall_s):
        """The rate of each direction, and iperf3's version."""
        flags = ["--time", seconds, "--omit", LINE_OMIT_S, *(["--bidir"] if both_ways else [])]
        command = ["sh", "-c", IPERF, "sh", "{host}", "{first}", *flags]
        ended = self.lab.run(command, stall_s + seconds + LINE_OMIT_S, self.scratch)
        if ended.code != 0:
            how = "did not end" if ended.code is None else f"ended with {ended.code}"
            raise Failed(f"iperf3 {how}: {f'{ended.output} {ended.errors}'.strip()[-300:]}")
        return line_rates(ended.output, control, both_ways)


def line_rates(output, control, both_ways):
    """The rate of each direction in Mbit/s, and iperf3's version, from its JSON."""
    try:
        told = json.loads(output)
        if "error" in told:
            raise Failed(f"iperf3: {told['error']}")
        end, version = told["end"], told["start"]["version"]
        # The hosts of a lab take the machine's default when they are made. A host that did not would show here.
        if (used := end["sender_tcp_congestion"]) != control:
            raise Failed(f"the hosts of the lab use {used}, not {control}")
        names = ["sum_received", *(["sum_received_bidir_reverse"] if both_ways else [])]
        return [end[name]["bits_per_second"] / 1e6 for name in names], version
    except (ValueError, KeyError, TypeError) as error:
        raise Failed(f"iperf3 printed no JSON of a test: {error!r}") from error


class Rounds(rounds.Rounds):
    """Rounds in which the line is measured like a program."""

    def __init__(self, args, say):
        super().__init__(args, say)
        # By congestion control a list of (one way, the mean of both ways), one a round.
        self.carried = {}
        self.no_line = False

    def trial(self, program, case, sizes):
        if not isinstance(program, Line):
            super().trial(program, case, sizes)
            return
        self.say("trial of a line, iperf3", kept=False)
        try:
            default = machine.CONGESTION.read_text().strip()
            _, self.versions[program.key] = program.mbit_per_s(default, LINE_TRIAL_S, True, self.args.timeout)
        except Failed as error:
            self.say(f"LEFT OUT: {error}")
            self.no_line = True

    def turn(self, program, case, control, number):
        if not isinstance(program, Line):
            super().turn(program, case, control, number)
            return
        if self.no_line:
            return
        self.say(f"round {number + 1} of {self.args.rounds}, {control}, a line, iperf3", kept=False)
        machine.wait_until_idle(self.args.wait_idle, self.say)
        try:
            [one_way], _ = program.mbit_per_s(control, LINE_S, False, self.args.timeout)
            both_ways, _ = program.mbit_per_s(control, LINE_S, True, self.args.timeout)
        except Failed as error:
            self.say(f"FAILED in round {number + 1} under {control}: {error}")
            return
        self.carried.setdefault(control, []).append((one_way, statistics.mean(both_ways)))

    def lines(self):
        found = {}
        for control, measured in self.carried.items():
            one_way, both_ways = map(list, zip(*measured))
            found[control] = {
                "one_way_mbit_per_s": statistics.median(one_way),
                "both_ways_mbit_per_s": statistics.median(both_ways),
                "rounds_one_way_mbit_per_s": one_way,
                "rounds_both_ways_mbit_per_s": both_ways,
            }
        return found


def beside_the_line(rows, lines):
    """Adds to each row its part of what a line carries, if that was measured."""
    for row in rows:
        if line := lines.get(row["congestion_control_host"]):
            row["line_gb_per_s"] = line["one_way_mbit_per_s"] / 8e3
            row["line_both_ways_gb_per_s"] = line["both_ways_mbit_per_s"] / 8e3
            row["line_part"] = row["busbw_gb_per_s"] / row["line_gb_per_s"]


def find(args, scratch):
    """All programs that can run in the lab, and (key, reason) of those that are missing."""
    reason = args.lab.lacks()
    if reason:
        return [], [(key, reason) for key in EXPECTED]
    programs, absent = [], []
    if shutil.which("iperf3"):
        programs.append(Line(args.lab, scratch))
    else:
        absent.append(("iperf3", "not found (apt-get install iperf3), so the rate of the lines is unknown"))
    if (args.programs / "ringbench").exists():
        programs.append(Ringbench(args.lab, args, scratch))
    else:
        absent.append((OURS, f"no ringbench in {args.programs}; run cargo build --release"))
    found, missing = peers.Gloo.all(args, scratch)
    programs += [Gloo(args.lab, gloo.python, scratch) for gloo in found]
    return programs, absent + missing
