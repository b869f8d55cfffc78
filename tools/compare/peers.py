"""Finds, installs and starts the programs that are compared, and defines which cases each program can measure."""

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
from machine import core_count, processor_count

HERE = pathlib.Path(__file__).resolve().parent
WARM_UP = 5
# The suffix of the keys of programs from an earlier build (--before).
BEFORE = "-before"
# Gloo measures only these operations.
REDUCTIONS_AND_COPIES = ("all_reduce", "broadcast", "all_gather", "reduce_scatter")
OPERATIONS = (*REDUCTIONS_AND_COPIES, "reduce", "barrier", "gather", "scatter", "all_to_all", "ping_pong", "send_receive")
# The operations that divide the buffer into equal parts, one for each rank.
WITH_PARTS = ("all_gather", "reduce_scatter", "gather", "scatter", "all_to_all")
DTYPES = {"f32": 4, "f64": 8, "f16": 2, "bf16": 2}
# The packages that `--install` installs. Each entry has a separate virtual environment, because all MPIs have an mpicc.
PACKAGES = {
    "torch": ["torch", "numpy"],
    "openmpi": ["openmpi"],
    "mpich": ["mpich"],
    "intelmpi": ["impi-rt", "impi-devel"],
}
# The programs that run by default. A message names each program that is missing.
EXPECTED = (
    *("ringbench", "ringbench-alloc", "ringbench-tcp", "gloo", "openmpi4-tcp", "openmpi4", "openmpi5-tcp", "openmpi5"),
    *("mpich5-tcp", "mpich5", "intelmpi2021-tcp", "intelmpi2021"),
)


class MeasurementFailed(Exception):
    """A program could not measure a case."""


@dataclasses.dataclass(frozen=True)
class BenchmarkCase:
    operation: str
    dtype: str
    world: int
    # "rewritten": every rank writes to each cache line of its input before each iteration. Otherwise "unchanged".
    input: str = "rewritten"

    def smallest_size(self):
        """Returns the smallest size of the buffer, in bytes, with which each rank has an element."""
        parts = self.world if self.operation in WITH_PARTS else 1
        return DTYPES[self.dtype] * parts


@dataclasses.dataclass
class Measurement:
    version: str
    # For each size: time_us_mean and time_us_median, iterations, wrong (the number of wrong elements), and cpu_s. cpu_s is the
    # processor time of all ranks and iterations together, or None if it was not measured.
    rows: dict
    # False if the program was killed because it printed nothing for too long.
    finished: bool


class ComparedProgram:
    """A program that the comparison measures. The printed table has one column for each program."""

    key = name = ""
    dtypes = tuple(DTYPES)

    def unsupported_reason(self, case):
        """Returns the reason why the program cannot measure the case, or None if it can."""
        if case.operation == "ping_pong" and case.world != 2:
            # The other ranks would wait, and the ranks of an MPI spin while they wait.
            return "ping_pong is measured with 2 ranks"
        return None if case.dtype in self.dtypes else f"it has no type {case.dtype}"

    def extra_time_s(self, world, default_s):
        """Returns how many seconds the measurement of one size may take in addition to the time of its iterations."""
        return default_s

    def measure(self, case, sizes, stall_s, cpu):
        raise NotImplementedError


