#!/usr/bin/env bash
# Recovery of jobs with `[recovery]` on two GPUs: as two ranks of one host, and as two hosts of one GPU with a spare host. Ranks and hosts are killed, and losses
# and weights are compared with those of an undisturbed run. Prints a PASS or FAIL line for each promise, the seconds from a kill to the next step, and the cost
# of snapshots in a step. Fails where a promise fails.
#
# usage: scripts/gpu-recovery.sh OTTAVA FOLDER    OTTAVA is the program; FOLDER receives logs, metrics and results.txt
# Needs two GPUs and Python 3; neither Rust nor a network. MEMORY (default /dev/shm) is the folder for snapshots.
# STEPS (default 120) is the length of a run, and SNAPSHOT_STEPS (default 5) the interval. LIMIT (default 230) is the seconds for all of it.
# SETTINGS are further settings of the runs, such as "model.path=configs/models/llama-110m.json data.max_length=1024".
set -uo pipefail
ottava=$(realpath "$1")
mkdir -p "$2"
out=$(realpath "$2")
cd "$(dirname "$0")/.."
deadline=$((SECONDS + ${LIMIT:-230}))
work=$(mktemp -d)
# The memory folder of a container may be too small: then a folder on disk shows all but the cost of snapshots.
[ "$(df -k --output=avail /dev/shm | tail -n 1)" -gt 2000000 ] && default=/dev/shm || default=$work
memory=$(mktemp -d "${MEMORY:-$default}/recovery-XXXXXX")
trap 'kill $(jobs -p) 2>/dev/null; wait 2>/dev/null; rm -rf "$work" "$memory"' EXIT
export NCCL_SOCKET_IFNAME=lo NCCL_NVLS_ENABLE=0 NCCL_RAS_ENABLE=0 NCCL_DEBUG=WARN OTTAVA_SECRET=drill
steps=${STEPS:-120}
# The steps after which ranks and hosts are killed.
early=$((steps / 4)) late=$((steps * 3 / 5))
failed=0
settings=()
for setting in ${SETTINGS:-}; do settings+=(--set "$setting"); done
: >"$out/results.txt"

say() { echo "$1: $2 (at ${SECONDS} s)" | tee -a "$out/results.txt"; }
verdict() {
    local what=$1
    shift
    if "$@" >>"$out/checks.log" 2>&1; then say PASS "$what"; else
        say FAIL "$what"
        failed=1
    fi
}
# arguments NAME: of a small run that two ranks divide.
arguments() {
    train=(train configs/quickstart.toml --device cuda --set "output_dir=$work/$1" --set "cache_dir=$work/tokens" --set val_set_size=50
        --set eval_steps=end --set 'prompts=[]' --set warmup_steps=10 --set lr_scheduler.type=constant --set global_batch_size=32
        --set parallel.zero=1 --set precision.deterministic=true --set "max_steps=$steps" "${settings[@]}")
    recovery=(--set recovery.snapshot_steps="${SNAPSHOT_STEPS:-5}" --set "recovery.memory_dir=$memory" --set recovery.silence_timeout=5
        --set recovery.host_timeout=60)
}
# step NAME: the last step in the metrics.
step() { tail -n 1 "$work/$1/metrics.jsonl" 2>/dev/null | sed -n 's/^{"step":\([0-9]*\).*/\1/p'; }
# trained NAME STEP: waits for a step.
trained() {
    until [ "$(step "$1")" ] && [ "$(step "$1")" -ge "$2" ]; do
        [ "$SECONDS" -lt "$deadline" ] || return 1
        sleep 0.02
    done
}
# now: seconds, with fractions.
now() { date +%s.%N; }
# after_kill NAME WHAT SINCE: prints the seconds since the kill until the metrics have a step that they did not have at the kill.
after_kill() {
    local before
    before=$(step "$1")
    if trained "$1" $((before + 1)); then
        say TIME "$2: $(python3 -c "print(f'{$(now) - $3:.2f} s')") from the kill to a new step"
    else
        say FAIL "$2: no new step"
        failed=1
    fi
}
# same NAME: whether a run has left the metrics and the weights of the undisturbed run.
same() {
    python3 - "$work/undisturbed" "$work/$1" "$steps" <<'P'
import json, sys
from pathlib import Path

one, other, steps = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]


def losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line.get("loss"), line.get("grad_norm"), line.get("eval_loss")) for line in lines]


def files(run):
    manifest = json.loads((run / "checkpoints" / f"checkpoint-{steps}" / "manifest.json").read_text())
    return {name: entry["sha256"] for name, entry in manifest["files"].items() if not name.endswith(".jsonl")}


