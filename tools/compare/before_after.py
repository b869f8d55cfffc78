"""Compares two builds of ringbench that were measured in the same rounds."""

import math
import statistics

from peers import BEFORE
from report import size_text

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


def compare_builds(rounds):
    """Returns a row for each case that was measured with both builds. A ratio is the new build's time divided by the
    old build's time. A row has the ratio of each round, the median of these ratios, and the confidence interval of
    the median.
    """
    rows = []
    for key, after in rounds.rows.items():
        before = rounds.rows.get(key.__class__(**{**vars(key), "program": key.program + BEFORE}))
        if not before:
            continue
        ratios = [new["time_us"] / old["time_us"] for new, old in zip(after, before)]
        ratio, interval = median_and_confidence_interval(ratios)
        rows.append({**vars(key), "ratio": ratio, "interval": interval, "rounds_ratio": ratios})
    return rows


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
