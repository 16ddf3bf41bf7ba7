"""Folders and files that the suite of data writes: each a function that fills a folder, and what to load of it."""

import csv
import gzip
import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict

LAYOUTS = []


def layout(path="", **settings):
    """Registers a layout. `path` is what to load of the folder; `settings` are keys of `[data]` of a run."""

    def register(function):
        LAYOUTS.append((function.__name__, function, path, settings))
        return function

    return register


def texts(*names):
    return [{"text": f"{name} {i}", "id": i} for name in names for i in range(2)]


def jsonl(path, records, encoding="utf-8", newline="\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes("".join(json.dumps(record, ensure_ascii=False) + newline for record in records).encode(encoding))


def table(path, rows, delimiter=",", **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=delimiter, **options).writerows(rows)


def parquet(path, columns, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, **options)


def splits(*names, form=lambda folder, name: folder / f"{name}.jsonl"):
    def fill(folder):
        for name in names:
            jsonl(form(folder, name), texts(name.replace("/", " ")))

    return fill


def by_names():
    """Layouts of JSON lines that differ only in the names of files."""
    names = {
        "files_of_splits": ["train", "test", "validation"],
        "folders_of_splits": ["train/0", "test/0", "validation/0"],
        "folders_of_splits_in_data": ["data/train/0", "data/test/0"],
        "shards": ["data/train-00000-of-00002", "data/train-00001-of-00002", "data/test-00000-of-00001"],
        "split_words_in_names": ["my_train_file", "my_test_file"],
        "training_val": ["training", "val"],
        "train_dev": ["train", "dev"],
        "train_valid": ["train_1", "valid_1"],
        "train_eval": ["train", "eval"],
        "train_evaluation": ["train", "evaluation"],
        "train_testing": ["train", "testing"],
        "training_folder": ["training/a", "testing/a"],
        "versions": ["train-v1.1", "dev-v1.1"],
        "years": ["2012-train", "2012-test"],
        "upper_case": ["Train", "Test"],
        "words_that_contain_test": ["contest", "latest", "attest"],
        "words_that_contain_train": ["trainer", "strain"],
        "only_test": ["test"],
        "only_validation_and_test": ["validation", "test"],
        "no_split": ["b", "a"],
        "train_among_others": ["train", "other"],
        "nested": ["x/y/b", "x/a", "c"],
        "numbered": ["part-10", "part-2", "part-1"],
        "named_splits": ["data/fold1-00000-of-00001", "data/fold2-00000-of-00001"],
        "named_splits_with_train": ["data/train-00000-of-00001", "data/extra-00000-of-00001"],
        "train_folder_and_file": ["train/a", "b"],
        "test_folder_below": ["en/train/a", "en/test/a"],
        "words_in_folders": ["train_data/a", "test_data/a"],
        "test_in_the_middle": ["a_test_b", "a_train_b"],
        "both_words": ["train_test", "other"],
        "dots": ["a.train", "a.test"],
        "hidden": ["a", ".b", ".c/d", "__e/f"],
    }
    for name, files in names.items():
        LAYOUTS.append((name, splits(*files), "", {}))
    LAYOUTS.append(("one_file_of_splits", splits("train", "test"), "train.jsonl", {}))
    LAYOUTS.append(("one_test_file", splits("train", "test"), "test.jsonl", {}))
    LAYOUTS.append(("one_folder_of_splits", splits("train/0", "test/0"), "train", {}))


by_names()


@layout()
def csv_of_splits(folder):
    for name in ("train", "test"):
        table(folder / f"{name}.csv", [["text", "id"], [f"{name} 0", 0], [f"{name} 1", 1]])


@layout()
def csv_with_quotes(folder):
    table(folder / "a.csv", [["id", "text"], [0, 'a "b", c'], [1, "two\nlines"], [2, " spaces "], [3, "é,日本"]])


@layout()
def csv_with_empty_cells(folder):
    table(folder / "a.csv", [["text", "n", "flag"], ["a", "", "True"], ["b", 2, ""], ["c", "NaN", "False"], ["d", "1.5", "true"]])


@layout()
def csv_with_missing_texts(folder):
    table(folder / "a.csv", [["text", "n"], ["a", 1], ["", 2], ["NA", 3], ["null", 4], ["None", 5], ["nan", 6], ["b", 7]])


@layout()
def csv_with_an_index(folder):
    table(folder / "a.csv", [["", "text"], [0, "a"], [1, "b"]])


@layout()
def csv_with_crlf(folder):
    (folder / "a.csv").write_bytes(b'text,id\r\na,1\r\n"b\r\nc",2\r\n')


@layout()
def csv_with_a_byte_order_mark(folder):
    (folder / "a.csv").write_bytes("\ufefftext,id\na,1\n".encode())


@layout()
def csv_of_numbers(folder):
    table(folder / "a.csv", [["text"], [1], [2]])


@layout()
def tsv(folder):
    table(folder / "a.tsv", [["text", "id"], ["a b", 1], ["c", 2]], delimiter="\t")


@layout()
def csv_gz(folder):
    (folder / "a.csv.gz").write_bytes(gzip.compress(b"text,id\na,1\nb,2\n"))


@layout()
def json_list(folder):
    (folder / "a.json").write_text(json.dumps(texts("a")))


@layout()
def json_lines_named_json(folder):
    jsonl(folder / "a.json", texts("a"))


@layout()
def json_indented(folder):
    (folder / "a.json").write_text(json.dumps(texts("a"), indent=2))


@layout()
def json_lines_gz(folder):
    (folder / "train.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n{"text": "b"}\n'))
    (folder / "test.jsonl.gz").write_bytes(gzip.compress(b'{"text": "c"}\n'))


@layout()
def json_with_nan(folder):
    (folder / "a.jsonl").write_text('{"text": "a", "s": NaN}\n{"text": "b", "s": Infinity}\n{"text": "c", "s": -Infinity}\n')


@layout()
def json_with_missing_keys(folder):
    jsonl(folder / "a.jsonl", [{"text": "a", "x": 1}, {"text": "b"}, {"text": "c", "y": [1]}])


@layout()
def json_with_null_texts(folder):
    jsonl(folder / "a.jsonl", [{"text": "a"}, {"text": None}, {"text": "c"}])


@layout()
def json_with_empty_texts(folder):
    jsonl(folder / "a.jsonl", [{"text": "a"}, {"text": ""}, {"text": "c"}])


@layout()
def json_with_blank_lines(folder):
    (folder / "a.jsonl").write_text('{"text": "a"}\n\n{"text": "b"}\n\n')


@layout()
def json_with_crlf(folder):
    jsonl(folder / "a.jsonl", texts("a"), newline="\r\n")


@layout()
def json_with_a_byte_order_mark(folder):
    jsonl(folder / "a.jsonl", texts("a"), encoding="utf-8-sig")


@layout()
def json_with_escapes(folder):
    (folder / "a.jsonl").write_text('{"text": "\\u00e9 \\ud83c\\udfbc \\/ \\t"}\n')


@layout()
def json_with_large_integers(folder):
    jsonl(folder / "a.jsonl", [{"text": "a", "n": 2**63}, {"text": "b", "n": 10**30}])


@layout()
def json_without_a_last_newline(folder):
    (folder / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}')


@layout()
def parquet_shards(folder):
    for i in range(2):
        parquet(folder / f"data/train-{i:05}-of-00002.parquet", {"text": [f"train {i}"]})
    parquet(folder / "data/test-00000-of-00001.parquet", {"text": ["test"]})


@layout()
def parquet_with_nulls(folder):
    parquet(folder / "a.parquet", {"text": ["a", None, "c"], "n": [1, None, 3]})


@layout()
def parquet_of_types(folder):
    columns = {"text": pa.array(["a", "b"], pa.large_string()), "f": pa.array([math.nan, 1.0]), "d": pa.array(["x", "y"]).dictionary_encode()}
    parquet(folder / "a.parquet", columns)


@layout()
def parquet_of_a_dictionary(folder):
    parquet(folder / "a.parquet", {"text": pa.array(["a", "b", "a"]).dictionary_encode()})


@layout()
def parquet_of_views(folder):
    parquet(folder / "a.parquet", {"text": pa.array(["a", "b"], pa.string_view())})


@layout()
def parquet_of_bytes(folder):
    parquet(folder / "a.parquet", {"text": pa.array([b"a", b"b"])})


@layout()
def parquet_of_zstandard(folder):
    parquet(folder / "a.parquet", {"text": ["a", "b"]}, compression="zstd")


@layout()
def parquet_of_row_groups(folder):
    parquet(folder / "a.parquet", {"text": [str(i) for i in range(20)]}, row_group_size=3, compression="gzip")


@layout()
def arrow_stream(folder):
    with pa.OSFile(str(folder / "a.arrow"), "w") as sink, pa.ipc.new_stream(sink, pa.schema([("text", pa.string())])) as writer:
        writer.write(pa.record_batch({"text": ["a", "b"]}))


@layout()
def arrow_file(folder):
    with pa.OSFile(str(folder / "a.arrow"), "w") as sink, pa.ipc.new_file(sink, pa.schema([("text", pa.string())])) as writer:
        writer.write(pa.record_batch({"text": ["a", "b"]}))


@layout()
def saved_dataset(folder):
    Dataset.from_list(texts("a")).save_to_disk(folder)


@layout()
def saved_shards(folder):
    Dataset.from_list(texts("a", "b")).save_to_disk(folder, num_shards=2)


@layout()
def saved_splits(folder):
    DatasetDict({name: Dataset.from_list(texts(name)) for name in ("train", "test", "validation")}).save_to_disk(folder)


@layout(path="train")
def saved_train_split(folder):
    DatasetDict({name: Dataset.from_list(texts(name)) for name in ("train", "test")}).save_to_disk(folder)


@layout()
def saved_selection(folder):
    """Rows that an index selects: `indices.arrow` beside the data."""
    Dataset.from_list(texts("a", "b", "c")).select([4, 0]).save_to_disk(folder)


@layout()
def readme_and_license(folder):
    splits("train", "test")(folder)
    (folder / "README.md").write_text("# Otters\n")
    (folder / "LICENSE.txt").write_text("Free\n")
    (folder / ".gitattributes").write_text("*.jsonl -text\n")


@layout()
def readme_with_configs(folder):
    splits("a", "b")(folder)
    (folder / "README.md").write_text(
        '---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: "a.jsonl"\n  - split: test\n    path: "b.jsonl"\n---\n'
    )


@layout()
def readme_with_several_configs(folder):
    splits("en/a", "fr/b")(folder)
    lines = "".join(f'- config_name: {name}\n  data_files: "{name}/*.jsonl"\n' for name in ("en", "fr"))
    (folder / "README.md").write_text(f"---\nconfigs:\n{lines}---\n")


@layout()
def infos_beside_data(folder):
    splits("train", "test")(folder)
    (folder / "dataset_infos.json").write_text(json.dumps({"default": {"description": "Otters"}}))


@layout()
def two_formats(folder):
    splits("a", "b")(folder)
    table(folder / "c.csv", [["text"], ["c"]])


@layout(text_documents="line")
def text_lines(folder):
    (folder / "train.txt").write_text("a\n\nb c\n")
    (folder / "test.txt").write_text("d\n")


@layout(path="train.txt", text_documents="line")
def text_file(folder):
    (folder / "train.txt").write_bytes("a\r\n b \r\n\té\u2028x\x0cy\n".encode())
