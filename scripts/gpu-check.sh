#!/usr/bin/env bash
# Everything that is to be shown on a GPU, in one go: parity and promises, the quick start, a 112 M-parameter Llama in BF16 and in both
# FP8 recipes, and the saved folder against transformers. Takes about eight minutes on an H200.
#
# usage: scripts/gpu-check.sh [FOLDER]    FOLDER holds `ottava`, `tensor-tests` and `promises` built elsewhere; without it they are built here
# RESULTS (default runs/gpu-check) receives metrics and plots. STEPS (default 300) is the length of the 112 M runs.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${1:-}
results=${RESULTS:-runs/gpu-check}
mkdir -p "$results"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [ -z "$bin" ]; then
    cargo build --release
    bin=$work/bin
    mkdir -p "$bin"
    cp target/release/ottava "$bin/"
    for test in ottava-tensor:ottava_tensor:tensor-tests ottava-train:promises:promises; do
        IFS=: read -r package name copy <<<"$test"
        cp "$(cargo test --release -p "$package" --no-run 2>&1 | grep -o "target/release/deps/$name-[0-9a-f]*" | head -n 1)" "$bin/$copy"
    done
fi
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
"$bin/ottava" doctor

scripts/gpu-tests.sh "$bin"

echo "== quick start, FP8 and BF16"
for recipe in fp8-delayed bf16; do
    run=$work/quickstart-$recipe
    "$bin/ottava" train configs/quickstart.toml --set recipe=$recipe --set "output_dir=$run" --set logging_steps=200 --json | tee "$results/quickstart-$recipe.json"
    cp "$run/metrics.jsonl" "$results/quickstart-$recipe.jsonl"
done

echo "== 112 M parameters"
for recipe in bf16 fp8-delayed fp8-current; do
    run=$work/llama-110m-$recipe
    "$bin/ottava" train configs/llama-110m.toml --set recipe=$recipe --set "output_dir=$run" --set "max_steps=${STEPS:-300}" --json | tee "$results/llama-110m-$recipe.json"
    cp "$run/metrics.jsonl" "$results/llama-110m-$recipe.jsonl"
done
python3 - "$results" <<'PY'
import json, sys
def evals(recipe):
    lines = [json.loads(line) for line in open(f"{sys.argv[1]}/llama-110m-{recipe}.jsonl")]
    return {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}, sorted(line["tokens_per_second"] for line in lines if "loss" in line)
base, _ = evals("bf16")
for recipe in ("bf16", "fp8-delayed", "fp8-current"):
    losses, speed = evals(recipe)
    gaps = {step: round(loss - base[step], 4) for step, loss in losses.items()}
    print(f"{recipe:12} final validation loss {losses[max(losses)]:.4f}, gap to bf16 by step {gaps}, median {speed[len(speed) // 2]:.0f} tokens/s")
PY

echo "== the saved folder in transformers"
# Read to the end, so that no broken pipe stops this script.
zcat data/wordnet-glosses.txt.gz | sed -n 1,200p >"$work/sample.txt"
checkpoint=$(ls -d "$work"/llama-110m-fp8-delayed/checkpoints/checkpoint-*)
python3 scripts/check_folder.py "$bin/ottava" "$checkpoint" "$work/sample.txt" 128 cpu
python3 scripts/check_folder.py "$bin/ottava" "$checkpoint" "$work/sample.txt" 128 cuda

echo "== a Qwen3 folder in transformers"
cat >"$work/qwen3.json" <<'JSON'
{
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 4096, "hidden_size": 192, "intermediate_size": 512,
    "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu",
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": true, "attention_bias": false, "bos_token_id": 0, "eos_token_id": 0,
    "use_sliding_window": false
}
JSON
"$bin/ottava" train configs/quickstart.toml --set "model.path=$work/qwen3.json" --set "output_dir=$work/qwen3" --set max_steps=100
python3 scripts/check_folder.py "$bin/ottava" "$(ls -d "$work"/qwen3/checkpoints/checkpoint-*)" "$work/sample.txt" 128 cpu
python3 scripts/check_folder.py "$bin/ottava" "$(ls -d "$work"/qwen3/checkpoints/checkpoint-*)" "$work/sample.txt" 128 cuda
