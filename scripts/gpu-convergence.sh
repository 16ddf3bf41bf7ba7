#!/usr/bin/env bash
# Whether FP8 learns as BF16 does: the 112 M-parameter Llama of configs/english-110m.toml on 30 M tokens, in BF16 with every seed and in
# each recipe with the first, then scripts/compare_losses.py. Sized to take less than nine minutes on one H200.
# CONFIG=configs/english-smollm2.toml continues a pretrained model instead.
#
# usage: scripts/gpu-convergence.sh OTTAVA CORPUS_FOLDER [OPTION OF `ottava train`]...
#        CORPUS_FOLDER holds english.jsonl.gz (scripts/fetch-english.sh)
# RESULTS (default runs/gpu-convergence) receives the metrics of each run, losses.txt and gaps.svg.
# RECIPES (default "fp8-delayed fp8-current fp8-row fp8-block") and SEEDS (default "42 1") are compared, and STORAGES of the
# optimizer with fp8-delayed (none by default).
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# -lt 2 ]; then
    echo "usage: scripts/gpu-convergence.sh OTTAVA CORPUS_FOLDER [OPTION OF ottava train]..." >&2
    exit 1
fi
ottava=$1
corpus=$2/english.jsonl.gz
shift 2
results=${RESULTS:-runs/gpu-convergence}
config=${CONFIG:-configs/english-110m.toml}
read -ra recipes <<<"${RECIPES-fp8-delayed fp8-current fp8-row fp8-block}"
read -ra seeds <<<"${SEEDS:-42 1}"
read -ra storages <<<"${STORAGES:-}"
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

# One run after the other, since they share the GPU. A run that fails is named, and the others go on. All use the tokens that the first
# made, since those lie beside the runs' folders.
failed=()
train() {
    local recipe=$1 storage=$2 seed=$3 start=$SECONDS
    shift 3
    local name=$recipe-$seed
    [ "$storage" = float32 ] || name=$recipe-$storage-$seed
    local run=$work/$name
    "$ottava" train "$config" --set "recipe=$recipe" --set "storage=$storage" --set "seed=$seed" --set "output_dir=$run" \
        --set "data.train_files=[\"$corpus\"]" "$@" || failed+=("$name")
    if [ -f "$run/metrics.jsonl" ]; then
        cp "$run/metrics.jsonl" "$results/$name.jsonl"
    fi
    rm -rf "$run"
    echo "== $name took $((SECONDS - start)) s"
}
for seed in "${seeds[@]}"; do
    train bf16 float32 "$seed" "$@"
done
for recipe in "${recipes[@]}"; do
    train "$recipe" float32 "${seeds[0]}" "$@"
done
for storage in "${storages[@]}"; do
    train fp8-delayed "$storage" "${seeds[0]}" "$@"
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "runs that failed: ${failed[*]}" >&2
fi
python3 scripts/compare_losses.py "$results" | tee "$results/losses.txt"
[ ${#failed[@]} -eq 0 ]