assert losses(one) == losses(other), "losses differ"
assert files(one) == files(other), "weights or states differ"
P
}
# speed NAME: tokens per second, after the first steps. A step with a snapshot lowers the mean.
speed() {
    python3 - "$work/$1" <<'P'
import json, statistics, sys
from pathlib import Path

lines = [json.loads(line) for line in (Path(sys.argv[1]) / "metrics.jsonl").read_text().splitlines()]
steps = [line for line in lines if line.get("tokens_per_second")][5:]
tokens = [line["tokens_per_second"] for line in steps]
print(f"{statistics.median(tokens):.0f} tokens/s in the median step, {statistics.harmonic_mean(tokens):.0f} in the mean")
P
}
# host NAME HOST HOSTS PORT ARGUMENT...: becomes the keeper of a host. The spare host has the GPU of host 1, which is lost.
host() {
    local name=$1 host=$2 hosts=$3 port=$4
    shift 4
    local gpu=$host
    [ "$host" -lt 2 ] || gpu=${SPARE_GPU:-1}
    exec env NCCL_HOSTID="host-$host" CUDA_VISIBLE_DEVICES="$gpu" RANK="$host" WORLD_SIZE="$hosts" MASTER_ADDR=127.0.0.1 MASTER_PORT="$port" \
        "$ottava" "${train[@]}" "${recovery[@]}" --gpus 1 --set recovery.spares=1 "$@" >>"$out/$name-host-$host.log" 2>&1
}
# ranks_of KEEPER: the processes that it has started, in the order of their ranks.
ranks_of() { cat "/proc/$1"/task/*/children 2>/dev/null | tr ' ' '\n' | grep . | sort -n; }
keep() { cp "$work/$1/metrics.jsonl" "$out/$1-metrics.jsonl" 2>/dev/null; cp "$work/$1"/rank-*.log "$out" 2>/dev/null; }

{ nvidia-smi --query-gpu=index,name,driver_version,memory.used --format=csv && "$ottava" doctor; } >"$out/machine.txt" 2>&1
df -h "$memory" >>"$out/machine.txt"

arguments undisturbed
"$ottava" "${train[@]}" --gpus 2 >"$out/undisturbed.log" 2>&1 || { say FAIL "an undisturbed run"; exit 1; }
say COST "without snapshots: $(speed undisturbed)"
keep undisturbed

# The cost of snapshots, without losses.
arguments snapshots
"$ottava" "${train[@]}" "${recovery[@]}" --gpus 2 >"$out/snapshots.log" 2>&1
verdict "snapshots change no bit" same snapshots
say COST "with a snapshot every ${SNAPSHOT_STEPS:-5} steps: $(speed snapshots)"
keep snapshots

# Two ranks of one host.
arguments one-host
"$ottava" "${train[@]}" "${recovery[@]}" --gpus 2 >"$out/one-host.log" 2>&1 &
keeper=$!
trained one-host "$early"
kill -KILL "$(ranks_of $keeper | tail -n 1)"
after_kill one-host "rank 1 of one host" "$(now)"
trained one-host "$late"
kill -KILL "$(ranks_of $keeper | head -n 1)"
after_kill one-host "rank 0 of one host" "$(now)"
wait $keeper
verdict "one host: exit code 0" test $? -eq 0
verdict "one host: the bits of an undisturbed run" same one-host
keep one-host

# Two hosts of one GPU, and a spare host with the GPU of the host that is lost.
lose() {
    local name=$1 victim=$2 port=$3
    arguments "$name"
    local keepers=() host
    for host in 0 1 2; do
        host "$name" $host 3 "$port" &
        keepers[host]=$!
    done
    trained "$name" "$early"
    local ranks
    ranks=$(ranks_of "${keepers[victim]}")
    kill -KILL "${keepers[victim]}"
    # shellcheck disable=SC2086
    kill -KILL $ranks 2>/dev/null
    after_kill "$name" "host $victim of two" "$(now)"
    for host in 0 1 2; do
        [ "$host" -eq "$victim" ] && continue
        wait "${keepers[host]}"
        verdict "$name: exit code 0 of host $host" test $? -eq 0
    done
    verdict "$name: the bits of an undisturbed run" same "$name"
    keep "$name"
}
SPARE_GPU=1 lose host-1-lost 1 29510
SPARE_GPU=0 lose host-0-lost 0 29530

if [ "$failed" -eq 0 ]; then echo "all passed"; else echo "some failed"; fi
exit "$failed"
