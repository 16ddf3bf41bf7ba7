#!/usr/bin/env python3
"""Draws docs/images/peers.svg: speed and memory of Ottava and of other frameworks, from the rows of docs/figures/peers.json.

usage: scripts/make_chart.py            draws the chart
       scripts/make_chart.py --check    fails if the file is not what this script draws

Each row quotes its source, which must be in the named section of the document, with the numbers in it. Python's standard library is enough.
"""

import json
import re
import sys
from html import escape

import pictures
from pictures import ROOT

ROWS = ROOT / "docs/figures/peers.json"
PICTURE = ROOT / "docs/images/peers.svg"

WIDTH, TOP, ROW, BAR = 860, 66, 30, 18  # pixels
NAMES, GAP, VALUE = 210, 24, 54  # width of the names, between the panels, and of the number after the longest bar
TEXT, OWN, OTHER = "#7d848e", "#3b82f6", "#9aa2ad"  # readable on white and on black
PANELS = [("speed", "tokens/s per GPU"), ("memory", "GiB per GPU, peak")]


def section(document, title):
    """The text of the section `title`, with each run of spaces and line ends as one space."""
    parts = [part.split("\n", 1) for part in document.split("\n## ")[1:]]
    found = [text for name, text in parts if name == title]
    if not found:
        sys.exit(f"there is no section `{title}`")
    return " ".join(found[0].split())


def check_sources(chart):
    """Ends the program unless each row's source is in the document and holds the row's numbers."""
    text = section((ROOT / chart["document"]).read_text("utf-8"), chart["section"])
    for row in chart["rows"]:
        if row["source"] not in text:
            sys.exit(f"{ROWS.name}: `{row['source']}` is not in the section `{chart['section']}` of {chart['document']}")
        for key, _ in PANELS:
            if not re.search(rf"(?<![\d,.]){re.escape(row[key])}(?!\d)", row["source"]):
                sys.exit(f"{ROWS.name}: `{row['source']}` does not have the number {row[key]}")


def bar(x, y, width, row, key):
    weight = ' font-weight="600"' if row["own"] else ""
    return (
        f'<rect x="{x}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2" fill="{OWN if row["own"] else OTHER}"/>\n'
        f'<text x="{x + width + 6:.1f}" y="{y + 13.5}"{weight}>{row[key]}</text>'
    )


def draw(chart):
    """The SVG file: a column of names, and a panel of bars from zero for each number."""
    rows, panel = chart["rows"], (WIDTH - NAMES - GAP * len(PANELS)) / len(PANELS)
    height = TOP + ROW * len(rows) + 30
    parts = [f'<text x="16" y="22" font-size="14" font-weight="600">{escape(chart["title"])}</text>']
    for i, row in enumerate(rows):
        weight = ' font-weight="600"' if row["own"] else ""
        parts.append(f'<text x="{NAMES - 8}" y="{TOP + ROW * i + 13.5}" text-anchor="end"{weight}>{escape(row["name"])}</text>')
    for i, (key, title) in enumerate(PANELS):
        x = NAMES + i * (panel + GAP)
        most = max(number(row, key) for row in rows)
        parts.append(f'<text x="{x:g}" y="{TOP - 14}">{title}</text>')
        parts += [bar(x, TOP + ROW * j, (panel - VALUE) * number(row, key) / most, row, key) for j, row in enumerate(rows)]
    parts.append(f'<text x="16" y="{height - 12}" font-size="11">{escape(chart["note"])}</text>')
    words = "; ".join(f"{row['name']}: {row['speed']} tokens/s, {row['memory']} GiB" for row in rows)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'aria-label="{escape(words)}" font-family="system-ui, sans-serif" font-size="13" fill="{TEXT}">\n' + "\n".join(parts) + "\n</svg>\n"
    )


def number(row, key):
    return float(row[key].replace(",", ""))


def main():
    arguments = sys.argv[1:]
    if arguments not in ([], ["--check"]):
        sys.exit(__doc__)
    chart = json.loads(ROWS.read_text("utf-8"))
    check_sources(chart)
    pictures.write(draw(chart), PICTURE, check=bool(arguments))


if __name__ == "__main__":
    main()
