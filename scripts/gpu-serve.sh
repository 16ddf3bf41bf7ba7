#!/usr/bin/env bash
# Throughput and latencies of `ottava serve` under 64 clients and under one (CLIENTS), on one GPU and on GPUS, with and without flags, for a model of
# Llama-3-8B's shape with random weights. About 60 s per server.
#
# usage: scripts/gpu-serve.sh [OTTAVA]    the program; without it, it is built here
# GPUS (default 1) is the largest number of GPUs, MODEL a folder (default: one with random weights is made), ROUNDS (default 2) the number of alternating rounds.
# MODES (default "default no-async-scheduling") are the flags of the servers that are compared, without dashes; `default` has none.
# RESULTS (default runs/gpu-serve) receives a JSON file per server and load.
set -euo pipefail
cd "$(dirname "$0")/.."
ottava=${1:-} results=${RESULTS:-runs/gpu-serve}
mkdir -p "$results"
if [ -z "$ottava" ]; then
    cargo build --release
    ottava=target/release/ottava
fi
ottava=$(realpath "$ottava") port=8123
export NCCL_NVLS_ENABLE=0 NCCL_SOCKET_IFNAME=lo
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
model=${MODEL:-}
if [ -z "$model" ]; then
    model=$(mktemp -d)
    python3 scripts/make_random_llama.py "$model"
fi

# load NAME ARGUMENT...: writes NAME.json, and prints its rates
load() {
    local name=$1
    shift
    "$ottava" bench serve --base-url "http://127.0.0.1:$port" --random-input-len 512 --random-output-len 128 --json "$@" >"$results/$name.json"
    python3 - "$name" "$results/$name.json" <<'PYTHON'
import json, sys
row = json.load(open(sys.argv[2]))
print(f"{sys.argv[1]:<32} {row['output_throughput']:>9.0f} new tokens/s; ms: first token {row['median_ttft_ms']:.1f}, each further token {row['median_tpot_ms']:.2f}")
PYTHON
}

# serve NAME OPTION...: measures a server with these options
serve() {
    local name=$1
    shift
    "$ottava" serve "$model" --port $port --recipe fp8-row --kv-cache-dtype fp8 --max-length 1024 "$@" 2>"$results/$name.log" &
    local server=$!
    until python3 -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1])' "http://127.0.0.1:$port/health" 2>/dev/null; do
        kill -0 $server || { cat "$results/$name.log"; exit 1; }
        sleep 0.2
    done
    for clients in ${CLIENTS:-64 1}; do
        load "$name-$clients" --num-prompts $((clients == 1 ? 3 : 4 * clients)) --max-concurrency "$clients" --num-warmups $((clients == 1 ? 0 : clients))
    done
    kill $server
    wait $server || true
}

for round in $(seq "${ROUNDS:-2}"); do
    for gpus in $(seq "${GPUS:-1}"); do
        for mode in ${MODES:-default no-async-scheduling}; do
            flags=()
            [ "$mode" = default ] || flags=("--$mode")
            serve "gpus-$gpus-$mode-$round" --gpus "$gpus" "${flags[@]}"
        done
    done
done
