#!/usr/bin/env bash
# Speed of two builds of `ottava` in one run, in the order old-new-new-old, with one shared cache of kernels and GEMM algorithms. Parts:
#   train   Llama-2-7B on one GPU: fp8-delayed, fp8-current and BF16, and fp8-delayed at O2 and coat (90 s for two pairs)
#   decode  Llama-3-8B's shape on one GPU, batch 1, 16, 64 and 256, in BF16 and fp8-row (60 s for two pairs)
#   zero    Llama-2-7B on two GPUs: ZeRO 1 and 3, fp8-delayed and BF16 (90 s for two pairs)
#
# usage: scripts/compare-builds.sh OLD NEW [PART...]    OLD and NEW are `ottava` binaries; the default parts are train and decode
# STEPS (default 8) are timed per setting. ROUNDS (default 2) of two pairs each. OUT receives the results as JSON.
# Prints new / old of each pair and their median by setting, and planned beside measured peaks of memory. Fails where a median is below
# 0.995, or a peak is not the planned one.
set -euo pipefail
old=$(realpath "$1") new=$(realpath "$2")
shift 2
parts=("${@:-train decode}")
steps=${STEPS:-8} results=${OUT:-$(mktemp -d)}/builds
rm -rf "$results"
mkdir -p "$results"
export NCCL_NVLS_ENABLE=0 NCCL_SOCKET_IFNAME=lo NCCL_RAS_ENABLE=0

# bench BINARY RUN NAME ARGUMENT...: writes RUN-NAME.json
bench() {
    local binary=$1 run=$2 name=$3
    shift 3
    "$binary" bench "$@" --device cuda --json >"$results/$run-$name.json" 2>"$results/$run-$name.log"
}
# run BINARY RUN
run() {
    # By the names of options that builds before `--storages` and `--recipes` know too.
    local seven=(train --model llama-2-7b --steps "$steps") stage
    for part in ${parts[*]}; do
        case $part in
        train)
            bench "$1" "$2" states "${seven[@]}" --levels bf16 --compare fp8-delayed,fp8-current,bf16
            bench "$1" "$2" storages "${seven[@]}" --levels O2,coat --compare fp8-delayed
            ;;
        decode)
            bench "$1" "$2" decode decode --model llama-3-8b --batch 1,16,64,256 --context 1024 --recipes bf16,fp8-row --steps 20
            ;;
        zero)
            for stage in 1 3; do
                bench "$1" "$2" "zero$stage" "${seven[@]}" --gpus 2 --set "parallel.zero=$stage" --set gradient_dtype=bfloat16 --levels bf16 \
                    --compare fp8-delayed,bf16
            done
            ;;
        *) echo "compare-builds.sh: there is no part $part" >&2 && exit 1 ;;
        esac
    done
}
for round in $(seq "${ROUNDS:-2}"); do
    run "$old" "$round-a-old"
    run "$new" "$round-b-new"
    run "$new" "$round-c-new"
    run "$old" "$round-d-old"
done
python3 - "$results" <<'PY'
import glob, json, os, statistics, sys
# Storages by their names in builds before `--storages`.
NOW = {"O0": "float32", "O2": "msamp-o2", "bf16": "bfloat16"}
rows, peaks = {}, set()
for path in sorted(glob.glob(f"{sys.argv[1]}/*.json")):
    round_, place, _, name = os.path.basename(path)[:-5].split("-", 3)
    for row in json.load(open(path))["rows"]:
        storage = row.get("storage", row.get("level"))
        values = [row.get("recipe"), NOW.get(storage, storage), row.get("batch"), row.get("kv_cache_dtype")]
        setting = " ".join(str(value) for value in values if value is not None)
        rows.setdefault((name, setting), {})[round_, place] = row["tokens_per_second"]
        if "planned_peak_bytes" in row:
            peaks.add((name, setting, row["peak_memory_bytes"], row["planned_peak_bytes"]))
failed = False
for (name, setting), rates in rows.items():
    pairs = [(r, old, new) for r in sorted({r for r, _ in rates}) for old, new in (("a", "b"), ("d", "c"))]
    ratios = [rates[r, new] / rates[r, old] for r, old, new in pairs]
    median = statistics.median(ratios)
    failed |= median < 0.995
    print(f"{name:8} {setting:24} new/old {' '.join(f'{ratio:.4f}' for ratio in ratios)}  median {median:.4f}")
for name, setting, measured, planned in sorted(peaks):
    failed |= measured != planned
    print(f"{name:8} {setting:24} peak {measured / 2**30:.3f} GiB, planned {planned / 2**30:.3f}")
sys.exit(failed)
PY
