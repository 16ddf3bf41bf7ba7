#!/usr/bin/env bash
# Training speed of two builds on one GPU, in the order old-new-new-old, with one shared cache of kernels and GEMM algorithms.
#
# usage: scripts/compare-builds.sh OLD NEW [RESULTS]    OLD and NEW are `ottava` binaries
# STEPS (default 20) are timed per setting. Prints the ratio of each pair and the median by setting.
set -euo pipefail
old=$1 new=$2 results=${3:-$(mktemp -d)}
steps=${STEPS:-20}
mkdir -p "$results"
run() { # build, number
    "$1" bench train --model llama-2-7b --levels bf16 --compare fp8-delayed,fp8-current,bf16 --steps "$steps" --json >"$results/$2-states.json"
    "$1" bench train --model llama-2-7b --levels O2,coat --compare fp8-delayed --steps "$steps" --json >"$results/$2-levels.json"
}
run "$old" 0-old
run "$new" 1-new
run "$new" 2-new
run "$old" 3-old
python3 - "$results" <<'PY'
import glob, json, statistics, sys
rows = {}
for path in sorted(glob.glob(f"{sys.argv[1]}/*.json")):
    build = path.split("/")[-1].split("-")[0]
    for row in json.load(open(path))["rows"]:
        rows.setdefault((row["recipe"], row["level"]), {})[build] = row
for (recipe, level), by in rows.items():
    ratios = [by[new]["tokens_per_second"] / by[old]["tokens_per_second"] for old, new in (("0", "1"), ("3", "2"))]
    peak = {b: (round(r["peak_memory_bytes"] / 2**30, 2), round(r["planned_peak_bytes"] / 2**30, 2)) for b, r in by.items()}
    speeds = [round(by[b]["tokens_per_second"]) for b in sorted(by)]
    print(f"{recipe} {level}: tokens/s {speeds}, new/old {[round(r, 4) for r in ratios]}, peak and plan old {peak['0']} new {peak['1']} GiB")
PY