class Ringbench(ComparedProgram):
    def __init__(self, key, name, directory, transport, congestion, scratch, can_rewrite=True):
        self.key, self.name, self.directory, self.scratch = key, name, directory, scratch
        self.transport, self.congestion, self.can_rewrite = transport, congestion, can_rewrite

    @staticmethod
    def find_all(args, scratch):
        """Returns the ringbench programs of all builds, and (key, reason) for each missing program."""
        found, absent = Ringbench.find_in_build(args.programs, args.our_congestion, scratch, "")
        if args.before:
            more = Ringbench.find_in_build(args.before, args.our_congestion, scratch, BEFORE)
            found, absent = found + more[0], absent + more[1]
        return found, absent

    @staticmethod
    def find_in_build(directory, congestion, scratch, suffix):
        """Returns the ringbench programs of the build in `directory`, and (key, reason) for each missing program. `suffix` is
        appended to the keys and names, so that the programs of two builds have different names."""
        if not all((directory / name).exists() for name in ("ringrun", "ringbench")):
            reason = f"no ringrun and ringbench in {directory}; run cargo build --release"
            return [], [(key + suffix, reason) for key in ("ringbench", "ringbench-alloc", "ringbench-tcp")]
        usage = subprocess.run([directory / "ringbench", "--help"], capture_output=True, text=True, check=False)
        auto, tcp = (["--transport", name] if usage_lists_transport(usage.stdout, name) else None for name in ("auto", "tcp"))
        if auto and tcp:
            lent = ("ringbench-alloc", "ringbench --alloc", [*auto, "--alloc"])
            columns = [("ringbench", "ringbench", auto), lent, ("ringbench-tcp", "ringbench (TCP)", tcp)]
            absent = []
        else:
            columns = [("ringbench", "ringbench", [])]
            absent = [(key + suffix, "this ringbench has no --transport, so it is the same as `ringbench`")
                      for key in ("ringbench-alloc", "ringbench-tcp")]
        named = [(key + suffix, name + suffix.replace("-", ", "), flags) for key, name, flags in columns]
        can_rewrite = "--rewrite-input" in usage.stdout
        return [Ringbench(key, name, directory, flags, congestion, scratch, can_rewrite) for key, name, flags in named], absent

    def unsupported_reason(self, case):
        if "--alloc" in self.transport and case.operation != "all_reduce":
            return "--alloc is only for all_reduce"
        if case.input == "rewritten" and not self.can_rewrite:
            return "this build has no --rewrite-input; compare with --input unchanged"
        return super().unsupported_reason(case)

    def measure(self, case, sizes, stall_s, cpu):
        rows, version = {}, ""
        for size, iterations in sizes:
            row, used_s, environment = self.measure_size(case, size, iterations, stall_s)
            if row is None:
                return Measurement(version, rows, False)
            if cpu:
                # Subtract the time of a run with a single iteration, which leaves the time of the other iterations.
                _, once_s, _ = self.measure_size(case, size, 1, stall_s)
                row["cpu_s"] = (used_s - (once_s or 0)) * iterations / max(1, iterations - 1)
            rows[size] = row
            version = f"ringbench {environment['versions']['ringtrain']}"
            # A job in shared memory may have no links, and then no congestion control.
            if environment.get("congestion_control"):
                version += f" (its links use {environment['congestion_control']})"
        return Measurement(version, rows, True)

    def measure_size(self, case, size, iterations, stall_s):
        report = self.scratch / "ringbench.json"
        report.unlink(missing_ok=True)
        command = [
            *(self.directory / "ringbench", case.operation),
            *("-b", size, "-e", size, "-n", iterations, "-w", WARM_UP, "-t", case.dtype, "-c", 1),
            *(*self.transport, "--tcp-congestion", self.congestion, "--json", report),
        ]
        if case.operation in ("all_reduce", "reduce_scatter"):
            command += ["-o", "sum"]
        if case.input == "rewritten":
            command += ["--rewrite-input"]
        result = self.run_on_every_rank(case, command, stall_s)
        if result.code is None:
            return None, None, None
        if result.code != 0:
            raise MeasurementFailed(f"{self.name} ended with {result.code}: {result.errors.strip()[-500:]}")
        measured = json.loads(report.read_text())
        [row] = measured["results"]
        kept = {key: row[key] for key in ("time_us_mean", "iterations", "wrong", "transport", "algorithm") if key in row}
        return {**kept, "time_us_median": row["time_us"], "cpu_s": None}, result.cpu_s, measured["environment"]

    def run_on_every_rank(self, case, command, stall_s):
        """Runs the command on every rank of a job."""
        return processes.run_commands([[self.directory / "ringrun", "-n", case.world, *command]], stall_s, self.scratch)


def usage_lists_transport(usage, name):
    """Returns whether `ringbench --help` lists this value of --transport."""
    part = re.search(r"^ +--transport\b.*?(?=^ +(?:-\w, )?--\w)", usage, re.MULTILINE | re.DOTALL)
    return part is not None and re.search(rf"^ +- {name}\b", part.group(), re.MULTILINE) is not None


