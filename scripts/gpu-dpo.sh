#!/usr/bin/env bash
# Whether DPO in FP8 follows DPO in F32: scripts/check_dpo.py runs 20 steps of each recipe on the same pairs and compares losses and rewards
# with those of fp32, by step, and prints the margins of held-out pairs. Needs python3 without packages, and no network.
#
# usage: OTTAVA=BINARY scripts/gpu-dpo.sh [MODEL]
#        MODEL is a model folder with a chat template, or the GGUF file of one, such as SmolLM2-135M-Instruct.Q4_1.gguf of
#        scripts/fetch-smollm2.sh. By default, the script trains one from random weights: the 112 M-parameter Llama of
#        configs/llama-110m.toml on the bundled text, then on the bundled chats.
# DEVICE (default cuda) may be cpu. RECIPES (default "bf16 fp8-delayed fp8-current fp8-row fp8-block") may also have settings of all runs, such as
# "lora.r=16 lora.lora_alpha=32.0 learning_rate=1e-4 bf16 fp8-delayed": check_dpo.py describes them.
# STEPS (default 300) are those of each part of that training; OPTIONS are more options of its `ottava train`.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${OTTAVA:-}" ] || [ $# -gt 1 ]; then
    echo "usage: OTTAVA=BINARY scripts/gpu-dpo.sh [MODEL]" >&2
    exit 1
fi
device=${DEVICE:-cuda}
steps=${STEPS:-300}
read -ra recipes <<<"${RECIPES:-bf16 fp8-delayed fp8-current fp8-row fp8-block}"
read -ra options <<<"${OPTIONS:-}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if [ "$device" = cuda ] && command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
fi

if [ $# = 0 ]; then
    cat >"$work/template.jinja" <<'TEMPLATE'
{%- for message in messages %}{{ message['role'] + ': ' + message['content'] + eos_token + '\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}
TEMPLATE
    common=(--device "$device" --set recipe=bf16 --set "max_steps=$steps" --set "eval_steps=$steps" --set 'generation.prompts=[]' "${options[@]}")
    "$OTTAVA" train configs/llama-110m.toml "${common[@]}" --set "output_dir=$work/text"
    "$OTTAVA" train configs/chat.toml "${common[@]}" --set "output_dir=$work/chat" --set learning_rate=2e-4 \
        --set per_device_train_batch_size=16 --set "data.chat.chat_template_path=$work/template.jinja" \
        --set "model.path=$work/text/checkpoints/checkpoint-$steps"
    model=$work/chat/checkpoints/checkpoint-$steps
elif [ -f "$1" ]; then
    model=$work/model
    "$OTTAVA" convert "$1" "$model"
else
    model=$1
fi
python3 scripts/check_dpo.py "$OTTAVA" "$model" recipes "$device" "${recipes[@]}"
