#!/usr/bin/env bash
# What fast accumulation in dgrad and wgrad does to losses and to products, with fp8-delayed on one GPU. Trains the model of
# configs/quickstart.toml and the ~110 M model of configs/llama-110m.toml with both accumulations and several seeds, and prints validation losses
# and the mean of their differences with its standard error. In two more runs, the sentinel compares products with BF16: prints the median and
# the largest error of each kind. Seven minutes on one H200.
#
# usage: scripts/accumulation-losses.sh [FOLDER]    FOLDER (default target/release) holds `ottava`
# SMALL_SEEDS (default 1 to 24) train the quick start, four at a time; SEEDS (default "42 1 2 3") train 110 M parameters for 300 steps, LONG_SEEDS
# (default 42) for 3,000; SENTINEL_ROWS (default "32 128") are the rows of 512 tokens in a product that the sentinel compares. Each may be
# empty. OUT (default /tmp) receives metrics, in accumulation-losses/.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=$(realpath "${1:-target/release}")
out=${OUT:-/tmp}/accumulation-losses
rm -rf "$out"
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# run CONFIG ACCUMULATION NAME ARGUMENT...
run() {
    local config=$1 how=$2 name=$3
    shift 3
    timeout -k 5 200 "$bin/ottava" train "configs/$config.toml" --set "output_dir=$work/$how-$name" --set "cache_dir=$work/tokens" \
        --set save_steps=0 --set 'prompts=[]' --set gradient_dtype=bfloat16 --set "dgrad_accumulation=$how" \
        --set "wgrad_accumulation=$how" "$@" >"$out/$how-$name.log" 2>&1 || {
        echo "$how-$name ended with exit code $?: $(tail -n 1 "$out/$how-$name.log")"
        touch "$out/failed"
    }
    for file in metrics sentinel; do
        if [ -f "$work/$how-$name/$file.jsonl" ]; then cp "$work/$how-$name/$file.jsonl" "$out/$how-$name.$file.jsonl"; fi
    done
    rm -rf "${work:?}/$how-$name"
}
for config in quickstart llama-110m; do
    "$bin/ottava" prepare "configs/$config.toml" --set "cache_dir=$work/tokens" >"$out/prepare.log" 2>&1
done
for seed in ${SMALL_SEEDS-$(seq 24)}; do
    for how in exact fast; do
        while [ "$(jobs -r | wc -l)" -ge 4 ]; do wait -n; done
        run quickstart "$how" "quickstart-$seed" --set "seed=$seed" --set eval_steps=500 &
    done
done
wait
for seed in ${SEEDS-42 1 2 3}; do
    for how in exact fast; do run llama-110m "$how" "300-$seed" --set "seed=$seed" --set eval_steps=300; done
done
for seed in ${LONG_SEEDS-42}; do
    for how in exact fast; do run llama-110m "$how" "3000-$seed" --set "seed=$seed" --set max_steps=3000 --set eval_steps=1000; done
done
for rows in ${SENTINEL_ROWS-32 128}; do
    for how in exact fast; do
        run llama-110m "$how" "sentinel-$rows" --set max_steps=101 --set eval_steps=0 --set "per_device_train_batch_size=$rows" --set sentinel_steps=100
    done
done
python3 - "$out" <<'PY'
import glob, json, statistics, sys
out = sys.argv[1]
for steps in ("quickstart", "300", "3000"):
    gaps = []
    for path in sorted(glob.glob(f"{out}/exact-{steps}-*.metrics.jsonl")):
        pair = []
        for how in ("exact", "fast"):
            lines = [json.loads(line) for line in open(path.replace("exact-", f"{how}-"))]
            pair.append([x["eval_loss"] for x in lines if "eval_loss" in x][-1])
        gaps.append(pair[1] - pair[0])
        print(f"{steps}, seed {path.split('-')[-1].split('.')[0]:>2}: exact {pair[0]:.4f}, fast {pair[1]:.4f}, fast minus exact {gaps[-1]:+.4f}")
    if len(gaps) > 1:
        print(f"{steps}: mean of {len(gaps)} seeds {statistics.mean(gaps):+.4f}, standard error {statistics.stdev(gaps) / len(gaps) ** 0.5:.4f}")
for path in sorted(glob.glob(f"{out}/*.sentinel.jsonl")):
    how, _, rows = path.split("/")[-1].split(".")[0].split("-")
    last = json.loads(open(path).readlines()[-1])
    print(f"{how}, products of {rows} x 512 tokens, last comparison: cosine of all gradients {last['gradient_cosine']:.5f}, ratio of their norms {last['gradient_norm_ratio']:.5f}")
    for kind in ("cast", "fprop", "dgrad", "wgrad"):
        errors = [entry["error"] for entry in last[kind].values()]
        slopes = [entry["slope"] for entry in last[kind].values() if "slope" in entry]
        slope = f"; median slope {statistics.median(slopes):.5f}" if slopes else ""
        print(f"  relative error of {kind}: median {statistics.median(errors):.5f}, largest {max(errors):.5f}{slope}")
PY
[ ! -e "$out/failed" ]
