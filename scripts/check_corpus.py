#!/usr/bin/env python3
"""Checks the scripts of scripts/corpus on small archives made here: conversion, copies, the split by package, the task, packing and unpacking.

usage: scripts/check_corpus.py      needs Python 3.11 or later, tar and xz; takes about a second and no network
"""

import gzip
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import unittest
from pathlib import Path

CORPUS = Path(__file__).resolve().parent / "corpus"
sys.path.insert(0, str(CORPUS))

import convert  # noqa: E402

FUNCTION = "int value_{0}(int first_argument)\n{{\n    int doubled_{0} = 2 * first_argument;\n    return doubled_{0} + first_argument;\n}}\n\n"


def code(start, count):
    return "/* Copyright of nobody. */\n\n" + "".join(FUNCTION.format(name(i)) for i in range(start, start + count))


def name(number):
    """A word without digits, since files of digits are dropped."""
    return "".join(chr(ord("a") + int(digit)) for digit in str(number))


def prose(start, count):
    return "\n\n".join(f"The {name(i)} of the river is a thing that is told in the book of {name(7 * i)} and in the song of {name(3 * i)}. It is long." for i in range(start, start + count))


class Conversion(unittest.TestCase):
    def test_page(self):
        text = convert.page(
            "<html><head><title>T</title></head><body><nav>Home</nav><div class='sidebar'><div>Links</div></div><!-- c --><script>x<y</script>"
            "<h1>Otters</h1><p>They &amp; we\n swim.</p><ul><li><p>one</p></li></ul><pre>a  b\n  c</pre></body></html>"
        )
        self.assertEqual(text, "Otters\n\nThey & we swim.\n\n- one\n\na  b\n  c")

    def test_manual_page(self):
        text = convert.roff('.TH CAT 1\n.SH NAME\ncat \\- join files\n.PP\nSee\n.BR tac (1).\n.nf\n$ cat a\n$ cat b\n.fi\n.\\" comment')
        self.assertEqual(text, "NAME\n\ncat - join files\n\nSee tac(1).\n\n$ cat a\n$ cat b")

    def test_pod(self):
        self.assertEqual(convert.pod("=head1 NAME\n\nUse B<the I<name>> and L<perl|perlop>, E<lt>.\n\n=cut\n"), "NAME\n\nUse the name and perl, <.\n\n")

    def test_dictionary(self):
        data = gzip.compress(b"00-database-info\n   Made here.\notter \\Ot\"ter\\, n.\n   An animal\n   that swims. [1913 Webster]\nseal n\n   A {mammal}.\n")
        self.assertEqual(convert.convert("usr/share/dictd/x.dict.dz", data, "prose"), ("prose", ["otter, n. An animal that swims.\n\nseal n A mammal."]))

    def test_code(self):
        text = code(0, 12)
        self.assertEqual(convert.convert("a/b.c", text.encode(), "manuals"), ("code-c", [text.split("\n\n", 1)[1].strip("\n")]))
        for refused in ("/* DO NOT EDIT */\n" + text, text + "// " + "x" * 500, text + '"' + "QUJD" * 50 + '"', text.replace("argument", "123456789"), "int a;\n"):
            self.assertIsNone(convert.convert("a/b.c", refused.encode(), "manuals"))
        self.assertIsNone(convert.convert("a/b.c", text.encode() + b"// \xe9\n", "manuals"))

    def test_pages_without_sentences(self):
        self.assertIsNotNone(convert.convert("doc/a.txt", prose(0, 10).encode(), "prose"))
        self.assertIsNone(convert.convert("doc/genindex.txt", prose(0, 10).encode(), "prose"))
        self.assertIsNone(convert.convert("doc/a.txt", "\n".join(f"item {name(i)}" for i in range(100)).encode(), "prose"))
        self.assertIsNone(convert.convert("doc/a.txt", ("Ein Otter ist ein kleines Tier, das im Wasser lebt und Fische frisst. " * 20).encode(), "prose"))


