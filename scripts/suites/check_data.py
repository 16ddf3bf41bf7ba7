#!/usr/bin/env python3
"""Compares which rows of a folder or file Ottava trains on with those that `load_dataset(..., split="train")` gives.

usage: check_data.py OTTAVA_BINARY

`layouts.py` writes the files. The rows of Ottava are the documents that `ottava prepare --megatron` writes.
"""

import argparse
import json
import logging
import os
import struct
import sys
import tempfile
from pathlib import Path

os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}

import datasets
import numpy as np

from common import Program, Tally, message, write_byte_model
from layouts import LAYOUTS

# Why the program may refuse a layout that datasets loads, by a pattern of its error.
REFUSALS = {
    "null_texts.*null|with_nulls": "with records without a text",
    "parquet_of_bytes": "with binary columns",
    "parquet_of_zstandard.*zstd": "with Parquet compressed with Zstandard",
    "^two_formats.*several kinds": "with files of several formats",
    "^readme_with": "with splits that a README lists",
}
# Layouts whose rows differ on purpose, with the reason.
DIFFERENT = {
    "upper_case": "with splits in capitals, which datasets does not know",
    "csv_with_missing_texts": "with cells such as NA, which are texts and no nulls",
}


def theirs(path, cache):
    """The texts of the split that one trains on; a folder of `save_to_disk` is what `load_from_disk` gives."""
    if (path / "dataset_dict.json").exists():
        return list(datasets.load_from_disk(path)["train"]["text"])
    if (path / "state.json").exists():
        return list(datasets.load_from_disk(path)["text"])
    options = dict(split="train", cache_dir=str(cache))
    if path.is_dir():
        return list(datasets.load_dataset(str(path), **options)["text"])
    suffixes = [suffix.strip(".") for suffix in path.suffixes]
    builder = dict(jsonl="json", txt="text").get(suffixes[0], suffixes[0])
    return list(datasets.load_dataset(builder, data_files=str(path), **options)["text"])


def documents(prefix, tokenizer):
    """The texts of the documents that were written for Megatron-LM, without the tokens around them."""
    index = Path(f"{prefix}.idx").read_bytes()
    assert index[:9] == b"MMIDIDX\0\0"
    dtype = {4: np.int32, 8: np.uint16}[index[17]]
    (count,) = struct.unpack_from("<Q", index, 18)
    sizes = np.frombuffer(index, np.int32, count, 34)
    tokens = np.fromfile(f"{prefix}.bin", dtype)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    return [tokenizer.decode(tokens[a:b].tolist(), skip_special_tokens=True) for a, b in zip(starts, starts[1:])]


def write_run(root, model, path, settings):
    """The configuration of a run on `path`, which is returned."""
    data = dict(train_files=[str(path)], cache_dir=str(root / "prepared"), max_length=64, val_set_size=0) | settings
    lines = [f"{key} = {json.dumps(value)}" for key, value in data.items()]
    run = root / "run.toml"
    run.write_text("\n".join([f'output_dir = "{root}/run"', "[model]", f'path = "{model}"', "[data]", *lines, "[training]", "max_steps = 1"]))
    return run


def ours(program, root, model, tokenizer, path, settings):
    """The texts that Ottava trains on, or its error."""
    status, _, error = program.run("prepare", write_run(root, model, path, settings), "--megatron", root / "tokens")
    return documents(root / "tokens", tokenizer) if status == 0 else message(error)


def judge(tally, name, found, expected, error):
    if isinstance(found, str):
        if expected is None:
            tally.expect("refused by both")
        else:
            tally.refuse(name, f"{found}; datasets has {expected}")
    elif expected is None and "Unknown split" in error:
        tally.expect("without a train split, trained as a whole")
    elif expected is None:
        tally.fail(name, f"datasets refuses ({error}), Ottava has {found}")
    elif found == [str(text) for text in expected if text not in ("", None)]:  # documents without text are skipped
        tally.hold()
    elif name in DIFFERENT:
        tally.expect(DIFFERENT[name])
    else:
        tally.fail(name, f"{found}, datasets has {expected}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    arguments = parser.parse_args()
    datasets.utils.logging.set_verbosity(logging.CRITICAL)
    program, tally = Program(arguments.binary), Tally(f"layouts of datasets {datasets.__version__}", REFUSALS)
    with tempfile.TemporaryDirectory() as root:
        model = Path(root) / "model"
        model.mkdir()
        tokenizer = write_byte_model(model)
        for name, fill, path, settings in LAYOUTS:
            work = Path(root) / name
            folder = work / "data-of-otters"
            folder.mkdir(parents=True)
            fill(folder)
            try:
                expected, error = theirs(folder / path, work / "cache"), None
            except Exception as reason:
                expected, error = None, f"{type(reason).__name__}: {reason}"[:200]
            judge(tally, name, ours(program, work, model, tokenizer, folder / path, settings), expected, error)
    return tally.report()


if __name__ == "__main__":
    sys.exit(main())
