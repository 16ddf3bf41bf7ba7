#!/usr/bin/env python3
"""Makes a multiple-choice task from the validation documents of a corpus: which of four texts continues a text?

usage: scripts/corpus/task.py FOLDER [--items 1200] [--seed 42]      FOLDER is scripts/corpus/build.py's

Writes FOLDER/task/continuations.jsonl and FOLDER/task/continuations.toml, and the same for each source as continuations-SOURCE. The wrong choices come
from other documents of the same source, and have about the length of the right choice. Same corpus and seed, same bytes.
"""

import argparse
import json
import random
from pathlib import Path

# Characters of a prompt and of a choice, at least and at most.
PROMPT = (200, 600)
CHOICE = (80, 240)

TASK = """name = "{name}"
data = "{name}.jsonl"
type = "multiple_choice"
prompt = "prompt"
choices = "choices"
answer = "answer"
metrics = ["acc", "acc_norm"]
target_delimiter = ""
"""


def whole_lines(text, limits, from_end):
    """The lines at one end of a text, as many as the upper limit allows; None below the lower limit."""
    lines = text.split("\n")
    taken, length = [], 0
    for line in reversed(lines) if from_end else lines:
        if length + len(line) + 1 > limits[1]:
            break
        taken.append(line)
        length += len(line) + 1
    part = "\n".join(reversed(taken) if from_end else taken)
    return part if len(part.strip()) >= limits[0] else None


def split(text, source, chance):
    """A prompt and its continuation from a random place: code is cut between lines, other text between sentences."""
    separator = "\n" if source.startswith("code") else ". "
    cuts, at = [], text.find(separator)
    while at != -1:
        cut = at + 1
        if PROMPT[0] <= cut <= len(text) - CHOICE[0]:
            cuts.append(cut)
        at = text.find(separator, at + 1)
    for cut in chance.sample(cuts, min(len(cuts), 8)):
        if separator == "\n":
            prompt, choice = whole_lines(text[: cut - 1], PROMPT, True), whole_lines(text[cut:], CHOICE, False)
            prompt = prompt and prompt.rstrip() + "\n"
            choice = choice and choice.strip("\n")
        else:
            prompt, choice = text[max(0, cut - PROMPT[1]) : cut], text[cut : cut + CHOICE[1]]
            prompt = prompt[prompt.find(" ") + 1 :] if cut > PROMPT[1] else prompt
            end = choice.rfind(". ")
            choice = choice[: end + 1] if end >= CHOICE[0] else choice.rsplit(" ", 1)[0]
        if prompt and choice and choice.strip() and CHOICE[0] <= len(choice) and len(prompt) >= PROMPT[0]:
            return prompt, choice.rstrip()
    return None


def items(documents, source, wanted, chance):
    """At most `wanted` items of a source, over its documents in turn."""
    pairs, order = [], list(range(len(documents)))
    chance.shuffle(order)
    for _ in range(8):
        for number in order:
            if len(pairs) < wanted and (pair := split(documents[number]["text"], source, chance)):
                if pair[1] not in (choice for other, _, choice in pairs if other == number):
                    pairs.append((number, *pair))
    made = []
    for number, prompt, right in pairs:
        others = sorted({choice for other, _, choice in pairs if other != number and choice != right}, key=lambda choice: (abs(len(choice) - len(right)), choice))
        # Of the choices of about this length, three are drawn.
        if len(others) < 12:
            continue
        choices = chance.sample(others[:12], 3)
        answer = chance.randrange(4)
        choices.insert(answer, right)
        made.append({"source": source, "package": documents[number]["package"], "prompt": prompt, "choices": choices, "answer": answer})
    return made


def write(folder, name, made):
    with open(folder / f"{name}.jsonl", "w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(item, ensure_ascii=False) + "\n" for item in made)
    (folder / f"{name}.toml").write_text(TASK.format(name=name), encoding="utf-8")
    print(f"{name:28}{len(made):6} items")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--items", type=int, default=1200)
    parser.add_argument("--seed", type=int, default=42)
    arguments = parser.parse_args()
    folder = arguments.folder / "task"
    folder.mkdir(exist_ok=True)
    paths = sorted((arguments.folder / "validation").glob("*.jsonl"))
    everything = []
    for path in paths:
        with open(path, encoding="utf-8") as lines:
            documents = [json.loads(line) for line in lines]
        made = items(documents, path.stem, -(-arguments.items // len(paths)), random.Random(f"{arguments.seed} {path.stem}"))
        write(folder, f"continuations-{path.stem}", made)
        everything += made
    write(folder, "continuations", everything)


if __name__ == "__main__":
    main()
