#!/usr/bin/env python3
"""Writes JSON lines, one document per line with its text in `text`, from unpacked Debian packages and the bundled glosses.

usage: scripts/convert_english.py PACKAGES GLOSSES >english.jsonl      (scripts/fetch-english.sh runs it)

PACKAGES holds what `dpkg -x` made of dict-gcide and python3.11-doc, and `linux-source-6.1/Documentation` from the tar of that package.
Counts go to standard error. Python's standard library is enough.
"""

import gzip
import json
import re
import sys
from pathlib import Path

# Dictionary entries are a line to a page long; neighbours are joined until a document has this many characters.
DOCUMENT = 4000

# An indented line begins with one space for every four columns; no other blanks follow each other; the lines of signs under and over
# headings and tables are four signs long. Their tokens would be many, and nearly all of them certain.
BLANKS = re.compile(r"(?<=\S)[ \t]+")
SIGNS = re.compile(r"([^\w\s]|_)\1{4,}")

# Where a definition comes from ("[1913 Webster]", "[WordNet 1.5 +PJC]"), and how a headword is spoken ("\Coak\ (k[=o]k)").
ORIGIN = re.compile(r"\s*\[[^\[\]]*(?:1913|WordNet|PJC)[^\[\]]*\]")
SPOKEN = re.compile(r"\s*\\[^\\]{1,80}\\(?:\s*\([^()]*\))?")


def entries(folder):
    """The dictionary's entries in its order; dictd's index gives offset and length of each in base 64."""
    with gzip.open(folder / "gcide.dict.dz") as file:  # dictzip is gzip
        data = file.read()
    digits = {c: i for i, c in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")}

    def number(text):
        value = 0
        for c in text:
            value = value * 64 + digits[c]
        return value

    spans = set()  # several headwords may share an entry
    for line in (folder / "gcide.index").read_text("utf-8").splitlines():
        word, offset, length = line.split("\t")[:3]
        if not word.startswith("00"):  # preface and licence
            spans.add((number(offset), number(length)))
    for offset, length in sorted(spans):
        # A few stray bytes of an older encoding are dropped.
        entry = data[offset : offset + length].decode("utf-8", "ignore")
        entry = ORIGIN.sub("", SPOKEN.sub("", entry)).replace("{", "").replace("}", "")
        paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", entry))
        if text := "\n".join(filter(None, paragraphs)):
            yield text


def joined(parts, separator):
    """Neighbouring texts as documents of about DOCUMENT characters."""
    document, length = [], 0
    for part in parts:
        document.append(part)
        length += len(part) + len(separator)
        if length >= DOCUMENT:
            yield separator.join(document)
            document, length = [], 0
    if document:
        yield separator.join(document)


def tidied(text):
    """A technical text with less drawing in it."""
    lines = []
    for line in text.replace("\f", "\n").expandtabs(8).splitlines():
        words = line.strip()
        if words.startswith((".. SPDX-License-Identifier", "# SPDX-License-Identifier")):
            continue
        columns = len(line) - len(line.lstrip())
        lines.append(" " * ((columns + 3) // 4 if words else 0) + SIGNS.sub(lambda m: m[1] * 4, BLANKS.sub(" ", words)))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")


def files(folder, wanted):
    """One document per file, in the order of their paths."""
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    for path in sorted(paths, key=lambda path: path.relative_to(folder).as_posix()):
        if wanted(path.relative_to(folder)):
            yield tidied(path.read_text("utf-8", "ignore"))


def kernel(path):
    """English alone: the translations are left out."""
    return path.parts[0] != "translations" and (path.suffix in (".rst", ".txt") or path.parts[0] == "ABI" and path.name != "README")


def main():
    sys.stdout.reconfigure(encoding="utf-8", newline="\n")
    packages, glosses = Path(sys.argv[1]), Path(sys.argv[2])
    with gzip.open(glosses, "rt", encoding="utf-8") as file:
        lines = file.read().splitlines()
    sources = {
        "dict-gcide": joined(dict.fromkeys(entries(packages / "usr/share/dictd")), "\n\n"),
        "linux-source-6.1": files(packages / "linux-source-6.1/Documentation", kernel),
        "python3.11-doc": files(packages / "usr/share/doc/python3.11/html/_sources", lambda path: path.suffix == ".txt"),
        "wordnet-base": joined(lines, "\n"),
    }
    print(f"{'source':18}{'documents':>10}{'bytes':>12}{'words':>12}", file=sys.stderr)
    seen, totals = set(), [0, 0, 0]
    for name, documents in sources.items():
        counts = [0, 0, 0]
        for text in documents:
            if not text.strip() or text in seen:
                continue
            seen.add(text)
            counts = [a + b for a, b in zip(counts, (1, len(text.encode()), len(text.split())))]
            print(json.dumps({"source": name, "text": text}, ensure_ascii=False))
        if counts[0] == 0:
            sys.exit(f"{name}: no text under {packages}")
        totals = [a + b for a, b in zip(totals, counts)]
        print(f"{name:18}{counts[0]:10}{counts[1]:12}{counts[2]:12}", file=sys.stderr)
    print(f"{'all':18}{totals[0]:10}{totals[1]:12}{totals[2]:12}", file=sys.stderr)


main()
