"""Measures the rounds of a comparison: orders the programs, chooses the number of iterations, and handles programs
that do not finish."""

import dataclasses

import machine
from peers import WARM_UP, MeasurementFailed

# The time for each size in a round. A program runs as many iterations as fit into this time.
BUDGET_US = 400_000
ITERATIONS_MIN, ITERATIONS_MAX = 8, 50_000
TRIAL_ITERATIONS = 10
REPEATS_MAX = 5
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size_bytes(text):
    """Converts `64K` to bytes."""
    unit = UNITS.get(text[-1:].upper())
    return int(text[:-1]) * unit if unit else int(text)


def size_range(text):
    """Converts `4:64M:4` to the sizes from 4 bytes to 64 MiB, each four times the size before it."""
    first, last, factor = text.split(":")
    size, last, factor = size_bytes(first), size_bytes(last), int(factor)
    if size < 1 or factor < 2:
        raise ValueError("the first size must be at least 1 and the factor at least 2")
    sizes = []
    while size <= last:
        sizes.append(size)
        size *= factor
    return sizes


def iterations_for(time_us):
    return max(ITERATIONS_MIN, min(ITERATIONS_MAX, round(BUDGET_US / max(time_us, 1e-3))))


def rotate_programs(programs, number):
    """Rotates the list of programs by `number`, the number of the round, so that each round begins with another
    program.
    """
    first = number % max(1, len(programs))
    return programs[first:] + programs[:first]


def busbw_factor(operation, world):
    """Returns busbw divided by algbw, as in nccl-tests. The factor is the smallest number of bytes that each rank
    must send, divided by the size of the buffer.

    The table of operations in docs/benchmarking.md shows the factor of each operation.
    """
    whole_buffer = {"broadcast": 1.0, "ping_pong": 1.0, "send_receive": 1.0}
    return {"all_reduce": 2 * (world - 1) / world, **whole_buffer}.get(operation, (world - 1) / world)


@dataclasses.dataclass(frozen=True)
class MeasurementKey:
    """Identifies a measured time: the operation, its element type and size, the number of ranks, and the program."""

    operation: str
    dtype: str
    congestion: str
    world: int
    bytes: int
    program: str


