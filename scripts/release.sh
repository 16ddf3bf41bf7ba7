#!/usr/bin/env bash
# Builds the wheel of the last commit twice, in two folders, and ends with an error unless both have the same bytes.
#
# usage: scripts/release.sh [FOLDER]      (the folder for the wheel and its SHA-256, by default target/wheels)
#
# Needs Rust, Python 3 with venv, and the package registries. PROFILE=dev builds faster, to try the script.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-target/wheels}"
profile="${PROFILE:-release}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

python3 -m venv target/release-python
target/release-python/bin/pip install --quiet --disable-pip-version-check 'maturin>=1.9,<2'
# Times in the wheel are that of the commit; paths of this machine are not in the program.
commit="$(git rev-parse HEAD)"
SOURCE_DATE_EPOCH="$(git log -1 --format=%ct "$commit")"
export SOURCE_DATE_EPOCH CARGO_INCREMENTAL=0
for copy in first second-copy; do
    mkdir -p "$work/$copy/source"
    git archive "$commit" | tar -x -C "$work/$copy/source"
    (
        cd "$work/$copy/source"
        export RUSTFLAGS="--remap-path-prefix=$work/$copy=/build --remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=/cargo"
        export CARGO_TARGET_DIR="$work/$copy/target"
        "$OLDPWD/target/release-python/bin/maturin" build --quiet --locked --profile "$profile" --out "$work/$copy/wheels"
    )
    rm -rf "$work/$copy/target"
    sha256sum "$work/$copy/wheels"/*.whl
done
if ! cmp "$work"/first/wheels/*.whl "$work"/second-copy/wheels/*.whl; then
    echo "the two builds differ" >&2
    exit 1
fi
mkdir -p "$out"
cp "$work"/first/wheels/*.whl "$out/"
(cd "$out" && sha256sum ./*.whl > SHA256SUMS)
echo "the same bytes twice; the wheel is in $out"
