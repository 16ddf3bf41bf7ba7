#!/usr/bin/env python3
"""Compares renderings of chat templates with `apply_chat_template` of transformers, byte for byte.

usage: check_templates.py OTTAVA_BINARY [WHEEL_OR_FOLDER...]    templates are the *.jinja files of trl and of each argument

`ottava serve` renders each conversation of `conversations.py` with and without the prompt for an answer, and `ottava plan --show-data` those that end with an answer.
Both must give the same text, or both refuse.
"""

import argparse
import json
import logging
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from datetime import datetime
from pathlib import Path

import torch
import transformers
import trl
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from check_data import write_run
from common import Program, Tally, message, write_byte_model
from conversations import CONVERSATIONS

# Why the program may refuse a conversation that transformers renders.
REFUSALS = {
    "does not use `tools`": "with tools, which the template would drop",
    "does not read `": "with arguments that the template does not read",
    "has no place for them": "with tools, which the template would drop",
    "renders what precedes message": "with turns that the template renders differently once others follow",
    r"training: refused: .*fields .*`(thinking|reasoning)`": "with fields that the template does not read",
}
# Conversations that differ on purpose, by name.
DIFFERENT = {"no calls": "with an empty list of calls, which templates get as no list"}


def templates(sources):
    """Names and texts of templates."""
    own = Path(trl.__file__).parent / "chat_templates"
    for source in [own, *map(Path, sources)]:
        if source.is_dir():
            files = ((file.name, file.read_text()) for file in sorted(source.rglob("*.jinja")))
        else:
            wheel = zipfile.ZipFile(source)
            files = ((Path(name).name, wheel.read(name).decode()) for name in sorted(wheel.namelist()) if name.endswith(".jinja"))
        for name, text in files:
            yield f"{source.name.split('-')[0]}/{name}", text


