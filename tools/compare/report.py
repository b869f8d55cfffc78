"""Converts the measurements to rows of a JSON file, and the rows to Markdown tables."""

import statistics

from rounds import busbw_factor

GIB = 1 << 30
# What a time means, for the operations for which the name does not say it.
TIME_MEANINGS = {
    "ping_pong": "half of a round trip: the round trip is a message from rank 0 to rank 1 and a message back",
    "send_receive": "a whole exchange: each rank sends a message to the next rank and receives one from the previous rank",
}


def result_rows(rounds, ours, names):
    """Returns a row for each `rounds.MeasurementKey`: for each program, size and other setting that was measured.

    In each row, `times_ours` is a ratio: the row's median time divided by the median time of the program `ours`.
    """
    rows = []
    for key, measured in rounds.rows.items():
        times = [row["time_us"] for row in measured]
        median = statistics.median(times)
        reference = rounds.rows.get(key.__class__(**{**vars(key), "program": ours}))
        cpu = [row["cpu_s"] * GIB / (row["iterations"] * key.bytes) for row in measured if row.get("cpu_s") is not None]
        rows.append(
            {
                "operation": key.operation,
                "time_is": TIME_MEANINGS.get(key.operation, "the whole operation"),
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


def json_document(machine, rounds, rows, names, notes, args):
    """Returns the contents of the JSON file."""
    return {
        "machine": machine,
        # The rates of a lab's lines, by the host's default congestion control; empty without a lab.
        "lines": rounds.measured_line_rates(),
        "versions": {names[key]: version for key, version in rounds.versions.items()},
        "rounds": args.rounds,
        "statistic": args.statistic,
        "input": args.input,
        "ours": args.ours,
        "programs": names,
        "notes": notes,
        "did_not_finish": [
            dict(zip(("operation", "dtype", "world_size", "bytes", "program"), key)) for key in sorted(rounds.unfinished)
        ],
        "results": rows,
    }


def group_rows(rows):
    """Groups the rows by (operation, dtype, host's default congestion control, ranks), and keeps their order."""
    found = {}
    for row in rows:
        key = (row["operation"], row["dtype"], row["congestion_control_host"], row["world_size"])
        found.setdefault(key, []).append(row)
    return found


def report_heading(machine, versions, rounds):
    """Returns one line with the machine, the versions and the number of rounds."""
    host = f"{machine['cpu']}, {machine['processors']} processors, {machine['kernel']}"
    if machine.get("network"):
        host += f", {machine['network']}"
    default = f"default congestion control {machine['congestion_control_default']}"
    # Several programs of the same library have the same version, which is shown once.
    return f"{host}, {default}; {rounds} round{'s' if rounds != 1 else ''}; {'; '.join(dict.fromkeys(versions.values()))}"


def time_text(time_us):
    for limit, unit, name in ((1e3, 1, "µs"), (1e6, 1e3, "ms"), (float("inf"), 1e6, "s")):
        if time_us < limit:
            value = time_us / unit
            return f"{value:.{2 if value < 1 else 1 if value < 100 else 0}f} {name}"
    raise AssertionError("the last limit is infinite")


def size_text(size):
    for unit, name in ((1 << 30, "G"), (1 << 20, "M"), (1 << 10, "K")):
        if size >= unit and size % unit == 0:
            return f"{size // unit}{name}"
    return str(size)


def markdown_tables(data, cpu):
    """Returns the Markdown tables for the contents `data` of the JSON file: a table of the times for each group of `group_rows`,
    and if `cpu` is true, also a table of the processor times."""
    parts = []
    missing = {tuple(row.values()) for row in data["did_not_finish"]}
    ours = data["programs"].get(data["ours"], data["ours"])
    for (operation, dtype, control, world), rows in group_rows(data["results"]).items():
        keys = [key for key in data["programs"] if any(row["program"] == key for row in rows)]
        # If a program did not finish any size, the program still has a column.
        stopped = {key for *what, _, key in missing if what == [operation, dtype, world]}
        keys += [key for key in data["programs"] if key not in keys and key in stopped]
        cells = {(row["bytes"], row["program"]): row for row in rows}

        def cell(size, key, text):
            row = cells.get((size, key))
            unfinished = (operation, dtype, world, size, key) in missing
            return text(row) if row else "did not finish" if unfinished else "-"

        sizes = sorted({size for size, _ in cells})
        title = f"**{operation} of {dtype}, {world} ranks, the host's default congestion control is {control}**"
        title += f"\n\nEach cell shows the median, the range, and in bold the time divided by that of {ours}."
        if meaning := TIME_MEANINGS.get(operation):
            title += f" A time is {meaning}."
        if data.get("input") == "rewritten":
            title += " Before each iteration, every rank writes to each cache line of its input; the times do not contain this."
        if line := data["lines"].get(control):
            title += f"\n\n{line_rates_text(line)}"
        parts.append(markdown_table(title, data["programs"], keys, sizes, lambda size, key: cell(size, key, times_text)))
        if cpu:
            title = f"**the same runs: CPU seconds of all ranks for each GiB of {operation}**"
            parts.append(markdown_table(title, data["programs"], keys, sizes, lambda size, key: cell(size, key, cpu_text)))
    return "\n\n".join(parts)


def markdown_table(title, names, keys, sizes, text):
    lines = [title, "", f"| bytes | {' | '.join(names[key] for key in keys)} |", "|---" * (len(keys) + 1) + "|"]
    lines += [f"| {size_text(size)} | {' | '.join(text(size, key) for key in keys)} |" for size in sizes]
    return "\n".join(lines)


def times_text(row):
    ratio = row["times_ours"]
    behind = f" **{ratio:.{2 if ratio >= 0.1 else 3}f}**" if ratio else ""
    if row.get("line_part") is not None:
        behind += f" {row['line_part']:.1%}"
    return f"{time_text(row['time_us'])} ({time_text(row['time_us_min'])} - {time_text(row['time_us_max'])}){behind}"


def line_rates_text(line):
    """Returns sentences with the rates that iperf3 has measured."""
    shown = [
        f"{median:.0f} Mbit/s ({min(measured):.0f} - {max(measured):.0f}) {direction}"
        for direction, median, measured in (
            ("in one direction", line["one_way_mbit_per_s"], line["rounds_one_way_mbit_per_s"]),
            ("in each direction when both are used", line["both_ways_mbit_per_s"], line["rounds_both_ways_mbit_per_s"]),
        )
    ]
    rates = f"iperf3 measures {' and '.join(shown)} at the same time."
    return f"{rates} Each percentage is the bus bandwidth divided by the first rate."


def cpu_text(row):
    # If the value is not above zero, the processor time is smaller than the noise of the measurement.
    value = row["cpu_s_per_gib"]
    return "-" if value is None or value <= 0 else f"{value:.3g}"
