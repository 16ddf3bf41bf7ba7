#!/usr/bin/env bash
# What fast accumulation in dgrad, in wgrad and in both does to losses and to products, with fp8-delayed on one GPU. Trains the model of
# configs/quickstart.toml and the ~110 M model of configs/llama-110m.toml with several seeds, and prints validation losses and the mean of their
# differences from exact accumulation, with its standard error. In further runs, the sentinel compares products with BF16; the script prints the
# median and the largest error of each kind. Seven minutes on one H200.
#
# usage: scripts/accumulation-losses.sh [FOLDER]    FOLDER (default target/release) holds `ottava`
# Seeds, each list of which may be empty:
#   SMALL_SEEDS (default 1 to 16)     the quick start, four runs at a time
#   WIDE_SEEDS (default none)         likewise, with MLPs as wide as those of Llama-2-7B, whose longest dgrad sums have 22,016 products
#   SEEDS (default "42 1 2 3")        110 M parameters for 300 steps
#   LONG_SEEDS (default 42)           the same for 3,000 steps
# SETTINGS (default "exact dgrad wgrad both"), SMALL_STEPS (default 500, with five evaluations) and LEARNING_RATE (default 3e-3) apply only to
# the quick start and the wide model. SENTINEL_ROWS (default "32 128") are batch sizes of runs of 110 M parameters with the sentinel, in sequences
# of 512 tokens; with WIDE_SEEDS, the wide model has such runs of 128 sequences of 128 tokens.
# OUT (default /tmp) receives metrics, in accumulation-losses/.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=$(realpath "${1:-target/release}")
out=${OUT:-/tmp}/accumulation-losses
rm -rf "$out"
mkdir -p "$out"
small_steps=${SMALL_STEPS:-500}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# run CONFIG FAST NAME ARGUMENT...: FAST is exact, dgrad, wgrad or both.
run() {
    local config=$1 fast=$2 name=$3 dgrad=exact wgrad=exact
    shift 3
    case $fast in dgrad | both) dgrad=fast ;; esac
    case $fast in wgrad | both) wgrad=fast ;; esac
    timeout -k 5 200 "$bin/ottava" train "configs/$config.toml" --set "output_dir=$work/$fast-$name" --set "cache_dir=$work/tokens" \
        --set save_steps=end --set 'prompts=[]' --set gradient_dtype=bfloat16 --set "dgrad_accumulation=$dgrad" \
        --set "wgrad_accumulation=$wgrad" "$@" >"$out/$fast-$name.log" 2>&1 || {
        echo "$fast-$name ended with exit code $?: $(tail -n 1 "$out/$fast-$name.log")"
        touch "$out/failed"
    }
    for file in metrics sentinel; do
        if [ -f "$work/$fast-$name/$file.jsonl" ]; then cp "$work/$fast-$name/$file.jsonl" "$out/$fast-$name.$file.jsonl"; fi
    done
    rm -rf "${work:?}/$fast-$name"
}
for config in quickstart llama-110m; do
    "$bin/ottava" prepare "configs/$config.toml" --set "cache_dir=$work/tokens" >"$out/prepare.log" 2>&1
done
# small NAME SEEDS ARGUMENT...
small() {
    local name=$1 seeds=$2
    shift 2
    for seed in $seeds; do
        for fast in ${SETTINGS-exact dgrad wgrad both}; do
            while [ "$(jobs -r | wc -l)" -ge 4 ]; do wait -n; done
            run quickstart "$fast" "$name-$seed" --set "seed=$seed" --set "max_steps=$small_steps" --set "eval_steps=$((small_steps / 5))" \
                --set "learning_rate=${LEARNING_RATE:-3e-3}" "$@" &
        done
    done
    wait
}
sed 's/"intermediate_size": 512/"intermediate_size": 11008/' configs/models/quickstart.json >"$work/wide.json"
grep -q 11008 "$work/wide.json" || { echo "accumulation-losses.sh: configs/models/quickstart.json has no intermediate size of 512" >&2 && exit 1; }
small quickstart "${SMALL_SEEDS-$(seq 16)}"
small wide "${WIDE_SEEDS-}" --set "model.path=$work/wide.json"
for seed in ${SEEDS-42 1 2 3}; do
    for fast in exact both; do run llama-110m "$fast" "300-$seed" --set "seed=$seed" --set eval_steps=300; done
done
for seed in ${LONG_SEEDS-42}; do
    for fast in exact both; do run llama-110m "$fast" "3000-$seed" --set "seed=$seed" --set max_steps=3000 --set eval_steps=1000; done
done
for rows in ${SENTINEL_ROWS-32 128}; do
    for fast in exact both; do
        run llama-110m "$fast" "sentinel-${rows}x512" --set max_steps=201 --set eval_steps=end --set "per_device_train_batch_size=$rows" --set sentinel_steps=100
    done
done
if [ -n "${WIDE_SEEDS-}" ]; then
    for fast in exact both; do
        run quickstart "$fast" sentinel-wide --set "model.path=$work/wide.json" --set max_steps=201 --set eval_steps=end --set sentinel_steps=100 \
            --set per_device_train_batch_size=128
    done
fi
python3 - "$out" <<'PY'
import glob, json, statistics, sys
out = sys.argv[1]

def losses(path):
    return {line["step"]: line["eval_loss"] for line in map(json.loads, open(path)) if "eval_loss" in line}

def by_seed(setting, runs):
    return {int(path.split("-")[-1].split(".")[0]): losses(path) for path in glob.glob(f"{out}/{setting}-{runs}-*.metrics.jsonl")}

for runs in ("quickstart", "wide", "300", "3000"):
    exact = by_seed("exact", runs)
    for setting in ("dgrad", "wgrad", "both"):
        fast = by_seed(setting, runs)
        for step in sorted({step for of_seed in fast.values() for step in of_seed}):
            gaps = {seed: fast[seed][step] - exact[seed][step] for seed in sorted(fast.keys() & exact.keys())}
            print(f"{runs}, step {step}, fast {setting}:", ", ".join(f"seed {seed} {gap:+.4f}" for seed, gap in gaps.items()))
            if len(gaps) > 1:
                error = statistics.stdev(gaps.values()) / len(gaps) ** 0.5
                print(f"{runs}, step {step}, fast {setting}: mean of {len(gaps)} seeds {statistics.mean(gaps.values()):+.4f}, standard error {error:.4f}")
for path in sorted(glob.glob(f"{out}/*.sentinel.jsonl")):
    fast, _, rows = path.split("/")[-1].split(".")[0].split("-")
    last = json.loads(open(path).readlines()[-1])
    print(f"fast: {fast}, {rows}, step {last['step']}: gradient cosine {last['gradient_cosine']:.5f}, norm ratio {last['gradient_norm_ratio']:.5f}")
    for kind in ("cast", "fprop", "dgrad", "wgrad"):
        errors = [entry["error"] for entry in last[kind].values()]
        slopes = [entry["slope"] for entry in last[kind].values() if "slope" in entry]
        slope = f"; median slope {statistics.median(slopes):.5f}" if slopes else ""
        print(f"  relative error of {kind}: median {statistics.median(errors):.5f}, largest {max(errors):.5f}{slope}")
PY
[ ! -e "$out/failed" ]
