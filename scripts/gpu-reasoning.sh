#!/usr/bin/env bash
# Does FP8 learn from rewards as BF16 does? Accuracy of SmolLM2-135M-Instruct on held-out word problems over GRPO steps, by recipe and seed.
#
# usage: scripts/gpu-reasoning.sh OTTAVA MODEL [CASE...]    OTTAVA is a release build; MODEL the folder of scripts/fetch-smollm2.sh. A CASE is
#        RECIPE:SEED or constant:RECIPE:SEED, whose reward is the same for all completions; by default bf16, fp8-row and fp8-block with seeds 1 to 3,
#        and constant:bf16:1.
# STEPS (default 300), LR (default 1e-5), AT_ONCE (default 1, runs beside each other). OUT receives the metrics; further settings are in SET. The final weights are
# evaluated again in each recipe of EVALUATE (default: none).
set -euo pipefail
ottava=$(realpath "$1") model=$(realpath "$2") steps=${STEPS:-300} results=${OUT:-$(mktemp -d)}
shift 2
cd "$(dirname "$0")/.."
cases=("$@")
[ $# -gt 0 ] || cases=({bf16,fp8-row,fp8-block}:1 constant:bf16:1 {bf16,fp8-row,fp8-block}:{2,3})
work=$(mktemp -d)
python3 scripts/make_word_problems.py "$work"
run() {
    local name=$1 constant= recipe seed began=$SECONDS
    case $name in constant:*) constant=1 name=${name#constant:} ;; esac
    IFS=: read -r recipe seed <<<"$name"
    local folder=$work/${1//:/-}
    {
        cat <<TOML
output_dir = "$folder"
seed = $seed
[model]
path = "$model"
[data]
train_files = ["$work/problems.jsonl"]
val_files = ["$work/held-out.jsonl"]
max_length = 144
[reinforcement]
num_generations = 8
max_completion_length = 48
[[reinforcement.rewards]]
type = "number"
TOML
        # The score is logged, and the reward of each completion is 0.
        [ -z "$constant" ] || printf 'weight = 0.0\n'
        cat <<TOML
[training]
max_steps = $steps
per_device_train_batch_size = 64
gradient_accumulation_steps = 4
[optimizer]
learning_rate = ${LR:-1e-5}
weight_decay = 0.0
[lr_scheduler]
warmup_steps = 10
[evaluation]
eval_steps = 50
[checkpoint]
save_steps = "end"
[precision]
recipe = "$recipe"
[precision.exceptions]
skip_slow_linears = false
TOML
    } >"$folder.toml"
    # shellcheck disable=SC2086
    "$ottava" train "$folder.toml" ${SET:-} >"$folder.log" 2>&1 || { echo "$1 failed"; tail -5 "$folder.log"; return; }
    cp "$folder/metrics.jsonl" "$results/${1//:/-}.jsonl"
    cp "$folder.log" "$results/${1//:/-}.log"
    local final=$folder/checkpoints/checkpoint-$steps evaluated=()
    for recipe in ${EVALUATE:-}; do
        "$ottava" train "$folder.toml" --set model.path="$final" --set recipe="$recipe" --set output_dir="$folder-$recipe" --set max_steps=1 >"$folder-$recipe.log" 2>&1 \
            || tail -3 "$folder-$recipe.log"
        evaluated+=("$recipe:$folder-$recipe/metrics.jsonl")
    done
    python3 - "$folder/metrics.jsonl" "$1" $((SECONDS - began)) "${evaluated[@]}" <<'PY'
import json, statistics, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
accuracies = lambda rows: {row["step"]: row["eval_rewards/number/mean"] for row in rows if "eval_rewards/number/mean" in row}
accuracy = accuracies(rows)
others = {name: accuracies(map(json.loads, open(path)))[0] for name, path in (case.split(":", 1) for case in sys.argv[4:])}
draws = [row for row in rows if "reward" in row]
mean = lambda name, part: statistics.mean(row[name] for row in part if name in row)
print(f"{sys.argv[2]:18} accuracy " + " ".join(f"{step}:{value:.3f}" for step, value in accuracy.items())
      + "".join(f" | final in {name}: {value:.3f}" for name, value in others.items())
      + f" | reward {mean('reward', draws[:10]):.3f} to {mean('reward', draws[-10:]):.3f}"
      + f" | mismatch {mean('token_mult_prob_error', draws):.4f}, largest {max(row['token_mult_prob_error'] for row in draws):.4f}"
      + f" | entropy {mean('entropy', draws[:10]):.3f} to {mean('entropy', draws[-10:]):.3f}"
      + f" | length {mean('completions/mean_length', draws[:10]):.1f} to {mean('completions/mean_length', draws[-10:]):.1f}"
      + f" | {float(sys.argv[3]):.0f} s, of draws {sum(row.get('timing_s/gen', 0) for row in rows):.0f} s", flush=True)
PY
}
active=0
for name in "${cases[@]}"; do
    run "$name" &
    active=$((active + 1))
    [ "$active" -lt "${AT_ONCE:-1}" ] || { wait -n; active=$((active - 1)); }
done
wait
grep -h -i "fp8" "$results"/fp8-*.log | grep -i "linear" | sort | uniq -c | head -4 || true
