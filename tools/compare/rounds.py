"""The rounds: the order of the programs, the number of iterations, and the handling of programs that do not finish."""

import dataclasses

import machine
from peers import WARM_UP, Failed

# The time for each size in a round, for every program: as many iterations as fit.
BUDGET_US = 400_000
ITERATIONS_MIN, ITERATIONS_MAX = 8, 50_000
TRIAL_ITERATIONS = 10
REPEATS_MAX = 5
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def size_bytes(text):
    """`64K` as bytes."""
    unit = UNITS.get(text[-1:].upper())
    return int(text[:-1]) * unit if unit else int(text)


def size_range(text):
    """`4:64M:4` as the sizes from 4 bytes to 64 MiB, each four times the one before."""
    first, last, factor = text.split(":")
    size, last, factor = size_bytes(first), size_bytes(last), int(factor)
    if size < 1 or factor < 2:
        raise ValueError("sizes begin at 1 and grow by 2 at least")
    sizes = []
    while size <= last:
        sizes.append(size)
        size *= factor
    return sizes


def iterations_for(time_us):
    return max(ITERATIONS_MIN, min(ITERATIONS_MAX, round(BUDGET_US / max(time_us, 1e-3))))


def rotated(programs, number):
    """Each round begins with another program, so that no program always follows the same one."""
    turn = number % max(1, len(programs))
    return programs[turn:] + programs[:turn]


def busbw_factor(operation, world):
    """What each rank must send at least, by the size: nccl-tests' factors, as in docs/benchmarking.md."""
    return {"all_reduce": 2 * (world - 1) / world, "broadcast": 1.0}.get(operation, (world - 1) / world)


@dataclasses.dataclass(frozen=True)
class Key:
    """What a figure was measured for."""

    operation: str
    dtype: str
    congestion: str
    world: int
    bytes: int
    program: str


class Rounds:
    """Everything that was measured so far."""

    def __init__(self, args, say):
        self.args, self.say = args, say
        # By Key a list of rows, one a round.
        self.rows = {}
        self.unfinished = set()
        self.versions = {}
        # Iterations by bytes, if the user has chosen them.
        self.fixed = {}
        # How often a program has stalled in a round, by (case, program).
        self.stalls = {}
        # Iterations and time by (case, program) and bytes; empty if the program gives no figures.
        self.iterations = {}

    def lines(self):
        """What the network's lines carry, by congestion control, if that is measured."""
        return {}

    def measure_all(self, programs, cases, sizes, congestion):
        self.fixed = {size: count for size, count in sizes if count}
        controls = congestion.names(self.args.congestion)
        for case in cases:
            for program in programs:
                self.trial(program, case, sizes)
        # The congestion controls alternate within a round, so that a drift of the machine affects all of them.
        for number in range(self.args.rounds):
            for control in controls:
                congestion.set(control)
                for case in cases:
                    for program in rotated(programs, number):
                        self.turn(program, case, control, number)

    def trial(self, program, case, sizes):
        """Chooses the iterations, and finds out what the program cannot do."""
        wanted = [(size, count or TRIAL_ITERATIONS) for size, count in sizes if size >= case.smallest()]
        self.iterations[case, program.key] = counts = {}
        for size, _ in sizes:
            if size < case.smallest():
                self.say(f"LEFT OUT: {size} bytes of {case.operation}: fewer than an element for each of {case.world} ranks")
        reason = program.lacks(case)
        if reason:
            self.say(f"LEFT OUT: {program.name} with {case.operation} of {case.dtype}: {reason}")
            return
        self.say(f"trial of {case.operation} of {case.dtype}, {case.world} ranks, {program.name}", kept=False)
        trial = [(size, min(count, TRIAL_ITERATIONS)) for size, count in wanted]
        machine.wait_until_idle(self.args.wait_idle, self.say)
        try:
            figures = program.measure(case, trial, program.patience_s(case.world, self.args.timeout), False)
        except Failed as error:
            if program.key.startswith("ringbench"):
                raise
            self.say(f"LEFT OUT: {error} ({case.operation} of {case.dtype}, {case.world} ranks)")
            return
        self.accept(program, case, figures)
        if not figures.finished:
            self.did_not_finish(program, case, [size for size, _ in wanted if size not in figures.rows])
        for size, row in figures.rows.items():
            counts[size] = self.count(size, row["time_us"])

    def count(self, size, time_us):
        """How many iterations a size gets, with the time that one of them takes."""
        return self.fixed.get(size) or iterations_for(time_us), time_us

    def turn(self, program, case, control, number):
        counts = self.iterations[case, program.key]
        if not counts:
            return
        self.say(f"round {number + 1} of {self.args.rounds}, {control}, {case.operation} of {case.dtype}, "
                 f"{case.world} ranks, {program.name}", kept=False)
        sizes = [(size, count) for size, (count, _) in counts.items()]
        longest_s = max((count + WARM_UP) * time_us for count, time_us in counts.values()) / 1e6
        stall_s = program.patience_s(case.world, self.args.timeout) + 4 * longest_s
        try:
            figures = self.undisturbed(program, case, sizes, stall_s)
        except Failed as error:
            if program.key.startswith("ringbench"):
                raise
            self.say(f"FAILED in round {number + 1} under {control}: {error}")
            return
        self.accept(program, case, figures)
        for size, row in figures.rows.items():
            key = Key(case.operation, case.dtype, control, case.world, size, program.key)
            self.rows.setdefault(key, []).append(row)
            # The trial was short. A disturbance in it would cause too few iterations in every round.
            counts[size] = self.count(size, min(counts[size][1], row["time_us"]))
        if not figures.finished:
            self.stalled(program, case, control, number, [size for size, _ in sizes if size not in figures.rows])

    def stalled(self, program, case, control, number, sizes):
        """It succeeded in the trial, so one stall is forgiven."""
        self.stalls[case, program.key] = times = self.stalls.get((case, program.key), 0) + 1
        self.say(f"STALLED in round {number + 1} under {control}: {program.name}, {case.world} ranks, at {sizes[0]} bytes")
        if times > 1:
            self.did_not_finish(program, case, sizes)

    def undisturbed(self, program, case, sizes, stall_s):
        """A program's figures from a run with an idle machine before and after it."""
        for _ in range(REPEATS_MAX):
            machine.wait_until_idle(self.args.wait_idle, self.say)
            figures = program.measure(case, sizes, stall_s, self.args.cpu)
            if self.args.wait_idle == 0 or machine.busy() <= machine.BUSY_MAX:
                return figures
            self.say(f"{program.name} may have been disturbed; measured again", kept=False)
        self.say(f"DISTURBED: {program.name}: no quiet moment in {REPEATS_MAX} attempts; the last one counts")
        return figures

    def accept(self, program, case, figures):
        """Wrong results end the comparison."""
        if figures.version:
            self.versions[program.key] = figures.version
        for size, row in figures.rows.items():
            if row["wrong"] != 0:
                raise Failed(f"{program.name} gave {row['wrong']} wrong elements in {case.operation} of {size} bytes")

    def did_not_finish(self, program, case, sizes):
        for size in sizes:
            self.unfinished.add((case.operation, case.dtype, case.world, size, program.key))
            # It does not run again: each attempt would cost the whole time-out.
            self.iterations[case, program.key].pop(size, None)
        shown = ", ".join(str(size) for size in sizes)
        self.say(f"DID NOT FINISH: {program.name}, {case.operation} of {case.dtype}, {case.world} ranks: {shown} bytes")
