"""Compares pairs of programs that were measured in the same rounds, by the ratios of their times in each round."""

import math
import statistics

from peers import BEFORE
from report import size_text

# A program is slower at a size if the whole confidence interval of the ratio lies above this ratio.
SLOWER_FROM = 1.05

# The highest accepted probability that the interval does not contain the true median.
MISS_MAX = 0.05


def median_and_confidence_interval(values):
    """Returns the median of `values`, and the 95% confidence interval of the median. With fewer than six values, the
    interval is None.

    The ends of the interval are two of the values. The interval is that of a sign test, so it is valid for every
    distribution.
    """
    ordered = sorted(values)
    count, skipped, miss = len(ordered), 0, 0.0
    # Leave out one more value at each end while the probability that the interval misses the true median is low enough.
    while (miss := miss + 2 * math.comb(count, skipped) / 2**count) <= MISS_MAX:
        skipped += 1
    interval = (ordered[skipped - 1], ordered[-skipped]) if skipped else None
    return statistics.median(ordered), interval


def ratio_rows(rounds, program, other):
    """Returns a row for each case that was measured with both programs. A ratio is the time of `program` divided by the
    time of `other` in the same round. A row has the ratio of each round, the median of these ratios, and the confidence
    interval of the median.
    """
    rows = []
    for key, measured in rounds.rows.items():
        others = rounds.rows.get(key.__class__(**{**vars(key), "program": other})) if key.program == program else None
        if not others:
            continue
        # A round in which one of the programs failed has no ratio.
        times = {row["round"]: row["time_us"] for row in others}
        ratios = [row["time_us"] / times[row["round"]] for row in measured if row["round"] in times]
        if ratios:
            ratio, interval = median_and_confidence_interval(ratios)
            rows.append({**vars(key), "other": other, "ratio": ratio, "interval": interval, "rounds_ratio": ratios})
    return rows


def compare_builds(rounds):
    """Returns the ratios of this build's times to the times of the build before."""
    programs = dict.fromkeys(key.program for key in rounds.rows)
    return [row for program in programs for row in ratio_rows(rounds, program, program + BEFORE)]


def compare_with_peers(rounds, ours):
    """Returns the ratios of the times of the program `ours` to the times of each other library."""
    programs = dict.fromkeys(key.program for key in rounds.rows if not key.program.startswith("ringbench"))
    return [row for program in programs for row in ratio_rows(rounds, ours, program)]


def geometric_mean_ratio(rows):
    """Returns the geometric mean of the rows' ratios."""
    return math.exp(statistics.fmean(math.log(row["ratio"]) for row in rows))


def ratio_table(rows):
    """Returns a Markdown table with the median ratio and the interval of each case. Below the table is the geometric
    mean of the ratios of each program.
    """
    lines = ["**this build's time divided by the time of the build before (median of the rounds, 95% interval)**", ""]
    lines += ["| program | operation | type | congestion | ranks | bytes | ratio | 95% interval |", "|---" * 8 + "|"]
    for row in rows:
        interval = "{:.3f} - {:.3f}".format(*row["interval"]) if row["interval"] else "too few rounds"
        what = [row[name] for name in ("program", "operation", "dtype", "congestion", "world")]
        cells = [*map(str, what), size_text(row["bytes"]), f"{row['ratio']:.3f}", interval]
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for program in dict.fromkeys(row["program"] for row in rows):
        own = [row for row in rows if row["program"] == program]
        lines.append(f"- {program}: geometric mean of {len(own)} ratios {geometric_mean_ratio(own):.3f}")
    return "\n".join(lines)


def is_slower(row):
    """Returns whether the row shows that the first program is slower. With too few rounds for an interval, nothing is shown."""
    return row["interval"] is not None and row["interval"][0] > SLOWER_FROM


def summary_table(rows):
    """Returns a Markdown table with a line for each other library, operation and number of ranks: the geometric mean of the
    ratios, the largest ratio, and the sizes at which the first program is slower.
    """
    title = f"**the time of {rows[0]['program']} divided by the time of each other library**"
    lines = [title, "", "| library | operation | type | congestion | ranks | sizes | geometric mean | largest ratio | slower at |"]
    lines.append("|---" * 9 + "|")
    cases = {}
    for row in rows:
        what = tuple(str(row[name]) for name in ("other", "operation", "dtype", "congestion", "world"))
        cases.setdefault(what, []).append(row)
    for what, own in cases.items():
        largest = max(own, key=lambda row: row["ratio"])
        slower = ", ".join(size_text(row["bytes"]) for row in own if is_slower(row)) or "-"
        sizes = [str(len(own)), f"{geometric_mean_ratio(own):.2f}", f"{largest['ratio']:.2f} ({size_text(largest['bytes'])})"]
        lines.append(f"| {' | '.join([*what, *sizes, slower])} |")
    lines += ["", f"A size counts as slower if the whole 95% interval of the median ratio lies above {SLOWER_FROM}."]
    if any(row["interval"] is None for row in rows):
        lines.append("With fewer than six rounds there is no interval, and no size counts as slower.")
    return "\n".join(lines)
