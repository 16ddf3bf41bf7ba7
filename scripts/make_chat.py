#!/usr/bin/env python3
"""Makes data/chat.jsonl.gz: 2,000 questions about the meaning of words, with answers from the bundled glosses of WordNet 3.0.

usage: make_chat.py

Needs Python without further packages. Same glosses, same bytes: words are ordered by the SHA-256 of their spelling.

A word is taken if it has one gloss alone, is 4 to 12 small letters long, and its first definition, up to a semicolon, has 30 to 110
characters without parentheses or quotation marks. Each record has `messages`: a question and an answer.
"""

import gzip
import hashlib
import json
import re
from collections import Counter
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "data"
COUNT = 2000
QUESTIONS = [
    'What does the word "{}" mean?',
    'Define "{}".',
    'What is the meaning of "{}"?',
    'Tell me what "{}" means.',
]


def records():
    with gzip.open(DATA / "wordnet-glosses.txt.gz", "rt") as lines:
        parsed = [re.fullmatch(r"(.+?) \((noun|verb|adjective|adverb)\): (.+)\n", line).groups() for line in lines]
    glosses = Counter(word for word, _, _ in parsed)
    chosen = []
    for word, speech, gloss in parsed:
        definition = gloss.split(";")[0].strip()
        plain = 30 <= len(definition) <= 110 and not re.search(r'[()"]', definition)
        if glosses[word] == 1 and re.fullmatch("[a-z]{4,12}", word) and plain:
            key = hashlib.sha256(word.encode()).digest()
            chosen.append((key, word, speech, definition))
    for key, word, speech, definition in sorted(chosen)[:COUNT]:
        question = QUESTIONS[key[-1] % len(QUESTIONS)].format(word)
        answer = f'The {speech} "{word}" means: {definition}.'
        yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def main():
    lines = [json.dumps(record) + "\n" for record in records()]
    assert len(lines) == COUNT
    path = DATA / "chat.jsonl.gz"
    with open(path, "wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as out:
        out.write("".join(lines).encode())
    print(f"{path}: {len(lines)} conversations, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