class ComparisonRounds:
    """Measures the rounds of a comparison, and stores the results."""

    def __init__(self, args, say):
        self.args, self.say = args, say
        # For each MeasurementKey, a list with a row for each round.
        self.rows = {}
        self.unfinished = set()
        self.versions = {}
        # The number of iterations for each size for which the user has chosen such a number.
        self.fixed = {}
        # How often each (case, program) has stalled in a round.
        self.stalls = {}
        # For each (case, program), the iterations and the time of each size; empty if the program cannot measure the case.
        self.iterations = {}

    def measured_line_rates(self):
        """Returns, for each congestion control, the rates that iperf3 has measured on the lines (the network links).
        Only a comparison in a lab measures these rates.
        """
        return {}

    def measure_all(self, programs, cases, sizes, congestion):
        self.fixed = {size: count for size, count in sizes if count}
        controls = congestion.find_settable(self.args.congestion)
        for case in cases:
            for program in programs:
                self.run_trial(program, case, sizes)
        # The congestion controls alternate within a round, so that a change in the machine's speed affects all congestion
        # controls.
        for number in range(self.args.rounds):
            for control in controls:
                congestion.set(control)
                for case in cases:
                    for program in rotate_programs(programs, number):
                        self.measure_in_round(program, case, control, number)

    def run_trial(self, program, case, sizes):
        """Chooses the number of iterations of each size, and reports the sizes that the program cannot measure."""
        wanted = [(size, count or TRIAL_ITERATIONS) for size, count in sizes if size >= case.smallest_size()]
        self.iterations[case, program.key] = counts = {}
        for size, _ in sizes:
            if size < case.smallest_size():
                self.say(f"LEFT OUT: {size} bytes of {case.operation}: less than one element for each of {case.world} ranks")
        reason = program.unsupported_reason(case)
        if reason:
            self.say(f"LEFT OUT: {program.name} with {case.operation} of {case.dtype}: {reason}")
            return
        self.say(f"trial of {case.operation} of {case.dtype}, {case.world} ranks, {program.name}", keep=False)
        trial = [(size, min(count, TRIAL_ITERATIONS)) for size, count in wanted]
        machine.wait_until_idle(self.args.wait_idle, self.say)
        try:
            measurement = program.measure(case, trial, program.extra_time_s(case.world, self.args.timeout), False)
        except MeasurementFailed as error:
            if program.key.startswith("ringbench"):
                raise
            self.say(f"LEFT OUT: {error} ({case.operation} of {case.dtype}, {case.world} ranks)")
            return
        self.check_results(program, case, measurement)
        if not measurement.finished:
            self.drop_sizes(program, case, [size for size, _ in wanted if size not in measurement.rows])
        for size, row in measurement.rows.items():
            counts[size] = self.iterations_and_time(size, self.selected_time(program, row))

    def selected_time(self, program, row):
        """Returns the time of a measured row that --statistic selects, in microseconds."""
        time_us = row.get(f"time_us_{self.args.statistic}")
        if time_us is None:
            hint = "compare with --statistic median, which every version measures"
            raise MeasurementFailed(f"{program.name} is too old: it does not report the {self.args.statistic} time; {hint}")
        return time_us

    def iterations_and_time(self, size, time_us):
        """Returns the number of iterations of a size, and the time of one iteration."""
        return self.fixed.get(size) or iterations_for(time_us), time_us

    def measure_in_round(self, program, case, control, number):
        counts = self.iterations[case, program.key]
        if not counts:
            return
        self.say(f"round {number + 1} of {self.args.rounds}, {control}, {case.operation} of {case.dtype}, "
                 f"{case.world} ranks, {program.name}", keep=False)
        sizes = [(size, count) for size, (count, _) in counts.items()]
        longest_s = max((count + WARM_UP) * time_us for count, time_us in counts.values()) / 1e6
        stall_s = program.extra_time_s(case.world, self.args.timeout) + 4 * longest_s
        try:
            measurement = self.measure_undisturbed(program, case, sizes, stall_s)
        except MeasurementFailed as error:
            if program.key.startswith("ringbench"):
                raise
            self.say(f"FAILED in round {number + 1} under {control}: {error}")
            return
        self.check_results(program, case, measurement)
        for size, row in measurement.rows.items():
            key = MeasurementKey(case.operation, case.dtype, control, case.world, size, program.key)
            time_us = self.selected_time(program, row)
            self.rows.setdefault(key, []).append({**row, "time_us": time_us, "round": number})
            # Use the shortest time so far. If other programs disturbed the trial, its time is too long, and the number of
            # iterations that follows from it is too small.
            counts[size] = self.iterations_and_time(size, min(counts[size][1], time_us))
        if not measurement.finished:
            self.record_stall(program, case, control, number, [size for size, _ in sizes if size not in measurement.rows])

    def record_stall(self, program, case, control, number, sizes):
        """Counts a stall of the program. From the second stall of the program in this case on, drops the unfinished
        `sizes`.

        After a program's first stall in a case, the comparison keeps the sizes, because the program has measured them
        in its trial.
        """
        self.stalls[case, program.key] = times = self.stalls.get((case, program.key), 0) + 1
        self.say(f"STALLED in round {number + 1} under {control}: {program.name}, {case.world} ranks, at {sizes[0]} bytes")
        if times > 1:
            self.drop_sizes(program, case, sizes)

    def measure_undisturbed(self, program, case, sizes, stall_s):
        """Repeats a measurement until the machine was idle before and after it, at most `REPEATS_MAX` times. Returns
        the last measurement.
        """
        for _ in range(REPEATS_MAX):
            machine.wait_until_idle(self.args.wait_idle, self.say)
            measurement = program.measure(case, sizes, stall_s, self.args.cpu)
            if self.args.wait_idle == 0 or machine.busy_fraction() <= machine.BUSY_MAX:
                return measurement
            self.say(f"other programs may have disturbed {program.name}; measuring again", keep=False)
        self.say(f"DISTURBED: {program.name}: the machine was busy in {REPEATS_MAX} attempts; the last attempt counts")
        return measurement

    def check_results(self, program, case, measurement):
        """Ends the comparison if a result is wrong, and records the program's version."""
        if measurement.version:
            self.versions[program.key] = measurement.version
        for size, row in measurement.rows.items():
            if row["wrong"] != 0:
                what = f"{row['wrong']} wrong elements in {case.operation} of {size} bytes"
                raise MeasurementFailed(f"{program.name} returned {what}")

    def drop_sizes(self, program, case, sizes):
        for size in sizes:
            self.unfinished.add((case.operation, case.dtype, case.world, size, program.key))
            # Do not measure this size again: each attempt would take the whole time-out.
            self.iterations[case, program.key].pop(size, None)
        shown = ", ".join(str(size) for size in sizes)
        self.say(f"DID NOT FINISH: {program.name}, {case.operation} of {case.dtype}, {case.world} ranks: {shown} bytes")
