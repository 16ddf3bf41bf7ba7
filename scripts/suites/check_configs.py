#!/usr/bin/env python3
"""Compares the losses of generated configurations of every family with transformers.

usage: check_configs.py OTTAVA_BINARY [--count N] [--family NAME] [--record FILE]

Each case is a `config.json` of a tiny model (`configs.py`) with seeded weights. transformers and `ottava eval` load the same folder; their losses in F32
must agree within 1e-5, or Ottava must refuse the file for one of the reasons in `REFUSALS`. `--record` writes the configurations that are right, with
their losses, for the test `promises::configurations`.
"""

import argparse
import json
import logging
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from common import ROW, TEXT, TOLERANCE, Program, Tally, ids_of, in_parallel, seeded, write_recording, write_tokenizer
from configs import FAMILIES, generated

# Why the program may refuse a configuration that transformers loads, by a pattern of its error.
REFUSALS = {
    r'^(?!gemma|gpt_oss).*`(hidden_act|activation_function)` is "(relu|quick_gelu|silu)"': "with an activation that is not implemented",
    r'`hidden_activation` is "(relu|quick_gelu)"': "with an activation that is not implemented",
    "`(scale_attn_weights|scale_attn_by_inverse_layer_idx|reorder_and_upcast_attn|add_cross_attention)` is": "with attention of GPT-2 that is not implemented",
    "`clip_qkv` is": "with clipping that is not implemented",
    "`swiglu_(limit|alpha)` is": "with other constants of the activation of gpt-oss",
    "`use_bidirectional_attention` is": "with attention to later tokens",
    "^deepseek_v2.*`mlp_bias` is": "with biases of MLPs that are not implemented",
    "^deepseek_v3.*`(topk_method|scoring_func)` is": "with a router that DeepSeek's code computes and transformers ignores",
    "^deepseek_v2.*`(norm_topk_prob|topk_method|scoring_func)` is": "with a router that DeepSeek's code computes and transformers ignores",
    "`use_sliding_window` is false": "with layers whose window is empty",
    "the rope type `(proportional|ntk|mrope)`": "with a rotary scaling that is not implemented",
    "the key `(full|sliding)_attention`": "with rotary positions by kinds of layers, which transformers ignores in this family",
    "`(short|long)_factor` has": "with a list of factors of another length than a head",
    "`attention_factor` is 0": "with an attention factor of 0",
    "`rope_scaling` and `rope_parameters` say different": "with two spellings of rotary positions that differ",
    '"rope_scaling".*rope_parameters: the key `.*` is missing': "with two spellings of rotary positions that differ",
    '`layer_types` has "sliding_attention", and `use_sliding_window` is false': "with windows in `layer_types` that `use_sliding_window` turns off",
    "`sliding_window` is 0": "with a window of 0 tokens",
    "`partial_rotary_factor` is .* stretched": "with a part of each head rotated, for which transformers repeats one frequency",
    "^gemma3_text.*the key `type` is not read": "with a key of rotary positions that transformers ignores in Gemma 3",
}


def referee(folder):
    """The model of a folder as transformers builds it, with seeded weights, which are written to the folder."""
    text = (folder / "config.json").read_text()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="eager", dtype=torch.float32)
    model.save_pretrained(folder)  # the names and shapes of files
    with safe_open(folder / "model.safetensors", "pt") as file:
        weights = {name: torch.from_numpy(seeded(name, file.get_slice(name).get_shape()).copy()) for name in file.keys()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(text)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def loss_of(model, ids):
    """The mean loss of `ids` in rows of `ROW` tokens."""
    ids = torch.tensor(ids)
    inputs, targets = ids[:-1].view(-1, ROW), ids[1:].view(-1, ROW)
    with torch.no_grad():
        rows = [model(input_ids=row[None], use_cache=False, return_dict=True).logits[0] for row in inputs]
    return torch.nn.functional.cross_entropy(torch.cat(rows).double(), targets.flatten()).item()


def error_of(error):
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]


class Case:
    """One configuration in a folder of its own."""

    def __init__(self, root, number, name, changes, config):
        self.name, self.changes, self.config = name, changes, config
        self.folder = root / f"case-{number}"
        self.folder.mkdir()
        (self.folder / "config.json").write_text(json.dumps(config))
        write_tokenizer(self.folder)
        (self.folder / "text.txt").write_text(TEXT)

    def __str__(self):
        return f"{self.name} {json.dumps(self.changes)}"

    def build(self):
        try:
            self.model, self.error = referee(self.folder), None
        except Exception as error:  # whatever transformers raises is its refusal
            self.model, self.error = None, error_of(error)
        return self

    def evaluate(self, program):
        self.ours = program.evaluate(self.folder, self.folder / "text.txt")
        return self

    def expected(self, end):
        """The loss by transformers, or None."""
        if self.model is None:
            return None
        try:
            return loss_of(self.model, ids_of(TEXT, end))
        except Exception as error:
            self.error = error_of(error)
            return None


def judge(case, tally):
    """Compares a case, and returns what is recorded of it if it is right."""
    refused = isinstance(case.ours, str)
    end = 0 if refused else case.ours["preceding_id"]
    expected = case.expected(end)
    if expected is None:
        (tally.hold if refused else lambda: tally.expect("that transformers cannot run"))()
        if not refused:
            print(f"only Ottava loads {case}: {case.error}")
        return None
    entry = dict(name=case.name, config=case.config, ids=ids_of(TEXT, end), loss=expected, refused=refused)
    if refused:
        return entry if tally.refuse(case, f"{case.ours}; transformers {expected:.6f}") else None
    difference = abs(case.ours["loss"] - expected)
    if difference > TOLERANCE * max(1.0, abs(expected)):
        tally.fail(case, f"loss {case.ours['loss']:.6f}, transformers {expected:.6f}")
        return None
    tally.hold()
    return entry


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    parser.add_argument("--count", type=int, default=36, help="random configurations per family, beside those of each of its keys")
    parser.add_argument("--family", choices=FAMILIES, action="append")
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity(logging.CRITICAL)
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    program, tally, recorded = Program(arguments.binary), Tally("transformers configurations", REFUSALS), []
    for family in arguments.family or FAMILIES:
        with tempfile.TemporaryDirectory() as root:
            cases = (Case(Path(root), number, *case).build() for number, case in enumerate(generated(family, arguments.count)))
            for case in in_parallel(lambda case: case.evaluate(program), cases):
                entry = judge(case, tally)
                recorded += [entry] if entry else []
                shutil.rmtree(case.folder)
    if arguments.record:
        write_recording(arguments.record, recorded)
    return tally.report()


if __name__ == "__main__":
    sys.exit(main())
