#!/usr/bin/env python3
"""Draws how unevenly routers load experts: `router_imbalance` by step, the most tokens of an expert divided by the mean of its layer.

usage: scripts/draw_router_load.py METRICS.jsonl... PICTURE.svg      (scripts/gpu-experts.sh runs it)

The name of a file is the name of its curve. A point is the mean of WINDOW steps. Python's standard library is enough.
"""

import json
import statistics
import sys
from html import escape
from pathlib import Path

WINDOW = 25  # steps
WIDTH, HEIGHT = 860, 400  # pixels
LEFT, RIGHT, TOP, BOTTOM = 56, 130, 46, 44
TEXT, GRID = "#7d848e", "#7d848e44"  # readable on white and on black
COLOURS = ["#3b82f6", "#f0731a", "#16a34a", "#a855f7", "#dc2626", "#0891b2"]


def points(path):
    """(step, mean imbalance of the WINDOW steps up to it) of a run."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    values = [(line["step"], line["router_imbalance"]) for line in lines if line.get("router_imbalance") is not None]
    groups = [values[i : i + WINDOW] for i in range(0, len(values), WINDOW)]
    return [(group[-1][0], statistics.fmean(value for _, value in group)) for group in groups]


def draw(curves):
    last = max(step for curve in curves.values() for step, _ in curve)
    top = max(value for curve in curves.values() for _, value in curve) * 1.05

    def x(step):
        return LEFT + step / last * (WIDTH - LEFT - RIGHT)

    def y(value):
        return HEIGHT - BOTTOM - (value - 1) / (top - 1) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12" fill="{TEXT}">',
        f'<text x="{LEFT}" y="22" font-size="15">Most tokens of an expert, divided by the mean of its layer ({WINDOW} steps per point)</text>',
    ]
    for i in range(5):
        value = 1 + (top - 1) * i / 4
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="{GRID}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.2f}</text>')
        step = last * i // 4
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{step}</text>')
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in curve)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 10}" y="{TOP + 18 * number + 10}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__.split("\n\n")[1])
    *files, picture = map(Path, sys.argv[1:])
    Path(picture).write_text(draw({path.stem: points(path) for path in files}), "utf-8")


if __name__ == "__main__":
    main()
