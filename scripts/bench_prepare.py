#!/usr/bin/env python3
"""Compares `ottava prepare` with the Python package tokenizers: the same JSON lines, tokenizer and cores, in turns; checks that the ids agree.

usage: bench_prepare.py OTTAVA TOKENIZER TEXT.jsonl [--pairs N] [--cores 1,2] [--work FOLDER]

OTTAVA is the binary, TOKENIZER a folder with tokenizer.json, and TEXT.jsonl has a `text` in each line. Needs the packages tokenizers and numpy.
Both read the file and write the ids to a file: Python with json.loads, encode_batch_fast of 1,000 texts at a time and ndarray.tofile; Ottava
also hashes the file twice, hashes and checks what it writes, and writes its tables. Prints MB of text per second of wall time and of CPU
time (user and system), the median of all pairs, and the ratio of each pair.
"""
import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

RUN = """output_dir = "{work}/run"
device = "cpu"
[model]
path = "{tokenizer}"
init = "random"
tokenizer = "{tokenizer}"
[data]
train_files = ["{text}"]
val_set_size = 0
cache_dir = "{work}/cache"
"""

PYTHON = """
import json, sys
import numpy
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
tokenizer.no_padding()
tokenizer.no_truncation()
encode = getattr(tokenizer, "encode_batch_fast", tokenizer.encode_batch)
texts, out = [], open(sys.argv[3], "wb")
def write():
    for encoding in encode(texts, add_special_tokens=False):
        numpy.array(encoding.ids, numpy.uint16).tofile(out)
    texts.clear()
for line in open(sys.argv[2]):
    texts.append(json.loads(line)["text"])
    if len(texts) == 1000:
        write()
write()
"""


def timed(command, cores, environment):
    """Wall and CPU seconds of a command on the first cores."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.monotonic()
    pin = lambda: os.sched_setaffinity(0, range(cores))
    subprocess.run(command, env={**os.environ, **environment}, preexec_fn=pin, check=True, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL)
    wall = time.monotonic() - begin
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("ottava")
    parser.add_argument("tokenizer")
    parser.add_argument("text")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--cores", default="1,2")
    parser.add_argument("--work")
    args = parser.parse_args()
    tokenizer, text = os.path.abspath(args.tokenizer), os.path.abspath(args.text)
    with open(text) as file:
        megabytes = sum(len(json.loads(line)["text"].encode()) for line in file) / 1e6
    work = tempfile.mkdtemp(dir=args.work)
    try:
        run, ids = os.path.join(work, "run.toml"), os.path.join(work, "ids.bin")
        with open(run, "w") as file:
            file.write(RUN.format(work=work, tokenizer=tokenizer, text=text))
        commands = {
            "python": [sys.executable, "-c", PYTHON, os.path.join(tokenizer, "tokenizer.json"), text, ids],
            "ottava": [args.ottava, "prepare", run],
        }
        print(f"{megabytes:.1f} MB of text")
        for cores in map(int, args.cores.split(",")):
            seconds = {name: [] for name in commands}
            environment = {"RAYON_NUM_THREADS": str(cores), "TOKENIZERS_PARALLELISM": "true" if cores > 1 else "false"}
            for _ in range(args.pairs):
                for name, command in commands.items():
                    shutil.rmtree(os.path.join(work, "cache"), ignore_errors=True)
                    seconds[name].append(timed(command, cores, environment))
            for name, all_seconds in seconds.items():
                wall, cpu = (statistics.median(megabytes / of[i] for of in all_seconds) for i in (0, 1))
                print(f"{name:7} on {cores} cores: {wall:7.2f} MB/s, {cpu:7.2f} MB per CPU second")
            pairs = zip(seconds["python"], seconds["ottava"])
            ratios = [tuple(p / o for p, o in zip(*pair)) for pair in pairs]
            print(f"ratios on {cores} cores, wall and CPU: " + ", ".join(f"{wall:.2f} {cpu:.2f}" for wall, cpu in ratios))
        compare(os.path.join(work, "cache"), ids)
    finally:
        shutil.rmtree(work)


def compare(cache, ids):
    """Ids of the last runs: those of Ottava have one token more at the end of each document."""
    import numpy

    folder = os.path.join(cache, next(name for name in os.listdir(cache) if name.startswith("tokens-")))
    shards = sorted(name for name in os.listdir(folder) if name.startswith("tokens-"))
    ours = numpy.concatenate([numpy.fromfile(os.path.join(folder, name), numpy.uint16) for name in shards])
    ends = numpy.fromfile(os.path.join(folder, "documents.bin"), numpy.uint64)[1:] - 1
    ours, theirs = numpy.delete(ours, ends.astype(numpy.int64)), numpy.fromfile(ids, numpy.uint16)
    if not numpy.array_equal(ours, theirs):
        raise SystemExit("the ids differ")
    print(f"{len(theirs)} ids agree")


if __name__ == "__main__":
    main()
