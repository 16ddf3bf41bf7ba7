"""Tables of a run's file, and their values as TOML."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any, Iterator, Mapping


class Table:
    """A table of a run's file. A field that is None is not written, so the program takes its default. A dictionary becomes the table of its field."""

    def __setattr__(self, name: str, value: Any) -> None:
        field = self.__dataclass_fields__.get(name)  # type: ignore[attr-defined]
        if field is None:
            raise AttributeError(f"{type(self).__name__} has no key `{name}`; the keys are {', '.join(self.__dataclass_fields__)}")  # type: ignore[attr-defined]
        table = vars(sys.modules[type(self).__module__]).get(field.type[len("Optional[") : -1])
        if isinstance(table, type) and issubclass(table, Table) and value is not None and not isinstance(value, table):
            if not isinstance(value, Mapping):
                raise ValueError(f"{type(self).__name__}: `{name}` is a {type(value).__name__}; write a {table.__name__}")
            value = table(**value)
        super().__setattr__(name, value)

    def items(self) -> Iterator[tuple[str, Any]]:
        """The keys that are set, as dotted paths, with their values."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, name = getattr(self, field.name), field.name.rstrip("_")
            if isinstance(value, Table):
                yield from ((f"{name}.{key}", inner) for key, inner in value.items())
            elif value is not None:
                yield name, value

    def toml(self) -> str:
        """The table as a TOML file."""
        lines: list[str] = []
        table = ""
        for path, value in sorted(self.items(), key=lambda item: item[0].rpartition(".")[0]):
            of, _, name = path.rpartition(".")
            if of != table:
                lines.append(f"\n[{of}]")
                table = of
            lines.append(f"{name} = {written(value)}")
        return "\n".join(lines) + "\n"


def scalar(value: Any) -> Any:
    """The number of a scalar of NumPy, also of one that is a float of Python; any other value as it is."""
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0 else value


def written(value: Any) -> str:
    """`value` as TOML writes it, on one line. Errors with TypeError if TOML has no such value."""
    value = scalar(getattr(value, "value", value))
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return {"nan": "nan", "inf": "inf", "-inf": "-inf"}.get(repr(value), repr(value))
    if isinstance(value, (str, os.PathLike)):
        return quoted(os.fspath(value))
    if isinstance(value, (list, tuple, set, frozenset)):
        entries = sorted(value) if isinstance(value, (set, frozenset)) else value
        return "[" + ", ".join(written(entry) for entry in entries) + "]"
    if isinstance(value, Table):
        value = dict(value.items())
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{quoted(str(key))} = {written(entry)}" for key, entry in value.items() if entry is not None) + " }"
    raise TypeError(f"{value!r} ({type(value).__name__}) is no value of a setting")


def statements(toml: str) -> Iterator[str]:
    """The lines of a file of `ottava import`: comments, heads of tables, and settings. A text of several lines is in one line with its setting."""
    lines: list[str] = []
    # Other separators of lines, such as U+2028, are letters of texts.
    for line in toml.rstrip("\n").split("\n"):
        lines.append(line)
        value = "\n".join(lines).partition(" = ")[2]
        if value[:3] not in ('"""', "'''") or value[:3] in value[3:]:
            yield "\n".join(lines)
            lines = []


def merged(toml: str, settings: Mapping[str, Any]) -> str:
    """`toml` with other values of some settings, by their dotted paths. `toml` has the form of a file of `ottava import`."""
    lines, table, others = [], "", {key: f"{key.rpartition('.')[2]} = {written(value)}" for key, value in settings.items()}
    for line in statements(toml):
        if line.startswith("["):
            table = path = line.strip("[]")
        else:
            path = f"{table}.{line.partition(' = ')[0]}".lstrip(".")
        if not any(path == key or path.startswith(f"{key}.") for key in others):
            lines.append(line)
    for key, line in others.items():
        head = f"[{key.rpartition('.')[0]}]"
        if head == "[]":
            lines.insert(next((at for at, line in enumerate(lines) if line.startswith("[")), len(lines)), line)
        elif head in lines:
            lines.insert(lines.index(head) + 1, line)
        else:
            lines += ["", head, line]
    return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    """`text` as a basic string of TOML, which has no control characters."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\r"}
    parts = (escapes.get(c) or (f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else c) for c in text)
    return '"' + "".join(parts) + '"'
