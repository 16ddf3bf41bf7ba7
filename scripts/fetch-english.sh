#!/usr/bin/env bash
# Makes english.jsonl.gz, 76 MB of English in 25 MB: an English dictionary (dict-gcide), the documentation of Linux (linux-source-6.1) and
# of Python (python3.11-doc), from Debian's packages, and the bundled glosses (wordnet-base, scripts/make-corpus.sh). docs/data.md has more.
# Needs apt with Debian 12's sources and `apt-get update` run before, tar, xz, gzip and python3, 160 MB of download and a minute.
# Same packages, same bytes: files are read in the order of their paths, and gzip stores neither name nor time.
#
# usage: scripts/fetch-english.sh [FOLDER]    where the file goes, by default data/english
set -euo pipefail
export LC_ALL=C

packages=(
    dict-gcide 0.48.5+nmu2 7b0af5cfde3cbdef5e9d6e78f92ec335ced7c2790f37a40f49bebc6f7347ac0f
    linux-source-6.1 6.1.192-2 ae95fe63d4c553f8d0e6c86cb1ab566f3894a43743eb19ab585cd97d82f26514
    python3.11-doc 3.11.2-6+deb12u9 5b3594189d6ef9a6963ce0347fd307a1cc67620ad697e144db366070e2e146be
)
# Of the text before compression.
result="ee76a4255a7e79de16ddf99971fef35191ced9b5816b90116b4aa3a6188b18d3"

root="$(cd "$(dirname "$0")/.." && pwd)"
mkdir -p "${1:-$root/data/english}"
folder="$(cd "${1:-$root/data/english}" && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

cd "$work"
for ((i = 0; i < ${#packages[@]}; i += 3)); do
    name=${packages[i]} version=${packages[i + 1]} sha256=${packages[i + 2]}
    offered=$(apt-cache madison "$name" 2>/dev/null | awk -F ' *[|] *' '{ print $2 }' | sort -u)
    versions=${offered//$'\n'/, }
    if ! grep -qxF "$version" <<<"$offered"; then
        echo "$name: version $version is not among those that this system's package sources offer (${versions:-none});" \
            "add Debian 12 with its security updates, or Debian's archive of past versions, and run apt-get update." >&2
        exit 1
    fi
    apt-get download --quiet=2 "$name=$version"
    echo "$sha256  $(echo "${name}"_*.deb)" | sha256sum --check --quiet
    dpkg -x "${name}"_*.deb package
done
tar -xf package/usr/src/linux-source-6.1.tar.xz -C package linux-source-6.1/Documentation

python3 "$root/scripts/convert_english.py" package "$root/data/wordnet-glosses.txt.gz" >english.jsonl
echo "$result  english.jsonl" | sha256sum --check --quiet
gzip -9 -n english.jsonl
mv english.jsonl.gz "$folder/english.jsonl.gz"
ls -l "$folder/english.jsonl.gz"
