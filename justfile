# `just` lists these; CONTRIBUTING.md says when to use which.

# List the recipes
default:
    @just --list

# Formatting, lints, documentation, dependencies
check:
    cargo fmt --check
    cargo clippy --workspace --all-targets -- -D warnings
    RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps
    cargo deny check

# All tests on the CPU, and on a GPU where there is one
test *args:
    if cargo nextest --version >/dev/null 2>&1; then cargo nextest run {{ args }}; else cargo test {{ args }}; fi

# Parity and promises on a machine with a GPU; fails without one
gpu:
    scripts/gpu-tests.sh

# The longer version of the convergence test of recipes, with its table; minutes on two cores
nightly:
    OTTAVA_CONVERGENCE=full cargo test --release -p ottava-lm --test promises fp8_learns_as_well -- --nocapture

# The same of the optimizer's levels, and of activations saved in FP8
nightly-memory:
    OTTAVA_CONVERGENCE=full cargo test --release -p ottava-lm --test promises as_well_as -- --nocapture --skip fp8_learns_as_well

# Every recipe with every way to keep memory, on 2, 4 and 8 ranks, in every division of the model
nightly-ranks:
    OTTAVA_RANKS=full cargo test -p ottava-lm --test promises ranks:: -- --nocapture
    OTTAVA_RANKS=full cargo test -p ottava --test cli rank_faults:: -- --nocapture

# SmolLM2 learns in FP8 to answer as a dictionary does (configs/chat.toml), and answers a question; a quarter of an hour on two cores
nightly-chat:
    [ -d data/smollm2 ] || scripts/fetch-smollm2.sh
    cargo run --release -- train configs/chat.toml --set output_dir=runs/nightly-chat --device cpu
    cargo run --release -- generate runs/nightly-chat --chat --prompt 'What is the meaning of "otter"?' --device cpu

# Kill a run 1,000 times at random moments; two to four minutes
nightly-kill:
    OTTAVA_KILLS=1000 cargo test -p ottava --test cli kill -- --nocapture

# Send 10,000 requests to a server, most of them faulty or broken off, then honest ones beside clients that attack it, and print percentiles
# and memory; a minute
nightly-soak:
    OTTAVA_SOAK=10000 cargo test -p ottava --test cli soak -- --nocapture

# Everything that is to be shown on a GPU, training runs included
gpu-check:
    scripts/gpu-check.sh

# What two GPUs of one machine must show; less than four minutes. FOLDER holds `ottava` and `tensor-tests`
two-gpus folder=".carry":
    scripts/two-gpus.sh {{ folder }}

# How fast this machine is, by `ottava bench`: kernels, gemm, linear, attention or train, and its options
bench *args="kernels":
    cargo run --release -- bench {{ args }}

# Record the golden losses again, and show how they moved
golden:
    OTTAVA_GOLDEN=record cargo test -p ottava-lm --test promises golden
    git diff --stat -- crates/ottava-lm/tests/data/golden_losses.json

# Train on the bundled text
quickstart:
    cargo run --release -- train configs/quickstart.toml

# Fuzz a parser (a target in fuzz/fuzz_targets), guided by coverage; needs no nightly toolchain, but a C++ compiler
fuzz target seconds="60":
    mkdir -p fuzz/corpus/{{ target }}
    RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table -Ccodegen-units=1" \
        cargo run --manifest-path fuzz/Cargo.toml --target {{ arch() }}-unknown-linux-gnu --bin {{ target }} -- -max_total_time={{ seconds }} -timeout=10 -rss_limit_mb=600 -max_len=1000000 fuzz/corpus/{{ target }}
