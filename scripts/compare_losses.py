#!/usr/bin/env python3
"""Compares the losses of runs in other recipes with those in BF16 of the same seed, and with the spread of seeds.

usage: scripts/compare_losses.py FOLDER      (scripts/gpu-convergence.sh runs it)

FOLDER holds the metrics of each run as RECIPE-SEED.jsonl. Tables go to standard output, the curves of differences to FOLDER/gaps.svg.
Python's standard library is enough.

A recipe is within the bar when it ends at most max(0.01 nat, twice the spread of the BF16 seeds) above BF16 of its seed, both in the last
validation loss and in the mean training loss of the last tenth of the steps. Training losses of one seed are of the same batches.
"""

import json
import math
import re
import statistics
import sys
from html import escape
from pathlib import Path

BASE = "bf16"
BAR = 0.01  # nats, fixed before the runs
WINDOW = 50  # steps that a point of a curve is the mean of

WIDTH, HEIGHT = 860, 460  # colours and measures of a run's own loss.svg
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 48, 52
TEXT = "#7d848e"
COLOURS = ["#3b82f6", "#f0731a", "#16a34a", "#a855f7", "#dc2626", "#0891b2"]


class Run:
    """Losses of a run by step: `train` of each step, `valid` where it was evaluated. Steps whose loss is not finite are left out."""

    def __init__(self, path, recipe, seed):
        self.recipe, self.seed, self.name = recipe, seed, f"{recipe}, seed {seed}"
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        self.train = {line["step"]: line["loss"] for line in lines if line.get("loss") is not None}
        self.valid = {line["step"]: line["eval_loss"] for line in lines if line.get("eval_loss") is not None}
        self.bits_per_byte = next((line["eval_bits_per_byte"] for line in reversed(lines) if line.get("eval_bits_per_byte")), math.nan)
        self.speed = statistics.median([line["tokens_per_second"] for line in lines if line.get("tokens_per_second")] or [math.nan])
        self.last = max(self.train, default=0)


def gaps(run, base, kind):
    """Loss of `run` minus loss of `base` at the steps that both have."""
    ours, theirs = getattr(run, kind), getattr(base, kind)
    return {step: ours[step] - theirs[step] for step in sorted(ours.keys() & theirs.keys())}


def read(folder):
    """All runs by recipe and seed, BF16 first."""
    runs = {}
    for path in sorted(folder.glob("*.jsonl")):
        if name := re.fullmatch(r"(.+)-(\d+)", path.stem):
            runs[name[1], int(name[2])] = Run(path, name[1], int(name[2]))
    return dict(sorted(runs.items(), key=lambda item: (item[0][0] != BASE, item[0])))


