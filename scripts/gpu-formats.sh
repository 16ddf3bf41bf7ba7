#!/usr/bin/env bash
# What the formats of Blackwell GPUs do to losses: trains the ~110 M model of configs/llama-110m.toml with each recipe and seed, with every linear
# cast, and prints the last validation losses, and the losses minus the loss of bf16 of the same seed. Sized for less than 280 s on one H200 with
# 300 steps; needs neither Rust nor a network.
#
# usage: scripts/gpu-formats.sh OTTAVA FOLDER [OPTION OF `ottava train`]...     FOLDER receives metrics and logs
# STEPS (default 300), RECIPES (default "bf16 fp8-row mxfp8 nvfp4"; bf16 is the base of the gaps) and SEEDS (default "42 1").
# NVFP4_OPTIONS (default "--set last_layers_bf16=2") are options of the runs with nvfp4: NVIDIA's recipe keeps the last blocks in BF16.
# Fails where a run fails.
set -uo pipefail
if [ $# -lt 2 ]; then
    echo "usage: scripts/gpu-formats.sh OTTAVA FOLDER [OPTION OF ottava train]..." >&2
    exit 1
fi
ottava=$(realpath "$1")
mkdir -p "$2"
out=$(realpath "$2")
shift 2
cd "$(dirname "$0")/.."
steps=${STEPS:-300}
read -ra recipes <<<"${RECIPES:-bf16 fp8-row mxfp8 nvfp4}"
read -ra seeds <<<"${SEEDS:-42 1}"
read -ra of_nvfp4 <<<"${NVFP4_OPTIONS---set last_layers_bf16=2}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
fi
"$ottava" prepare configs/llama-110m.toml --set "cache_dir=$work/tokens" >"$out/prepare.log" 2>&1
failed=0
for seed in "${seeds[@]}"; do
    for recipe in "${recipes[@]}"; do
        name=$recipe-$seed
        start=$SECONDS
        options=()
        [ "$recipe" = nvfp4 ] && options=("${of_nvfp4[@]}")
        "$ottava" train configs/llama-110m.toml --set "output_dir=$work/$name" --set "cache_dir=$work/tokens" --set "recipe=$recipe" \
            --set "seed=$seed" --set "max_steps=$steps" --set "eval_steps=$steps" --set save_steps=end --set 'prompts=[]' \
            "${options[@]}" "$@" >"$out/$name.log" 2>&1 || {
            echo "$name ended with exit code $?: $(tail -n 1 "$out/$name.log")"
            failed=1
        }
        [ -f "$work/$name/metrics.jsonl" ] && cp "$work/$name/metrics.jsonl" "$out/$name.jsonl"
        rm -rf "${work:?}/$name"
        echo "== $name took $((SECONDS - start)) s"
    done
done
python3 - "$out" "${recipes[*]}" "${seeds[*]}" <<'PY'
import json, os, statistics, sys
out, recipes, seeds = sys.argv[1], sys.argv[2].split(), sys.argv[3].split()
def read(name):
    path = f"{out}/{name}.jsonl"
    lines = [json.loads(line) for line in open(path)] if os.path.exists(path) else []
    loss = next((line["eval_loss"] for line in reversed(lines) if line.get("eval_loss") is not None), None)
    speeds = [line["tokens_per_second"] for line in lines if line.get("tokens_per_second")]
    return loss, statistics.median(speeds) if speeds else float("nan")
print(f"{'recipe':10} {'seed':>5} {'validation':>11} {'minus bf16':>11} {'tokens/s':>10}")
for recipe in recipes:
    gaps = []
    for seed in seeds:
        (loss, speed), (base, _) = read(f"{recipe}-{seed}"), read(f"bf16-{seed}")
        if loss is None:
            print(f"{recipe:10} {seed:>5}      failed")
            continue
        gap = None if base is None else loss - base
        gaps += [] if gap is None else [gap]
        print(f"{recipe:10} {seed:>5} {loss:11.4f} {'' if gap is None else format(gap, '+.4f'):>11} {speed:10.0f}")
    if recipe != "bf16" and gaps:
        print(f"{recipe:10}  mean             {statistics.mean(gaps):+11.4f}")
PY
[ "$failed" = 0 ]
