"""The measurements, as rows for JSON and as tables."""

import statistics

from rounds import busbw_factor

GIB = 1 << 30


def results(rounds, ours, names):
    """A row for each figure; `ours` is the key of the program that the others' times are divided by."""
    rows = []
    for key, measured in rounds.rows.items():
        times = [row["time_us"] for row in measured]
        median = statistics.median(times)
        reference = rounds.rows.get(key.__class__(**{**vars(key), "program": ours}))
        cpu = [row["cpu_s"] * GIB / (row["iterations"] * key.bytes) for row in measured if row.get("cpu_s") is not None]
        rows.append(
            {
                "operation": key.operation,
                "dtype": key.dtype,
                "congestion_control_host": key.congestion,
                "world_size": key.world,
                "bytes": key.bytes,
                "program": key.program,
                "name": names[key.program],
                "iterations": measured[-1]["iterations"],
                "time_us": median,
                "time_us_min": min(times),
                "time_us_max": max(times),
                "rounds_us": times,
                "busbw_gb_per_s": key.bytes / median / 1e3 * busbw_factor(key.operation, key.world),
                "times_ours": median / statistics.median(row["time_us"] for row in reference) if reference else None,
                "cpu_s_per_gib": statistics.median(cpu) if cpu else None,
                "rounds_cpu_s_per_gib": cpu,
                **{name: measured[-1][name] for name in ("transport", "algorithm") if name in measured[-1]},
            }
        )
    return rows


def document(machine, rounds, rows, names, notes, args):
    """Everything, for the JSON file."""
    return {
        "machine": machine,
        # What the lines of a lab carry, by the host's default; empty without a lab.
        "lines": rounds.lines(),
        "versions": {names[key]: version for key, version in rounds.versions.items()},
        "rounds": args.rounds,
        "ours": args.ours,
        "programs": names,
        "notes": notes,
        "did_not_finish": [
            dict(zip(("operation", "dtype", "world_size", "bytes", "program"), key)) for key in sorted(rounds.unfinished)
        ],
        "results": rows,
    }


def groups(rows):
    """The rows by (operation, dtype, host's default, ranks), in the order in which they were asked for."""
    found = {}
    for row in rows:
        key = (row["operation"], row["dtype"], row["congestion_control_host"], row["world_size"])
        found.setdefault(key, []).append(row)
    return found


def heading(machine, versions, rounds):
    """The machine, the versions and the number of rounds, in one line."""
    host = f"{machine['cpu']}, {machine['processors']} processors, {machine['kernel']}"
    if machine.get("network"):
        host += f", {machine['network']}"
    default = f"default congestion control {machine['congestion_control_default']}"
    # Two columns of one library share a version.
    return f"{host}, {default}; {rounds} round{'s' if rounds != 1 else ''}; {'; '.join(dict.fromkeys(versions.values()))}"


def time_text(time_us):
    for limit, unit, name in ((1e3, 1, "µs"), (1e6, 1e3, "ms"), (float("inf"), 1e6, "s")):
        if time_us < limit:
            value = time_us / unit
            return f"{value:.{2 if value < 1 else 1 if value < 100 else 0}f} {name}"
    raise AssertionError("nothing is longer than forever")


def size_text(size):
    for unit, name in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if size >= unit and size % unit == 0:
            return f"{size // unit}{name}"
    return str(size)


def tables(told, cpu):
    """Markdown: for each group the times, and with `cpu` the processors' time."""
    parts = []
    missing = {tuple(row.values()) for row in told["did_not_finish"]}
    for (operation, dtype, control, world), rows in groups(told["results"]).items():
        keys = [key for key in told["programs"] if any(row["program"] == key for row in rows)]
        # A program that finished nothing also has a column.
        gone = {key for *what, _, key in missing if what == [operation, dtype, world]}
        keys += [key for key in told["programs"] if key not in keys and key in gone]
        cells = {(row["bytes"], row["program"]): row for row in rows}

        def cell(size, key, text):
            row = cells.get((size, key))
            unfinished = (operation, dtype, world, size, key) in missing
            return text(row) if row else "did not finish" if unfinished else "-"

        sizes = sorted({size for size, _ in cells})
        title = f"**{operation} of {dtype}, {world} ranks, host's default {control}**"
        if line := told["lines"].get(control):
            title += f"\n\n{line_text(line)}"
        parts.append(grid(title, told["programs"], keys, sizes, lambda size, key: cell(size, key, times_text)))
        if cpu:
            title = f"**the same: CPU seconds of all ranks for each GiB of {operation}**"
            parts.append(grid(title, told["programs"], keys, sizes, lambda size, key: cell(size, key, cpu_text)))
    return "\n\n".join(parts)


def grid(title, names, keys, sizes, text):
    lines = [title, "", f"| bytes | {' | '.join(names[key] for key in keys)} |", "|---" * (len(keys) + 1) + "|"]
    lines += [f"| {size_text(size)} | {' | '.join(text(size, key) for key in keys)} |" for size in sizes]
    return "\n".join(lines)


def times_text(row):
    ratio = row["times_ours"]
    behind = f" **{ratio:.{2 if ratio >= 0.1 else 3}f}**" if ratio else ""
    if row.get("line_part") is not None:
        behind += f" {row['line_part']:.1%}"
    return f"{time_text(row['time_us'])} ({time_text(row['time_us_min'])} - {time_text(row['time_us_max'])}){behind}"


def line_text(line):
    """What iperf3 has measured, in a sentence."""
    shown = [
        f"{median:.0f} Mbit/s ({min(measured):.0f} - {max(measured):.0f}) {way}"
        for way, median, measured in (
            ("one way", line["one_way_mbit_per_s"], line["rounds_one_way_mbit_per_s"]),
            ("each way with both at once", line["both_ways_mbit_per_s"], line["rounds_both_ways_mbit_per_s"]),
        )
    ]
    return f"A line carries {' and '.join(shown)}, as iperf3 says; the percentages are parts of the former."


def cpu_text(row):
    # Below zero is noise: less than what a start varies by.
    value = row["cpu_s_per_gib"]
    return "-" if value is None or value <= 0 else f"{value:.3g}"
