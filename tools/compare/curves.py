"""Draws the test accuracy of training runs over time as an SVG. Time is on a logarithmic axis."""

import math
import statistics

import plot

# Programs of the same library have the same kind of line.
DASHES = {"gloo": ' stroke-dasharray="6 4"', "ring": ' stroke-dasharray="2 3"', "ringtrain": ""}
COLOURS = ("#0b62a4", "#009e73", "#b5489a", "#8a6d00", "#56b4e9", "#d55e00", "#555555", "#e69f00")
PANEL_WIDTH, PANEL_HEIGHT = 1000, 420
TICK_STEPS = (1, 2, 5)


def heading(data):
    """Returns one line with the training and the machine."""
    host = data["machine"]
    line = f"{data['model']}, batches of {data['batch_size']} samples, {data['optimizer']}, {data['schedule']} rate {data['lr']:g}; "
    return line + f"{host['network']}; {host['cpu']}, {host['processors']} processors, {host['kernel']}"


def median_curve(runs):
    """Returns for each epoch the median time, the median accuracy, and the lowest and highest accuracy of the runs."""
    points = []
    for epoch in zip(*runs):
        accuracies = [accuracy for _, accuracy in epoch]
        time = statistics.median(seconds for seconds, _ in epoch)
        points.append((time, statistics.median(accuracies), min(accuracies), max(accuracies)))
    return points


def time_ticks(low, high):
    """Returns the values 1, 2 and 5 times a power of ten from `low` to `high`, and one value on each side."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    ticks = [step * 10.0**power for power in powers for step in TICK_STEPS]
    first = max(index for index, tick in enumerate(ticks) if tick <= low)
    last = min(index for index, tick in enumerate(ticks) if tick >= high)
    return ticks[first : last + 1]


def accuracy_ticks(low, high):
    """Returns ticks at each hundredth, or at every second or fifth hundredth."""
    step = next(step for step in (1, 2, 5, 10) if (high - low) * 100 / step <= 8)
    first, last = math.floor(low * 100 / step), math.ceil(high * 100 / step)
    return [step * number / 100 for number in range(first, last + 1)]


def series_styles(names):
    """Returns the colour, the dash attribute and the line width of each program. A codec has the same colour in each library."""
    keys = list(dict.fromkeys(name.partition("/")[2] for name in names))
    styles = {}
    for name in names:
        library, _, codec = name.partition("/")
        styles[name] = COLOURS[keys.index(codec) % len(COLOURS)], DASHES[library], 2.2 if library == "ringtrain" else 1.6
    return styles


def draw_svg(data):
    """Returns an SVG of the `points` of training.py."""
    drawn = {name: median_curve(runs) for name, runs in data["points"].items()}
    styles = series_styles(drawn)
    body = [plot.text_element(plot.MARGIN, 34, "Test accuracy over time", size=18, weight=600)]
    y = 56
    for part in plot.wrap_line(heading(data), int((plot.WIDTH - 2 * plot.MARGIN) / plot.CHARACTER)):
        body.append(plot.text_element(plot.MARGIN, y, part, colour=plot.FAINT))
        y += 17
    y = plot.draw_legend(body, y + 8, {name: name for name in drawn}, styles) + 24
    draw_panel(body, plot.MARGIN + plot.LEFT, y, drawn, styles, data["target"])
    seeds = max(len(runs) for runs in data["points"].values())
    of = f"the median of {seeds} seeds; bars show the range" if seeds > 1 else "one seed"
    note = f"A point is the end of an epoch: {of}. The axis of time is logarithmic."
    if data.get("from_steps"):
        note += " A time is the number of steps times the median time of a step."
    height = y + PANEL_HEIGHT + 84
    body.append(plot.text_element(plot.MARGIN, height - 16, note, colour=plot.FAINT))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {plot.WIDTH} {height}" width="{plot.WIDTH}" height="{height}"'
    return "\n".join([f'{head} font-family="{plot.FONT}" role="img">',
                      f'<rect width="{plot.WIDTH}" height="{height}" fill="#ffffff"/>', *body, "</svg>", ""])


def draw_panel(body, x, y, drawn, styles, target):
    """Draws the panel whose upper left corner is at (x, y)."""
    points = [point for curve in drawn.values() for point in curve]
    times = time_ticks(min(point[0] for point in points), max(point[0] for point in points))
    values = accuracy_ticks(min(*(point[2] for point in points), target), max(*(point[3] for point in points), target))
    across = plot.log_scale(times[0], times[-1], x + 10, x + PANEL_WIDTH - 10)
    rise = plot.linear_scale(values[-1] - values[0], y + PANEL_HEIGHT, y)
    body.append(plot.text_element(x, y - 12, "test accuracy", colour=plot.FAINT, weight=600))
    for tick in values:
        up = rise(tick - values[0])
        body.append(f'<path d="M{x} {up:.1f}h{PANEL_WIDTH}" stroke="{plot.GRID}"/>')
        body.append(plot.text_element(x - 8, up + 4, f"{tick:.2f}", colour=plot.FAINT, anchor="end"))
    for tick in times:
        body.append(f'<path d="M{across(tick):.1f} {y + PANEL_HEIGHT}v5" stroke="{plot.FAINT}"/>')
        body.append(plot.text_element(across(tick), y + PANEL_HEIGHT + 19, f"{tick:g} s", colour=plot.FAINT, anchor="middle"))
    goal = rise(target - values[0])
    body.append(f'<path d="M{x} {goal:.1f}h{PANEL_WIDTH}" stroke="{plot.INK}" stroke-dasharray="2 4"/>')
    body.append(plot.text_element(x + 8, goal - 6, f"target {target:g}", colour=plot.FAINT))
    body.append(f'<path d="M{x} {y + PANEL_HEIGHT}h{PANEL_WIDTH}" stroke="{plot.FAINT}"/>')
    for name, curve in drawn.items():
        colour, dash, width = styles[name]
        places = [(across(time), rise(middle - values[0])) for time, middle, _, _ in curve]
        for (time, _, low, high), (left, _) in zip(curve, places):
            ends = f"M{left:.1f} {rise(high - values[0]):.1f}V{rise(low - values[0]):.1f}"
            body.append(f'<path d="{ends}" stroke="{colour}" stroke-opacity="0.45"/>')
        line = " ".join(f"{left:.1f},{up:.1f}" for left, up in places)
        body.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>')
        body += [f'<circle cx="{left:.1f}" cy="{up:.1f}" r="{1.4 + width / 2:.1f}" fill="{colour}"/>' for left, up in places]
