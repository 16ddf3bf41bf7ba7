#!/usr/bin/env bash
# What the sentinel costs, and whether its recommendation pays. Sized to take less than eight minutes on one H200:
# (a) a comparison with BF16 of Llama-2-7B, its share of 100 steps, and the planned and measured peak of memory;
# (b) configs/english-smollm2.toml in BF16, in fp8-delayed, in fp8-delayed with all down_proj in BF16, and in fp8-delayed with the linears in BF16
#     that `ottava inspect --recommend` chooses from the comparisons of the run in fp8-delayed: only their forward, and all three products.
#
# usage: scripts/gpu-sentinel.sh OTTAVA CORPUS_FOLDER [OPTION OF `ottava train`]...
#        CORPUS_FOLDER holds english.jsonl.gz (scripts/fetch-english.sh)
# RESULTS (default runs/gpu-sentinel) receives cost.txt, the metrics of each run, sentinel.jsonl, sentinel.html, overrides.toml and losses.txt.
# COST (default "fp8-delayed,fp8-block") are the recipes of (a), none if empty. CONFIG (default configs/english-smollm2.toml).
# SHARE (default 0.5) is the share of the estimated cost that the recommendation avoids.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# -lt 2 ]; then
    echo "usage: scripts/gpu-sentinel.sh OTTAVA CORPUS_FOLDER [OPTION OF ottava train]..." >&2
    exit 1
fi
ottava=$1
corpus=$2/english.jsonl.gz
shift 2
results=${RESULTS:-runs/gpu-sentinel}
config=${CONFIG:-configs/english-smollm2.toml}
cost=${COST-fp8-delayed,fp8-block}
if [ ! -f "$corpus" ]; then
    echo "$corpus is missing; scripts/fetch-english.sh makes it" >&2
    exit 1
fi
mkdir -p "$results"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
fi

if [ -n "$cost" ]; then
    start=$SECONDS
    "$ottava" bench train --model llama-2-7b --recipes "$cost" --set sentinel_steps=100 --steps 6 | tee "$results/cost.txt"
    echo "== the cost took $((SECONDS - start)) s"
fi

# One run after the other, since they share the GPU. A run that fails is named, and the others go on. All use the tokens that the first
# made, since those lie beside the runs' folders.
failed=()
train() {
    local name=$1 recipe=$2 overrides=$3 start=$SECONDS
    shift 3
    local run=$work/$name
    cat "$config" "$overrides" >"$work/$name.toml"
    "$ottava" train "$work/$name.toml" --set "recipe=$recipe" --set "output_dir=$run" --set "data.train_files=[\"$corpus\"]" "$@" ||
        failed+=("$name")
    if [ -f "$run/metrics.jsonl" ]; then
        cp "$run/metrics.jsonl" "$results/$name-42.jsonl"
    fi
    rm -rf "$run/checkpoints"
    echo "== $name took $((SECONDS - start)) s"
}
train bf16 bf16 /dev/null "$@"
train fp8-delayed fp8-delayed /dev/null --set sentinel_steps=20 --set sentinel_sequences=20 "$@"
"$ottava" inspect "$work/fp8-delayed" --recommend "$results/overrides.toml" --share "${SHARE:-0.5}" --top 20
cp "$work/fp8-delayed/sentinel.jsonl" "$work/fp8-delayed/sentinel.html" "$results"
cat "$results/overrides.toml"
printf '[[precision.overrides]]\nlayers = ["*.down_proj"]\nrecipe = "bf16"\n' >"$work/down.toml"
sed 's/^high_precision_products = .*/recipe = "bf16"/' "$results/overrides.toml" >"$work/whole.toml"
train fp8-delayed-down_proj fp8-delayed "$work/down.toml" "$@"
train fp8-delayed-recommended fp8-delayed "$results/overrides.toml" "$@"
train fp8-delayed-recommended-whole fp8-delayed "$work/whole.toml" "$@"
if [ ${#failed[@]} -gt 0 ]; then
    echo "runs that failed: ${failed[*]}" >&2
fi
python3 scripts/compare_losses.py "$results" | tee "$results/losses.txt"
[ ${#failed[@]} -eq 0 ]
