#!/usr/bin/env bash
# Reinforcement learning on a GPU, from random weights: time of a step, and how far draws and steps are apart, in each recipe.
#
# usage: scripts/gpu-rollouts.sh OTTAVA [MODEL]    OTTAVA is a release build; MODEL a config.json, by default configs/models/llama-110m.json
# STEPS (default 12) in each of the RECIPES, on GPUS (default 1) GPUs. SETTINGS are further settings, such as "parallel.tensor=2". OUT receives the runs.
set -euo pipefail
ottava=$(realpath "$1") model=${2:-configs/models/llama-110m.json} steps=${STEPS:-12} results=${OUT:-$(mktemp -d)}/rollouts
cd "$(dirname "$0")/.."
rm -rf "$results" && mkdir -p "$results"
python3 - "$results/prompts.jsonl" <<'PY'
import json, random, sys
random.seed(1)
with open(sys.argv[1], "w") as file:
    for _ in range(4000):
        a, b = random.randrange(100), random.randrange(100)
        print(json.dumps({"prompt": f"{a} plus {b} is", "answer": str(a + b)}), file=file)
PY
cat >"$results/run.toml" <<TOML
[model]
path = "$model"
init = "random"
tokenizer = "data/tokenizer"
[data]
train_files = ["$results/prompts.jsonl"]
max_length = 288
val_set_size = 0
[reinforcement]
num_generations = 8
prompts_per_generation = 64
max_completion_length = 256
[[reinforcement.rewards]]
type = "length"
target = 64
distance = 256
[training]
max_steps = $steps
per_device_train_batch_size = 32
gradient_accumulation_steps = 8
[optimizer]
learning_rate = 1e-5
[precision.exceptions]
skip_slow_linears = false
TOML
settings=()
for setting in ${SETTINGS:-}; do settings+=(--set "$setting"); done
[ "${GPUS:-1}" -eq 1 ] || settings+=(--gpus "$GPUS")
for recipe in ${RECIPES:-bf16 fp8-delayed fp8-current fp8-row fp8-block}; do
    "$ottava" train "$results/run.toml" --set "output_dir=$results/$recipe" --set "precision.recipe=$recipe" "${settings[@]}" >"$results/$recipe.log" 2>&1 ||
        { echo "$recipe failed"; tail -5 "$results/$recipe.log"; continue; }
    python3 - "$results/$recipe/metrics.jsonl" "$recipe" <<'PY'
import json, statistics, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
steps = [row for row in rows if "sampling/sampling_logp_difference/mean" in row]
# The first step of each generation has the weights that drew.
first, later = steps[2::2], steps[3::2]
mean = lambda rows, name: statistics.mean(row[name] for row in rows)
lengths = [row["completions/mean_length"] for row in steps if "completions/mean_length" in row]
print(f"{sys.argv[2]:12} first step: mean difference {mean(first, 'sampling/sampling_logp_difference/mean'):.2e}, largest "
      f"{max(row['sampling/sampling_logp_difference/max'] for row in first):.2e}, token_mult_prob_error {mean(first, 'token_mult_prob_error'):.6f}; "
      f"tokens/s {mean(first, 'tokens_per_second'):.0f} with, {mean(later, 'tokens_per_second'):.0f} without a generation; "
      f"reward {steps[0]['reward']:.3f} to {[r['reward'] for r in steps if 'reward' in r][-1]:.3f}, length {lengths[0]:.0f} to {lengths[-1]:.0f}, peak {max(row.get('peak_memory_bytes', 0) for row in steps) / 2**30:.2f} GiB")
PY
    rm -rf "$results/$recipe/checkpoints"
done
