#!/usr/bin/env bash
# What two GPUs of one machine must show. Prints a PASS, FAIL or SKIP line for each promise, and fails where one fails. Its parts:
#   train   collectives and messages against the CPU's; training beside one GPU, by --gpus, by torchrun and as two machines; a benchmark (4 minutes)
#   axes    two GPUs that divide tensors, sequences, layers or experts beside one, and inference of divided models (5 minutes)
#   offload ranks whose slices of weights are in host memory beside those without, bit for bit (4 minutes)
#   curve   100 steps of two GPUs beside one; a run that goes on from two GPUs to one and back (3 minutes)
#   faults  ranks that are killed or stopped, that live and never come, or never join (3 minutes)
#   signals a signal to rank 1 in training, in an evaluation, in a save and while samples are generated, under each stage of ZeRO (4 minutes)
#   axis-faults  the same signals, and lost ranks, where ranks divide tensors or layers; a run that goes on under another division (4 minutes)
#   saves   how long a save pauses training, and a rank that is killed during one (3 minutes)
#
# usage: scripts/two-gpus.sh [FOLDER [PART...]]    FOLDER (default .carry) holds `ottava` and `tensor-tests` built elsewhere
# OUT (default /tmp) receives logs and metrics, in two-gpus/. LIMIT (default 580) is the seconds for all of it. SAVE_LAYERS (default 8) are
# the blocks of the model that is saved: each has 202 million parameters, and 32 make Llama-2-7B, which takes 94 GB of disk.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=$(realpath "${1:-.carry}")
out=${OUT:-/tmp}/two-gpus
deadline=$((SECONDS + ${LIMIT:-580}))
shift $(($# > 0))
parts=" ${*:-train axes offload curve faults signals axis-faults saves} "
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

# wants PART
wants() { [[ $parts == *" $1 "* ]]; }
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
        --set eval_steps=end --set 'prompts=[]' --set warmup_steps=10 --set global_batch_size=32)
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
# losses A B LIMIT: those of two runs side by side; fails where they differ by more than this share.
losses() {
    python3 - "$out/$1-metrics.jsonl" "$out/$2-metrics.jsonl" "$3" <<'PY'
import json, sys
a, b = ([line["loss"] for line in map(json.loads, open(path)) if "loss" in line] for path in sys.argv[1:3])
worst = max(abs(x - y) / x for x, y in zip(a, b))
print(f"{'step':>4} {'first':>9} {'second':>9}")
for step in sorted({*range(0, len(a), max(5, len(a) // 10)), len(a) - 1}):
    print(f"{step + 1:>4} {a[step]:9.5f} {b[step]:9.5f}")
print(f"{len(a)} and {len(b)} steps; they differ by {worst:.1e} at most" + (", the bits are equal" if a == b else ""))
sys.exit(not (len(a) == len(b) > 0 and worst < float(sys.argv[3])))
PY
}
# compare WHAT A B [LIMIT]
compare() {
    local limit=${4:-0.02}
    losses "$2" "$3" "$limit" 2>&1 | tee "$out/$2-$3.txt"
    verdict "$1: losses differ by less than $limit" losses "$2" "$3" "$limit"
}
# lives PID
lives() { [ -e "/proc/$1/stat" ] && ! grep -q ') Z ' "/proc/$1/stat"; }
# trained NAME STEPS
trained() { [ "$(cat "$work/$1/metrics.jsonl" 2>/dev/null | wc -l)" -ge "$2" ]; }
# saving NAME: a checkpoint is complete, and a later one is being written.
saving() {
    local folder=$work/$1/checkpoints
    compgen -G "$folder/checkpoint-*" >/dev/null && compgen -G "$folder/.tmp-checkpoint-*/training/optimizer-*" >/dev/null
}
# saved NAME: a checkpoint is complete.
saved() { grep -q "  saved " "$out/$1.log"; }
# speeds METRICS: median milliseconds of steps before and during the save of step 150.
speeds() {
    python3 - "$1" <<'PY'
import json, statistics, sys
rates = {line["step"]: line["tokens_per_second"] for line in map(json.loads, open(sys.argv[1])) if "loss" in line}
median = lambda steps: statistics.median([rates[step] for step in steps if step in rates] or [0])
print(f"median tokens/s: {median(range(50, 151)):.0f} in steps 50 to 150, {median(range(152, 300)):.0f} in steps 152 to 299, beside the save")
PY
}
# drill NAME SIGNAL RANK CODE WORDS SECONDS WHEN [ARGUMENT...]: a signal to a rank of a run in progress, once the command WHEN succeeds. The
# other rank must end in so many seconds, with the code and words, and no process may be left.
drill() {
    local name=$1 signal=$2 rank=$3 code=$4 words=$5 within=$6 when=$7 seconds got log
    shift 7
    if ! seconds=$(limit $((${patience:-60} + within))); then
        say SKIP "$name: no time is left"
        return 1
    fi
    arguments "$name"
    "$bin/ottava" "${train[@]}" "${two[@]}" --set max_steps=1000000 "$@" >"$out/$name.log" 2>&1 &
    local first=$! second='' end=$((SECONDS + seconds - within - 2))
    while lives "$first" && [ "$SECONDS" -lt "$end" ] && ! eval "$when"; do
        sleep 0.1
    done
    second=$(cat "/proc/$first/task/$first/children" 2>/dev/null)
    second=${second%% *}
    verdict "$name: $when" eval "$when"
    local pids=("$first" "${second:-$first}")
    local victim=${pids[$rank]} survivor=${pids[$((1 - rank))]} begin=${EPOCHREALTIME/./}
    kill "-$signal" "$victim"
    while { lives "$survivor" || lives "$victim"; } && [ $((${EPOCHREALTIME/./} - begin)) -lt $((within * 1000000)) ]; do
        sleep 0.05
    done
    say NOTE "$name: ended after $(((${EPOCHREALTIME/./} - begin) / 1000)) ms"
    verdict "$name: no process is left after $within s" eval '! lives '"$survivor"' && ! lives '"$victim"
    kill -KILL "$first" "${second:-$first}" 2>/dev/null
    wait "$first"
    got=$?
    finish "$name"
    log=$out/$name.log
    [ "$survivor" = "$first" ] || log=$out/$name-rank-1.log
    [ "$survivor" != "$first" ] || verdict "$name: exit code $code, it was $got" [ "$got" = "$code" ]
    verdict "$name: says \"$words\"" grep -q "$words" "$log"
    return 0
}
# signals NAME ARGUMENT...: SIGTERM to rank 1 of runs with these arguments, in training, in an evaluation and in a save.
signals() {
    local name=$1
    shift
    drill "$name-training" TERM 1 75 "stopped by a signal after step" 15 "trained $name-training 20" "$@"
    # Step 2 is evaluated for seconds, one sequence at a time: its line comes after that.
    drill "$name-evaluation" TERM 1 75 "stopped by a signal after step 2" 15 "trained $name-evaluation 2 && sleep 0.2" "$@" \
        --set eval_steps=2 --set val_set_size=20000 --set per_device_train_batch_size=1
    drill "$name-save" TERM 1 75 "stopped by a signal after step" 30 "trained $name-save 11" "$@" --set save_steps=10
}
# rank RANK PORT COMMAND...: becomes one of two ranks, as a launcher on a machine with one GPU starts it.
rank() {
    local rank=$1 port=$2
    shift 2
    exec env NCCL_HOSTID="machine-$rank" CUDA_VISIBLE_DEVICES="$rank" RANK="$rank" WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 \
        MASTER_PORT="$port" "$@"
}
# machines PORT COMMAND...: both ranks; fails where one does. The output of rank 1 goes to a file of its own.
machines() {
    local second
    rank 1 "$@" >"$out/machines-rank-1.log" 2>&1 &
    second=$!
    (rank 0 "$@") || {
        kill "$second"
        return 1
    }
    wait "$second"
}

{ nvidia-smi --query-gpu=index,name,driver_version,memory.used --format=csv && "$bin/ottava" doctor; } >"$out/machine.txt" 2>&1

if wants train; then
    run collectives 90 env OTTAVA_REQUIRE_GPUS=2 "$bin/tensor-tests" --exact comm::nccl::tests::collectives_of_two_gpus_equal_those_of_the_cpu --nocapture
    run messages 60 env OTTAVA_REQUIRE_GPUS=2 "$bin/tensor-tests" --exact comm::nccl::tests::messages_in_a_split_of_two_gpus_equal_those_of_the_cpu --nocapture
    run late-message 40 env OTTAVA_REQUIRE_GPUS=2 "$bin/tensor-tests" --exact comm::nccl::tests::a_gpu_that_waits_for_a_rank_that_sleeps_ends_at_the_deadline --nocapture
    grep -h "NCCL holds" "$out/collectives.log"

    arguments one-gpu
    run one-gpu 60 "$bin/ottava" "${train[@]}" "${one[@]}" --set max_steps=$steps
    arguments two-gpus
    run two-gpus 60 "$bin/ottava" "${train[@]}" "${two[@]}" --set max_steps=$steps
    compare "two GPUs train as one does" one-gpu two-gpus
    verdict "steps are captured as CUDA graphs" eval '! grep -q "not captured" "$out/two-gpus.log" "$out/two-gpus-rank-1.log"'

    torchrun=(torchrun)
    command -v torchrun >/dev/null || torchrun=(python3 -m torch.distributed.run)
    if "${torchrun[@]}" --help >/dev/null 2>&1; then
        arguments torchrun
        run torchrun 60 "${torchrun[@]}" --no-python --nproc-per-node 2 --master-port 29617 "$bin/ottava" "${train[@]}" "${one[@]}" --set max_steps=$steps
        compare "torchrun's ranks train as those of --gpus do" two-gpus torchrun
    else
        say SKIP "torchrun: PyTorch is not installed"
    fi

    # `timeout` starts a program, not a function of this shell.
    export -f machines rank
    export out
    arguments machines
    run machines 60 bash -c 'machines "$@"' - 29705 "$bin/ottava" "${train[@]}" "${one[@]}" --set max_steps=$steps
    compare "two machines with a GPU each train as two GPUs of one do" two-gpus machines

    bench=(bench train --model qwen2.5-0.5b --max-length 1024 --micro-batch 8 --steps 5 --recipes fp8-delayed)
    run bench 40 "$bin/ottava" "${bench[@]}" "${two[@]}" && sed -n 1,6p "$out/bench.log"
fi

if wants axes; then
    arguments alone
    run alone 60 "$bin/ottava" "${train[@]}" "${one[@]}" --set max_steps=$steps
    for axis in tensor context pipeline; do
        arguments "$axis"
        run "$axis" 60 "$bin/ottava" "${train[@]}" "${two[@]}" --set "parallel.$axis=2" --set max_steps=$steps
        compare "two GPUs of the $axis axis train as one does" alone "$axis"
        verdict "steps of the $axis axis are captured" eval '! grep -q "not captured" "$out/$axis.log" "$out/$axis-rank-1.log"'
    done
    model=$work/alone/checkpoints/checkpoint-$steps
    for gpus in one two; do
        declare -n devices=$gpus
        run "eval-$gpus" 60 "$bin/ottava" eval "$model" --data data/wordnet-glosses.txt.gz --recipe bf16 --json "${devices[@]}"
    done
    run generate 60 "$bin/ottava" generate "$model" --prompt "otter (noun):" "${two[@]}"
    # 60 prompts in one batch, and three of them.
    seq 1 60 | sed 's/$/ otters (noun): the/' >"$work/prompts.txt"
    sed -n '7p;23p;60p' "$work/prompts.txt" >"$work/three.txt"
    for recipe in bf16 fp8-row; do
        for prompts in prompts three; do
            run "invariant-$recipe-$prompts" 60 "$bin/ottava" generate "$model" --input "$work/$prompts.txt" --output "$work/$prompts.jsonl" --recipe $recipe \
                --set skip_slow_linears=false --batch-invariant "${two[@]}"
        done
        verdict "texts of two GPUs do not depend on the batch, $recipe" cmp <(sed -n '7p;23p;60p' "$work/prompts.jsonl") "$work/three.jsonl"
    done

    # Sixteen experts in place of each MLP.
    python3 - configs/models/quickstart.json "$work/mixture.json" <<'PY'
import json, sys
config = json.load(open(sys.argv[1]))
config.update(architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_experts=16, num_experts_per_tok=4,
              moe_intermediate_size=128, norm_topk_prob=True, tie_word_embeddings=False)
config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
json.dump(config, open(sys.argv[2], "w"))
PY
    for recipe in bf16 fp8-delayed fp8-block; do
        mixture=(--set "model.path=$work/mixture.json" --set "recipe=$recipe" --set max_steps=$steps)
        arguments "mixture-$recipe"
        run "mixture-$recipe" 60 "$bin/ottava" "${train[@]}" "${one[@]}" "${mixture[@]}"
        arguments "experts-$recipe"
        run "experts-$recipe" 60 "$bin/ottava" "${train[@]}" "${two[@]}" "${mixture[@]}" --set parallel.expert=2 --set parallel.zero=1
        compare "two GPUs with other experts train as one does, $recipe" "mixture-$recipe" "experts-$recipe"
        arguments "divided-mixture-$recipe"
        run "divided-mixture-$recipe" 60 "$bin/ottava" "${train[@]}" "${two[@]}" "${mixture[@]}" --set parallel.tensor=2
        compare "two GPUs that divide tensors and experts train as one does, $recipe" "mixture-$recipe" "divided-mixture-$recipe"
    done
    verdict "steps with other experts are captured" eval '! grep -q "not captured" "$out"/experts-*.log "$out"/divided-mixture-*.log'
    model=$work/mixture-bf16/checkpoints/checkpoint-$steps
    for gpus in one two; do
        declare -n devices=$gpus
        run "eval-mixture-$gpus" 60 "$bin/ottava" eval "$model" --data data/wordnet-glosses.txt.gz --recipe bf16 --json "${devices[@]}"
    done
    run generate-mixture 60 "$bin/ottava" generate "$model" --prompt "otter (noun):" "${two[@]}"
fi

if wants offload; then
    # Stage of ZeRO, recipe, storage, and the share of optimizer states in host memory.
    for setting in "1 bf16 bfloat16 0" "2 fp8-delayed float32 0.5" "3 fp8-delayed bfloat16 0" "3 fp8-current msamp-o2 0" "3 fp8-row float32 1"; do
        read -r stage recipe storage states <<<"$setting"
        name=offload-$stage-$recipe
        for share in 0 0.5 1; do
            arguments "$name-$share"
            run "$name-$share" 60 "$bin/ottava" "${train[@]}" "${two[@]}" --set max_steps=$steps --set deterministic=true --set skip_slow_linears=false \
                --set "parallel.zero=$stage" --set "recipe=$recipe" --set "storage=$storage" --set "offload_optimizer=$states" \
                --set "offload_parameters=$share" --set eval_steps=10 --set 'prompts=["otter (noun):"]'
            rm -rf "$work/$name-$share"
        done
        for share in 0.5 1; do
            compare "a share of $share of the weights in host memory changes no bit, ZeRO $stage, $recipe" "$name-0" "$name-$share" 1e-12
        done
    done
    verdict "steps with offloaded weights are captured" eval '! grep -q "not captured" "$out"/offload-*.log'
fi

if wants curve; then
    for gpus in one two; do
        declare -n devices=$gpus
        arguments "curve-$gpus"
        run "curve-$gpus" 60 "$bin/ottava" "${train[@]}" "${devices[@]}" --set max_steps=100
    done
    compare "100 steps of two GPUs are those of one" curve-one curve-two 0.05

    # A schedule that does not depend on the number of steps, and a learning rate at which rounding does not grow.
    constant=(--set lr_scheduler.type=constant --set learning_rate=3e-4)
    arguments unbroken
    run unbroken 60 "$bin/ottava" "${train[@]}" "${two[@]}" "${constant[@]}" --set max_steps=$steps
    arguments two-one-two
    run two-one-two 40 "$bin/ottava" "${train[@]}" "${two[@]}" "${constant[@]}" --set max_steps=10
    run two-one-two 40 "$bin/ottava" "${train[@]}" "${one[@]}" "${constant[@]}" --set max_steps=20 --resume
    run two-one-two 40 "$bin/ottava" "${train[@]}" "${two[@]}" "${constant[@]}" --set max_steps=$steps --resume
    compare "a run goes on from two GPUs to one and back" unbroken two-one-two
fi

if wants faults; then
    # Past the capture.
    drill killed-rank-1 KILL 1 5 "error: rank 1 (pid" 10 'trained killed-rank-1 40'
    drill killed-rank-0 KILL 0 137 "error: rank 0 (pid" 10 'trained killed-rank-0 40'
    # 64 micro-batches a step: forward and backward take nearly all of its time.
    drill killed-in-a-step KILL 1 5 "error: rank 1 (pid" 10 'trained killed-in-a-step 4' --set global_batch_size=2048
    drill signal-to-rank-1 TERM 1 75 "stopped by a signal after step" 10 'trained signal-to-rank-1 40' &&
        verdict "a checkpoint was saved" eval 'ls -d "$work"/signal-to-rank-1/checkpoints/checkpoint-*'
    # A rank that says nothing for so long counts as lost.
    drill stopped-rank-1 STOP 1 5 "error: rank 1 (pid" 35 'trained stopped-rank-1 40' --set silence_timeout=20
    # Its process is not given up, so the deadline of collectives ends the job: that of the hub, or of the wait for the GPU.
    drill late-rank-1 STOP 1 5 "did not call\\|has waited" 35 'trained late-rank-1 40' --set silence_timeout=600 --set collective_timeout=15
    arguments no-rank-1
    timeout -k 5 60 env RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29711 CUDA_VISIBLE_DEVICES=0 \
        "$bin/ottava" "${train[@]}" "${one[@]}" --set max_steps=1 --set join_timeout=15 >"$out/no-rank-1.log" 2>&1
    got=$?
    verdict "no-rank-1: exit code 5, it was $got" [ "$got" = 5 ]
    verdict "no-rank-1: is named" grep -q "rank 1 did not join" "$out/no-rank-1.log"
fi

if wants signals; then
    for stage in 0 1 2 3; do
        signals "zero-$stage" --set "parallel.zero=$stage"
    done
    # Rank 1 has ended by then, so the signal goes to rank 0.
    drill samples TERM 0 75 "the run is complete and saved" 15 "trained samples 3 && sleep 1" --set max_steps=3 --set max_new_tokens=500 \
        --set "prompts=[$(printf '"a",%.0s' $(seq 20000))]"
fi

if wants axis-faults; then
    for axis in tensor pipeline; do
        divided=(--set "parallel.$axis=2")
        drill "$axis-killed" KILL 1 5 "error: rank 1 (pid" 10 "trained $axis-killed 40" "${divided[@]}"
        # 64 micro-batches a step: it ends in a forward, in a backward, or in a message between them.
        drill "$axis-killed-in-a-step" KILL 1 5 "error: rank 1 (pid" 10 "trained $axis-killed-in-a-step 4" "${divided[@]}" \
            --set per_device_train_batch_size=4 --set global_batch_size=256
        drill "$axis-stopped" STOP 1 5 "error: rank 1 (pid" 35 "trained $axis-stopped 40" "${divided[@]}" --set silence_timeout=15
        signals "$axis" "${divided[@]}"
    done
    # A schedule that does not depend on the number of steps, and a learning rate at which rounding does not grow.
    constant=(--set lr_scheduler.type=constant --set learning_rate=3e-4)
    arguments alone-30
    run alone-30 60 "$bin/ottava" "${train[@]}" "${one[@]}" "${constant[@]}" --set max_steps=30
    arguments plans
    run plans 40 "$bin/ottava" "${train[@]}" "${two[@]}" "${constant[@]}" --set max_steps=10 --set parallel.tensor=2
    run plans 40 "$bin/ottava" "${train[@]}" "${two[@]}" "${constant[@]}" --set max_steps=20 --set parallel.pipeline=2 --resume
    run plans 40 "$bin/ottava" "${train[@]}" "${one[@]}" "${constant[@]}" --set max_steps=30 --resume
    compare "a run goes on from two tensor ranks to a pipeline and to one GPU" alone-30 plans 0.001
fi

if wants saves; then
    # model LAYERS: a file for a model with so many blocks.
    model() {
        cat >"$work/$1.json" <<JSON
{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": $1,
 "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "vocab_size": 4096,
 "tie_word_embeddings": false, "bos_token_id": 0, "eos_token_id": 0}
JSON
    }
    saving=(--set parallel.zero=1 --set val_set_size=0 --set save_total_limit=1 --set async_save=true)
    model "${SAVE_LAYERS:-8}"
    model 2
    large=("${saving[@]}" --set "model.path=$work/${SAVE_LAYERS:-8}.json")
    # Ends once one checkpoint is complete, since a disk may not have room for two.
    patience=240 drill saves KILL 1 5 "error: rank 1 (pid" 20 'saved saves' "${large[@]}" --set save_steps=150
    grep -h "host memory for snapshots\|  saved " "$out/saves.log"
    stood=$(sed -n 's/.*training was paused for \([0-9.]*\) s.*/\1/p' "$out/saves.log" | head -n 1)
    verdict "training was paused for ${stood:-?} s, at most 3" eval "awk 'BEGIN { exit !(${stood:-9} <= 3) }'"
    speeds "$out/saves-metrics.jsonl"
    rm -rf "$work/saves"
    # A model that is read again in seconds, and written slowly enough to be killed meanwhile.
    large=("${saving[@]}" --set "model.path=$work/2.json")
    if drill killed-in-a-save KILL 1 5 "error: rank 1 (pid" 10 'saving killed-in-a-save' "${large[@]}" --set save_steps=10; then
        verdict "one checkpoint is complete" eval 'ls -d "$work"/killed-in-a-save/checkpoints/checkpoint-*'
        arguments killed-in-a-save
        run killed-in-a-save-resumed 120 "$bin/ottava" "${train[@]}" "${two[@]}" "${large[@]}" --set max_steps=1 --resume
    fi
    rm -rf "$work/killed-in-a-save"
fi

say DONE "$(grep -c ^PASS "$out/results.txt") passed, $(grep -c ^FAIL "$out/results.txt") failed, $(grep -c ^SKIP "$out/results.txt") skipped"
exit "$failed"
