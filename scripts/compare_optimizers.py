#!/usr/bin/env python3
"""Prints a table of the last losses of runs with several optimizers.

usage: scripts/compare_optimizers.py FOLDER      (scripts/gpu-optimizers.sh runs it)

FOLDER holds the metrics of each run as RECIPE-OPTIMIZER-LEARNING_RATE-SEED.jsonl. `train` is the mean loss of the last tenth of the steps,
`valid` the last validation loss, both as the mean over seeds with the largest difference between seeds; `steps to AdamW` is the share of the
steps after which the validation loss was that of the best AdamW of the same recipe at its end.
"""

import json
import re
import statistics
import sys
from collections import defaultdict
from pathlib import Path

NAME = re.compile(r"(.+?)-(adamw|muon|lion)-(.+)-(\d+)")


def read(path):
    """The training loss of each step, the validation losses by step, and the median of the milliseconds of a step."""
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    train = [line["loss"] for line in lines if line.get("loss") is not None]
    valid = {line["step"]: line["eval_loss"] for line in lines if line.get("eval_loss") is not None}
    speed = statistics.median([line["tokens_per_second"] for line in lines if line.get("tokens_per_second")] or [float("nan")])
    return train, valid, speed


def spread(values):
    """The mean, and the largest difference if there are several values."""
    mean = f"{statistics.mean(values):.4f}"
    return f"{mean} ± {max(values) - min(values):.4f}" if len(values) > 1 else mean


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    runs = defaultdict(list)
    for path in sorted(Path(sys.argv[1]).glob("*.jsonl")):
        if name := NAME.fullmatch(path.stem):
            runs[name[1], name[2], name[3]].append(read(path))
    if not runs:
        sys.exit(f"{sys.argv[1]} has no metrics named RECIPE-OPTIMIZER-LEARNING_RATE-SEED.jsonl")
    last = {key: [valid[max(valid)] for _, valid, _ in seeds if valid] for key, seeds in runs.items()}
    best = {}
    for (recipe, optimizer, _), losses in last.items():
        if optimizer == "adamw" and losses:
            best[recipe] = min(best.get(recipe, float("inf")), statistics.mean(losses))
    print("| recipe | optimizer | learning rate | seeds | train | valid | steps to AdamW | tokens/s |")
    print("|---|---|---|---|---|---|---|---|")
    for (recipe, optimizer, rate), seeds in sorted(runs.items(), key=lambda item: (item[0][0], item[0][1], float(item[0][2]))):
        train = [statistics.mean(losses[-max(len(losses) // 10, 1) :]) for losses, _, _ in seeds]
        steps = []
        for losses, valid, _ in seeds:
            reached = [step for step, loss in sorted(valid.items()) if loss <= best.get(recipe, float("-inf"))]
            steps.append(f"{reached[0] / len(losses):.0%}" if reached and losses else "not")
        speed = statistics.median(speed for _, _, speed in seeds)
        valid = spread(last[recipe, optimizer, rate]) if last[recipe, optimizer, rate] else "none"
        print(f"| {recipe} | {optimizer} | {rate} | {len(seeds)} | {spread(train)} | {valid} | {', '.join(steps)} | {speed:,.0f} |")


main()
