"""Writes the same records in every format of data into crates/ottava-data/tests/data/formats, with pyarrow, polars, zstandard and Python.

    python -m venv v && v/bin/pip install polars pyarrow zstandard && v/bin/python scripts/make_data_files.py
"""

import csv
import gzip
import json
import pathlib
import shutil
import struct

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

FOLDER = pathlib.Path(__file__).parent.parent / "crates/ottava-data/tests/data/formats"

TEXTS = [
    {"id": 1, "text": "An otter is a small animal.", "score": 0.5},
    {"id": 2, "text": "Two lines,\nand \"quotes\"; a tab\tand an é.", "score": None},
    {"id": 3, "text": "日本語 and 🦦", "score": -1.5},
]


def turn(role, content):
    return {"role": role, "content": content}


CHATS = [
    {"messages": [turn("user", "What is an otter?"), turn("assistant", "A small animal,\nin rivers.")]},
    {"messages": [turn("system", "Be brief."), turn("user", "É?"), turn("assistant", "\"É\"."), turn("user", "And?"), turn("assistant", "No.")]},
]
PAIRS = [{"prompt": "2 + 2 =", "completion": " 4"}, {"prompt": "a,b\n", "completion": "c \"d\""}]
TOKENS = [{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}, {"input_ids": [9, 300], "labels": [9, 300]}]


def write_all(name, records):
    """Each format of `records`; lists in CSV are JSON texts."""
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    (FOLDER / f"{name}.jsonl").write_bytes(lines)
    (FOLDER / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines, mtime=0))
    packer = zstandard.ZstdCompressor(level=9)
    half = lines.index(b"\n") + 1
    # Two frames, as `zstd` appends them.
    (FOLDER / f"{name}.jsonl.zst").write_bytes(packer.compress(lines[:half]) + packer.compress(lines[half:]))
    (FOLDER / f"{name}.json").write_text(json.dumps(records, ensure_ascii=False, indent=2))
    for extension, delimiter in [("csv", ","), ("tsv", "\t")]:
        with open(FOLDER / f"{name}.{extension}", "w", newline="") as file:
            writer = csv.writer(file, delimiter=delimiter)
            writer.writerow(records[0])
            for record in records:
                cells = (json.dumps(value) if isinstance(value, list) else value for value in record.values())
                writer.writerow(["" if cell is None else cell for cell in cells])
    table = pa.Table.from_pylist(records)
    for codec in ["none", "snappy", "gzip", "lz4", "zstd"]:
        pq.write_table(table, FOLDER / f"{name}-{codec}.parquet", compression=codec, row_group_size=2)
    # Pages of version 2 do not compress their levels.
    pq.write_table(table, FOLDER / f"{name}-zstd-2.parquet", compression="zstd", row_group_size=2, data_page_version="2.0")
    # Zstandard is the default of Polars.
    pl.DataFrame(records).write_parquet(FOLDER / f"{name}-polars.parquet", row_group_size=2)
    # `datasets` keeps its cache as a stream.
    with pa.OSFile(str(FOLDER / f"{name}-stream.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    with pa.OSFile(str(FOLDER / f"{name}-file.arrow"), "wb") as file:
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)


def write_megatron(name, documents):
    """As `IndexedDatasetBuilder` of Megatron-LM writes documents of one sequence, with uint16 tokens."""
    (FOLDER / f"{name}.bin").write_bytes(b"".join(struct.pack(f"<{len(ids)}H", *ids) for ids in documents))
    offsets, offset = [], 0
    for ids in documents:
        offsets.append(offset)
        offset += 2 * len(ids)
    count = len(documents)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, count + 1)
    index += struct.pack(f"<{count}i", *map(len, documents)) + struct.pack(f"<{count}q", *offsets)
    (FOLDER / f"{name}.idx").write_bytes(index + struct.pack(f"<{count + 1}q", *range(count + 1)))


shutil.rmtree(FOLDER, ignore_errors=True)
FOLDER.mkdir()
# Pages that are large enough to be compressed, whose levels say which texts are missing.
long = pa.table({"text": [None if number % 3 == 1 else f"otter {number} " * 20 for number in range(60)]})
pq.write_table(long, FOLDER / "long-zstd-2.parquet", compression="zstd", data_page_version="2.0", use_dictionary=False)
write_all("texts", TEXTS)
write_all("chats", CHATS)
write_all("pairs", PAIRS)
write_all("tokens", TOKENS)
write_megatron("ids", [[5, 6, 7, 8], [9, 300], [11]])
