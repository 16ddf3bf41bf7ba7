"""What the suites share: seeded weights, a tokenizer of characters, calls of the program, and the tally that each suite prints."""

import gzip
import json
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

# 47 characters: with the end of text before and after them, two rows of 24 tokens.
ROW, TEXT = 24, "the otter sees a quiet brook jump over mud beds"
LETTERS = " abcdefghijklmnopqrstuvwxyz"
VOCABULARY = 40
TOLERANCE = 1e-5


def write_tokenizer(folder):
    """A tokenizer with one token per character and the end of text as id 0."""
    vocabulary = {"<|endoftext|>": 0} | {letter: 1 + i for i, letter in enumerate(LETTERS)}
    end = dict(id=0, content="<|endoftext|>", single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    split = dict(type="Split", pattern={"Regex": "."}, behavior="Isolated", invert=False)
    tokenizer = dict(version="1.0", truncation=None, padding=None, added_tokens=[end], normalizer=None, pre_tokenizer=split)
    tokenizer |= dict(post_processor=None, decoder=dict(type="Fuse"))
    tokenizer |= dict(model=dict(type="WordLevel", vocab=vocabulary, unk_token="<|endoftext|>"))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def write_byte_model(folder):
    """A tiny Llama with seeded weights and a tokenizer of bytes, which is returned."""
    special, channels = ["<s>", "</s>", "<pad>"], 8
    vocabulary = 256 + len(special)
    config = dict(model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=vocabulary, hidden_size=channels, intermediate_size=channels)
    config |= dict(num_hidden_layers=1, num_attention_heads=1, max_position_embeddings=1 << 17, eos_token_id=257, tie_word_embeddings=True)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(zip(["bos_token", "eos_token", "pad_token"], special))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(tokenizer_class="PreTrainedTokenizerFast", **names)))
    square, layer = [channels, channels], "model.layers.0"
    shapes = {f"{layer}.self_attn.{name}_proj.weight": square for name in "qkvo"} | {
        f"{layer}.mlp.{name}_proj.weight": square for name in ("gate", "up", "down")
    }
    shapes |= {f"{layer}.{name}_layernorm.weight": [channels] for name in ("input", "post_attention")}
    shapes |= {"model.norm.weight": [channels], "model.embed_tokens.weight": [vocabulary, channels]}
    save_file({name: seeded(name, shape) for name, shape in shapes.items()}, folder / "model.safetensors", {"format": "pt"})
    return tokenizer


def ids_of(text, end):
    """The ids that `ottava eval` reads: the end of the text before, the text, and its end."""
    return [end] + [1 + LETTERS.index(letter) for letter in text] + [end]


def seeded(name, shape):
    """Values of a tensor that depend only on its name and shape: uniform in [-0.5, 0.5), and around 1 for norms and magnitudes."""
    start = np.uint64(14695981039346656037)
    with np.errstate(over="ignore"):
        for byte in name.encode():  # FNV-1a
            start = (start ^ np.uint64(byte)) * np.uint64(1099511628211)
        x = start + np.arange(int(np.prod(shape)), dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)  # the mixer of SplitMix64
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    values = (x >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24) - np.float32(0.5)
    multiplies = len(shape) == 1 and name.endswith((".weight", "lora_magnitude_vector"))
    return (values + np.float32(1.0) if multiplies else values).reshape(shape)


def write_recording(path, cases):
    """Writes the cases of a test of Rust; the same bytes every time."""
    with gzip.GzipFile(path, "w", mtime=0) as file:
        file.write(json.dumps(cases).encode())


def message(error):
    """The sentence of an error, without the lines of the log before it."""
    return error[error.find("error: ") :].strip()


class Program:
    """The program under test."""

    def __init__(self, binary):
        self.binary = str(Path(binary).resolve())

    def run(self, *arguments):
        """Exit status, standard output and standard error."""
        done = subprocess.run([self.binary, *map(str, arguments)], capture_output=True, text=True, timeout=120)
        return done.returncode, done.stdout, done.stderr

    def evaluate(self, folder, text_file, *arguments):
        """The report of `ottava eval`, or its error as a string."""
        common = ["--data", text_file, "--max-length", ROW, "--recipe", "fp32", "--device", "cpu", "--json"]
        status, out, error = self.run("eval", folder, *common, *arguments)
        return json.loads(out) if status == 0 else message(error)


class Tally:
    """Outcomes of the cases of a suite. `refusals` maps a pattern of a case and its error to the reason why that error is right."""

    def __init__(self, suite, refusals=()):
        self.suite, self.refusals = suite, dict(refusals)
        self.held, self.exceptions, self.failures = 0, {}, []

    def hold(self):
        self.held += 1

    def fail(self, case, text):
        self.failures.append((case, text))

    def expect(self, reason):
        """A case that differs for a known reason."""
        self.exceptions[reason] = self.exceptions.get(reason, 0) + 1

    def refuse(self, case, error):
        """A case that the program refuses: an exception if `refusals` names the reason, otherwise a failure. Returns whether it is an exception."""
        for pattern, reason in self.refusals.items():
            if re.search(pattern, f"{case}: {error}"):
                self.expect(reason)
                return True
        self.fail(case, f"refused: {error}")
        return False

    def report(self):
        """Prints the summary and returns the exit status."""
        for case, text in self.failures:
            print(f"FAILED {case}: {text}")
        named = "; ".join(f"{count} {reason}" for reason, count in sorted(self.exceptions.items())) or "none"
        cases = self.held + len(self.failures) + sum(self.exceptions.values())
        print(f"{self.suite}: {cases} cases, {self.held} hold, exceptions: {named}; {len(self.failures)} fail")
        return 1 if self.failures else 0


def in_parallel(function, items):
    """`function` of each item, two at a time, in order."""
    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(function, items)
