#!/usr/bin/env bash
# What FP8 communication does to losses: the ~110 M model of configs/llama-110m.toml, 300 steps on two GPUs from two seeds, with gradients
# as BF16 and as FP8 codes, and weights whole or gathered as FP8 codes. Prints validation losses, and those minus the first of each recipe.
# On four GPUs the seeds run beside each other. One minute and a half; half of it on four.
#
# usage: scripts/communication-losses.sh [FOLDER]    FOLDER (default target/release) holds `ottava`
# OUT (default /tmp) receives metrics, in communication-losses/.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=$(realpath "${1:-target/release}")
out=${OUT:-/tmp}/communication-losses
rm -rf "$out"
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export NCCL_NVLS_ENABLE=0 NCCL_SOCKET_IFNAME=lo NCCL_RAS_ENABLE=0
float8="--set parallel.communication.reduce_dtype=float8"
# Recipe, what travels, and settings.
variants=(
    "bf16|gradients in BF16|--set parallel.zero=0"
    "bf16|gradients in FP8|--set parallel.zero=1 $float8"
    "fp8-delayed|gradients in BF16|--set parallel.zero=0"
    "fp8-delayed|gradients in BF16, weights in FP8|--set parallel.zero=1"
    "fp8-delayed|gradients and weights in FP8|--set parallel.zero=1 $float8"
    "fp8-delayed|the same, error feedback|--set parallel.zero=1 $float8 --set parallel.communication.error_feedback=true"
    "fp8-delayed|gradients in FP8, cast twice|--set parallel.zero=0 $float8"
)
seed_runs() {
    local i recipe settings
    for i in "${!variants[@]}"; do
        IFS='|' read -r recipe _ settings <<<"${variants[$i]}"
        # shellcheck disable=SC2086
        timeout -k 5 60 "$bin/ottava" train configs/llama-110m.toml --gpus 2 --set "output_dir=$work/$1-$i" --set "cache_dir=$work/tokens" \
            --set "seed=$1" --set global_batch_size=32 --set per_device_train_batch_size=16 --set eval_steps=300 --set save_steps=end \
            --set 'prompts=[]' --set gradient_dtype=bfloat16 --set "recipe=$recipe" $settings >"$out/$1-$i.log" 2>&1
        cp "$work/$1-$i/metrics.jsonl" "$out/$1-$i.jsonl"
    done
}
"$bin/ottava" prepare configs/llama-110m.toml --set "cache_dir=$work/tokens" >"$out/prepare.log" 2>&1
if [ "$(nvidia-smi -L | wc -l)" -ge 4 ]; then
    CUDA_VISIBLE_DEVICES=0,1 seed_runs 42 &
    CUDA_VISIBLE_DEVICES=2,3 seed_runs 1 &
    wait
else
    seed_runs 42
    seed_runs 1
fi
python3 - "$out" "${variants[@]}" <<'PY'
import json, sys
out, variants = sys.argv[1], [line.split("|")[:2] for line in sys.argv[2:]]
first = {}
print(f"{'recipe':<12} {'what travels':<36} {'seed':>4} {'loss':>8} {'gap':>8} {'training':>9} {'gap':>8} {'reduce_error':>13}")
failed = False
for i, (recipe, what) in enumerate(variants):
    for seed in (42, 1):
        try:
            lines = [json.loads(line) for line in open(f"{out}/{seed}-{i}.jsonl")]
            losses = [line["loss"] for line in lines if "loss" in line]
            seen = lines[-1]["eval_loss"], sum(losses[-30:]) / 30
        except (OSError, KeyError, IndexError) as error:
            print(f"{recipe:<12} {what:<36} {seed:>4} failed: {error!r}")
            failed = True
            continue
        base = first.setdefault((recipe, seed), seen)
        errors = [line["reduce_error"] for line in lines if "reduce_error" in line]
        mean = f"{sum(errors) / len(errors):.4f}" if errors else "-"
        print(f"{recipe:<12} {what:<36} {seed:>4} {seen[0]:8.4f} {seen[0] - base[0]:+8.4f} {seen[1]:9.4f} {seen[1] - base[1]:+8.4f} {mean:>13}")
sys.exit(failed)
PY
