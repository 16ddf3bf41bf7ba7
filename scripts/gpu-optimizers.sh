#!/usr/bin/env bash
# Whether Muon learns faster than AdamW: the 112 M-parameter Llama of configs/llama-110m.toml on the bundled text, with each optimizer at
# equal steps, with two seeds and two learning rates each, in BF16 and FP8. scripts/compare_optimizers.py prints the table. Runs with results
# are not repeated, so the script may be called again after a time limit.
#
# usage: scripts/gpu-optimizers.sh OTTAVA [OPTION OF `ottava train`]...
# RESULTS (default runs/gpu-optimizers) receives the metrics of each run and losses.txt.
# OPTIMIZERS (default "adamw:6e-4,1.8e-3 muon:6e-4,1.8e-3") are names with learning rates; "lion:6e-5,2e-4" is another.
# RECIPES (default "bf16 fp8-delayed"), SEEDS (default "42 1"), CONFIG (default configs/llama-110m.toml).
# TIME_LIMIT (default none): no run starts after so many seconds.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# -lt 1 ]; then
    echo "usage: scripts/gpu-optimizers.sh OTTAVA [OPTION OF ottava train]..." >&2
    exit 1
fi
ottava=$1
shift
results=${RESULTS:-runs/gpu-optimizers}
config=${CONFIG:-configs/llama-110m.toml}
read -ra optimizers <<<"${OPTIMIZERS:-adamw:6e-4,1.8e-3 muon:6e-4,1.8e-3}"
read -ra recipes <<<"${RECIPES:-bf16 fp8-delayed}"
read -ra seeds <<<"${SEEDS:-42 1}"
mkdir -p "$results"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
fi

# One run after the other, since they share the GPU. A run that fails is named, and the others go on. All use the tokens that the first
# made, since those lie beside the runs' folders.
failed=()
skipped=()
train() {
    local recipe=$1 optimizer=$2 rate=$3 seed=$4 start=$SECONDS
    shift 4
    local name=$recipe-$optimizer-$rate-$seed
    if [ -f "$results/$name.jsonl" ]; then
        return
    fi
    if [ -n "${TIME_LIMIT:-}" ] && [ "$SECONDS" -ge "$TIME_LIMIT" ]; then
        skipped+=("$name")
        return
    fi
    local run=$work/$name
    if "$ottava" train "$config" --set "recipe=$recipe" --set "optimizer.name=$optimizer" --set "seed=$seed" \
        --set "learning_rate=$rate" --set "output_dir=$run" "$@"; then
        cp "$run/metrics.jsonl" "$results/$name.jsonl"
    else
        failed+=("$name")
    fi
    rm -rf "$run"
    echo "== $name took $((SECONDS - start)) s"
}
# Seeds last, so that a time limit leaves one seed of everything.
for seed in "${seeds[@]}"; do
    for recipe in "${recipes[@]}"; do
        for entry in "${optimizers[@]}"; do
            IFS=, read -ra rates <<<"${entry#*:}"
            for rate in "${rates[@]}"; do
                train "$recipe" "${entry%%:*}" "$rate" "$seed" "$@"
            done
        done
    done
done
if [ ${#skipped[@]} -gt 0 ]; then
    echo "not run, for lack of time: ${skipped[*]}" >&2
fi
if [ ${#failed[@]} -gt 0 ]; then
    echo "runs that failed: ${failed[*]}" >&2
fi
python3 scripts/compare_optimizers.py "$results" | tee "$results/losses.txt"
[ ${#failed[@]} -eq 0 ]
