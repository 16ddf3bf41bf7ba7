#!/usr/bin/env python3
"""Sends the metrics of a run to Weights & Biases, MLflow or Trackio, while it trains or afterwards.

    pip install wandb            # or mlflow, or trackio
    scripts/forward_metrics.py runs/quickstart --to wandb --project words

It reads metrics.jsonl, which the run appends to, and ends when run.json says that the run has ended; with --once, at the end of the file. Steps that
a resumed run trains again are sent once, as these services do not take a step back. Needs Python 3.11.
"""

import argparse
import json
import pathlib
import sys
import time
import tomllib


def numbers(line):
    """Step and numbers of a line, or None if it is not one of metrics."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        return None
    values = {key: value for key, value in record.items() if isinstance(value, (int, float)) and key != "step"}
    return record["step"], values


def ended(run):
    """Whether the run has recorded its end."""
    try:
        return json.loads((run / "run.json").read_text())["end"] is not None
    except (OSError, ValueError, KeyError):
        return False


def follow(run, once, pause=2.0):
    """The metrics of the run, in the order of steps, each step once."""
    path, at, last = run / "metrics.jsonl", 0, -1
    while True:
        over = once or ended(run)
        if path.exists():
            if path.stat().st_size < at:
                at = 0
            with path.open("rb") as file:
                file.seek(at)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    at += len(line)
                    found = numbers(line)
                    if found and found[0] > last:
                        last = found[0]
                        yield found
        if over:
            return
        time.sleep(pause)


def wandb_like(module, name, project, config):
    """Weights & Biases, and Trackio, which has its functions."""
    module.init(project=project, name=name, config=config)
    return (lambda step, values: module.log(values, step=step)), module.finish


def mlflow(module, name, project, config):
    module.set_experiment(project)
    module.start_run(run_name=name)
    # MLflow's parameters are short texts.
    module.log_params({key: str(value)[:500] for key, value in config.items()})
    return (lambda step, values: module.log_metrics(values, step=step)), module.end_run


SERVICES = {"wandb": wandb_like, "trackio": wandb_like, "mlflow": mlflow}


def flat(table, prefix=""):
    """A table of TOML as `table.key` and value."""
    entries = {}
    for key, value in table.items():
        entries.update(flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return entries


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=pathlib.Path, help="the folder of a run, `output_dir` of its configuration")
    parser.add_argument("--to", required=True, choices=SERVICES)
    parser.add_argument("--project", default="ottava", help="the project, or the experiment of MLflow")
    parser.add_argument("--name", help="the name of the run there; by default that of its folder")
    parser.add_argument("--once", action="store_true", help="stop at the end of the file")
    args = parser.parse_args()
    if not args.run.is_dir():
        sys.exit(f"{args.run}: there is no such folder; name the `output_dir` of a run")
    try:
        module = __import__(args.to)
    except ImportError:
        sys.exit(f"the package `{args.to}` is missing; install it with `pip install {args.to}`")
    config = args.run / "config.toml"
    config = flat(tomllib.loads(config.read_text())) if config.exists() else {}
    log, finish = SERVICES[args.to](module, args.name or args.run.resolve().name, args.project, config)
    count = 0
    for step, values in follow(args.run, args.once):
        log(step, values)
        count += 1
    finish()
    print(f"{count} steps were sent to {args.to}")


if __name__ == "__main__":
    main()
