"""The programs that are compared: how each is found, installed and started, and what it can do."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import socket
import subprocess
import sys

import processes
from machine import cores, processors

HERE = pathlib.Path(__file__).resolve().parent
WARM_UP = 5
# What the keys of an earlier build's programs end in.
BEFORE = "-before"
OPERATIONS = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
DTYPES = {"f32": 4, "f64": 8, "f16": 2, "bf16": 2}
# What `--install` fetches, each into a separate virtual environment: the two MPIs would overwrite each other's mpicc.
PACKAGES = {"torch": ["torch", "numpy"], "openmpi": ["openmpi"], "mpich": ["mpich"]}
# The programs that run by default. A message names each one that is missing.
EXPECTED = (
    *("ringbench", "ringbench-alloc", "ringbench-tcp", "gloo", "openmpi4-tcp", "openmpi4", "openmpi5-tcp", "openmpi5"),
    *("mpich5-tcp", "mpich5"),
)


class Failed(Exception):
    """A program did not give its figures."""


@dataclasses.dataclass(frozen=True)
class Case:
    operation: str
    dtype: str
    world: int

    def smallest(self):
        """The smallest size at which each rank has an element."""
        parts = self.world if self.operation in ("all_gather", "reduce_scatter") else 1
        return DTYPES[self.dtype] * parts


@dataclasses.dataclass
class Figures:
    version: str
    # By bytes: time_us, iterations, wrong, and cpu_s of all ranks and iterations together or None.
    rows: dict
    # False if the program was killed because it stopped printing.
    finished: bool


class Program:
    """A column of the table."""

    key = name = ""
    dtypes = tuple(DTYPES)

    def lacks(self, case):
        """Why there cannot be figures, or None."""
        return None if case.dtype in self.dtypes else f"it has no {case.dtype}"

    def patience_s(self, world, otherwise_s):
        """How long a size may take in addition to its iterations."""
        return otherwise_s

    def measure(self, case, sizes, stall_s, cpu):
        raise NotImplementedError


class Ringbench(Program):
    def __init__(self, key, name, directory, transport, congestion, scratch):
        self.key, self.name, self.directory, self.scratch = key, name, directory, scratch
        self.transport, self.congestion = transport, congestion

    @staticmethod
    def all(args, scratch):
        """The programs, and (key, reason) of those that are missing."""
        found, absent = Ringbench.in_directory(args.programs, args.our_congestion, scratch, "")
        if args.before:
            more = Ringbench.in_directory(args.before, args.our_congestion, scratch, BEFORE)
            found, absent = found + more[0], absent + more[1]
        return found, absent

    @staticmethod
    def in_directory(directory, congestion, scratch, suffix):
        """The programs of one build; the suffix tells two builds apart."""
        if not all((directory / name).exists() for name in ("ringrun", "ringbench")):
            reason = f"no ringrun and ringbench in {directory}; run cargo build --release"
            return [], [(key + suffix, reason) for key in ("ringbench", "ringbench-alloc", "ringbench-tcp")]
        told = subprocess.run([directory / "ringbench", "--help"], capture_output=True, text=True, check=False)
        auto, tcp = (["--transport", name] if knows_transport(told.stdout, name) else None for name in ("auto", "tcp"))
        if auto and tcp:
            lent = ("ringbench-alloc", "ringbench --alloc", [*auto, "--alloc"])
            columns = [("ringbench", "ringbench", auto), lent, ("ringbench-tcp", "ringbench (TCP)", tcp)]
            absent = []
        else:
            columns = [("ringbench", "ringbench", [])]
            absent = [(key + suffix, "this ringbench has no --transport auto, so it is what `ringbench` does anyway")
                      for key in ("ringbench-alloc", "ringbench-tcp")]
        named = [(key + suffix, name + suffix.replace("-", ", "), flags) for key, name, flags in columns]
        return [Ringbench(key, name, directory, flags, congestion, scratch) for key, name, flags in named], absent

    def lacks(self, case):
        if "--alloc" in self.transport and case.operation != "all_reduce":
            return "buffers of the group are for all_reduce"
        return super().lacks(case)

    def measure(self, case, sizes, stall_s, cpu):
        rows, version = {}, ""
        for size, iterations in sizes:
            row, used_s, environment = self.one(case, size, iterations, stall_s)
            if row is None:
                return Figures(version, rows, False)
            if cpu:
                # The run's time less that of a run with a single iteration is the time of the other iterations.
                _, once_s, _ = self.one(case, size, 1, stall_s)
                row["cpu_s"] = (used_s - (once_s or 0)) * iterations / max(1, iterations - 1)
            rows[size] = row
            version = f"ringbench {environment['versions']['ringtrain']}"
            # Over shared memory there may be no links.
            if environment.get("congestion_control"):
                version += f" (its links use {environment['congestion_control']})"
        return Figures(version, rows, True)

    def one(self, case, size, iterations, stall_s):
        report = self.scratch / "ringbench.json"
        report.unlink(missing_ok=True)
        command = [
            *(self.directory / "ringbench", case.operation),
            *("-b", size, "-e", size, "-n", iterations, "-w", WARM_UP, "-t", case.dtype, "-c", 1),
            *(*self.transport, "--tcp-congestion", self.congestion, "--json", report),
        ]
        if case.operation in ("all_reduce", "reduce_scatter"):
            command += ["-o", "sum"]
        ended = self.run(case, command, stall_s)
        if ended.code is None:
            return None, None, None
        if ended.code != 0:
            raise Failed(f"{self.name} ended with {ended.code}: {ended.errors.strip()[-500:]}")
        told = json.loads(report.read_text())
        [row] = told["results"]
        kept = {key: row[key] for key in ("time_us", "iterations", "wrong", "transport", "algorithm") if key in row}
        return {**kept, "cpu_s": None}, ended.cpu_s, told["environment"]

    def run(self, case, command, stall_s):
        """Runs the command as every rank of a job."""
        return processes.run([[self.directory / "ringrun", "-n", case.world, *command]], stall_s, self.scratch)


def knows_transport(usage, name):
    """Whether `ringbench --help` lists this value of --transport."""
    part = re.search(r"^ +--transport\b.*?(?=^ +(?:-\w, )?--\w)", usage, re.MULTILINE | re.DOTALL)
    return part is not None and re.search(rf"^ +- {name}\b", part.group(), re.MULTILINE) is not None


class Gloo(Program):
    key, name = "gloo", "Gloo"

    def __init__(self, python, scratch):
        self.python, self.scratch = python, scratch

    @staticmethod
    def all(args, scratch):
        named = [pathlib.Path(args.python)] if args.python else []
        for python in [*named, *inside(args.peers, "bin/python")]:
            if can_gloo(python):
                return [Gloo(python, scratch)], []
        return [], [("gloo", "no Python with torch was found (--install, --peers, --python or COMPARE_PYTHON)")]

    def lacks(self, case):
        # A sum of more values has more digits than bf16 can hold, and could not be checked.
        if case.dtype == "bf16" and case.world > 16:
            return "bf16 is checked with up to 16 ranks"
        return super().lacks(case)

    def measure(self, case, sizes, stall_s, cpu):
        command = [self.python, HERE / "gloo_bench.py", "--warm-up", WARM_UP]
        command += ["--operation", case.operation, "--dtype", case.dtype]
        for size, iterations in sizes:
            command += ["--size", size, iterations]
        return figures(self, self.run(case, command, stall_s))

    def run(self, case, command, stall_s):
        """Runs the command as every rank of a job."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        job = {"WORLD_SIZE": case.world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [{**job, "RANK": rank} for rank in range(case.world)]
        return processes.run([command] * case.world, stall_s, self.scratch, ranks)


