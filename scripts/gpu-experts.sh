#!/usr/bin/env bash
# Whether a mixture of experts learns in FP8 as in BF16, and whether its load stays balanced: configs/quickstart-moe.toml in BF16, fp8-block and
# fp8-row, with two seeds each, then scripts/compare_losses.py and scripts/draw_router_load.py. About four minutes on one H200.
#
# usage: scripts/gpu-experts.sh OTTAVA [OPTION OF `ottava train`]...
# RESULTS (default runs/gpu-experts) receives the metrics of each run, losses.txt, gaps.svg and load.svg.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# -lt 1 ]; then
    echo "usage: scripts/gpu-experts.sh OTTAVA [OPTION OF ottava train]..." >&2
    exit 1
fi
ottava=$1
shift
results=${RESULTS:-runs/gpu-experts}
mkdir -p "$results"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for seed in 42 1; do
    for recipe in bf16 fp8-block fp8-row; do
        start=$SECONDS
        "$ottava" train configs/quickstart-moe.toml --set "recipe=$recipe" --set "seed=$seed" --set "output_dir=$work/$recipe-$seed" \
            --set "cache_dir=$work/tokens" --set logging_steps=1 --set max_steps=2000 --set per_device_train_batch_size=64 \
            --set learning_rate=1e-3 "$@"
        cp "$work/$recipe-$seed/metrics.jsonl" "$results/$recipe-$seed.jsonl"
        echo "== $recipe, seed $seed: $((SECONDS - start)) s"
    done
done
python3 scripts/compare_losses.py "$results" | tee "$results/losses.txt"
python3 scripts/draw_router_load.py "$results"/*.jsonl "$results/load.svg"
