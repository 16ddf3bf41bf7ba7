#!/usr/bin/env python3
"""Measures preparation, start and resumption of a run on a large corpus: seconds, CPU seconds and peak memory of each process.

usage: bench_corpus.py OTTAVA [--megabytes 2000] [--parts N] [--work FOLDER]

Writes a corpus of so many megabytes into FOLDER (by default a temporary one): four files with a document in each line, made of random lines of
the bundled glosses, about 2,000 bytes each. Tokenizes it with the bundled tokenizer, by one process or by N one after another, trains
a tiny model for one step, and resumes for another. The times of start and resumption contain a step and a checkpoint.
"""
import argparse
import gzip
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

MODEL = """{"architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
  "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 4096, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}"""

RUN = """output_dir = "run"
device = "cpu"
[model]
path = "model.json"
init = "random"
tokenizer = "{root}/data/tokenizer"
[data]
train_files = ["corpus/*.txt"]
val_set_size = 10
max_length = 64

[data.records]
text_documents = "line"
[training]
max_steps = 1
per_device_train_batch_size = 2
[lr_scheduler]
type = "constant"
[precision]
skip_slow_linears = false
"""


def write_corpus(folder, megabytes):
    """Four files of equal size. Returns the number of documents."""
    with gzip.open(os.path.join(ROOT, "data/wordnet-glosses.txt.gz"), "rt", encoding="utf-8") as file:
        lines = file.read().splitlines()
    draw, documents = random.Random(1), 0
    os.makedirs(folder)
    for number in range(4):
        size = 0
        with open(os.path.join(folder, f"{number}.txt"), "w", encoding="utf-8") as out:
            while size < megabytes * 1e6 / 4:
                document = ". ".join(draw.choices(lines, k=draw.randint(1, 40))) + "\n"
                size += out.write(document)
                documents += 1
    return documents


def measured(name, command, work):
    """Runs a command and prints its times and its peak memory."""
    begin = time.monotonic()
    with open(os.path.join(work, "log"), "w", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=work, stdout=log, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        with open(os.path.join(work, "log"), encoding="utf-8") as log:
            sys.exit(f"{name} failed:\n{log.read()[-2000:]}")
    wall, cpu = time.monotonic() - begin, usage.ru_utime + usage.ru_stime
    print(f"{name:14} {wall:8.2f} s, {cpu:8.2f} s of CPU time, {usage.ru_maxrss / 1024:6.0f} MiB", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("ottava")
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--work")
    args = parser.parse_args()
    ottava, work = os.path.abspath(args.ottava), tempfile.mkdtemp(dir=args.work)
    try:
        documents = write_corpus(os.path.join(work, "corpus"), args.megabytes)
        print(f"{args.megabytes} MB in {documents} documents", flush=True)
        for name, text in [("model.json", MODEL), ("run.toml", RUN.format(root=ROOT))]:
            with open(os.path.join(work, name), "w", encoding="utf-8") as file:
                file.write(text)
        if args.parts == 1:
            measured("prepare", [ottava, "prepare", "run.toml"], work)
        for part in range(1, args.parts + 1) if args.parts > 1 else []:
            measured(f"part {part}/{args.parts}", [ottava, "prepare", "run.toml", "--part", f"{part}/{args.parts}"], work)
        # The first start counts the rows of an epoch; the second one finds the count.
        measured("first start", [ottava, "train", "run.toml", "--set", "output_dir=first"], work)
        measured("start", [ottava, "train", "run.toml"], work)
        measured("resume", [ottava, "train", "run.toml", "--resume", "--set", "max_steps=2"], work)
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
