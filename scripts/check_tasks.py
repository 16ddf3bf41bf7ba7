#!/usr/bin/env python3
"""Evaluates tasks by Ottava and by lm-evaluation-harness, on small models with random weights, and compares each item.

usage: check_tasks.py OTTAVA             compares more than 1,000 items on each of two models
       check_tasks.py OTTAVA record      writes crates/ottava/tests/data/tasks: one model, a few items, and the numbers of lm-evaluation-harness

`pip install lm_eval==0.4.13 torch==2.15.0 transformers==5.24.0`; a minute on two cores. The items are made of the bundled text (data/).
"""

import contextlib
import gzip
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
import torch  # noqa: E402
from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.api.task import ConfigurableTask  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "crates/ottava/tests/data/tasks"
# Log-likelihoods are sums over tens of tokens. lm-evaluation-harness adds up in F32, whose roundings are 6e-8 of the sum.
ALLOWED, RELATIVE = 1e-4, 1e-6
END = "<|endoftext|>"


def glosses(count):
    """Returns words with their glosses."""
    with gzip.open(ROOT / "data/wordnet-glosses.txt.gz", "rt") as file:
        lines = [re.match(r"(.+?) \((\w+)\): (.+)", line) for line in file]
    found = [line.groups() for line in lines if line and len(line[3]) < 90]
    return random.Random(1).sample(found, count)


