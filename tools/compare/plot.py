"""Draws the results as an SVG: time against size on two logarithmic axes, and bus bandwidth against size.

This module uses no plotting library, because not every Python environment of the compared programs has one.
"""

import math
from xml.sax.saxutils import escape

import report

# The colour of each library. People with colour blindness can distinguish these colours. Programs that use only TCP have dashed
# lines.
COLOURS = {"ringbench": "#0b62a4", "gloo": "#d55e00", "openmpi4": "#009e73", "openmpi5": "#b5489a", "mpich5": "#8a6d00"}
OTHERS = ("#555555", "#56b4e9", "#111111")
INK, FAINT, GRID = "#1f2328", "#59636e", "#e4e7eb"
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif"
WIDTH, MARGIN = 1160, 24
PANEL_WIDTH, PANEL_HEIGHT, LEFT, GAP = 470, 300, 74, 98
LEGEND_LINE, ROW_HEAD, ROW_FOOT = 22, 62, 56
CHARACTER = 6.4


def draw_svg(data):
    """Returns an SVG with a row of two panels for each group of results."""
    groups = report.group_rows(data["results"])
    keys = [key for key in data["programs"] if any(row["program"] == key for row in data["results"])]
    styles = {key: series_style(key, keys) for key in keys}
    body = [text_element(MARGIN, 34, "Time and bandwidth of collectives", size=18, weight=600)]
    line = report.report_heading(data["machine"], data["versions"], data["rounds"])
    y = 56
    for part in wrap_line(line, int((WIDTH - 2 * MARGIN) / CHARACTER)):
        body.append(text_element(MARGIN, y, part, colour=FAINT))
        y += 17
    y = draw_legend(body, y + 8, data["programs"], styles)
    for (operation, dtype, control, world), rows in groups.items():
        title = f"{operation} of {dtype}, {world} ranks, the host's default congestion control is {control}"
        body.append(text_element(MARGIN, y + 26, title, size=14, weight=600))
        draw_panel(body, MARGIN + LEFT, y + ROW_HEAD, rows, styles, "time_us")
        draw_panel(body, MARGIN + LEFT + PANEL_WIDTH + GAP, y + ROW_HEAD, rows, styles, "busbw_gb_per_s")
        y += ROW_HEAD + PANEL_HEIGHT + ROW_FOOT
    height = y + 34
    note = "Points are medians of the rounds; bars show their range. "
    note += "In the left panels both axes are logarithmic, in the right panels only the size."
    body.append(text_element(MARGIN, height - 16, note, colour=FAINT))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    return "\n".join([f'{head} font-family="{FONT}" role="img">', f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
                      *body, "</svg>", ""])


def series_style(key, keys):
    """Returns the colour, the dash attribute and the line width of the program `key`."""
    library = key.removesuffix("-tcp")
    unknown = [other for other in dict.fromkeys(key.removesuffix("-tcp") for key in keys) if other not in COLOURS]
    colour = COLOURS.get(library) or OTHERS[unknown.index(library) % len(OTHERS)]
    dash = ' stroke-dasharray="6 4"' if key.endswith("-tcp") or key == "gloo" else ""
    return colour, dash, 2.6 if library == "ringbench" else 1.6


def draw_legend(body, y, names, styles):
    """Draws the line style and the name of each program, starting at height `y`. Returns the height below the legend."""
    x = MARGIN
    for key, (colour, dash, width) in styles.items():
        label = names[key]
        needed = 44 + CHARACTER * len(label) + 22
        if x + needed > WIDTH - MARGIN:
            x, y = MARGIN, y + LEGEND_LINE
        body.append(f'<path d="M{x} {y}h34" stroke="{colour}" stroke-width="{width}"{dash}/>')
        body.append(f'<circle cx="{x + 17}" cy="{y}" r="3" fill="{colour}"/>')
        body.append(text_element(x + 42, y + 4, label))
        x += needed
    return y + LEGEND_LINE - 6


