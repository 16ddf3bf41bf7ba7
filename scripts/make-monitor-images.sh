#!/usr/bin/env bash
# Makes docs/images/monitor-*.png again, from runs that the test trains. Needs Chromium and pngquant (Debian: chromium, pngquant).
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p docs/images
OTTAVA_IMAGES="$PWD/docs/images" cargo test -p ottava --test cli browsers_paint -- --nocapture
for image in docs/images/monitor-*.png; do
    pngquant --force --strip --speed 1 --output "$image" 32 "$image"
done
ls -l docs/images