def can_gloo(python):
    probe = [python, "-c", "import torch.distributed as d; assert d.is_gloo_available()"]
    return shutil.which(python) is not None and subprocess.run(probe, capture_output=True, check=False).returncode == 0


class Mpi(Program):
    # The standard has no type of 16 bits.
    dtypes = ("f32", "f64")

    def __init__(self, key, name, mpiexec, program, flags, variables, scratch):
        self.key, self.name, self.mpiexec, self.program = key, name, mpiexec, program
        self.flags, self.variables, self.scratch = flags, variables, scratch

    @staticmethod
    def all(args, scratch):
        """Two columns for each MPI that is found: over TCP only, and with its defaults."""
        programs, absent, failures = {}, [], []
        directories = [path.parent for path in inside(args.peers, "bin/mpicc")]
        if shutil.which("mpicc"):
            directories.append(pathlib.Path(shutil.which("mpicc")).parent)
        for number, directory in enumerate(directories):
            try:
                for program in Mpi.installed(directory, scratch, number):
                    programs.setdefault(program.key, program)
            except Failed as error:
                failures.append(str(error))
        for key in EXPECTED:
            if key.startswith(("openmpi", "mpich")) and key not in programs:
                absent.append((key, "; ".join(["not found (--install, --peers or mpicc in PATH)", *failures])))
        return list(programs.values()), absent

    @staticmethod
    def installed(directory, scratch, number):
        mpiexec, program = directory / "mpiexec", scratch / f"mpi_bench.{number}"
        compiled = processes.run([[directory / "mpicc", "-O2", "-o", program, HERE / "mpi_bench.c"]], 120, scratch)
        if compiled.code != 0:
            raise Failed(f"{directory / 'mpicc'} failed: {compiled.errors.strip()[-300:]}")
        # Ask the library which MPI it is: mpicc and mpiexec have the same names in all of them.
        probe = processes.run([[mpiexec, "-n", 1, program, "all_reduce", "f32", 1]], 30, scratch, [AS_ROOT])
        version = from_lines(probe.output)[1]
        found = re.match(r"(Open MPI|MPICH)\D*(\d+)", version)
        if probe.code != 0 or not found:
            raise Failed(f"{mpiexec} does not start a program: {(version or probe.errors.strip())[-300:]}")
        family, major = found.group(1), int(found.group(2))
        kind, key = (OpenMpi, f"openmpi{major}") if family == "Open MPI" else (Mpich, f"mpich{major}")
        for suffix, title, (flags, variables) in (("-tcp", " (TCP)", kind.TCP), ("", "", ([], {}))):
            yield kind(key + suffix, f"{family} {major}{title}", mpiexec, program, flags, variables, scratch)

    def measure(self, case, sizes, stall_s, cpu):
        command = [self.mpiexec, "-n", case.world, *self.flags, *self.more_flags(case.world)]
        command += [self.program, case.operation, case.dtype, WARM_UP]
        for size, iterations in sizes:
            command += [size, iterations]
        return figures(self, processes.run([command], stall_s, self.scratch, [{**AS_ROOT, **self.variables}]))

    def more_flags(self, world):
        return []


