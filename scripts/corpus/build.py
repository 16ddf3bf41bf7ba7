#!/usr/bin/env python3
"""Makes a corpus of text and code from the packages of packages.tsv: Debian's packages and PyPI's source archives, each pinned by SHA-256.

usage: scripts/corpus/build.py FOLDER [--only PACKAGE]... [--debian URL] [--keep-downloads]

Writes FOLDER/train/SOURCE.jsonl and FOLDER/validation/SOURCE.jsonl: an object per line with `text`, `source` and `package`, and FOLDER/counts.json.
A package is in training or in validation, never in both. Validation packages are read first, so a near copy of a validation text in another package
is dropped from training. Same list, same bytes, on any number of cores. Needs Python 3.11 or later and nothing else.
"""

import argparse
import csv
import hashlib
import io
import json
import lzma
import multiprocessing
import os
import re
import sys
import tarfile
import urllib.request
import zipfile
from pathlib import Path

from convert import convert

# A document is dropped if more than this share of its pairs of lines was seen before.
SEEN = 0.5
# Larger files are data, not text.
LARGEST = 40_000_000


def fetch(row, folder, debian):
    """Downloads a package unless it is there, and checks its SHA-256."""
    path = folder / row["url"].rpartition("/")[2]
    if not path.exists():
        url = row["url"].replace("https://deb.debian.org", debian)
        request = urllib.request.Request(url, headers={"User-Agent": "ottava-corpus"})
        with urllib.request.urlopen(request, timeout=120) as answer, open(path.with_suffix(".part"), "wb") as file:
            while block := answer.read(1 << 20):
                file.write(block)
        path.with_suffix(".part").rename(path)
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != row["sha256"]:
        sys.exit(f"{path}: its SHA-256 is {found}, and packages.tsv says {row['sha256']}; delete the file and try again, or correct the list")
    return path


def data_of_deb(path):
    """The tar of the files of a .deb, which is an `ar` archive."""
    with open(path, "rb") as file:
        file.read(8)
        while header := file.read(60):
            name, size = header[:16].decode().strip().rstrip("/"), int(header[48:58])
            if name.startswith("data.tar"):
                return io.BytesIO(file.read(size))
            file.seek(size + size % 2, 1)
    sys.exit(f"{path}: it has no data.tar")


def members(name, file):
    """The path and the bytes of each file of an archive, and of the archives of source code in it."""
    if name.endswith(".zip"):
        with zipfile.ZipFile(io.BytesIO(file.read())) as archive:
            for entry in archive.infolist():
                if not entry.is_dir() and entry.file_size < LARGEST:
                    yield entry.filename, archive.read(entry)
        return
    with tarfile.open(fileobj=file, mode="r|*") as archive:
        for entry in archive:
            if entry.isfile():
                if entry.name.endswith((".tar.xz", "/src.zip")):
                    yield from members(entry.name, io.BytesIO(archive.extractfile(entry).read()))
                elif entry.size < LARGEST:
                    yield entry.name.removeprefix("./"), archive.extractfile(entry).read()


def chosen(row, path):
    """Whether a file is in the share of the package that the list takes; the choice depends on its path alone."""
    if not re.search(row["select"], path):
        return False
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=4).digest(), "little") % 100 < int(row["keep"])


def work(job):
    path, data, kind = job
    try:
        return path, convert(path, data, kind)
    except (OSError, EOFError, lzma.LZMAError) as problem:  # a damaged compressed file
        print(f"{path}: {problem}", file=sys.stderr)
        return path, None


class Seen:
    """Hashes of lines and of pairs of lines of all documents so far."""

    def __init__(self):
        self.documents, self.paragraphs, self.pairs = set(), set(), set()

    @staticmethod
    def hash(text):
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def filtered(self, text, is_code):
        """The text without paragraphs that were seen before, or None for a copy of a document."""
        document = self.hash(text)
        if document in self.documents:
            return None
        self.documents.add(document)
        lines = [line for line in (line.strip() for line in text.split("\n")) if len(line) >= 12]
        # One pair in four is stored: enough for a share, and a quarter of the memory.
        pairs = {pair for pair in map(self.hash, map("\n".join, zip(lines, lines[1:]))) if pair % 4 == 0}
        if len(pairs) >= 4 and len(pairs & self.pairs) > SEEN * len(pairs):
            return None
        self.pairs |= pairs
        if is_code:
            return text
        kept = []
        for line in text.split("\n"):
            if len(line) >= 80:
                paragraph = self.hash(line.strip())
                if paragraph in self.paragraphs:
                    continue
                self.paragraphs.add(paragraph)
            kept.append(line)
        text = re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip("\n")
        return text if len(text) >= 200 else None


class Edges:
    """Removes lines of navigation: short first and last lines that several documents of a package share."""

    def __init__(self):
        self.counts = {}

    def trimmed(self, text):
        lines = text.split("\n")
        for first in (True, False):
            while lines:
                line = lines[0 if first else -1].strip()
                if len(line) >= 80:
                    break
                self.counts[line] = self.counts.get(line, 0) + 1
                if line and self.counts[line] < 4:
                    break
                lines.pop(0 if first else -1)
        return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", action="append", help="read this package alone; may be repeated")
    parser.add_argument("--debian", default="https://deb.debian.org", help="another server with Debian's packages")
    parser.add_argument("--keep-downloads", action="store_true", help="do not delete a package after it is read")
    arguments = parser.parse_args()
    with open(Path(__file__).parent / "packages.tsv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    if arguments.only:
        rows = [row for row in rows if row["package"] in arguments.only]
    rows.sort(key=lambda row: row["split"] != "validation")
    downloads = arguments.folder / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    files, counts, seen = {}, {}, Seen()
    with multiprocessing.Pool(os.cpu_count()) as pool:
        for number, row in enumerate(rows):
            path = fetch(row, downloads, arguments.debian)
            archive = data_of_deb(path) if path.suffix == ".deb" else open(path, "rb")
            jobs = ((name, data, row["source"]) for name, data in members(path.name, archive) if chosen(row, name))
            here, edges = {}, Edges()
            for _, result in pool.imap(work, jobs, chunksize=8):
                source, texts = result or (None, [])
                for text in texts:
                    if not source.startswith("code"):
                        text = edges.trimmed(text)
                    if text := seen.filtered(text, source.startswith("code")):
                        place = arguments.folder / row["split"] / f"{source}.jsonl"
                        if place not in files:
                            place.parent.mkdir(parents=True, exist_ok=True)
                            files[place] = open(place, "w", encoding="utf-8", newline="\n")
                        files[place].write(json.dumps({"text": text, "source": source, "package": row["package"]}, ensure_ascii=False) + "\n")
                        count = here.setdefault(source, [0, 0])
                        count[0] += 1
                        count[1] += len(text.encode())
            if not here:
                sys.exit(f"{row['package']}: no text; its column `select` matches no file of use")
            counts[f"{row['package']} {row['source']}"] = {"split": row["split"], "sources": {source: {"documents": d, "bytes": b} for source, (d, b) in here.items()}}
            print(f"{row['package']:28}{row['split']:12}" + "  ".join(f"{s} {d} documents {b / 1e6:.2f} MB" for s, (d, b) in here.items()), flush=True)
            if not arguments.keep_downloads and row["url"] not in (later["url"] for later in rows[number + 1 :]):
                path.unlink()
    for file in files.values():
        file.close()
    (arguments.folder / "counts.json").write_text(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    main()