class Server:
    """`ottava serve` of a folder."""

    def __init__(self, binary, folder):
        options = ["--port", "0", "--device", "cpu", "--recipe", "fp32", "--served-model-name", "m", "--kv-cache-tokens", "4096"]
        self.process = subprocess.Popen([binary, "serve", str(folder), *options], stderr=subprocess.PIPE, text=True)
        lines = []
        for line in self.process.stderr:
            lines.append(line)
            if " at http://" in line:
                self.base = "http://" + line.strip().split("http://")[1]
                return
        self.process.wait()
        raise RuntimeError("".join(lines).strip())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def render(self, body):
        """The ids of a rendering, or the server's error."""
        request = urllib.request.Request(f"{self.base}/tokenize", json.dumps({"model": "m"} | body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["tokens"], None
        except urllib.error.HTTPError as error:
            return None, error.read().decode(errors="replace")


def theirs(tokenizer, messages, tools, prompt, arguments):
    try:
        arguments = dict(tokenize=False, add_generation_prompt=prompt) | arguments
        return tokenizer.apply_chat_template(messages, tools=tools, **arguments), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"[:200]


def loses_parts(messages, text):
    """Whether a rendering has parts of messages as Python writes them, or lacks a text of a part."""
    parts = [part["text"] for message in messages if isinstance(message.get("content"), list) for part in message["content"]]
    return bool(parts) and (text is None or "'type': 'text'" in text or '"type": "text"' in text or not all(part in text for part in parts))


def judge(tally, name, messages, ours, expected):
    (text, error), (right, their_error) = ours, expected
    if text == right and text is not None:
        tally.hold()
    elif text is None and right is None:
        tally.expect("refused by both")
    elif text is not None and loses_parts(messages, right):
        tally.expect("parts of text joined for a template that takes no parts")
    elif name.split(", ")[1] in DIFFERENT:
        tally.expect(DIFFERENT[name.split(", ")[1]])
    elif text is None:
        tally.refuse(name, f"{error}; transformers has {right!r}")
    elif right is None:
        tally.fail(name, f"transformers refuses ({their_error}), Ottava has {text!r}")
    else:
        at = next((i for i, (a, b) in enumerate(zip(text, right)) if a != b), min(len(text), len(right)))
        start = max(0, at - 40)
        tally.fail(name, f"at character {at}: {text[start : at + 60]!r}, transformers {right[start : at + 60]!r}")


def marked(number, messages):
    """The messages, with a number in the first text of a user by which the document is found."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user" and isinstance(message["content"], str)]
    return [message | dict(content=message["content"] + f" #{number:03}#") if [i] == users[:1] else message for i, message in enumerate(messages)]


class Clock(datetime):
    """The day on which Ottava renders what it trains on."""

    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26)


def check_training(tally, program, folder, tokenizer, name, others):
    """Compares the documents that Ottava trains on: each conversation, with an answer at its end. Templates that trl marks may be those of `others`."""
    chats = []
    for number, (case, messages, tools, kwargs) in enumerate(CONVERSATIONS):
        if not kwargs and any(message["role"] == "user" and isinstance(message["content"], str) for message in messages):
            chats.append((number, case, [*marked(number, messages), dict(role="assistant", content="The end.")], tools))
    records = [dict(messages=messages) | (dict(tools=tools) if tools is not None else {}) for _, _, messages, tools in chats]
    with tempfile.TemporaryDirectory() as work:
        data, texts, skipped = Path(work) / "chats.jsonl", [], {}
        while records:  # an error names the line of a record that is refused
            data.write_text("".join(json.dumps(record) + "\n" for record in records))
            run = write_run(Path(work), folder, data, dict(max_length=1 << 15, packing="none"))
            status, out, error = program.run("plan", run, "--show-data", 4 * len(records), "--json", "--device", "cpu")
            if status == 0:
                texts = ["".join(segment["text"] for segment in row) for row in json.loads(out)["data"]["shown"]]
                break
            line = re.search(r"chats\.jsonl:(\d+): ", error)
            if not line:
                return tally.fail(f"{name}, training", message(error))
            skipped[json.dumps(records.pop(int(line[1]) - 1))] = message(error)
    chat_template_utils.datetime = Clock
    for number, case, messages, tools in chats:
        # Templates that change earlier turns give a document for each answer.
        found = max((text for text in texts if f"#{number:03}#" in text), key=len, default=None)
        reason = skipped.get(json.dumps(dict(messages=messages) | (dict(tools=tools) if tools is not None else {})))
        rights = [theirs(tokenizer, messages, tools, False, dict(chat_template=template)) for template in others]
        same = [
            right for right in rights if right[0] is not None and found is not None and right[0].removesuffix("</s>") == found.removesuffix("</s>")
        ]
        right = (found, None) if same else rights[0]
        if right[0] is not None and f"#{number:03}#" not in right[0]:
            tally.expect("that lose plain texts in the template")
            continue
        judge(tally, f"{name}, {case}, training", messages, (found, reason), right)
    chat_template_utils.datetime = datetime


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("sources", nargs="*")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    program = Program(arguments.binary)
    tally = Tally(f"chat templates of trl {trl.__version__} and {len(arguments.sources)} others", REFUSALS)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        backend = write_byte_model(folder)
        known = dict(templates(arguments.sources))
        for name, template in known.items():
            (folder / "chat_template.jinja").write_text(template)
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
            others = [template, *(text for other, text in known.items() if other == name.replace(".jinja", "_training.jinja"))]
            check_training(tally, program, folder, tokenizer, name, others)
            try:
                server = Server(arguments.binary, folder)
            except RuntimeError as error:
                tally.fail(name, f"the server does not start: {error}")
                continue
            with server:
                for case, messages, tools, kwargs in CONVERSATIONS:
                    for prompt in (False, True):
                        body = dict(messages=messages, add_generation_prompt=prompt, chat_template_kwargs=kwargs)
                        ids, error = server.render(body if tools is None else body | dict(tools=tools))
                        ours = None if ids is None else backend.decode(ids, skip_special_tokens=False)
                        expected = theirs(tokenizer, messages, tools, prompt, kwargs)
                        judge(tally, f"{name}, {case}, prompt {prompt}", messages, (ours, error), expected)
    return tally.report()


if __name__ == "__main__":
    sys.exit(main())
