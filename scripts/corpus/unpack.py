#!/usr/bin/env python3
"""Unpacks the pieces of scripts/corpus/pack.sh.

usage: scripts/corpus/unpack.py PIECES FOLDER      Python 3.11.4 or later is enough
"""

import json
import lzma
import sys
import tarfile
from pathlib import Path


class Joined:
    """The bytes of several files, one after the other."""

    def __init__(self, paths):
        self.files = [open(path, "rb") for path in paths]

    def read(self, size):
        while self.files:
            if block := self.files[0].read(size):
                return block
            self.files.pop(0).close()
        return b""


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__.strip())
    pieces, folder = Path(sys.argv[1]), Path(sys.argv[2])
    numbered = sorted(pieces.glob("piece-*.xz"))
    if not numbered or not (pieces / "validation.tar.xz").exists():
        sys.exit(f"{pieces}: piece-00.xz and validation.tar.xz are expected there; scripts/corpus/pack.sh makes them")
    # The text of training goes to a folder that gets its name at the end, so an interrupted call leaves no part of a corpus.
    unfinished = folder / "train.part"
    unfinished.mkdir(parents=True, exist_ok=True)
    files = {}
    with lzma.LZMAFile(Joined(numbered)) as lines:
        for line in lines:
            source = json.loads(line)["source"]
            if source not in files:
                files[source] = open(unfinished / f"{source}.jsonl", "wb")
            files[source].write(line)
    for file in files.values():
        file.close()
    with tarfile.open(pieces / "validation.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    unfinished.rename(folder / "train")


if __name__ == "__main__":
    main()
