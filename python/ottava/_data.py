"""Data sets of a script as files of a run."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any, Mapping


def files_of(name: str, data: Any, folder: Path) -> tuple[list[str], set[str]]:
    """The files of `data`, and the columns of its first record, if the records are known here.

    A path, a name of the Hub or a list of them stays as it is. Records (a data set of the library `datasets`, or a list of dictionaries) are written as JSONL
    into `folder`, into a file that is named by its content: the same records are the same file when a run resumes.
    """
    if isinstance(data, (str, os.PathLike)):
        return [os.path.expanduser(data)], set()
    if isinstance(data, Mapping):
        raise ValueError(f'`{name}` is a table of several data sets; pass one of them, such as DATASETS["train"]')
    if isinstance(data, (list, tuple)) and data and all(isinstance(entry, (str, os.PathLike)) for entry in data):
        return [os.path.expanduser(entry) for entry in data], set()
    digest = hashlib.sha256()
    columns: set[str] = set()
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f".{name}-{secrets.token_hex(8)}.part"
    try:
        with open(part, "wb") as file:
            for number, record in enumerate(data):
                line = line_of(name, number, record)
                columns = columns or set(record)
                digest.update(line)
                file.write(line)
        if not columns:
            raise ValueError(f"`{name}` has no records")
        path = folder / f"{name}-{digest.hexdigest()[:16]}.jsonl"
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return [str(path)], columns


def line_of(name: str, number: int, record: Any) -> bytes:
    """A record as a line of JSON."""
    if not isinstance(record, Mapping):
        raise ValueError(f"`{name}`: record {number} is a {type(record).__name__}, and a record is a dictionary of columns")
    try:
        return json.dumps(dict(record), ensure_ascii=False).encode("utf-8") + b"\n"
    except (TypeError, ValueError) as error:
        for column, value in record.items():
            try:
                json.dumps(value, ensure_ascii=False).encode("utf-8")
            except (TypeError, ValueError) as reason:
                raise ValueError(f"`{name}`: record {number}, column `{column}`: {reason}") from None
        raise ValueError(f"`{name}`: record {number}: {error}") from None
