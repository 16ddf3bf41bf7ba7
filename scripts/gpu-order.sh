#!/usr/bin/env bash
# The largest difference between log-probabilities of draws and of steps in reinforcement learning on a GPU, with and without `precision.batch_invariant`,
# for a small model and word problems (scripts/make-problems.sh). The first of ten steps is left out, since delayed scaling has no scales before it.
#
# usage: scripts/gpu-order.sh OTTAVA    OTTAVA is a release build
set -euo pipefail
ottava=$(realpath "$1")
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
scripts/make-problems.sh "$folder"
cat >"$folder/run.toml" <<'TOML'
device = "cuda"
[model]
init = "random"
[data]
max_length = 32
[reinforcement]
num_generations = 8
max_completion_length = 8
[[reinforcement.rewards]]
type = "math"
[training]
max_steps = 10
per_device_train_batch_size = 64
[precision.exceptions]
skip_slow_linears = false
TOML
for recipe in bf16 fp8-row fp8-block fp8-delayed; do
    for invariant in false true; do
        "$ottava" train "$folder/run.toml" --set "model.path=$folder/model" --set "data.train_files=[\"$folder/problems.jsonl\"]" --set "output_dir=$folder/$recipe-$invariant" \
            --set "recipe=$recipe" --set "batch_invariant=$invariant" >"$folder/log" 2>&1 || { tail -n 5 "$folder/log"; exit 1; }
        python3 - "$recipe" "$invariant" "$folder/$recipe-$invariant/metrics.jsonl" <<'PYTHON'
import json, sys
recipe, invariant, path = sys.argv[1:]
found = [json.loads(line).get("sampling/sampling_logp_difference/max") for line in open(path)]
found = [value for value in found if value is not None][1:]
print(f"{recipe:<12} batch_invariant={invariant:<5} {len(found)} steps, largest difference {max(found):.3e}")
PYTHON
    done
done
