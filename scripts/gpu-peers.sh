#!/usr/bin/env bash
# Speed of `ottava` beside Transformer Engine and transformers on one GPU, in one run. Parts:
#   train   Llama-2-7B, two rows of 4,096 tokens, BF16 states: recipes of `ottava` and of Transformer Engine, twice in the order
#           old, peer, new, new, peer, old (four minutes)
#   decode  Llama-3-8B at batch 1, 16, 64 and 256 after 1,024 tokens: `ottava` in BF16 and in fp8-row with an E4M3 cache, and
#           transformers in BF16, at 16 and 64 also compiled (two minutes)
#   qlora   Llama-2-70B's shape in NF4, adapters of rank 16 in BF16, one row of 2,048 tokens: `ottava`, and PEFT with bitsandbytes (two minutes)
#
# usage: scripts/gpu-peers.sh OTTAVA [PART...]    OTTAVA is the binary; the default parts are train and decode
# OLD, if set, is an older `ottava`, which is timed in two recipes of `train`. Needs python3 with torch, transformers and
# transformer_engine; qlora needs peft and bitsandbytes.
set -euo pipefail
cd "$(dirname "$0")/.."
ottava=$(realpath "$1")
shift
parts=("${@:-train decode}")

# ours BINARY ARGUMENT...
ours() {
    local binary=$1
    shift
    echo "== $(basename "$binary") bench train $*"
    # By the names of options that builds before `--storages` and `--recipes` know too.
    "$binary" bench train --model llama-2-7b --levels bf16 --set gradient_dtype=bfloat16 --steps 8 "$@" 2>&1
}
peer() {
    echo "== scripts/bench_peers.py $*"
    PYTHONWARNINGS=ignore python3 scripts/bench_peers.py "$@"
}
for part in ${parts[*]}; do
    case $part in
    train)
        for order in "old peer new" "new peer old"; do
            for which in $order; do
                case $which in
                old) [ -z "${OLD:-}" ] || ours "$OLD" --compare fp8-delayed,fp8-current ;;
                peer)
                    peer train
                    peer train --recipes delayed --clip
                    ;;
                new) ours "$ottava" --compare fp8-delayed,fp8-current,fp8-row,fp8-block,bf16 ;;
                esac
            done
        done
        ;;
    decode)
        "$ottava" bench decode --model llama-3-8b --batch 1,16,64,256 --context 1024 --recipes bf16,fp8-row --kv-cache-dtype auto,fp8 2>&1
        peer decode
        peer decode --batches 16,64 --compile
        ;;
    qlora)
        "$ottava" bench train --model configs/models/llama-2-70b.json --recipes bf16 --micro-batch 1 --max-length 2048 --set lora.r=16 --set lora.load_in_4bit=true \
            --set recompute=full --steps 5 2>&1
        peer qlora --steps 5
        ;;
    *) echo "gpu-peers.sh: there is no part $part" >&2 && exit 1 ;;
    esac
done
