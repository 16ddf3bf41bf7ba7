#!/usr/bin/env bash
# The rows of "Two and four GPUs" in docs/benchmarks.md, on two H200, and with four of them those of four; three minutes.
#
# usage: scripts/two-gpus-bench.sh [FOLDER]    FOLDER (default target/release) holds `ottava`
set -uo pipefail
cd "$(dirname "$0")/.."
bin=${1:-target/release}
export NCCL_NVLS_ENABLE=0 NCCL_SOCKET_IFNAME=lo NCCL_RAS_ENABLE=0
train=(timeout 100 "$bin/ottava" bench train --device cuda --set gradient_dtype=bfloat16 --steps 8)
part() {
    echo "== $1"
    shift
    "${train[@]}" "$@" 2>&1 | grep -v "INFO\|WARN"
}
part "ZeRO 1" --gpus 2 --set parallel.zero=1 --compare fp8-delayed,fp8-current,bf16
part "ZeRO 1, gradients in FP8" --gpus 2 --set parallel.zero=1 --set reduce_dtype=float8 --compare fp8-delayed
part "ZeRO 3" --gpus 2 --set parallel.zero=3 --compare fp8-delayed
part "ZeRO 3, activations saved in FP8" --gpus 2 --set parallel.zero=3 --set saved_activations=float8 --compare fp8-delayed
part "one GPU, micro-batch 1" --micro-batch 1 --compare fp8-delayed
part "ZeRO 1, micro-batch 1" --gpus 2 --set parallel.zero=1 --micro-batch 1 --compare fp8-delayed
big=(--gpus 2 --model llama-2-13b --micro-batch 1 --set parallel.zero=3 --compare fp8-delayed)
part "13B, ZeRO 3, coat" "${big[@]}" --levels coat
part "13B, ZeRO 3, O2" "${big[@]}" --levels O2 --set recompute=attention
[ "$(nvidia-smi -L | wc -l)" -ge 4 ] || exit 0
part "4 GPUs, ZeRO 1" --gpus 4 --set parallel.zero=1 --compare fp8-delayed,bf16
part "4 GPUs, ZeRO 3" --gpus 4 --set parallel.zero=3 --compare fp8-delayed
part "4 GPUs, ZeRO 2, micro-batch 1" --gpus 4 --set parallel.zero=2 --micro-batch 1 --compare fp8-delayed
part "4 GPUs, Llama-3-8B" --gpus 4 --model llama-3-8b --seq-len 8192 --micro-batch 1 --levels bf16 --set parallel.zero=3 --compare fp8-delayed
