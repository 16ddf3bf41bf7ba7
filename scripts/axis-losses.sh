#!/usr/bin/env bash
# What dividing a model does to losses: the ~110 M model of configs/llama-110m.toml, 300 steps on one GPU, and on two that divide tensors,
# layers or sequences, with each recipe and the same sequences in each step. Prints validation losses, those minus the loss of one GPU, and
# the largest difference of the losses of steps. Three minutes.
#
# usage: scripts/axis-losses.sh [FOLDER [ARGUMENT...]]    FOLDER (default target/release) holds `ottava`; all runs get the ARGUMENTs, such as
#        `--set seed=1`
# RECIPES (default bf16 fp8-delayed fp8-current fp8-row fp8-block) are compared. OUT (default /tmp) receives metrics, in axis-losses/.
# Fails where a run fails.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=$(realpath "${1:-target/release}")
shift $(($# > 0))
arguments=("$@")
out=${OUT:-/tmp}/axis-losses
recipes=(${RECIPES:-bf16 fp8-delayed fp8-current fp8-row fp8-block})
rm -rf "$out"
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export NCCL_NVLS_ENABLE=0 NCCL_SOCKET_IFNAME=lo NCCL_RAS_ENABLE=0
failed=0
# run RECIPE NAME ARGUMENT...
run() {
    local recipe=$1 name=$2
    shift 2
    timeout -k 5 90 "$bin/ottava" train configs/llama-110m.toml --set "output_dir=$work/$recipe-$name" --set "cache_dir=$work/tokens" \
        --set global_batch_size=32 --set per_device_train_batch_size=16 --set eval_steps=300 --set save_steps=end --set logging_steps=10 \
        --set 'prompts=[]' --set gradient_dtype=bfloat16 --set "recipe=$recipe" "${arguments[@]}" "$@" >"$out/$recipe-$name.log" 2>&1 || {
        echo "$recipe on $name ended with exit code $?: $(tail -n 1 "$out/$recipe-$name.log")"
        failed=1
    }
    cp "$work/$recipe-$name/metrics.jsonl" "$out/$recipe-$name.jsonl"
    rm -rf "$work/$recipe-$name"
}
"$bin/ottava" prepare configs/llama-110m.toml --set "cache_dir=$work/tokens" >"$out/prepare.log" 2>&1
for recipe in "${recipes[@]}"; do
    run "$recipe" one
    for axis in tensor pipeline context; do
        run "$recipe" "$axis" --gpus 2 --set "parallel.$axis=2"
    done
done
python3 - "$out" "${recipes[@]}" <<'PY'
import json, os, sys
out, recipes = sys.argv[1], sys.argv[2:]
def read(name):
    path = f"{out}/{name}.jsonl"
    lines = [json.loads(line) for line in open(path)] if os.path.exists(path) else []
    return [x["loss"] for x in lines if "loss" in x], next((x["eval_loss"] for x in reversed(lines) if "eval_loss" in x), None)
print(f"{'recipe':12} {'GPUs divide':12} {'validation':>10} {'minus one GPU':>14} {'steps differ by at most':>24}")
for recipe in recipes:
    losses, alone = read(f"{recipe}-one")
    print(f"{recipe:12} {'(one GPU)':12} {alone:10.5f}" if alone else f"{recipe:12} failed")
    for axis in ("tensor", "pipeline", "context"):
        of_axis, last = read(f"{recipe}-{axis}")
        if not (alone and last):
            print(f"{recipe:12} {axis:12} failed")
            continue
        worst = max(abs(a - b) for a, b in zip(losses, of_axis))
        print(f"{recipe:12} {axis:12} {last:10.5f} {last - alone:+14.5f} {worst:24.5f}" + (" (the same bits)" if losses == of_axis else ""))
PY
exit "$failed"
