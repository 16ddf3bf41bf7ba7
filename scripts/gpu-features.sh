#!/usr/bin/env bash
# Features on one GPU and on two: short runs of small models with random weights. Each line has the validation loss after the last step, or the mean of minus
# the log-probabilities of the first draws, and for runs on two GPUs how far it is from the run on one GPU. Fails where a run fails, or where two GPUs are more
# than 1 % from one; 3 % with experts, whose young router another order of sums moves by up to 2 %. About 3 s per run.
#
# usage: scripts/gpu-features.sh OTTAVA [FEATURE]...    OTTAVA is the program; by default all features
# STEPS (default 30) is the length of a run. DEVICE (default cuda) may be cpu, with ranks on the CPU. OUT receives logs and metrics.
set -uo pipefail
ottava=$(realpath "$1") steps=${STEPS:-30} device=${DEVICE:-cuda}
shift
wanted=" $* "
cd "$(dirname "$0")/.."
out=${OUT:-$(mktemp -d)}/features
rm -rf "$out" && mkdir -p "$out"
export NCCL_NVLS_ENABLE=0 NCCL_SOCKET_IFNAME=lo NCCL_RAS_ENABLE=0
python3 - "$out" <<'PY'
import json, sys
folder = sys.argv[1]
latent = dict(
    architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=3,
    num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=256, first_k_dense_replace=1, moe_intermediate_size=128, n_routed_experts=8,
    n_shared_experts=1, num_experts_per_tok=2, q_lora_rank=None, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32,
    rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=False, norm_topk_prob=False, scoring_func="softmax", topk_method="greedy", n_group=1,
    topk_group=1, routed_scaling_factor=1.0, bos_token_id=0, eos_token_id=0)
json.dump(latent, open(f"{folder}/latent.json", "w"))
chat = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
open(f"{folder}/chat.jinja", "w").write(chat)
with open(f"{folder}/prompts.jsonl", "w") as file:
    for i in range(512):
        print(json.dumps({"prompt": f"The word number {i} means", "answer": "a"}), file=file)
PY
failed=0
# run FEATURE NAME ARGUMENT...: a run; its metrics are FEATURE-NAME.jsonl
run() {
    local feature=$1 name=$2
    shift 2
    [ "$wanted" = "  " ] || [[ $wanted == *" $feature "* ]] || return 0
    timeout -k 5 120 "$ottava" train "$@" --device "$device" --set "output_dir=$out/run" --set "cache_dir=$out/tokens" --set "max_steps=$steps" \
        --set warmup_steps=5 --set lr_scheduler.type=constant --set eval_steps=end --set save_steps=end --set logging_steps=10 >"$out/$feature-$name.log" 2>&1 || {
        echo "$feature, $name: exit code $?: $(grep -a error "$out/$feature-$name.log" | tail -n 1)"
        failed=1
    }
    mv "$out/run/metrics.jsonl" "$out/$feature-$name.jsonl" 2>/dev/null
    [ "$name" != kept ] || { rm -rf "$out/base" && mv "$out/run" "$out/base"; }
    rm -rf "$out/run"
    [ ! -f "$out/$feature-$name.jsonl" ] || python3 - "$out" "$feature" "$name" <<'PY' || failed=1
import json, os, sys
folder, feature, name = sys.argv[1:]
def last(run):
    path = f"{folder}/{feature}-{run}.jsonl"
    if not os.path.exists(path):
        return None
    lines = [json.loads(line) for line in open(path)]
    key = "entropy" if feature.startswith("rollouts") else "eval_loss"
    values = [line[key] for line in lines if line.get(key) is not None]
    return values[0] if feature.startswith("rollouts") else values[-1]
value, one = last(name), last("one")
words, far = f"{feature:<28} {name:<16} {value:.5f}", 0.0
if one is not None and name != "one":
    far = abs(value - one) / max(abs(one), 1e-3)
    words += f"  {100 * far:.3f} % from one"
print(words, flush=True)
sys.exit(far > (0.03 if feature.startswith(("experts", "latent")) else 0.01))
PY
}
[ "$device" = cpu ] && two=(--ranks 2) || two=(--gpus 2)
small=(configs/quickstart.toml --set global_batch_size=32 --set per_device_train_batch_size=16 --set 'prompts=[]' --set val_set_size=100)
experts=("${small[@]}" --set model.path=configs/models/quickstart-moe.json)
latent=("${small[@]}" --set "model.path=$out/latent.json")
for recipe in bf16 fp8-row; do
    run "experts-$recipe" one "${experts[@]}" --set recipe=$recipe
    # Half micro-batches change only the order of sums: how far does that move the loss of a young router?
    run "experts-$recipe" half "${experts[@]}" --set recipe=$recipe --set per_device_train_batch_size=8
    run "experts-$recipe" tensor "${experts[@]}" --set recipe=$recipe "${two[@]}" --set parallel.tensor=2
    run "experts-$recipe" expert "${experts[@]}" --set recipe=$recipe "${two[@]}" --set parallel.expert=2
    run "latent-$recipe" one "${latent[@]}" --set recipe=$recipe
    run "latent-$recipe" half "${latent[@]}" --set recipe=$recipe --set per_device_train_batch_size=8
    run "latent-$recipe" tensor "${latent[@]}" --set recipe=$recipe "${two[@]}" --set parallel.tensor=2
    run "latent-$recipe" expert "${latent[@]}" --set recipe=$recipe "${two[@]}" --set parallel.expert=2
