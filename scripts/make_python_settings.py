#!/usr/bin/env python3
"""Writes python/ottava/settings.py, the tables of a run's file as dataclasses, from configs/run.schema.json.

usage: make_python_settings.py [--check]

With --check, nothing is written, and the exit status is 1 if the file is not current.
"""

import json
import keyword
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = ROOT / "configs" / "run.schema.json"
MODULE = ROOT / "python" / "ottava" / "settings.py"
SIMPLE = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
HEAD = '''"""The tables of a run's file. `scripts/make_python_settings.py` writes this module from `configs/run.schema.json`; do not edit it.

Each field is a key of the file, and None is the default of the key. `ottava config reference` prints all keys, their defaults and their whole texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Optional, Union

from ._table import Table
'''


def kind(schema):
    """The type of a value, as an annotation that `typing.get_type_hints` of Python 3.9 reads."""
    variants = schema.get("oneOf") or schema.get("anyOf")
    if variants:
        kinds = [kind(variant) for variant in variants]
        words = [word for found in kinds if found.startswith("Literal[") for word in found[8:-1].split(", ")]
        others = [found for found in kinds if not found.startswith("Literal[")]
        parts = ([f"Literal[{', '.join(words)}]"] if words else []) + others
        parts = list(dict.fromkeys(parts))
        return f"Union[{', '.join(parts)}]" if len(parts) > 1 else parts[0]
    if "const" in schema:
        return f"Literal[{json.dumps(schema['const'])}]"
    if "enum" in schema:
        return f"Literal[{', '.join(map(json.dumps, schema['enum']))}]"
    if schema["type"] == "array":
        return f"list[{kind(schema['items'])}]"
    if schema["type"] == "object":
        inner = schema.get("additionalProperties")
        return f"dict[str, {kind(inner) if isinstance(inner, dict) else 'Any'}]"
    return SIMPLE[schema["type"]]


def sentence(text):
    """The first sentence of a description, on one line."""
    first = re.split(r"(?<=[.!?])(?<!Dr\.)\s|:\n", text.strip(), maxsplit=1)[0]
    return " ".join(first.split()).replace("\\", "\\\\").rstrip(":.") + "."


def properties(schema):
    """The keys of a table. A table whose keys depend on a key, such as the name of the optimizer, has the keys of all its variants."""
    found = dict(schema.get("properties", {}))
    for variant in schema.get("oneOf", []):
        for name, inner in variant.get("properties", {}).items():
            before = found.get(name)
            if before and "const" in inner:
                words = [one for one in before.get("oneOf", [before])] + [inner]
                found[name] = {"oneOf": list({one["const"]: one for one in words}.values()), "description": before.get("description", "")}
            else:
                found.setdefault(name, inner)
    return found


def is_table(schema):
    return "properties" in schema or any("properties" in variant for variant in schema.get("oneOf", []))


def classes(name, schema):
    """The source of the class of a table, after the classes of the tables in it."""
    inner, fields = [], []
    for key, value in properties(schema).items():
        field = key + "_" if keyword.iskeyword(key) else key
        if is_table(value):
            of = ("" if name == "Run" else name) + "".join(part.capitalize() for part in key.split("_"))
            inner += classes(of, value)
            annotation = of
        else:
            annotation = kind(value)
        fields.append(f"    {field}: Optional[{annotation}] = None")
        if not is_table(value):
            text = value.get("description") or "Selects the variant of this table"
            fields.append(f'    """{sentence(text)}"""')
    head = [f"\n\n@dataclass\nclass {name}(Table):", f'    """{sentence(schema["description"])}"""']
    return inner + ["\n".join(head + fields)]


def main():
    schema = json.loads(SCHEMA.read_text("utf-8"))
    text = HEAD + "\n".join(classes("Run", schema)) + "\n"
    if sys.argv[1:] == ["--check"]:
        if not MODULE.is_file() or MODULE.read_text("utf-8") != text:
            sys.exit(f"{MODULE.relative_to(ROOT)} is not what {SCHEMA.relative_to(ROOT)} says; run scripts/make_python_settings.py")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        MODULE.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