def draw_panel(body, x, y, rows, styles, value):
    """Draws a panel whose upper left corner is at (x, y). `value` is "time_us" or "busbw_gb_per_s"."""
    timed = value == "time_us"
    sizes = sorted({row["bytes"] for row in rows})
    across = log_scale(sizes[0], sizes[-1], x + 10, x + PANEL_WIDTH - 10)
    if timed:
        low, high = min(row["time_us_min"] for row in rows), max(row["time_us_max"] for row in rows)
        ticks = decade_ticks(low, high)
        up = log_scale(ticks[0], ticks[-1], y + PANEL_HEIGHT, y)
        labels = [tick_text(tick) for tick in ticks]
        title = "time of one operation"
    else:
        line = rows[0].get("line_gb_per_s")
        ticks = linear_ticks(max(line or 0, *(bandwidth(row, row["time_us_min"]) for row in rows)))
        up = linear_scale(ticks[-1], y + PANEL_HEIGHT, y)
        labels = [f"{tick:g}" for tick in ticks]
        title = "bus bandwidth (GB/s)"
    body.append(text_element(x, y - 12, title, colour=FAINT, weight=600))
    for tick, label in zip(ticks, labels):
        body.append(f'<path d="M{x} {up(tick):.1f}h{PANEL_WIDTH}" stroke="{GRID}"/>')
        body.append(text_element(x - 8, up(tick) + 4, label, colour=FAINT, anchor="end"))
    for size in labelled_sizes(sizes):
        body.append(f'<path d="M{across(size):.1f} {y + PANEL_HEIGHT}v5" stroke="{FAINT}"/>')
        body.append(text_element(across(size), y + PANEL_HEIGHT + 19, report.size_text(size), colour=FAINT, anchor="middle"))
    if not timed and line:
        body.append(f'<path d="M{x} {up(line):.1f}h{PANEL_WIDTH}" stroke="{INK}" stroke-dasharray="2 4"/>')
        body.append(text_element(x + 8, up(line) - 6, "iperf3, one direction", colour=FAINT))
    body.append(f'<path d="M{x} {y + PANEL_HEIGHT}h{PANEL_WIDTH}" stroke="{FAINT}"/>')
    body.append(text_element(x + PANEL_WIDTH / 2, y + PANEL_HEIGHT + 38, "bytes", colour=FAINT, anchor="middle"))
    # ringbench is drawn last, so that its line is on top.
    for key in sorted(styles, key=lambda key: key.startswith("ringbench")):
        own = sorted((row for row in rows if row["program"] == key), key=lambda row: row["bytes"])
        draw_series(body, own, styles[key], across, up, (lambda row, time: time) if timed else bandwidth)


def draw_series(body, rows, style, x_of_size, y_of_value, value_at):
    """Draws the rows of one program: a line through the medians, and a bar from the lowest to the highest value of each size.

    `x_of_size` converts a size to x, and `y_of_value` converts a value to y. `value_at(row, time_us)` returns the value to draw for
    this time of the row.
    """
    colour, dash, width = style
    points = []
    for row in rows:
        x = x_of_size(row["bytes"])
        ends = sorted(y_of_value(value_at(row, row[name])) for name in ("time_us_min", "time_us_max"))
        body.append(f'<path d="M{x:.1f} {ends[0]:.1f}V{ends[1]:.1f}" stroke="{colour}" stroke-opacity="0.45"/>')
        points.append((x, y_of_value(value_at(row, row["time_us"]))))
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    body.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>')
    body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{1.4 + width / 2:.1f}" fill="{colour}"/>' for x, y in points]


def bandwidth(row, time_us):
    """Returns the bus bandwidth of the row for the time `time_us`. (The row contains the bus bandwidth for the median time.)"""
    return row["busbw_gb_per_s"] * row["time_us"] / time_us


def log_scale(low, high, start, end):
    """Returns a function that maps the values from `low` to `high` logarithmically to the coordinates from `start` to `end`."""
    span = math.log(high / low) or 1
    return lambda value: start + (end - start) * math.log(value / low) / span


def linear_scale(high, start, end):
    """Returns a function that maps the values from 0 to `high` linearly to the coordinates from `start` to `end`."""
    return lambda value: start + (end - start) * value / high


def decade_ticks(low, high):
    """Returns the powers of ten of an axis that contains the values from `low` to `high`."""
    first = math.floor(math.log10(low))
    last = max(first + 1, math.ceil(math.log10(high)))
    return [10.0**power for power in range(first, last + 1)]


def tick_text(time_us):
    """Returns the label of a power of ten, without trailing zeros."""
    value, unit = report.time_text(time_us).split()
    return f"{float(value):g} {unit}"


def linear_ticks(high):
    """Returns four to eight round values from 0 to at least `high`."""
    unit = 10.0 ** math.floor(math.log10(high / 4))
    step = next(unit * factor for factor in (1, 2, 5, 10) if high / (unit * factor) <= 7)
    return [round(step * index, 12) for index in range(math.ceil(high / step) + 1)]


def labelled_sizes(sizes):
    """Returns the sizes that get a label: at most 12 sizes at equal intervals, so that the labels do not overlap."""
    every = math.ceil(len(sizes) / 12)
    return sizes[::every]


def wrap_line(line, width):
    """Splits a line between words into lines of at most `width` characters."""
    lines, current = [], ""
    for word in line.split():
        if current and len(current) + 1 + len(word) > width:
            lines.append(current)
            current = word
        else:
            current = f"{current} {word}".strip()
    return [*lines, current]


def text_element(x, y, content, size=12, weight=400, colour=INK, anchor="start"):
    bold = f' font-weight="{weight}"' if weight != 400 else ""
    end = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}"{bold}{end}>{escape(content)}</text>'
