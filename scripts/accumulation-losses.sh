#!/usr/bin/env bash
# What fast accumulation in dgrad, in wgrad and in both does to losses and to products, with fp8-delayed on one GPU. Trains the model of
# configs/quickstart.toml and the ~110 M model of configs/llama-110m.toml with several seeds, and prints validation losses and the mean of their
# differences from exact accumulation, with its standard error. In further runs, the sentinel compares products with BF16; the script prints the
# median and the largest error of each kind. Seven minutes on one H200.
#
# usage: scripts/accumulation-losses.sh [FOLDER]    FOLDER (default target/release) holds `ottava`
# SMALL_SEEDS (default 1 to 16) train the quick start, four at a time; SEEDS (default "42 1 2 3") train 110 M parameters for 300 steps, LONG_SEEDS
# (default 42) for 3,000. SETTINGS (default "exact dgrad wgrad both") are those of the quick start. SENTINEL_ROWS (default "32 128") are batch sizes of runs with the sentinel, in sequences of 512 tokens. Each may be
# empty. OUT (default /tmp) receives metrics, in accumulation-losses/.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=$(realpath "${1:-target/release}")
out=${OUT:-/tmp}/accumulation-losses
rm -rf "$out"
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# run CONFIG FAST NAME ARGUMENT...: FAST is exact, dgrad, wgrad or both.
run() {
    local config=$1 fast=$2 name=$3 dgrad=exact wgrad=exact
    shift 3
    case $fast in dgrad | both) dgrad=fast ;; esac
    case $fast in wgrad | both) wgrad=fast ;; esac
    timeout -k 5 200 "$bin/ottava" train "configs/$config.toml" --set "output_dir=$work/$fast-$name" --set "cache_dir=$work/tokens" \
        --set save_steps=0 --set 'prompts=[]' --set gradient_dtype=bfloat16 --set "dgrad_accumulation=$dgrad" \
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
for seed in ${SMALL_SEEDS-$(seq 16)}; do
    for fast in ${SETTINGS-exact dgrad wgrad both}; do
        while [ "$(jobs -r | wc -l)" -ge 4 ]; do wait -n; done
        run quickstart "$fast" "quickstart-$seed" --set "seed=$seed" --set eval_steps=500 &
    done
done
wait
for seed in ${SEEDS-42 1 2 3}; do
    for fast in exact both; do run llama-110m "$fast" "300-$seed" --set "seed=$seed" --set eval_steps=300; done
done
for seed in ${LONG_SEEDS-42}; do
    for fast in exact both; do run llama-110m "$fast" "3000-$seed" --set "seed=$seed" --set max_steps=3000 --set eval_steps=1000; done
done
for rows in ${SENTINEL_ROWS-32 128}; do
    for fast in exact both; do
        run llama-110m "$fast" "sentinel-$rows" --set max_steps=201 --set eval_steps=0 --set "per_device_train_batch_size=$rows" --set sentinel_steps=100
    done
done
python3 - "$out" <<'PY'
import glob, json, statistics, sys
out = sys.argv[1]

def loss(path):
    return [line["eval_loss"] for line in map(json.loads, open(path)) if "eval_loss" in line][-1]

for runs in ("quickstart", "300", "3000"):
    exact = {path.split("-")[-1].split(".")[0]: loss(path) for path in glob.glob(f"{out}/exact-{runs}-*.metrics.jsonl")}
    for fast in ("dgrad", "wgrad", "both"):
        gaps = {path.split("-")[-1].split(".")[0]: loss(path) for path in glob.glob(f"{out}/{fast}-{runs}-*.metrics.jsonl")}
        gaps = {seed: value - exact[seed] for seed, value in gaps.items() if seed in exact}
        for seed, gap in sorted(gaps.items(), key=lambda item: int(item[0])):
            print(f"{runs}, seed {seed:>2}: exact {exact[seed]:.4f}, fast {fast} {gap:+.4f}")
        if len(gaps) > 1:
            error = statistics.stdev(gaps.values()) / len(gaps) ** 0.5
            print(f"{runs}, fast {fast}: mean of {len(gaps)} seeds {statistics.mean(gaps.values()):+.4f}, standard error {error:.4f}")
for path in sorted(glob.glob(f"{out}/*.sentinel.jsonl")):
    fast, _, rows = path.split("/")[-1].split(".")[0].split("-")
    last = json.loads(open(path).readlines()[-1])
    print(f"fast: {fast}, {rows} x 512 tokens, step {last['step']}: gradient cosine {last['gradient_cosine']:.5f}, norm ratio {last['gradient_norm_ratio']:.5f}")
    for kind in ("cast", "fprop", "dgrad", "wgrad"):
        errors = [entry["error"] for entry in last[kind].values()]
        slopes = [entry["slope"] for entry in last[kind].values() if "slope" in entry]
        slope = f"; median slope {statistics.median(slopes):.5f}" if slopes else ""
        print(f"  relative error of {kind}: median {statistics.median(errors):.5f}, largest {max(errors):.5f}{slope}")
PY
[ ! -e "$out/failed" ]
