#!/usr/bin/env bash
# A generation of reinforcement learning with the shape of an 8B model and random weights: draws, hand-over of the weights and step, in BF16 and FP8; and
# `ottava serve` at the same load: the same prompts' and completions' lengths, and the same KV cache.
#
# usage: scripts/gpu-rollout-bench.sh OTTAVA [RECIPE[:FORMAT]...]    OTTAVA is a release build; FORMAT is the format of the KV cache, by default auto; without
#        recipes, bf16, fp8-row and fp8-row:fp8
# Codes of weights exist only in draws (`weight_codes = false`), which changes nothing for BF16.
# KV (default 320000) tokens of the KV cache, PROMPTS (default 64) of 8 completions each. SERVE=0 leaves out the server. Needs python3 with torch and safetensors.
set -euo pipefail
ottava=$(realpath "$1") kv=${KV:-320000} prompts=${PROMPTS:-64}
shift
[ $# -gt 0 ] || set -- bf16 fp8-row fp8-row:fp8
recipes=("${@%%:*}") formats=()
for case in "$@"; do
    case $case in *:*) formats+=("${case#*:}") ;; *) formats+=(auto) ;; esac
done
cd "$(dirname "$0")/.."
"$ottava" bench rollouts --model llama-3-8b --prompts "$prompts" --kv-cache-tokens "$kv" --recipes "$(IFS=,; echo "${recipes[*]}")" \
    --kv-cache-dtype "$(IFS=,; echo "${formats[*]}")" --set skip_slow_linears=false --set weight_codes=false
[ "${SERVE:-1}" = 1 ] || exit 0
folder=$(mktemp -d) server=
trap 'kill $server 2>/dev/null || true; rm -rf "$folder"' EXIT
python3 scripts/make_random_llama.py "$folder" data/tokenizer
for i in "${!recipes[@]}"; do
    recipe=${recipes[i]}
    "$ottava" serve "$folder" --port 8011 --recipe "$recipe" --kv-cache-dtype "${formats[i]}" --set skip_slow_linears=false --max-length 4096 --max-num-seqs $((8 * prompts)) --kv-cache-tokens "$kv" \
        --max-queue $((16 * prompts)) --client-timeout 600 >"$folder/serve.log" 2>&1 &
    server=$!
    until python3 -c 'import urllib.request; urllib.request.urlopen("http://127.0.0.1:8011/health")' 2>/dev/null; do
        kill -0 $server 2>/dev/null || { tail -5 "$folder/serve.log"; exit 1; }
        sleep 1
    done
    echo "serve, $recipe, KV cache ${formats[i]}: $(python3 scripts/serve_rollouts.py 127.0.0.1:8011 "$prompts" 8)"
    kill $server
    wait $server || true
done