done
muon=("${small[@]}" --set recipe=bf16 --set optimizer.type=muon)
run muon one "${muon[@]}"
run muon tensor "${muon[@]}" "${two[@]}" --set parallel.tensor=2
run muon zero "${muon[@]}" "${two[@]}" --set parallel.zero=2

pairs=(configs/dpo.toml --set model.path=configs/models/quickstart.json --set model.init=random --set model.tokenizer=data/tokenizer --set "data.chat.chat_template_path=$out/chat.jinja"
    --set lora.r=0 --set recipe=bf16 --set global_batch_size=16 --set per_device_train_batch_size=8 --set 'prompts=[]')
run preferences one "${pairs[@]}"
run preferences tensor "${pairs[@]}" "${two[@]}" --set parallel.tensor=2
run preferences context "${pairs[@]}" "${two[@]}" --set parallel.context=2

# Adapters on a model that a first run has trained.
run base kept "${small[@]}" --set recipe=bf16
adapters=("${small[@]}" --set model.init=pretrained --set "model.path=$out/base" --set recipe=fp8-row --set lora.r=8 --set optimizer.learning_rate=1e-3)
run adapters one "${adapters[@]}"
run adapters tensor "${adapters[@]}" "${two[@]}" --set parallel.tensor=2
run modules one "${adapters[@]}" --set 'lora.modules_to_save=["lm_head","embed_tokens"]'
run modules zero "${adapters[@]}" --set 'lora.modules_to_save=["lm_head","embed_tokens"]' "${two[@]}" --set parallel.zero=2
run neftune one "${adapters[@]}" --set neftune_noise_alpha=5

# The mean of minus the log-probabilities of the tokens of the first generation.
rollouts=(--set "train_files=[\"$out/prompts.jsonl\"]" --set data.records.formatting=prompts --set max_length=64 --set reinforcement.num_generations=4 --set reinforcement.max_completion_length=24 --set 'reinforcement.rewards=[{type="length",target=12,distance=24}]' --set val_set_size=16)
# These settings replace the setting of texts in the file of the quick start.
grep -v text_documents configs/quickstart.toml >"$out/rollouts.toml"
small[0]=$out/rollouts.toml experts[0]=$out/rollouts.toml
run rollouts one "${small[@]}" "${rollouts[@]}" --set recipe=bf16
run rollouts tensor "${small[@]}" "${rollouts[@]}" --set recipe=bf16 "${two[@]}" --set parallel.tensor=2
run rollouts-experts one "${experts[@]}" "${rollouts[@]}" --set recipe=bf16
run rollouts-experts expert "${experts[@]}" "${rollouts[@]}" --set recipe=bf16 "${two[@]}" --set parallel.expert=2
run rollouts-experts tensor "${experts[@]}" "${rollouts[@]}" --set recipe=bf16 "${two[@]}" --set parallel.tensor=2
exit $failed
