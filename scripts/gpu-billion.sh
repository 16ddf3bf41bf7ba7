#!/usr/bin/env bash
# Trains the Llama of 1.07 billion parameters of configs/pretraining-1b.toml from random weights with each recipe and seed, and prints for each run the last
# validation losses by source, the score of the task of held-out text, the losses minus the losses of bf16 of the same seed, tokens/s, MFU and joules
# per million tokens. Needs neither Rust nor a network.
#
# usage: scripts/gpu-billion.sh OTTAVA FOLDER [OPTION OF `ottava train`]...     FOLDER receives metrics, logs and summary.tsv
# The option `--gpus N` divides each step among N GPUs; J/Mtoken then counts the GPU of rank 0 alone.
# CORPUS (default data/corpus) holds the corpus of scripts/corpus. PIECES, if set, is the folder of its packed pieces, which are unpacked to CORPUS first.
# RECIPES (default "bf16 fp8-row fp8-block fp8-delayed fp8-current"; bf16 is the base of the gaps), SEEDS (default "42"), STEPS (default 1526) and
# EVAL_STEPS (default a quarter of STEPS) select the runs. SETTINGS are more settings of every run, such as "per_device_train_batch_size=8 save_total_limit=2".
# LIMIT is the number of seconds after which the run in progress saves a checkpoint and the script ends with exit code 75; a call with the same WORK
# (default a new folder, deleted at the end) continues there. Runs that are done are not repeated. Fails where a run fails.
set -uo pipefail
if [ $# -lt 2 ]; then
    echo "usage: scripts/gpu-billion.sh OTTAVA FOLDER [OPTION OF ottava train]..." >&2
    exit 1
fi
ottava=$(realpath "$1")
mkdir -p "$2"
out=$(realpath "$2")
shift 2
root=$(realpath "$(dirname "$0")/..")
corpus=$(realpath -m "${CORPUS:-$root/data/corpus}")
pieces=${PIECES:+$(realpath "$PIECES")}
steps=${STEPS:-1526}
eval_steps=${EVAL_STEPS:-$(((steps + 3) / 4))}
read -ra recipes <<<"${RECIPES:-bf16 fp8-row fp8-block fp8-delayed fp8-current}"
read -ra seeds <<<"${SEEDS:-42}"
read -ra settings <<<"${SETTINGS:-}"
if [ -n "${WORK:-}" ]; then
    mkdir -p "$WORK"
    work=$(realpath "$WORK")
else
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi
cd "$root"
if [ -n "$pieces" ] && [ ! -d "$corpus/train" ]; then
    python3 scripts/corpus/unpack.py "$pieces" "$corpus" || exit 1
fi
if [ ! -d "$corpus/train" ]; then
    echo "$corpus/train is missing; scripts/corpus/README.md says how to make it, and PIECES names the folder of a packed corpus" >&2
    exit 1
fi
if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
fi
options=(--set "cache_dir=$work/tokens")
for setting in "${settings[@]}"; do
    options+=(--set "$setting")
done
config=$work/pretraining-1b.toml
sed "s|data/corpus/|$corpus/|" configs/pretraining-1b.toml >"$config"
"$ottava" prepare "$config" "${options[@]}" >"$out/prepare.log" 2>&1 || {
    tail -n 3 "$out/prepare.log"
    exit 1
}
tail -n 1 "$out/prepare.log"

failed=0 stopped=0
for seed in "${seeds[@]}"; do
    for recipe in "${recipes[@]}"; do
        name=$recipe-$seed
        if [ "$stopped" = 1 ] || [ -f "$work/$name.done" ]; then
            continue
        fi
        start=$SECONDS
        limit=()
        [ -n "${LIMIT:-}" ] && limit=(timeout --foreground --signal=TERM $((LIMIT > SECONDS ? LIMIT - SECONDS : 1)))
        "${limit[@]}" "$ottava" train "$config" --set "output_dir=$work/$name" --set "recipe=$recipe" --set "seed=$seed" --set "max_steps=$steps" \
            --set "eval_steps=$eval_steps" --set save_steps=end --set save_only_model=true --resume=auto "${options[@]}" "$@" >>"$out/$name.log" 2>&1
        code=$?
        [ -f "$work/$name/metrics.jsonl" ] && cp "$work/$name/metrics.jsonl" "$out/$name.jsonl"
        # 124 is the code of `timeout`; the program itself ends with 75 after it has saved.
        if [ "$code" = 75 ] || { [ "$code" = 124 ] && [ -n "${LIMIT:-}" ]; }; then
            stopped=1
            echo "== $name stopped after $((SECONDS - start)) s: $(tail -n 1 "$out/$name.log")"
            continue
        fi
        if [ "$code" = 0 ]; then
            touch "$work/$name.done"
        else
            echo "$name ended with exit code $code: $(tail -n 1 "$out/$name.log")"
            failed=1
        fi
        rm -rf "${work:?}/$name"
        echo "== $name took $((SECONDS - start)) s"
    done
done
python3 - "$out" "${recipes[*]}" "${seeds[*]}" <<'PY'
import json, os, statistics, sys
out, recipes, seeds = sys.argv[1], sys.argv[2].split(), sys.argv[3].split()
def read(name):
    path = f"{out}/{name}.jsonl"
    lines = [json.loads(line) for line in open(path)] if os.path.exists(path) else []
    last = {}
    for line in lines:
        last.update({key: value for key, value in line.items() if value is not None})
    def median(key):
        values = [line[key] for line in lines if line.get(key)]
        return statistics.median(values) if values else float("nan")
    # Joules of a second, over tokens of a second.
    return last, {"tokens/s": median("tokens_per_second"), "mfu": median("mfu"), "J/Mtoken": 1e6 * median("gpu_power_watts") / median("tokens_per_second")}
rows = {(recipe, seed): read(f"{recipe}-{seed}") for seed in seeds for recipe in recipes if os.path.exists(f"{out}/{recipe}-{seed}.jsonl")}
losses = sorted({key for last, _ in rows.values() for key in last if key.startswith("eval_") and key.endswith("loss")}, key=lambda key: (key != "eval_loss", key))
scores = sorted({key for last, _ in rows.values() for key in last if key.startswith("eval_continuations") and not key.endswith("stderr")})
head = ["recipe", "seed", "step", *losses, *[f"{key} minus bf16" for key in losses], *scores, "tokens/s", "mfu", "J/Mtoken"]
table = [head]
for (recipe, seed), (last, speed) in rows.items():
    base = rows.get(("bf16", seed), ({}, {}))[0] if recipe != "bf16" else {}
    gap = lambda key: f"{last[key] - base[key]:+.4f}" if key in last and key in base and last.get("step") == base.get("step") else ""
    number = lambda key: f"{last[key]:.4f}" if key in last else ""
    table.append([recipe, seed, str(last.get("step", "")), *map(number, losses), *map(gap, losses), *map(number, scores),
                  f"{speed['tokens/s']:.0f}", f"{speed['mfu']:.4f}", f"{speed['J/Mtoken']:.1f}"])
open(f"{out}/summary.tsv", "w").writelines("\t".join(row) + "\n" for row in table)
# On the screen, a run is a column.
for row in zip(*table):
    print(f"{row[0]:36}" + "".join(f"{cell:>13}" for cell in row[1:]))
PY
[ "$failed" = 0 ] || exit 1
[ "$stopped" = 0 ] || exit 75
