#!/usr/bin/env bash
# The GPU suite: parity of all ops, and the promises that concern a GPU, in several processes beside each other, since most of their time is
# spent on the CPU. Fails where there is no GPU.
#
# usage: scripts/gpu-tests.sh [FOLDER [FILTER...]]    FOLDER holds `tensor-tests` and `promises` built elsewhere; if it is missing or empty,
#        they are built here. Runs tests whose names contain a FILTER, by default all.
# OUT, if set, keeps the logs, also of a run that is cut short.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=${1:-}
shift $(($# > 0))
logs=${OUT:-$(mktemp -d)}
[ -n "${OUT:-}" ] || trap 'rm -rf "$logs"' EXIT
if [ -z "$bin" ]; then
    bin=$logs/bin
    mkdir -p "$bin"
    for test in ottava-tensor:ottava_tensor:tensor-tests:--lib ottava-train:promises:promises:--test=promises; do
        IFS=: read -r package name copy which <<<"$test"
        cp "$(cargo test --release -p "$package" "$which" --no-run 2>&1 | tee /dev/stderr | grep -o "target/release/deps/$name-[0-9a-f]*" | head -n 1)" "$bin/$copy"
    done
fi
# New memory is filled with NaN, so that a test notices when something reads what nothing has written.
export OTTAVA_REQUIRE_GPU=1 OTTAVA_POISON=1
# The modules of promises that run on a GPU. A test of this project compares this list with the sources.
gpu_promises=(
    folders::folder_codes folders::loading
    inference::adapters inference::ahead inference::embeddings inference::engine inference::invariant inference::packed inference::scoring
    models::experts models::families models::family_referee models::referee
    objectives::encoders objectives::log_probabilities objectives::weights_of_draws
    peft::experts
    peft::lora
    precision::calibrate precision::cast_log precision::casts precision::convergence precision::fp16 precision::golden
    precision::high_precision precision::products precision::smooth
    runs::resume
    sentinel::devices
    step::accumulation step::determinism step::documents step::memory step::model_gradients step::muon step::recompute step::steps
)
processes=()
# Runs the tests whose names stand in the input, in several processes. Without names, a test binary would run all its tests, so xargs starts none.
run() {
    local names part parts=$(($(nproc) < 12 ? 2 : $(nproc) / 4))
    names=$(cat)
    for ((part = 0; part < parts; part++)); do
        awk "NR % $parts == $part" <<<"$names" | xargs --no-run-if-empty "$bin/$1" --test-threads=1 --exact >"$logs/$1-$part" 2>&1 &
        processes+=($!)
    done
}
list() { "$bin/$1" --list --format terse "${@:2}" | sed -n 's/: test$//p'; }
# Kernels for other GPUs are compiled in CI.
tensor_tests=$(list tensor-tests --skip kernels_compile_wherever "$@")
promises=$(list promises "$@")
promises=$(grep -E "^($(IFS='|' && echo "${gpu_promises[*]}"))::" <<<"$promises" || true)
[ -n "$tensor_tests$promises" ] || { echo "no test has a name with ${*:-any letter}" >&2; exit 1; }
run tensor-tests <<<"$tensor_tests"
run promises <<<"$promises"
failed=0
for process in "${processes[@]}"; do wait "$process" || failed=1; done
for log in "$logs"/tensor-tests-* "$logs"/promises-*; do
    echo "== ${log##*/}"
    grep -v ' \.\.\. ok$' "$log" || true
done
exit "$failed"
