"""Writes arithmetic word problems as prompts for reinforcement learning (docs/reinforcement.md): a chat message of the user, and the answer.

usage: make_word_problems.py FOLDER [TRAIN [HELD_OUT]]    writes FOLDER/problems.jsonl (4,000) and FOLDER/held-out.jsonl (200), which share no
problem. The files are the same on every machine.
"""

import json
import pathlib
import random
import sys

NAMES = "Ann Ben Carla David Emma Felix Grace Henry Ida Jack Kate Leo Mia Noah Olga Paul".split()
THINGS = "apples books coins marbles pencils shells stamps stickers cookies buttons".split()
INSTRUCTION = "Answer with the number."


def problem(random):
    """Returns a problem and its answer."""
    first, second = random.sample(NAMES, 2)
    thing = random.choice(THINGS)
    kind = random.randrange(4)
    if kind == 0:
        a, b = random.randrange(2, 31), random.randrange(2, 21)
        text, answer = f"{first} has {a} {thing} and buys {b} more. How many {thing} does {first} have now?", a + b
    elif kind == 1:
        a = random.randrange(5, 31)
        b = random.randrange(2, a)
        text, answer = f"{first} has {a} {thing} and gives {b} to {second}. How many {thing} does {first} have left?", a - b
    elif kind == 2:
        a, b = random.randrange(2, 11), random.randrange(2, 7)
        text, answer = f"{first} has {a} boxes with {b} {thing} in each box. How many {thing} does {first} have?", a * b
    else:
        a, b, c = (random.randrange(2, 11) for _ in range(3))
        text = f"{first} finds {a} {thing} on Monday, {b} on Tuesday and {c} on Wednesday. How many {thing} does {first} find in all?"
        answer = a + b + c
    return f"{text} {INSTRUCTION}", answer


def main():
    folder = pathlib.Path(sys.argv[1])
    train, held_out = (int(argument) for argument in (sys.argv[2:] + ["4000", "200"][len(sys.argv) - 2 :]))
    folder.mkdir(parents=True, exist_ok=True)
    generator, problems = random.Random(20261128), {}
    while len(problems) < train + held_out:
        text, answer = problem(generator)
        problems.setdefault(text, answer)
    rows = [{"prompt": [{"role": "user", "content": text}], "answer": str(answer)} for text, answer in problems.items()]
    for name, part in (("held-out", rows[:held_out]), ("problems", rows[held_out:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


if __name__ == "__main__":
    main()
