#!/usr/bin/env bash
# Reproduces data/wordnet-glosses.txt.gz and data/WORDNET-LICENSE.txt from Debian's package of WordNet 3.0.
# Needs apt (Debian 12 or later), awk, gzip and `apt-get update` run before. Same input, same bytes:
# the lines are sorted bytewise and gzip stores neither name nor time.
set -euo pipefail
export LC_ALL=C

version="1:3.0-37"
sha256="61060d960f9ada8fa120872312eccd3ecebfbab8c4579e4f5a74e1cf67620752"
data="$(cd "$(dirname "$0")/.." && pwd)/data"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

cd "$work"
apt-get download "wordnet-base=$version"
echo "$sha256  $(echo wordnet-base_*.deb)" | sha256sum --check --quiet
dpkg -x wordnet-base_*.deb package
wordnet="$work/package/usr/share/wordnet"

# Each data file opens with the licence: 29 lines that start with two spaces and a line number.
sed -n '1,29{s/^ *[0-9]* //;s/ *$//;p}' "$wordnet/data.noun" >"$data/WORDNET-LICENSE.txt"

# A synset reads `offset file type count lemma id ... | gloss`. Adjectives may end in a marker such as "(p)".
for speech in noun verb adj adv; do
    awk -v speech="$speech" '
        BEGIN { name["noun"] = "noun"; name["verb"] = "verb"; name["adj"] = "adjective"; name["adv"] = "adverb" }
        /^  / { next }
        {
            lemma = $5
            sub(/\((a|p|ip)\)$/, "", lemma)
            gsub(/_/, " ", lemma)
            gloss = substr($0, index($0, " | ") + 3)
            gsub(/[ \t]+/, " ", gloss)
            gsub(/_/, " ", gloss)
            gsub(/ +;/, ";", gloss)
            gsub(/^ +|[; ]+$/, "", gloss)
            if (gloss != "") print lemma " (" name[speech] "): " gloss
        }' "$wordnet/data.$speech"
done | sort -u >glosses.txt

gzip -9 -n -c glosses.txt >"$data/wordnet-glosses.txt.gz"
wc -l -c glosses.txt
