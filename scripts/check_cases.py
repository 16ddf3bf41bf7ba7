"""Runs the table crates/ottava-serve/src/tests/cases.jsonl against `ottava serve` with a tiny model with random weights. Each row has a request, the status,
and checks of the answer. The rows are about what the tests named in `of` ask, in the words of this project. Rows with `unmet` do not hold, for the reason
given there; a row that holds although it has a reason is an error too. Exit status 1 if a row is wrong.

usage: check_cases.py OTTAVA_BINARY
"""

import json
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from tiny_server import KEY, serving

TABLE = Path(__file__).resolve().parent.parent / "crates/ottava-serve/src/tests/cases.jsonl"


def expanded(value):
    if isinstance(value, dict):
        return value["$repeat"] * value["times"] if "$repeat" in value else {name: expanded(field) for name, field in value.items()}
    return [expanded(entry) for entry in value] if isinstance(value, list) else value


def call(url, row):
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"} | row.get("headers", {})
    data = json.dumps(expanded(row["body"])).encode() if "body" in row else None
    try:
        with urllib.request.urlopen(urllib.request.Request(url + row["path"], data, headers)) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def of_stream(text):
    """A streamed answer as one value: its events, what is counted in them, and the last of them."""
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    events = [json.loads(line) for line in data if line != "[DONE]"]
    choices = [choice for event in events for choice in event.get("choices", [])]
    calls = [call for choice in choices for call in choice.get("delta", {}).get("tool_calls", [])]
    return {
        "done": data[-1] == "[DONE]", "events": events, "count": len(events), "last": events[-1],
        "finishes": sum(choice["finish_reason"] is not None for choice in choices),
        "usages": sum(isinstance(event.get("usage"), dict) for event in events),
        "text": "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices),
        "arguments": "".join(call["function"]["arguments"] for call in calls),
    }


def at(value, pointer):
    for part in pointer.split("/")[1:]:
        try:
            value = value[int(part)] if isinstance(value, list) else value.get(part)
        except (IndexError, AttributeError):
            return None
    return value


def has_keys(found, keys):
    try:
        value = json.loads(found)
    except (TypeError, ValueError):
        return False
    return isinstance(value, dict) and all(key in value for key in keys)


CHECKS = {
    "is": lambda answer, found, asked: found == asked,
    "len": lambda answer, found, asked: found is not None and len(found) == asked,
    "at_least": lambda answer, found, asked: found is not None and (len(found) if isinstance(found, (str, list, dict)) else found) >= asked,
    "kind": lambda answer, found, asked: isinstance(found, {"string": str, "number": (int, float), "list": list}[asked]),
    "begins": lambda answer, found, asked: isinstance(found, str) and found.startswith(asked),
    "has": lambda answer, found, asked: isinstance(found, str) and asked in found,
    "among": lambda answer, found, asked: found in asked,
    "same": lambda answer, found, asked: found == at(answer, asked),
    "json": lambda answer, found, asked: has_keys(found, asked),
    "match": lambda answer, found, asked: isinstance(found, str) and re.fullmatch(asked, found) is not None,
}


def wrong(url, row):
    """What is wrong with the answer to a row; None if nothing is."""
    status, text = call(url, row)
    if status != row["status"]:
        return f"status {status}: {text[:300]}"
    is_stream = status == 200 and row.get("body", {}).get("stream") is True
    answer = of_stream(text) if is_stream else json.loads(text)
    for pointer, word, asked in row["checks"]:
        found = at(answer, pointer)
        if not CHECKS[word](answer, found, asked):
            return f"{pointer} is {json.dumps(found)[:200]}, and not {word} {json.dumps(asked)}"
    return None


def main():
    rows = [json.loads(line) for line in TABLE.read_text().splitlines()]
    failed, held = 0, {}
    with serving(sys.argv[1]) as url:
        for row in rows:
            reason, unmet = wrong(url, row), row.get("unmet")
            if (reason is None) == (unmet is not None):
                failed += 1
                print(f"WRONG  {row['of']}: {row['case']}: {reason or 'it holds, although it has a reason why not'}")
            elif unmet:
                print(f"unmet  {row['of']}: {row['case']}: {unmet}")
            group = held.setdefault(row["of"].split()[0], [0, 0])
            group[0] += reason is None
            group[1] += 1
    print(", ".join(f"{name}: {count} of {total} hold" for name, (count, total) in held.items()))
    sys.exit(failed > 0)


main()
