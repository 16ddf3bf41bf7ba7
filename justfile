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

# The proofs that take too long for every commit, with a table: all, or some of convergence, memory, ranks, kill, interruptions, parsers, soak, sentinel, smollm2, chat, suites
nightly *parts:
    scripts/nightly.sh {{ parts }}

# Everything that is to be shown on a GPU, training runs included
gpu-check:
    scripts/gpu-check.sh

# What two GPUs of one machine must show, in parts of three to four minutes. FOLDER holds `ottava` and `tensor-tests`
two-gpus folder=".carry":
    scripts/two-gpus.sh {{ folder }}

# How fast this machine is, by `ottava bench`: kernels, gemm, linear, attention or train, and its options
bench *args="kernels":
    cargo run --release -- bench {{ args }}

# Record the golden losses again, and show how they moved
golden:
    OTTAVA_GOLDEN=record cargo test -p ottava-train --test promises golden
    git diff --stat -- crates/ottava-train/tests/data/golden_losses.json

# Train on the bundled text
quickstart:
    cargo run --release -- train configs/quickstart.toml

# Fuzz a parser (a target in fuzz/fuzz_targets), guided by coverage; needs no nightly toolchain, but a C++ compiler
fuzz target seconds="60":
    mkdir -p fuzz/corpus/{{ target }}
    RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table -Ccodegen-units=1" \
        cargo run --manifest-path fuzz/Cargo.toml --target {{ arch() }}-unknown-linux-gnu --bin {{ target }} -- -max_total_time={{ seconds }} -timeout=10 -rss_limit_mb=600 -max_len=1000000 fuzz/corpus/{{ target }}

# The files of a release of the last commit, built twice to see that both have the same bytes
release folder="target/wheels":
    scripts/release.sh {{ folder }}
