#!/usr/bin/env bash
# Installs a wheel in bare Debian systems without Rust, as pip, uv tool and pipx do, and runs the program from each of these, and the tests of the Python
# module. In the first system NVIDIA's libraries are installed too, and the program must find them; there the quick start is trained. Needs root,
# debootstrap and the network.
#
# usage: scripts/check-wheel.sh WHEEL [SUITE]...      (Debian suites, by default bookworm with glibc 2.36 and bullseye with glibc 2.31)
# EXTRA (default cu13) is the extra with NVIDIA's libraries; STEPS (default 500) are the steps of the quick start.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# -lt 1 ]; then
    echo "usage: scripts/check-wheel.sh WHEEL [SUITE]..." >&2
    exit 1
fi
wheel=$(realpath "$1")
shift
[ $# -gt 0 ] || set -- bookworm bullseye
extra="[${EXTRA-cu13}]"
steps=${STEPS-500}
work=$(mktemp -d)
clean_up() {
    for suite in "$work"/*/proc; do
        ! mountpoint -q "$suite" || umount "$suite"
    done
    rm -rf "$work"
}
trap clean_up EXIT

for suite in "$@"; do
    root=$work/$suite
    echo "== $suite"
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates "$suite" "$root" >"$work/log" || {
        tail -n 20 "$work/log" >&2
        exit 1
    }
    cp /etc/resolv.conf "$root/etc/"
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
    [ ! -f /etc/pip.conf ] || cp /etc/pip.conf "$root/etc/"
    mkdir -p "$root/quickstart"
    cp -r --parents configs $(git ls-files data) "$root/quickstart"
    cp scripts/check_python.py scripts/tiny_run.py "$root/"
    cp "$wheel" "$root/"
    cat >"$root/check.sh" <<'CHECK'
set -euo pipefail
package="ottava$1 @ file://$2"
export SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt HOME=/root PATH=/root/.local/bin:/usr/local/bin:/usr/bin:/bin
/usr/bin/ldd --version | sed -n 1p
if command -v cargo rustc; then exit 1; fi
libraries() { "$1" doctor || true; }
echo "== pip"
python3 -m venv /pip
/pip/bin/pip install --quiet --disable-pip-version-check "$package"
/pip/bin/ottava --version
libraries /pip/bin/ottava
/pip/bin/python /check_python.py
python3 -m venv /tools
/tools/bin/pip install --quiet --disable-pip-version-check uv pipx
echo "== uv tool"
/tools/bin/uv --quiet tool install "$package"
libraries ottava
/tools/bin/uv --quiet tool uninstall ottava
echo "== pipx"
/tools/bin/pipx install --quiet "$package"
libraries ottava
if [ "$3" -gt 0 ]; then
    echo "== quick start"
    cd /quickstart
    ottava train configs/quickstart.toml --set "max_steps=$3" | tail -n 25
fi
CHECK
    # The program finds its own environment through /proc.
    mount -t proc proc "$root/proc"
    env -i "$(command -v chroot)" "$root" bash /check.sh "$extra" "/$(basename "$wheel")" "$steps"
    umount "$root/proc"
    # The first system shows that the libraries are found; the others, that the program starts.
    extra=
    steps=0
    rm -rf "$root"
done