class Build(unittest.TestCase):
    """A corpus of four archives: a validation and a training package of code, and the same of prose."""

    def setUp(self):
        self.work = tempfile.TemporaryDirectory()
        self.addCleanup(self.work.cleanup)
        self.folder = Path(self.work.name)
        scripts = self.folder / "scripts"
        scripts.mkdir()
        for path in CORPUS.glob("*.py"):
            (scripts / path.name).write_bytes(path.read_bytes())
        self.rows = []
        self.package("held", "validation", {f"held/{i}.c": code(100 * i, 60) for i in range(20)} | {f"held/{i}.txt": prose(1000 * i, 40) for i in range(20)})
        # A near copy of a held-out file, a copy of a training file, and new files.
        files = {"main/copy.c": code(100, 50), "main/a.c": code(5000, 30), "main/b.c": code(5000, 30), "main/copy.txt": prose(1000, 35), "main/a.txt": prose(90000, 30)}
        self.package("main", "train", files)
        self.write_list()

    def package(self, package, split, files):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            for path, text in files.items():
                entry = tarfile.TarInfo(path)
                entry.size = len(text.encode())
                archive.addfile(entry, io.BytesIO(text.encode()))
        path = self.folder / f"{package}.tar.gz"
        path.write_bytes(buffer.getvalue())
        digest = hashlib.sha256(buffer.getvalue()).hexdigest()
        # Training comes first in the list, and is read last all the same.
        self.rows.insert(0, [package, "1", "prose", split, "100", "^", "MIT", path.as_uri(), digest])

    def write_list(self):
        head = ["package", "version", "source", "split", "keep", "select", "licence", "url", "sha256"]
        (self.folder / "scripts/packages.tsv").write_text("".join("\t".join(row) + "\n" for row in [head, *self.rows]))

    def call(self, script, *arguments):
        return subprocess.run([sys.executable, self.folder / "scripts" / script, *arguments], capture_output=True, text=True)

    def documents(self, path):
        return [json.loads(line) for line in (self.folder / path).read_text().splitlines()]

    def test_a_corpus(self):
        made = self.call("build.py", self.folder / "a")
        self.assertEqual(made.returncode, 0, made.stderr)
        self.assertEqual(len(self.documents("a/validation/code-c.jsonl")), 20)
        self.assertEqual(len(self.documents("a/validation/prose.jsonl")), 20)
        for source, begins in (("code-c", "int value_faaa("), ("prose", "The jaaaa of")):
            [document] = self.documents(f"a/train/{source}.jsonl")
            self.assertTrue(document["text"].startswith(begins), document["text"][:50])
            self.assertEqual((document["source"], document["package"]), (source, "main"))

        # The same list and the same corpus give the same bytes.
        for folder in ("a", "b"):
            self.assertEqual(self.call("build.py", self.folder / folder).returncode, 0)
            made = self.call("task.py", self.folder / folder, "--items", "80")
            self.assertEqual(made.returncode, 0, made.stderr)
        same = lambda other, *names: self.assertEqual(*[{p.relative_to(f): p.read_bytes() for n in names for p in (f / n).rglob("*") if p.is_file()} for f in (self.folder / "a", other)])
        same(self.folder / "b", "train", "validation", "task")

        # An item continues its document, and the other choices are from other documents.
        items = self.documents("a/task/continuations.jsonl")
        self.assertEqual(len(items), 80)
        self.assertEqual({item["answer"] for item in items}, {0, 1, 2, 3})
        for item in items:
            texts = [document["text"] for document in self.documents(f"a/validation/{item['source']}.jsonl")]
            [owner] = [text for text in texts if item["prompt"].rstrip("\n") in text]
            right = item["choices"].pop(item["answer"])
            self.assertIn(right.strip(), owner[owner.index(item["prompt"].rstrip("\n")) :])
            self.assertFalse(any(choice in owner for choice in item["choices"]))

        # Packing into several pieces and unpacking changes nothing.
        (self.folder / "a/tokenizer").mkdir()
        (self.folder / "a/tokenizer/tokenizer.json").write_text("{}")
        made = subprocess.run(["bash", CORPUS / "pack.sh", self.folder / "a", self.folder / "pieces"], env={"PATH": "/usr/bin:/bin", "BYTES": "600", "PRESET": "1"}, capture_output=True, text=True)
        self.assertEqual(made.returncode, 0, made.stderr)
        self.assertGreater(len(list((self.folder / "pieces").glob("piece-*.xz"))), 1)
        made = self.call("unpack.py", self.folder / "pieces", self.folder / "c")
        self.assertEqual(made.returncode, 0, made.stderr)
        same(self.folder / "c", "train", "validation", "task", "tokenizer")

    def test_an_archive_with_another_hash(self):
        self.rows[0][-1] = "0" * 64
        self.write_list()
        made = self.call("build.py", self.folder / "a")
        self.assertEqual(made.returncode, 1)
        self.assertIn("packages.tsv says 0000", made.stderr)

    def test_a_row_that_selects_nothing(self):
        self.rows[0][5] = "absent"
        self.write_list()
        made = self.call("build.py", self.folder / "a")
        self.assertEqual(made.returncode, 1)
        self.assertIn("main: no text", made.stderr)


if __name__ == "__main__":
    unittest.main()
