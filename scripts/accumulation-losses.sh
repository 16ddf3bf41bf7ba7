#!/usr/bin/env bash
# What fast accumulation in dgrad and wgrad does to losses and to products: the ~110 M model of configs/llama-110m.toml with fp8-delayed on one
# GPU, with both accumulations and several seeds. Prints validation losses, their mean difference with its standard error, and, of products that
# the sentinel compares in one more run, the median and the largest error of each kind. Six minutes on one H200.
#
# usage: scripts/accumulation-losses.sh [FOLDER]    FOLDER (default target/release) holds `ottava`
# SEEDS (default "42 1 2 3 4 5") train for 300 steps, LONG_SEEDS (default 42) for 3,000. OUT (default /tmp) receives metrics, in
# accumulation-losses/.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=$(realpath "${1:-target/release}")
out=${OUT:-/tmp}/accumulation-losses
rm -rf "$out"
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
# run ACCUMULATION NAME ARGUMENT...
run() {
    local how=$1 name=$2
    shift 2
    timeout -k 5 200 "$bin/ottava" train configs/llama-110m.toml --set "output_dir=$work/run" --set "cache_dir=$work/tokens" --set save_steps=0 \
        --set 'prompts=[]' --set gradient_dtype=bfloat16 --set "dgrad_accumulation=$how" --set "wgrad_accumulation=$how" "$@" \
        >"$out/$how-$name.log" 2>&1 || {
        echo "$how-$name ended with exit code $?: $(tail -n 1 "$out/$how-$name.log")"
        failed=1
    }
    for file in metrics sentinel; do
        if [ -f "$work/run/$file.jsonl" ]; then cp "$work/run/$file.jsonl" "$out/$how-$name.$file.jsonl"; fi
    done
    rm -rf "$work/run"
}
"$bin/ottava" prepare configs/llama-110m.toml --set "cache_dir=$work/tokens" >"$out/prepare.log" 2>&1
for seed in ${SEEDS:-42 1 2 3 4 5}; do
    for how in exact fast; do run "$how" "300-$seed" --set "seed=$seed" --set eval_steps=300; done
done
for seed in ${LONG_SEEDS-42}; do
    for how in exact fast; do run "$how" "3000-$seed" --set "seed=$seed" --set max_steps=3000 --set eval_steps=1000; done
done
for how in exact fast; do run "$how" sentinel --set eval_steps=300 --set sentinel_steps=100; done
python3 - "$out" <<'PY'
import glob, json, statistics, sys
out = sys.argv[1]
for steps in ("300", "3000"):
    gaps = []
    for path in sorted(glob.glob(f"{out}/exact-{steps}-*.metrics.jsonl")):
        pair = []
        for how in ("exact", "fast"):
            lines = [json.loads(line) for line in open(path.replace("exact-", f"{how}-"))]
            pair.append([x["eval_loss"] for x in lines if "eval_loss" in x][-1])
        gaps.append(pair[1] - pair[0])
        print(f"{steps} steps, seed {path.split('-')[-1].split('.')[0]:>2}: exact {pair[0]:.4f}, fast {pair[1]:.4f}, fast minus exact {gaps[-1]:+.4f}")
    if len(gaps) > 1:
        print(f"{steps} steps: mean of {len(gaps)} seeds {statistics.mean(gaps):+.4f}, standard error {statistics.stdev(gaps) / len(gaps) ** 0.5:.4f}")
print("relative errors in the last comparison: median, largest; slope: median")
for how in ("exact", "fast"):
    last = json.loads(open(f"{out}/{how}-sentinel.sentinel.jsonl").readlines()[-1])
    for kind in ("cast", "fprop", "dgrad", "wgrad"):
        errors = [entry["error"] for entry in last[kind].values()]
        slopes = [entry["slope"] for entry in last[kind].values() if "slope" in entry]
        slope = f", {statistics.median(slopes):.5f}" if slopes else ""
        print(f"{how:6} {kind:6} {statistics.median(errors):.5f}, {max(errors):.5f}{slope}")
PY
exit "$failed"
