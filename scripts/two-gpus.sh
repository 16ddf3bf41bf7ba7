#!/usr/bin/env bash
# What two GPUs of one machine must show, in less than four minutes: collectives against the CPU's, training beside one GPU, by --gpus and
# by torchrun, killed ranks, a signal, and the speed of a benchmark. Prints a PASS, FAIL or SKIP line for each, and fails where one fails.
#
# usage: scripts/two-gpus.sh [FOLDER]    FOLDER (default .carry) holds `ottava` and `tensor-tests` built elsewhere
# OUT (default /tmp) receives logs and metrics, in two-gpus/. LIMIT (default 235) is the seconds for all of it.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=$(realpath "${1:-.carry}")
out=${OUT:-/tmp}/two-gpus
deadline=$((SECONDS + ${LIMIT:-235}))
rm -rf "$out"
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# One host, and no multicast, which a shared machine may lack.
export NCCL_SOCKET_IFNAME=lo NCCL_NVLS_ENABLE=0 NCCL_RAS_ENABLE=0 NCCL_DEBUG=WARN
one=(--device cuda)
two=(--device cuda --gpus 2)
steps=30
failed=0

say() { echo "$1: $2 (at ${SECONDS} s)" | tee -a "$out/results.txt"; }
# verdict WHAT COMMAND...: PASS where the command succeeds.
verdict() {
    local what=$1
    shift
    if "$@" >>"$out/checks.log" 2>&1; then
        say PASS "$what"
    else
        say FAIL "$what"
        failed=1
    fi
}
# limit SECONDS: the seconds that a part may take; fails where too few are left.
limit() {
    local rest=$((deadline - SECONDS - 4))
    [ "$rest" -gt 10 ] || return 1
    echo $((rest < $1 ? rest : $1))
}
# arguments NAME: of a small run.
arguments() {
    train=(train configs/quickstart.toml --set "output_dir=$work/$1" --set "cache_dir=$work/tokens" --set val_set_size=50
        --set eval_steps=0 --set 'prompts=[]' --set warmup_steps=10 --set global_batch_size=32)
}
# finish NAME: keeps what a run has written.
finish() {
    for file in metrics.jsonl rank-1.log; do
        [ ! -e "$work/$1/$file" ] || cp "$work/$1/$file" "$out/$1-$file"
    done
}
# run NAME SECONDS COMMAND...: a part that must succeed in time.
run() {
    local name=$1 seconds
    if ! seconds=$(limit "$2"); then
        say SKIP "$name: no time is left"
        return 1
    fi
    shift 2
    timeout -k 5 "$seconds" "$@" >"$out/$name.log" 2>&1
    local code=$?
    finish "$name"
    verdict "$name ends with exit code 0, it was $code" [ "$code" = 0 ]
    return "$code"
}
# losses A B: those of two runs side by side; fails where they differ by more than 2 %.
losses() {
    python3 - "$out/$1-metrics.jsonl" "$out/$2-metrics.jsonl" <<'PY'
import json, sys
a, b = ([line["loss"] for line in map(json.loads, open(path)) if "loss" in line] for path in sys.argv[1:])
worst = max(abs(x - y) / x for x, y in zip(a, b))
print(f"{'step':>4} {'first':>9} {'second':>9}")
for step in sorted({*range(0, len(a), 5), len(a) - 1}):
    print(f"{step + 1:>4} {a[step]:9.5f} {b[step]:9.5f}")
print(f"{len(a)} and {len(b)} steps; they differ by {worst:.1e} at most" + (", the bits are equal" if a == b else ""))
sys.exit(not (len(a) == len(b) > 0 and worst < 0.02))
PY
}
# compare WHAT A B
compare() {
    losses "$2" "$3" 2>&1 | tee "$out/$2-$3.txt"
    verdict "$1" losses "$2" "$3"
}
# lives PID
lives() { [ -e "/proc/$1/stat" ] && ! grep -q ') Z ' "/proc/$1/stat"; }
# drill NAME SIGNAL RANK CODE WORDS: a signal to a rank of a run in progress. The other rank must end in 10 s, with the code and words.
drill() {
    local name=$1 signal=$2 rank=$3 code=$4 words=$5 seconds got log
    if ! seconds=$(limit 50); then
        say SKIP "$name: no time is left"
        return
    fi
    arguments "$name"
    "$bin/ottava" "${train[@]}" "${two[@]}" --set max_steps=1000000 >"$out/$name.log" 2>&1 &
    local first=$! second='' end=$((SECONDS + seconds - 12))
    # Past the capture.
    while lives "$first" && [ "$SECONDS" -lt "$end" ] && [ "$(cat "$work/$name/metrics.jsonl" 2>/dev/null | wc -l)" -lt 40 ]; do
        sleep 0.1
    done
    second=$(cat "/proc/$first/task/$first/children" 2>/dev/null)
    second=${second%% *}
    verdict "$name: trains 40 steps" [ "$(cat "$work/$name/metrics.jsonl" 2>/dev/null | wc -l)" -ge 40 ]
    local pids=("$first" "${second:-$first}")
    local victim=${pids[$rank]} survivor=${pids[$((1 - rank))]} begin=${EPOCHREALTIME/./}
    kill "-$signal" "$victim"
    while { lives "$survivor" || lives "$victim"; } && [ $((${EPOCHREALTIME/./} - begin)) -lt 10000000 ]; do
        sleep 0.05
    done
    say NOTE "$name: ended after $(((${EPOCHREALTIME/./} - begin) / 1000)) ms"
    verdict "$name: no process is left after 10 s" eval '! lives '"$survivor"' && ! lives '"$victim"
    kill -KILL "$first" "${second:-$first}" 2>/dev/null
    wait "$first"
    got=$?
    finish "$name"
    log=$out/$name.log
    [ "$survivor" = "$first" ] || log=$out/$name-rank-1.log
    [ "$survivor" != "$first" ] || verdict "$name: exit code $code, it was $got" [ "$got" = "$code" ]
    verdict "$name: says \"$words\"" grep -q "$words" "$log"
}