def write_items(folder, count):
    """Writes the items and the tasks of both programs, and returns the tasks of lm-evaluation-harness by name."""
    rng = random.Random(2)
    words = glosses(count + 40)
    choices = []
    for at, (word, kind, gloss) in enumerate(words[:count]):
        others = [rng.choice(words)[2] for _ in range(2 + at % 3)]
        label = rng.randrange(len(others) + 1)
        others.insert(label, gloss)
        choices.append({"word": word, "kind": kind, "choices": others, "label": label, "gloss": gloss, "prompt": ["", " "][at % 2] + word + " " * (at % 3)})
    sums = []
    for _ in range(count):
        a, b = rng.randrange(100), rng.randrange(100)
        sums.append({"question": f"{a} + {b} =", "answer": str(a + b), "answers": [str(a + b), f"{a + b}.", "amid"]})
    texts = [{"text": ". ".join(words[(at + i) % len(words)][2] for i in range(1 + at % 9)) + " "} for at in range(count)]
    for name, items in {"words": choices, "sums": sums, "texts": texts}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (folder / "few.jsonl").write_text("".join(json.dumps(item) + "\n" for item in choices[:2]))
    (folder / "few_sums.jsonl").write_text("".join(json.dumps(item) + "\n" for item in sums[:3]))
    ours, theirs = {}, {}
    ours["words"] = '''
data = "words.jsonl"
type = "multiple_choice"
prompt = "{{ word }} ({{ kind }}):"
choices = "choices"
answer = "label"
metrics = ["acc", "acc_norm", "acc_bytes"]
'''
    theirs["words"] = {
        "dataset": "words", "output_type": "multiple_choice", "doc_to_text": "{{ word }} ({{ kind }}):", "doc_to_choice": "choices", "doc_to_target": "label",
        "metric_list": [{"metric": name} for name in ("acc", "acc_norm", "acc_bytes")],
    }  # fmt: skip
    ours["shots"] = '''
data = "words.jsonl"
type = "multiple_choice"
prompt = """{% if kind == 'noun' %}
Noun: {{ prompt }}
{%- else %}Word: {{ prompt }}{% endif %}
means"""
choices = "{{ choices }}"
answer = "{{ label }}"
num_fewshot = 2
fewshot_data = "few.jsonl"
fewshot_separator = "\\n--\\n"
'''
    theirs["shots"] = {
        "dataset": "words", "output_type": "multiple_choice", "doc_to_choice": "{{ choices }}", "doc_to_target": "{{ label }}", "num_fewshot": 2, "few": "few",
        "doc_to_text": "{% if kind == 'noun' %}\nNoun: {{ prompt }}\n{%- else %}Word: {{ prompt }}{% endif %}\nmeans", "fewshot_delimiter": "\n--\n",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }  # fmt: skip
    ours["spaces"] = '''
data = "words.jsonl"
type = "multiple_choice"
prompt = "prompt"
choices = ["{{ choices[0] }}", "{{ gloss }}", " also"]
answer = "gloss"
target_delimiter = ""
'''
    theirs["spaces"] = {
        "dataset": "words", "output_type": "multiple_choice", "doc_to_text": "prompt", "doc_to_choice": "{{ [choices[0], gloss, ' also'] }}",
        "doc_to_target": "gloss", "target_delimiter": "", "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }  # fmt: skip
    ours["sums"] = '''
data = "sums.jsonl"
type = "generate_until"
prompt = "question"
answer = "answers"
num_fewshot = 3
fewshot_data = "few_sums.jsonl"
fewshot_separator = "\\n"
[generation]
until = ["\\n", "."]
max_gen_toks = 12
[filter]
regex_pattern = "([a-z]+)|([0-9]+)"
group_select = -1
[exact_match]
ignore_case = true
ignore_punctuation = true
regexes_to_ignore = ["[a-g]", "[h-o]+"]
'''
    theirs["sums"] = {
        "dataset": "sums", "output_type": "generate_until", "doc_to_text": "question", "doc_to_target": "answers", "num_fewshot": 3, "few": "few_sums",
        "fewshot_delimiter": "\n", "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 12, "do_sample": False},
        "filter_list": [{"name": "none", "filter": [
            {"function": "regex", "regex_pattern": "([a-z]+)|([0-9]+)", "group_select": -1}, {"function": "take_first"},
        ]}],
        "metric_list": [{"metric": "exact_match", "ignore_case": True, "ignore_punctuation": True, "regexes_to_ignore": ["[a-g]", "[h-o]+"]}],
    }  # fmt: skip
    ours["texts"] = '''
data = "texts.jsonl"
type = "loglikelihood_rolling"
answer = "text"
'''
    theirs["texts"] = {
        "dataset": "texts", "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text",
        "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    }  # fmt: skip
    for name, text in ours.items():
        (folder / f"{name}.toml").write_text(f'name = "{name}"{text}')
    return theirs


def task_of(folder, name, config):
    """Returns a task of lm-evaluation-harness."""
    config = dict(config)
    files = {"test": str(folder / f"{config.pop('dataset')}.jsonl")}
    if "few" in config:
        files["few"] = str(folder / f"{config.pop('few')}.jsonl")
        config |= {"fewshot_split": "few", "fewshot_config": {"sampler": "first_n"}}
    return ConfigurableTask(config={"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": files}, "test_split": "test", **config})


def write_models(folder):
    """Writes two models: Llama with a tokenizer of characters that adds a token before a text, and GPT-2 with the bundled tokenizer, which adds none."""
    torch.manual_seed(3)
    llama, gpt2 = folder / "llama", folder / "gpt2"
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=96)
    config = LlamaConfig(vocab_size=104, initializer_range=0.3, bos_token_id=1, eos_token_id=0, tie_word_embeddings=False, **sizes)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(llama)
    vocabulary = {END: 0, "<s>": 1} | {chr(code): number for number, code in enumerate([*range(32, 127), 10], 2)} | {" a": 98, "th": 99, " t": 100}
    special = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    processor = {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }  # fmt: skip
    tokenizer = {
        "version": "1.0", "added_tokens": [{"id": 0, "content": END, **special}, {"id": 1, "content": "<s>", **special}], "post_processor": processor,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [[" ", "a"], ["t", "h"], [" ", "t"]]}, "decoder": {"type": "Fuse"},
    }  # fmt: skip
    (llama / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": END, "clean_up_tokenization_spaces": False}
    (llama / "tokenizer_config.json").write_text(json.dumps(names))
    bundled = ROOT / "data/tokenizer"
    size = len(PreTrainedTokenizerFast(tokenizer_file=str(bundled / "tokenizer.json")))
    config = GPT2Config(vocab_size=size, n_embd=32, n_layer=2, n_head=2, n_positions=64, initializer_range=0.2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(config).save_pretrained(gpt2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled / name, gpt2 / name)
    for path in (llama / "generation_config.json", gpt2 / "generation_config.json"):
        path.unlink(missing_ok=True)
    return [llama, gpt2]


def harness(model, tasks):
    """Returns the samples and the results of lm-evaluation-harness, by task."""
    model = HFLM(pretrained=str(model), device="cpu", dtype="float32", batch_size=1)
    # Bars of progress fill the log.
    with contextlib.redirect_stderr(io.StringIO()):
        found = simple_evaluate(model=model, tasks=tasks, log_samples=True, bootstrap_iters=2)
    return {name: sorted(found["samples"][name], key=lambda sample: sample["doc_id"]) for name in found["samples"]}, found["results"]


def numbers(sample):
    """Returns what the program computed for an item: log-likelihoods, or a text and its filtered text."""
    first = sample["resps"][0]
    first = first[0] if isinstance(first, list) else first
    if isinstance(first, str):
        filtered = sample["filtered_resps"][0]
        return None, (first, filtered)
    values = [response[0] for response in sample["resps"]]
    return [value[0] if isinstance(value, (list, tuple)) else value for value in values], None


def ottava(binary, model, folder, names, output, more=()):
    """Returns the samples and the results of Ottava, by task."""
    tasks = [part for name in names for part in ("--task", str(folder / f"{name}.toml"))]
    command = [binary, "eval", str(model), *tasks, "--recipe", "fp32", "--device", "cpu", "--json", "--output", str(output), *more]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    samples = {name: [] for name in names}
    for line in output.read_text().splitlines():
        sample = json.loads(line)
        samples[sample["task"]].append(sample)
    return samples, json.loads(done.stdout)["results"]


def compare(name, ours, theirs, results):
    """Compares the items and metrics of a task, and returns the largest difference of a log-likelihood."""
    ours, theirs, (own, other) = ours[name], theirs[name], results
    assert len(ours) == len(theirs), name
    largest, texts = 0.0, 0
    for a, b in zip(ours, theirs):
        values, text = numbers(b)
        where = f"{name}, item {a['doc_id']}"
        if values is None:
            if (a["resps"][0], a["filtered_resps"][0]) != text:
                texts += 1
                print(f"{where}: {a['resps'][0]!r} -> {a['filtered_resps'][0]!r}, and there {text}")
            continue
        assert len(values) == len(a["resps"]), where
        for found, value in zip(a["resps"], values):
            assert abs(found - value) <= max(ALLOWED, RELATIVE * abs(value)), f"{where}: {found}, and there {value}"
            largest = max(largest, abs(found - value))
        for metric in ("acc", "acc_norm", "acc_bytes"):
            # A tie of two choices may be decided otherwise.
            ties = len(values) > 1 and sorted(values)[-1] - sorted(values)[-2] < ALLOWED
            assert metric not in b or ties or a[metric] == b[metric], f"{where}: {metric}"
    for key, value in other[name].items():
        metric = key.split(",")[0]
        if metric in own[name] and isinstance(value, float):
            assert abs(own[name][metric] - value) <= ALLOWED * max(1, abs(value)), f"{name}: {metric} is {own[name][metric]}, and there {value}"
        elif metric.endswith("_stderr") and isinstance(value, float) and "per" not in metric:
            sys.exit(f"{name}: there is no {metric}")
    return largest, texts, len(ours)


def main():
    binary, record = str(Path(sys.argv[1]).resolve()), sys.argv[2:] == ["record"]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        theirs = write_items(folder, 12 if record else 400)
        for model in write_models(folder)[: 1 if record else 2]:
            samples, results = harness(model, [task_of(folder, name, config) for name, config in theirs.items()])
            if record:
                write_record(folder, model, samples, results)
                continue
            ours, own = ottava(binary, model, folder, theirs, folder / "samples.jsonl")
            items = 0
            for name in theirs:
                largest, texts, count = compare(name, ours, samples, (own, results))
                items += count
                print(f"{model.name:6} {name:7} {count} items, largest difference {largest:.1e}, texts that differ: {texts}")
                # Two tokens can be almost equally likely.
                assert texts <= count // 100, name
            print(f"{items} cases, {items} hold")


def write_record(folder, model, samples, results):
    """Writes the fixture."""
    shutil.rmtree(RECORDED, ignore_errors=True)
    RECORDED.mkdir(parents=True)
    for path in [*folder.glob("*.toml"), *folder.glob("*.jsonl")]:
        shutil.copy(path, RECORDED / path.name)
    shutil.copytree(model, RECORDED / "model")
    found = {}
    for name, items in samples.items():
        keys = [key.split(",")[0] for key, value in results[name].items() if isinstance(value, float)]
        keys = [key for key in keys if not (key.endswith("_stderr") and "per" in key)]
        metrics = {key.split(",")[0]: value for key, value in results[name].items() if key.split(",")[0] in keys}
        responses = [values if values is not None else list(text) for values, text in map(numbers, items)]
        found[name] = {"metrics": metrics, "responses": responses}
    (RECORDED / "expected.json").write_text(json.dumps(found, indent=1) + "\n")


main()
