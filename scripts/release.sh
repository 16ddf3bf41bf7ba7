#!/usr/bin/env bash
# Builds the wheel of the last commit twice, in two folders, with an archive of the program and a list of its crates (SBOM) beside it, and ends with an
# error unless all files have the same bytes twice. The program contains the kernels of the known models for Hopper, which NVIDIA's compiler, a Python
# package, compiles first.
#
# usage: scripts/release.sh [FOLDER]      (the folder for the files and their SHA-256, by default target/wheels)
#
# Needs Rust, Python 3.11 with venv, and the package registries. PROFILE=dev builds faster, to try the script.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-target/wheels}"
profile="${PROFILE:-release}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

python3 -m venv target/release-python
target/release-python/bin/pip install --quiet --disable-pip-version-check 'maturin>=1.9,<2' 'ziglang>=0.14,<1' 'nvidia-cuda-nvrtc>=13,<14'
# The linker is Zig's, which builds for the glibc that a tag names, however new that of this machine is.
export PATH="$PWD/target/release-python/bin:$PATH"
tag=manylinux_2_28
# Times in the wheel are that of the commit; paths of this machine are not in the program.
commit="$(git rev-parse HEAD)"
SOURCE_DATE_EPOCH="$(git log -1 --format=%ct "$commit")"
export SOURCE_DATE_EPOCH CARGO_INCREMENTAL=0
OTTAVA_LIBRARY_PATH="$(echo "$PWD"/target/release-python/lib/python3*/site-packages/nvidia/cu13/lib)" \
    cargo run --quiet --locked --profile "$profile" -p ottava-train --example pack_kernels -- "$work/kernels.pack"
export OTTAVA_KERNELS="$work/kernels.pack"
for copy in first second-copy; do
    mkdir -p "$work/$copy/source"
    git archive "$commit" | tar -x -C "$work/$copy/source"
    (
        cd "$work/$copy/source"
        export RUSTFLAGS="--remap-path-prefix=$work/$copy=/build --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/cargo"
        export CARGO_TARGET_DIR="$work/$copy/target"
        maturin build --quiet --locked --profile "$profile" --zig --compatibility "$tag" --out "$work/$copy/wheels"
        scripts/make_release_files.py "$work/$copy/wheels"/*.whl "$work/$copy/wheels"
    )
    rm -rf "$work/$copy/target"
    sums="$(cd "$work/$copy/wheels" && sha256sum -- *)"
    tee "$work/$copy/wheels/SHA256SUMS" <<<"$sums"
done
if ! diff -r "$work/first/wheels" "$work/second-copy/wheels"; then
    echo "the two builds differ" >&2
    exit 1
fi
mkdir -p "$out"
cp "$work"/first/wheels/* "$out/"
echo "the same bytes twice; the wheel, the archive, the SBOM and SHA256SUMS are in $out"
