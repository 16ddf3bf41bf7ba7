#!/usr/bin/env bash
# The rows of benchmarks/2026-11-26-two-and-four-gpus.md, on 1 to 8 GPUs of one machine. Each part takes at most ten minutes:
#   zero     Llama-2-7B, sequence 4096, micro-batch 2: stages 1 and 3, four recipes, gradients in BF16 and FP8; one GPU beside it (3 minutes)
#   models   Llama-2-13B, Llama-3-8B at 8192, and Llama-3-70B's shape with as many blocks as fit (3 minutes)
#   axes     Llama-2-7B whose tensors, layers or sequences are divided, with sequences of 4096 and 32768 tokens (3 minutes)
#   losses   the ~110 M model, 300 steps: all GPUs against one (2 minutes)
#   faults   drills and saves of scripts/two-gpus.sh, which take two of the GPUs (9 minutes)
#
# usage: scripts/gpu-many.sh [FOLDER [PART...]]    FOLDER (default target/release) holds `ottava`, and for faults `tensor-tests`
# GPUS (default all) is how many to use. OUT (default /tmp) receives metrics.
set -uo pipefail
cd "$(dirname "$0")/.."
folder=${1:-target/release}
bin=$(realpath "$folder")
shift $(($# > 0))
parts=" ${*:-zero models axes losses faults} "
gpus=${GPUS:-$(nvidia-smi -L | wc -l)}
out=${OUT:-/tmp}
export NCCL_NVLS_ENABLE=0 NCCL_SOCKET_IFNAME=lo NCCL_RAS_ENABLE=0

wants() { [[ $parts == *" $1 "* ]]; }
# train WHAT ARGUMENT...: a row, or one for each recipe.
train() {
    echo "== $1"
    shift
    timeout 150 "$bin/ottava" bench train --device cuda --set gradient_dtype=bfloat16 --steps 8 "$@" 2>&1 | grep -v "INFO\|WARN"
}
all=(--gpus "$gpus")
[ "$gpus" -gt 1 ] || all=()
# Arguments of a stage: one GPU has none.
stage() { [ "$gpus" -eq 1 ] || echo "--set parallel.zero=$1"; }

if wants zero; then
    recipes=fp8-delayed,fp8-current,fp8-block,bf16
    # shellcheck disable=SC2046
    for zero in 1 3; do
        train "$gpus GPUs, ZeRO $zero" "${all[@]}" $(stage $zero) --recipes $recipes
        [ "$gpus" -eq 1 ] && break
        train "$gpus GPUs, ZeRO $zero, gradients in FP8" "${all[@]}" $(stage $zero) --set reduce_dtype=float8 --recipes fp8-delayed
    done
    [ "$gpus" -eq 1 ] || train "one GPU, micro-batch 1" --micro-batch 1 --recipes fp8-delayed,bf16
    [ "$gpus" -eq 1 ] || train "$gpus GPUs, ZeRO 1, micro-batch 1" "${all[@]}" --set parallel.zero=1 --micro-batch 1 --recipes fp8-delayed,bf16
fi
if wants models; then
    # shellcheck disable=SC2046
    three=("${all[@]}" $(stage 3) --micro-batch 1 --recipes fp8-delayed)
    train "Llama-2-13B, coat" "${three[@]}" --model llama-2-13b --storages coat
    train "Llama-2-13B, msamp-o2" "${three[@]}" --model llama-2-13b --storages msamp-o2 --set recompute=attention
    train "Llama-3-8B, sequence 8192" "${three[@]}" --model llama-3-8b --max-length 8192 --storages bfloat16
    # Each of its blocks has 856 million parameters; storage `coat` keeps about 5.2 bytes of each.
    layers=$((gpus * 10 < 80 ? gpus * 10 : 80))
    train "Llama-3-70B, $layers blocks, coat" "${three[@]}" --model llama-3-70b --layers "$layers" --storages coat
fi
if wants axes; then
    bf16=(--storages bfloat16)
    recipes=fp8-delayed,fp8-current,bf16
    train "one GPU" "${bf16[@]}" --recipes $recipes
    train "$gpus GPUs, tensors" "${all[@]}" "${bf16[@]}" --set "parallel.tensor=$gpus" --recipes $recipes
    train "$gpus GPUs, layers, 8 micro-batches" "${all[@]}" "${bf16[@]}" --set "parallel.pipeline=$gpus" --micro-batches 8 --recipes fp8-delayed
    long=("${bf16[@]}" --max-length 32768 --micro-batch 1 --recipes fp8-delayed --set recompute=full)
    train "one GPU, sequence 32768" "${long[@]}"
    train "$gpus GPUs, sequence 32768" "${all[@]}" "${long[@]}" --set "parallel.context=$gpus"
fi
if wants losses; then
    work=$(mktemp -d)
    for ranks in 1 "$gpus"; do
        micro=$((ranks == 1 ? 16 : 32 / ranks))
        timeout -k 5 120 "$bin/ottava" train configs/llama-110m.toml --gpus "$ranks" --set "output_dir=$work/run" \
            --set "cache_dir=$work/tokens" --set global_batch_size=32 --set "per_device_train_batch_size=$micro" --set eval_steps=300 \
            --set save_steps=end --set 'prompts=[]' --set gradient_dtype=bfloat16 --set recipe=fp8-delayed --set logging_steps=10 \
            >"$out/losses-$ranks.log" 2>&1
        cp "$work/run/metrics.jsonl" "$out/losses-$ranks.jsonl"
        rm -rf "$work/run"
    done
    rm -rf "$work"
    python3 - "$out/losses-1.jsonl" "$out/losses-$gpus.jsonl" <<'PY'
import json, sys
one, many = ([json.loads(line) for line in open(path)] for path in sys.argv[1:])
losses = [[line["loss"] for line in lines if "loss" in line] for lines in (one, many)]
apart = [abs(a - b) / a for a, b in zip(*losses)]
last = [next(line["eval_loss"] for line in reversed(lines) if "eval_loss" in line) for lines in (one, many)]
print(f"losses of {len(apart)} logged steps: {100 * max(apart):.2f} % apart at most; validation {last[0]:.4f} and {last[1]:.4f}")
PY
fi
if wants faults; then
    OUT=$out scripts/two-gpus.sh "$folder" faults saves
fi