# Open MPI 4 and 5 refuse root without these. Other programs ignore them.
AS_ROOT = {
    f"{prefix}_ALLOW_RUN_AS_ROOT{suffix}": 1 for prefix in ("OMPI", "PRTE") for suffix in ("", "_CONFIRM")
}


class OpenMpi(Mpi):
    # Also switch off the shared memory of the collectives, not only that of the messages.
    TCP = (
        [*("--mca", "pml", "ob1", "--mca", "btl", "tcp,self"), *("--mca", "coll", "^sm", "--mca", "btl_tcp_if_include", "lo")],
        {},
    )

    def more_flags(self, world):
        # Only where it is needed: version 5 binds no rank to a core any more once it has been given this. It counts cores,
        # not their threads.
        more = ["--oversubscribe"] if world > cores() else []
        return [*more, "--mca", "mpi_yield_when_idle", "1"] if world > processors() else more


class Mpich(Mpi):
    # NOLOCAL switches off its shared memory; the provider restricts it to TCP.
    TCP = ([], {"MPIR_CVAR_NOLOCAL": 1, "MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "lo"})
    OVERSUBSCRIBED_S = 10

    def patience_s(self, world, otherwise_s):
        # It spins and has no option like mpi_yield_when_idle: if ranks share a processor, a step takes a time slice.
        return min(otherwise_s, self.OVERSUBSCRIBED_S) if world > processors() else otherwise_s


def from_lines(text):
    """The rows by bytes, and the version, of what gloo_bench.py and mpi_bench.c print."""
    rows, version = {}, ""
    for line in text.splitlines():
        if not (line.startswith("{") and line.endswith("}")):
            continue
        told = json.loads(line)
        if "bytes" in told:
            rows[told.pop("bytes")] = told
        else:
            version = re.sub(r"\s+", " ", told.get("version", "").replace("Version:", "").replace("MPI v", "MPI "))
    return rows, version


def figures(program, ended):
    if ended.code not in (None, 0):
        raise Failed(f"{program.name} ended with {ended.code}: {ended.errors.strip()[-500:]}")
    rows, version = from_lines(ended.output)
    return Figures(version, rows, ended.code == 0)


def inside(directory, path):
    """Every such file in the virtual environments of a directory of peers."""
    return sorted(directory.glob(f"*/{path}")) if directory else []


def find(args, scratch):
    """All programs, and (key, reason) of those that are expected but missing."""
    programs, absent = [], []
    for kind in (Ringbench, Gloo, Mpi):
        here, missing = kind.all(args, scratch)
        programs += here
        absent += missing
    order = {key: place for place, key in enumerate(EXPECTED)}
    return sorted(programs, key=lambda program: order.get(program.key, len(order))), absent


def install(directory, say):
    """Makes a virtual environment for each peer that the directory does not have yet."""
    present = {
        "torch": any(can_gloo(python) for python in inside(directory, "bin/python")),
        "openmpi": bool(inside(directory, "bin/ompi_info")),
        "mpich": bool(inside(directory, "bin/mpichversion")),
    }
    for name, packages in PACKAGES.items():
        if present[name]:
            continue
        say(f"installing {' and '.join(packages)} into {directory / name}", kept=False)
        directory.mkdir(parents=True, exist_ok=True)
        made = [[sys.executable, "-m", "venv", directory / name]]
        made.append([directory / name / "bin/pip", "install", "--quiet", "--disable-pip-version-check", *packages])
        for command in made:
            done = subprocess.run(command, stdout=sys.stderr, check=False)
            if done.returncode != 0:
                say(f"NOT INSTALLED: {name}: {command[0]} ended with {done.returncode}")
                break
