#!/usr/bin/env python3
"""Records the quick start, and draws the recording as an animated SVG file (CSS, no script), which a README can show.

usage: scripts/make_recording.py OTTAVA [NOTE]    runs the program OTTAVA for some minutes, writes docs/figures/quickstart.json and draws it
       scripts/make_recording.py                  draws docs/images/quickstart.svg from the recorded lines again
       scripts/make_recording.py --check          fails if the file is not what this script draws

A recording is of a whole run. Its title says how long the run took, on which machine, NOTE (such as "beside builds") and how many times as
fast it is played. Python's standard library is enough.
"""

import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from html import escape
from pathlib import Path

import pictures
from pictures import ROOT

RECORDED = ROOT / "docs/figures/quickstart.json"
PICTURE = ROOT / "docs/images/quickstart.svg"
COMMAND = ["ottava", "train", "configs/quickstart.toml"]

COLUMNS, ROWS = 118, 26
CHARACTER, LINE, MARGIN, BAR = 7.25, 17, 14, 30  # pixels: width of a character of 12 pixels, heights
PLAYED, HELD = 24, 8  # seconds in which the run is played, and in which its end stays


def machine():
    """The processor's name and the number of cores that the program may use."""
    name = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    return f"{len(os.sched_getaffinity(0))} cores, {name[1] if name else 'unknown processor'}"


def record(program, note):
    """Runs the quick start in a folder of its own. Returns its lines with the seconds at which they were printed."""
    program = Path(program).resolve()
    with tempfile.TemporaryDirectory() as folder:
        for part in ("configs", "data"):
            shutil.copytree(ROOT / part, Path(folder) / part)
        start, lines = time.monotonic(), []
        run = subprocess.Popen([program, *COMMAND[1:]], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in run.stdout:
            lines.append([round(time.monotonic() - start, 2), line.rstrip("\n")])
        if run.wait() != 0:
            sys.exit(f"{program} ended with {run.returncode}: {lines[-1:]}")
        seconds = round(time.monotonic() - start, 1)
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    return {"command": " ".join(COMMAND), "program": version, "machine": machine(), "note": note, "date": date, "seconds": seconds, "lines": lines}


def rows(recording):
    """Rows of the terminal with their times: the command, then lines, wrapped where a terminal wraps them."""
    yield 0.0, f"$ {recording['command']}"
    for at, line in recording["lines"]:
        for start in range(0, max(len(line), 1), COLUMNS):
            yield at, line[start : start + COLUMNS]


def keyframes(name, states):
    """CSS of an animation that jumps to each state at its time; `states` are (seconds, CSS) in order."""
    total = PLAYED + HELD
    steps = "".join(f"{100 * at / total:.2f}%{{{css}}}" for at, css in states)
    return f"@keyframes {name}{{{steps}}}"


def draw(recording):
    """The SVG file. Without animations, or if the reader's system asks for less motion, it shows the end of the run."""
    faster = recording["seconds"] / PLAYED
    shown = [(at / faster, text) for at, text in rows(recording)]
    width, height = COLUMNS * CHARACTER + 2 * MARGIN, ROWS * LINE + 2 * MARGIN + BAR
    offset = lambda count: f"transform:translateY({-LINE * max(0, count - ROWS)}px)"
    scroll = [(0, offset(0))] + [(at, offset(i + 1)) for i, (at, _) in enumerate(shown) if i + 1 > ROWS]
    styles = [keyframes("scroll", scroll), f"#lines{{{offset(len(shown))}}}"]
    texts = []
    for i, (at, text) in enumerate(shown):
        if at > 0:
            styles.append(keyframes(f"k{i}", [(0, "opacity:0"), (at, "opacity:1")]))
        style = f' style="animation-name:k{i}"' if at > 0 else ""
        kind = ' class="prompt"' if i == 0 else ""
        texts.append(f'<text y="{LINE * (i + 1) - 4}"{kind}{style} xml:space="preserve">{escape(text)}</text>')
    minutes, seconds = divmod(round(recording["seconds"]), 60)
    where = ", ".join(part for part in (recording["machine"], recording["note"], recording["date"]) if part)
    title = f"{recording['program']}: {minutes} min {seconds} s on {where}; played {faster:.0f} times as fast"
    animated = f"animation:{PLAYED + HELD}s step-end infinite"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}" role="img" aria-label="{escape(recording['command'])}">
<style>
text{{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;fill:#d4d9e0}}
.prompt{{fill:#7ee787}}.title{{fill:#9aa4b1}}
{chr(10).join(styles)}
@media (prefers-reduced-motion:no-preference){{#lines,#lines text{{{animated}}}#lines{{animation-name:scroll}}}}
</style>
<rect width="100%" height="100%" rx="8" fill="#161b22"/>
<text class="title" x="{MARGIN}" y="20">{escape(title)}</text>
<path d="M0 {BAR}H{width:.0f}" stroke="#30363d"/>
<svg x="{MARGIN}" y="{BAR + MARGIN}" width="{COLUMNS * CHARACTER:.0f}" height="{ROWS * LINE}">
<g id="lines">
{chr(10).join(texts)}
</g>
</svg>
</svg>
"""


def main():
    arguments = sys.argv[1:]
    check = arguments == ["--check"]
    if not check and (len(arguments) > 2 or any(argument.startswith("-") for argument in arguments)):
        sys.exit(__doc__)
    if arguments and not check:
        recording = record(arguments[0], arguments[1] if len(arguments) > 1 else "")
        RECORDED.write_text(json.dumps(recording, indent=1, ensure_ascii=False) + "\n", "utf-8")
    pictures.write(draw(json.loads(RECORDED.read_text("utf-8"))), PICTURE, check)


if __name__ == "__main__":
    main()