{ nvidia-smi --query-gpu=index,name,driver_version,memory.used --format=csv && "$bin/ottava" doctor; } >"$out/machine.txt" 2>&1

run collectives 90 env OTTAVA_REQUIRE_GPUS=2 "$bin/tensor-tests" --exact comm::nccl::tests::collectives_of_two_gpus_equal_those_of_the_cpu --nocapture
grep -h "NCCL holds" "$out/collectives.log"

arguments one-gpu
run one-gpu 60 "$bin/ottava" "${train[@]}" "${one[@]}" --set max_steps=$steps
arguments two-gpus
run two-gpus 60 "$bin/ottava" "${train[@]}" "${two[@]}" --set max_steps=$steps
compare "two GPUs train as one does" one-gpu two-gpus
verdict "steps are captured as CUDA graphs" eval '! grep -q "not captured" "$out/two-gpus.log" "$out/two-gpus-rank-1.log"'

drill killed-rank-1 KILL 1 5 "error: rank 1 (pid"
drill signal-to-rank-1 TERM 1 75 "stopped by a signal after step"
verdict "a checkpoint was saved" eval 'ls -d "$work"/signal-to-rank-1/checkpoints/checkpoint-*'

torchrun=(torchrun)
command -v torchrun >/dev/null || torchrun=(python3 -m torch.distributed.run)
if "${torchrun[@]}" --help >/dev/null 2>&1; then
    arguments torchrun
    run torchrun 60 "${torchrun[@]}" --no-python --nproc-per-node 2 --master-port 29617 "$bin/ottava" "${train[@]}" "${one[@]}" --set max_steps=$steps
    compare "torchrun's ranks train as those of --gpus do" two-gpus torchrun
else
    say SKIP "torchrun: PyTorch is not installed"
fi

drill killed-rank-0 KILL 0 137 "error: rank 0 (pid"
bench=(bench train --model qwen2.5-0.5b --seq-len 1024 --micro-batch 8 --steps 5 --compare fp8-delayed)
run bench 40 "$bin/ottava" "${bench[@]}" "${two[@]}" && sed -n 1,6p "$out/bench.log"

say DONE "$(grep -c ^PASS "$out/results.txt") passed, $(grep -c ^FAIL "$out/results.txt") failed, $(grep -c ^SKIP "$out/results.txt") skipped"
exit "$failed"
