#!/usr/bin/env bash
# Packs a corpus: training text in pieces of at most 28 MB, and one file with validation text, tokenizer and task. The training text of each source is one
# stream of xz; the streams are joined and cut into pieces.
#
# usage: scripts/corpus/pack.sh FOLDER PIECES      FOLDER is scripts/corpus/build.py's; scripts/corpus/unpack.py is the inverse
# Needs tar, xz and split, 1 GB of memory per core, and about a core-second per MB of text. BYTES (default 28000000) is the size of a piece.
# PRESET (default 7) is the preset of xz.
set -euo pipefail
if [ $# -ne 2 ]; then
    echo "usage: scripts/corpus/pack.sh FOLDER PIECES" >&2
    exit 1
fi
mkdir -p "$2"
pieces=$(realpath "$2")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$1"
# Text has no alignment (pb=0), and its next byte depends on more bits of the previous byte (lc=4).
options=--lzma2=preset=${PRESET:-7},lc=4,pb=0,dict=64MiB
# The largest first, so that all cores end at about the same time.
ls -S train | xargs -P "$(nproc)" -I{} sh -c "xz -c $options train/{} >'$work'/{}.xz"
cat "$work"/*.xz | split -b "${BYTES:-28000000}" -d --additional-suffix=.xz - "$pieces/piece-"
tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cf - validation tokenizer task | xz "$options" >"$pieces/validation.tar.xz"
ls -l "$pieces"