class Gloo(ComparedProgram):
    key, name = "gloo", "Gloo"

    def __init__(self, python, scratch):
        self.python, self.scratch = python, scratch

    @staticmethod
    def find_all(args, scratch):
        named = [pathlib.Path(args.python)] if args.python else []
        for python in [*named, *find_in_environments(args.peers, "bin/python")]:
            if has_gloo(python):
                return [Gloo(python, scratch)], []
        return [], [("gloo", "no Python with torch was found (--install, --peers, --python or COMPARE_PYTHON)")]

    def unsupported_reason(self, case):
        if case.operation not in REDUCTIONS_AND_COPIES:
            return f"gloo_bench.py does not measure {case.operation}"
        # A sum over more than 16 ranks needs more digits than bf16 has, so an exact check is not possible.
        if case.dtype == "bf16" and case.world > 16:
            return "bf16 results can be checked with at most 16 ranks"
        return super().unsupported_reason(case)

    def measure(self, case, sizes, stall_s, cpu):
        command = [self.python, HERE / "gloo_bench.py", "--warm-up", WARM_UP]
        command += ["--operation", case.operation, "--dtype", case.dtype, "--input", case.input]
        for size, iterations in sizes:
            command += ["--size", size, iterations]
        return parse_measurement(self, self.run_on_every_rank(case, command, stall_s))

    def run_on_every_rank(self, case, command, stall_s):
        """Runs the command on every rank of a job."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        job = {"WORLD_SIZE": case.world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [{**job, "RANK": rank} for rank in range(case.world)]
        return processes.run_commands([command] * case.world, stall_s, self.scratch, ranks)


def has_gloo(python):
    probe = [python, "-c", "import torch.distributed as d; assert d.is_gloo_available()"]
    return shutil.which(python) is not None and subprocess.run(probe, capture_output=True, check=False).returncode == 0


class Mpi(ComparedProgram):
    # The MPI standard has no floating-point type of 16 bits.
    dtypes = ("f32", "f64")

    def __init__(self, key, name, mpiexec, program, flags, variables, scratch):
        self.key, self.name, self.mpiexec, self.program = key, name, mpiexec, program
        self.flags, self.variables, self.scratch = flags, variables, scratch

    @staticmethod
    def find_all(args, scratch):
        """Returns two programs for each MPI: one that uses only TCP, and one with the defaults of the MPI. Also returns (key,
        reason) for each missing program."""
        programs, absent, failures = {}, [], []
        directories = [path.parent for path in find_in_environments(args.peers, "bin/mpicc")]
        if shutil.which("mpicc"):
            directories.append(pathlib.Path(shutil.which("mpicc")).parent)
        for number, directory in enumerate(directories):
            try:
                for program in Mpi.compile_programs(directory, scratch, number):
                    programs.setdefault(program.key, program)
            except MeasurementFailed as error:
                failures.append(str(error))
        for key in EXPECTED:
            if key.startswith(MPI_KEYS) and key not in programs:
                absent.append((key, "; ".join(["not found (--install, --peers or mpicc in PATH)", *failures])))
        return list(programs.values()), absent

    @staticmethod
    def compile_programs(directory, scratch, number):
        mpiexec, program = directory / "mpiexec", scratch / f"mpi_bench.{number}"
        # The mpicc of Intel MPI needs to know where it is installed.
        variables = {**AS_ROOT, "I_MPI_ROOT": directory.parent}
        compile_command = [directory / "mpicc", "-O2", "-o", program, HERE / "mpi_bench.c"]
        compiled = processes.run_commands([compile_command], 120, scratch, [variables])
        if compiled.code != 0:
            raise MeasurementFailed(f"{directory / 'mpicc'} failed: {compiled.errors.strip()[-300:]}")
        # Run a program to learn which MPI this is, because mpicc and mpiexec have the same names in all MPIs.
        probe_command = [mpiexec, "-n", 1, program, "all_reduce", "f32", 1, "unchanged"]
        probe = processes.run_commands([probe_command], 30, scratch, [variables])
        version = parse_rows_and_version(probe.output)[1]
        found = re.match(r"(Open MPI|MPICH|Intel\(R\) MPI)\D*(\d+)", version)
        if probe.code != 0 or not found:
            raise MeasurementFailed(f"{mpiexec} cannot start a program: {(version or probe.errors.strip())[-300:]}")
        family, major = found.group(1).replace("(R)", ""), int(found.group(2))
        kind = {"Open MPI": OpenMpi, "MPICH": Mpich, "Intel MPI": IntelMpi}[family]
        key = f"{family.replace(' ', '').lower()}{major}"
        for suffix, title, (flags, variables) in (("-tcp", " (TCP)", kind.TCP), ("", "", ([], {}))):
            yield kind(key + suffix, f"{family} {major}{title}", mpiexec, program, flags, variables, scratch)

    def measure(self, case, sizes, stall_s, cpu):
        command = [self.mpiexec, "-n", case.world, *self.flags, *self.oversubscription_flags(case.world)]
        command += [self.program, case.operation, case.dtype, WARM_UP, case.input]
        for size, iterations in sizes:
            command += [size, iterations]
        return parse_measurement(self, processes.run_commands([command], stall_s, self.scratch, [{**AS_ROOT, **self.variables}]))

    def oversubscription_flags(self, world):
        """Returns the flags that mpiexec needs for `world` ranks if they share cores or processors."""
        return []


# How the keys of the MPI programs start.
MPI_KEYS = ("openmpi", "mpich", "intelmpi")
# Without these variables, Open MPI 4 and 5 refuse to run as root. Other programs ignore the variables.
AS_ROOT = {
    f"{prefix}_ALLOW_RUN_AS_ROOT{suffix}": 1 for prefix in ("OMPI", "PRTE") for suffix in ("", "_CONFIRM")
}


class OpenMpi(Mpi):
    # `--mca btl` switches off shared memory only in messages. `--mca coll ^sm` switches it off in collectives.
    TCP = (
        [*("--mca", "pml", "ob1", "--mca", "btl", "tcp,self"), *("--mca", "coll", "^sm", "--mca", "btl_tcp_if_include", "lo")],
        {},
    )

    def oversubscription_flags(self, world):
        # Pass the option only where it is needed, because with it Open MPI 5 no longer binds ranks to cores. Open MPI counts
        # cores, not hardware threads.
        more = ["--oversubscribe"] if world > core_count() else []
        return [*more, "--mca", "mpi_yield_when_idle", "1"] if world > processor_count() else more


class Mpich(Mpi):
    # NOLOCAL switches off shared memory, and FI_PROVIDER selects TCP.
    TCP = ([], {"MPIR_CVAR_NOLOCAL": 1, "MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "lo"})
    OVERSUBSCRIBED_S = 10

    def extra_time_s(self, world, default_s):
        # MPICH spins and has no option like mpi_yield_when_idle. If ranks share a processor, each step takes a time slice, and
        # large sizes would take very long. So the limit is short.
        return min(default_s, self.OVERSUBSCRIBED_S) if world > processor_count() else default_s


class IntelMpi(Mpi):
    # Without the fabric `shm`, all messages go through libfabric.
    TCP = ([], {"I_MPI_FABRICS": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "lo"})


def parse_rows_and_version(text):
    """Parses the output of gloo_bench.py or mpi_bench.c. Returns a dictionary with the row of each size, and the version."""
    rows, version = {}, ""
    for line in text.splitlines():
        if not (line.startswith("{") and line.endswith("}")):
            continue
        row = json.loads(line)
        if "bytes" in row:
            rows[row.pop("bytes")] = row
        else:
            version = re.sub(r"\s+", " ", row.get("version", "").replace("Version:", "").replace("MPI v", "MPI "))
    return rows, version


def parse_measurement(program, result):
    if result.code not in (None, 0):
        raise MeasurementFailed(f"{program.name} ended with {result.code}: {result.errors.strip()[-500:]}")
    rows, version = parse_rows_and_version(result.output)
    return Measurement(version, rows, result.code == 0)


def find_in_environments(directory, path):
    """Returns the files with this path in the virtual environments that --install has created in `directory`."""
    return sorted(directory.glob(f"*/{path}")) if directory else []


def find_programs(args, scratch):
    """Returns all programs that were found, and (key, reason) for each expected program that is missing."""
    programs, absent = [], []
    for kind in (Ringbench, Gloo, Mpi):
        here, missing = kind.find_all(args, scratch)
        programs += here
        absent += missing
    order = {key: index for index, key in enumerate(EXPECTED)}
    return sorted(programs, key=lambda program: order.get(program.key, len(order))), absent


def install_programs(directory, say):
    """Creates a virtual environment in `directory` for each program that is not yet installed there."""
    present = {
        "torch": any(has_gloo(python) for python in find_in_environments(directory, "bin/python")),
        "openmpi": bool(find_in_environments(directory, "bin/ompi_info")),
        "mpich": bool(find_in_environments(directory, "bin/mpichversion")),
        "intelmpi": bool(find_in_environments(directory, "bin/impi_info")),
    }
    for name, packages in PACKAGES.items():
        if present[name]:
            continue
        say(f"installing {' and '.join(packages)} into {directory / name}", keep=False)
        directory.mkdir(parents=True, exist_ok=True)
        made = [[sys.executable, "-m", "venv", directory / name]]
        made.append([directory / name / "bin/pip", "install", "--quiet", "--disable-pip-version-check", *packages])
        for command in made:
            done = subprocess.run(command, stdout=sys.stderr, check=False)
            if done.returncode != 0:
                say(f"NOT INSTALLED: {name}: {command[0]} ended with {done.returncode}")
                break
