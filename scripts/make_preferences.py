#!/usr/bin/env python3
"""Makes data/preferences.jsonl.gz of data/chat.jsonl.gz: of each question, the right answer is chosen, and the definition of another word
with the same part of speech is rejected.

usage: make_preferences.py    Same input, same bytes. Needs only Python.
"""

import gzip
import json
import re
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "data"
RECORDS = 400


def main():
    with gzip.open(DATA / "chat.jsonl.gz", "rt", encoding="utf-8") as file:
        chats = [json.loads(line)["messages"] for line in file]
    # By part of speech: answers are 'The noun "word" means: definition'.
    parts = {}
    for chat in chats:
        if len(chat) == 2 and (found := re.fullmatch(r'(The (\w+) ".*" means: )(.*)', chat[1]["content"])):
            parts.setdefault(found[2], []).append((chat[0]["content"], found[1], found[3]))
    records = []
    for same in parts.values():
        for (question, beginning, right), (_, _, wrong) in zip(same, same[1:] + same[:1]):
            answer = lambda text: [{"role": "assistant", "content": beginning + text}]
            prompt = [{"role": "user", "content": question}]
            records.append({"prompt": prompt, "chosen": answer(right), "rejected": answer(wrong)})
    step = len(records) // RECORDS
    lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records[: step * RECORDS : step])
    with open(DATA / "preferences.jsonl.gz", "wb") as file:
        file.write(gzip.compress(lines.encode(), 9, mtime=0))


main()