def table(rows):
    """Rows of text in columns, a Markdown table that can also be read as it is."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    rows.insert(1, ["-" * width for width in widths])
    for row in rows:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |")
    print()


def verdict(run, base, bar):
    """The row of a run that is compared: its gaps at the end and whether they are within the bar."""
    if run.last < base.last or base.last not in run.valid:
        return [run.name, "", "", "", f"stopped at step {run.last} of {base.last}"]
    valid = gaps(run, base, "valid")[base.last]
    first = base.last - base.last // 10
    train = statistics.fmean(gap for step, gap in gaps(run, base, "train").items() if step > first or step == base.last)
    worst = max(valid, train)
    within = f"within {BAR} nat" if worst <= BAR else "within the bar" if worst <= bar else "ABOVE THE BAR"
    return [run.name, f"{valid:+.4f}", f"{100 * valid / base.valid[base.last]:+.2f} %", f"{train:+.4f}", within]


def report(runs):
    """Prints the tables; returns the pairs of run and baseline, and the bar."""
    bases = {seed: run for (recipe, seed), run in runs.items() if recipe == BASE}
    pairs = [(run, bases[run.seed]) for run in runs.values() if run.recipe != BASE and run.seed in bases]
    if not pairs:
        sys.exit(f"nothing to compare: no run in {BASE} and one in another recipe have the same seed")
    end = max(run.last for run in bases.values())
    rows = [["run", "validation loss at the end", "bits per byte", "tokens/s, median"]]
    for run in runs.values():
        loss = f"{run.valid[end]:.4f}" if end in run.valid else f"stopped at step {run.last}"
        rows.append([run.name, loss, f"{run.bits_per_byte:.4f}", f"{run.speed:,.0f}"])
    table(rows)

    print(f"Validation loss minus that of {BASE} with the same seed, in nats:\n")
    columns = [gaps(run, base, "valid") for run, base in pairs]
    rows = [["step"] + [run.name for run, _ in pairs]]
    for step in sorted(set().union(*columns)):
        rows.append([str(step)] + [f"{column[step]:+.4f}" if step in column else "" for column in columns])
    table(rows)

    finals = [run.valid[end] for run in bases.values() if end in run.valid]
    spread = max(finals) - min(finals) if finals else 0.0
    bar = max(BAR, 2 * spread)
    if len(finals) > 1:
        print(f"{len(finals)} seeds of {BASE} end {spread:.4f} nat apart; the bar is max({BAR}, 2 x {spread:.4f}) = {bar:.4f} nat.\n")
    else:
        print(f"One seed of {BASE} shows no spread; the bar is {BAR} nat.\n")
    table([["run", "gap in validation", "relative", "gap in training, last 10 % of steps", "verdict"]] + [verdict(*pair, bar) for pair in pairs])
    return pairs, list(bases.values()), bar


def smoothed(points, window):
    """Means of the last `window` gaps, from the first full window on."""
    steps, values = list(points), list(points.values())
    means = [(steps[i], statistics.fmean(values[i + 1 - window : i + 1])) for i in range(window - 1, len(steps))]
    every = -(-len(means) // 300)  # more cannot be seen
    return means[::-1][::every][::-1] if means else []


def spacing(low, high):
    """1, 2 or 5 times a power of ten, so that about six fit between the two."""
    rough = max(high - low, 1e-9) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= rough)


def draw(pairs, bases, bar):
    """The differences over steps: lines of training, dots of validation; other seeds of BF16 dotted, cut off where they leave the frame."""
    last = max(base.last for base in bases)
    window = max(1, min(WINDOW, last // 10))
    curves = [(run, smoothed(gaps(run, base, "train"), window), gaps(run, base, "valid")) for run, base in pairs]
    shown = [gap for _, train, valid in curves for gap in [p[1] for p in train] + [v for step, v in valid.items() if step >= window]]
    unit = spacing(min(shown + [0.0]), max(shown + [BAR]))
    low, high = math.floor(min(shown + [0.0]) / unit) * unit, math.ceil(max(shown + [BAR]) / unit) * unit
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def x(step):
        return LEFT + step / last * (right - LEFT)

    def y(gap):
        return bottom - (gap - low) / (high - low) * (bottom - TOP)

    def line(points, style):
        if points:
            path = " ".join(f"{x(step):.1f},{y(gap):.1f}" for step, gap in points)
            svg.append(f'<polyline fill="none" clip-path="url(#frame)" {style} points="{path}"/>')

    title = f"Loss minus that of {BASE} with the same seed (nats): training, means of {window} steps; dots: validation"
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{TEXT}">',
        f'<clipPath id="frame"><rect x="{LEFT}" y="{TOP}" width="{right - LEFT}" height="{bottom - TOP}"/></clipPath>',
        f'<text x="{LEFT}" y="22" font-size="14">{title}</text>',
    ]
    decimals = max(0, -math.floor(math.log10(unit) + 1e-9))
    for i in range(round((high - low) / unit) + 1):
        gap = low + i * unit
        weight = "0.9" if abs(gap) < unit / 2 else "0.25"
        svg.append(f'<path d="M{LEFT} {y(gap):.1f}H{right}" stroke="{TEXT}" stroke-opacity="{weight}"/>')
        svg.append(f'<text x="{LEFT - 8}" y="{y(gap) + 4.5:.1f}" text-anchor="end">{gap + 0.0:+.{decimals}f}</text>')
    every = max(1, round(spacing(0, last)))
    for step in range(0, last + 1, every):
        svg.append(f'<text x="{x(step):.1f}" y="{bottom + 20}" text-anchor="middle">{step}</text>')
    svg.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 12}" text-anchor="middle">step</text>')
    if bar <= high:
        svg.append(f'<path d="M{LEFT} {y(bar):.1f}H{right}" stroke="{TEXT}" stroke-dasharray="6 4"/>')
        svg.append(f'<text x="{right}" y="{y(bar) - 5:.1f}" text-anchor="end">the bar at the end, {bar:.4f}</text>')
    legend = []
    for i, (run, train, valid) in enumerate(curves):
        colour = COLOURS[i % len(COLOURS)]
        line(train, f'stroke="{colour}" stroke-width="1.8"')
        for step, gap in valid.items():
            if low <= gap <= high:
                svg.append(f'<circle cx="{x(step):.1f}" cy="{y(gap):.1f}" r="3.5" fill="{colour}"/>')
        legend.append((run.name if len({base.seed for _, base in pairs}) > 1 else run.recipe, colour))
    first = pairs[0][1]
    for other in (base for base in bases if base is not first):
        line(gaps(other, first, "valid").items(), f'stroke="{TEXT}" stroke-dasharray="2 3"')
        legend.append((f"{BASE}: validation of seed {other.seed} minus {first.seed}", TEXT))
    at = LEFT
    for name, colour in legend:
        svg.append(f'<text x="{at}" y="40" font-size="12" fill="{colour}">{escape(name)}</text>')
        at += 7 * len(name) + 14
    return "\n".join(svg) + "\n</svg>\n"


def main():
    folder = Path(sys.argv[1])
    pairs, bases, bar = report(read(folder))
    (folder / "gaps.svg").write_text(draw(pairs, bases, bar), "utf-8")


main()
