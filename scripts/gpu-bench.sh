#!/usr/bin/env bash
# The numbers of benchmarks/2026-11-21-training-one-gpu.md on one H200, in about six minutes: training steps by recipe and model, memory by policy, linear layers.
#
# usage: scripts/gpu-bench.sh [OTTAVA]    the program; without it, it is built here
# RESULTS (default runs/gpu-bench) receives one file per table.
set -euo pipefail
cd "$(dirname "$0")/.."
ottava=${1:-}
results=${RESULTS:-runs/gpu-bench}
mkdir -p "$results"
if [ -z "$ottava" ]; then
    cargo build --release
    ottava=target/release/ottava
fi
nvidia-smi --query-gpu=name,driver_version,temperature.gpu --format=csv,noheader
narrow=(--storages bfloat16)
# The first line of a table, its rows and warnings; the time by family stays in the file.
train() {
    local file=$results/$1.txt
    shift
    echo "== bench train $*"
    "$ottava" bench train "$@" >"$file" 2>&1
    grep -E '^(recipe |bf16 |fp8-[a-z]+ ).*[0-9]$|^recipe|WARN' "$file" | grep -v 'ms % of step' || cat "$file"
}

train llama-2-7b "${narrow[@]}" --steps 8 --recipes fp8-delayed,fp8-current,fp8-row,fp8-block,bf16
train llama-2-7b-deterministic "${narrow[@]}" --steps 6 --recipes fp8-delayed --set deterministic=true
for policy in none norm-swiglu attention full; do
    train "llama-2-7b-$policy" "${narrow[@]}" --steps 4 --recipes fp8-delayed --set recompute=$policy
done
for policy in none norm-swiglu; do
    train "llama-2-7b-$policy-float8" "${narrow[@]}" --steps 4 --recipes fp8-delayed --set recompute=$policy --set saved_activations=float8
done
train llama-2-7b-lean "${narrow[@]}" --steps 4 --recipes fp8-delayed --set recompute=norm-swiglu --set weight_codes=false
train llama-2-7b-f32 --steps 4 --recipes fp8-delayed
one=(--max-length 4096 --micro-batch 1 --recipes fp8-delayed)
train llama-2-7b-storages "${one[@]}" --steps 5 --storages float32,msamp-o1,msamp-o2,msamp-o3,coat,bfloat16 --set recompute=attention
train llama-2-13b "${one[@]}" --model llama-2-13b --steps 4 --storages msamp-o3
train llama-2-13b-2 --model llama-2-13b --micro-batch 2 --steps 4 --recipes fp8-delayed --storages msamp-o3 --set recompute=norm-swiglu
large=(--model llama-30b --max-length 4096 --steps 2 --recipes fp8-delayed --storages coat --set gradient_dtype=float8 --set weight_codes=false
    --set recompute=full --set offload_optimizer=0.5)
train llama-30b "${large[@]}" --micro-batch 1
train llama-30b-4 "${large[@]}" --micro-batch 4 --set offload_residuals=true
all_away=(--set offload_optimizer=1.0 --set offload_parameters=1.0 --set offload_residuals=true)
for rows in 1 4; do
    small=("${narrow[@]}" --max-length 4096 --micro-batch $rows --steps 3 --recipes fp8-delayed --set recompute=full --set weight_codes=false)
    train "llama-2-7b-here-$rows" "${small[@]}"
    train "llama-2-7b-away-$rows" "${small[@]}" "${all_away[@]}"
done
train llama-3-8b "${narrow[@]}" --model llama-3-8b --max-length 8192 --micro-batch 1 --steps 4 --recipes bf16,fp8-delayed
for size in 0.5b 1.5b; do
    train "qwen2.5-$size" "${narrow[@]}" --model qwen2.5-$size --max-length 1024 --micro-batch 32 --steps 6 --recipes bf16,fp8-delayed
done
echo "== bench linear"
"$ottava" bench linear | tee "$results/linear.txt"
echo "== bench kernels"
"$ottava" bench kernels >"$results/kernels.txt"
