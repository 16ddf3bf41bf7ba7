#!/usr/bin/env python3
"""Checks what `ottava convert` makes of every metadata key of a GGUF file that changes the function of a model or its tokenizer.

usage: check_gguf_keys.py OTTAVA_BINARY

The package gguf writes a tiny model of each architecture and adds the keys of a case. The folder must have the values that llama.cpp reads, or the error
must name the key.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
from gguf import GGUFValueType as Type

from common import Program, Tally, in_parallel, message, seeded

ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma2", "gemma3"]
CHANNELS, HIDDEN, HEADS, KV_HEADS, LAYERS = 16, 24, 4, 2, 2
TOKENS = ["<unk>", "<s>", "</s>", "<|eot|>", "<|eom|>", "<pad>", "a", "b", "ab", "Ġ", "Ġa", "c"]
TYPES = [3] * 6 + [1] * 6
REFUSED = "refused"
DROPPED = object()  # the key is left out
# Errors that name what the keys say instead of the keys, by pattern.
REFUSALS = {
    "the rope scaling `": "with another kind of rotary scaling",
    r"rotary positions of \d+ of the|heads of \d+ channels": "with heads of other sizes",
    r"tensor .* is missing|has shape|no place in a model": "with sizes of another model",
    r"the key `.*` is missing": "without a key that is needed",
    r"there are \d+ tokens and": "with lists of different lengths",
}


class Reads:
    """The values of keys of the folder, by file; a path into nested objects has dots."""

    def __init__(self, **values):
        self.values = {key.replace("__", "."): value for key, value in values.items()}

    def differences(self, files):
        for path, expected in self.values.items():
            found = files
            for step in path.split("."):
                found = found.get(step) if isinstance(found, dict) else None
            found = sorted(found) if isinstance(found, list) else found
            near = isinstance(expected, float) and isinstance(found, (int, float)) and abs(found - expected) <= 1e-6 * abs(expected)
            if found != expected and not near:
                yield f"{path} is {found}, expected {expected}"


class Same(Reads):
    """A folder as without the keys."""


GEMMAS, OTHERS = ["gemma2", "gemma3"], ["llama", "qwen2", "qwen3"]


def rope(**values):
    """Rotary positions of layers that see the whole context, in both spellings of architectures with one kind."""
    return Reads(**{f"rope__{key}": value for key, value in values.items()})


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
# Keys below the architecture's name (those with a colon stand alone), what is right, and the architectures, by default all. Several right answers are a
# list: a key may be read, or refused by name.
CASES = [
    ({"rope.freq_base": 500.0}, rope(rope_theta=500.0)),
    ({"rope.freq_base": DROPPED}, rope(rope_theta=10000.0)),
    ({"rope.scaling.type": "none"}, rope(rope_type="default")),
    ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, rope(rope_type="default")),
    ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, rope(rope_type="linear", factor=4.0)),
    ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, [rope(rope_type="default"), rope(rope_type="linear", factor=1.0)]),
    ({"rope.scaling.type": "linear"}, [rope(rope_type="default"), REFUSED]),
    ({"rope.scaling.factor": 4.0}, [rope(rope_type="linear", factor=4.0), REFUSED]),
    ({"rope.scaling.factor": 1.0}, [rope(rope_type="default"), rope(rope_type="linear", factor=1.0)]),
    ({"rope.scale_linear": 2.0}, [rope(rope_type="linear", factor=2.0), REFUSED]),
    ({"rope.scale_linear": 1.0}, [rope(rope_type="default"), rope(rope_type="linear", factor=1.0)]),
    ({"rope.scaling.type": "linear", "rope.scale_linear": 2.0}, [rope(rope_type="linear", factor=2.0), REFUSED]),
    (YARN, [rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16), REFUSED]),
    (YARN | {"rope.scaling.original_context_length": DROPPED}, [rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64), REFUSED]),
    (YARN | {"rope.scaling.attn_factor": 1.3}, REFUSED),
    (YARN | {"rope.scaling.yarn_log_multiplier": 0.1}, REFUSED),
    (YARN | {"rope.scaling.yarn_ext_factor": 0.5}, REFUSED),
    (YARN | {"rope.scaling.yarn_attn_factor": 1.3}, REFUSED),
    (YARN | {"rope.scaling.yarn_beta_fast": 16.0}, [rope(rope_type="yarn", beta_fast=16.0), REFUSED]),
    (YARN | {"rope.scaling.yarn_beta_slow": 2.0}, [rope(rope_type="yarn", beta_slow=2.0), REFUSED]),
    ({"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}, REFUSED),
    ({"rope.scaling.type": "dynamic"}, REFUSED),
    ({"rope.scaling.finetuned": True}, Same()),
    ({"rope.scaling.attn_factor": 1.3}, REFUSED),
    ({"rope.scaling.alpha": 1000.0}, REFUSED),
    ({"rope.dimension_count": 2}, REFUSED),
    ({"rope.dimension_count": 4}, Same()),
    ({"rope.dimension_sections": [1, 1, 0, 0]}, REFUSED),
    ({"rope.freq_base_swa": 300.0}, [Reads(config__rope_parameters__sliding_attention__rope_theta=300.0), REFUSED], ["gemma3"]),
    ({"attention.key_length": 4, "attention.value_length": 4}, Reads(config__head_dim=4)),
    ({"attention.value_length": 8}, REFUSED),
    ({"attention.head_count_kv": DROPPED}, REFUSED),
    ({"attention.clamp_kqv": 3.0}, REFUSED),
    ({"attention.max_alibi_bias": 8.0}, REFUSED),
    ({"attention.scale": 0.25}, [Reads(config__query_pre_attn_scalar=16), REFUSED]),
    ({"attention.output_scale": 0.25}, REFUSED),
    ({"attention.temperature_length": 128}, REFUSED),
    ({"attention.temperature_scale": 0.1}, REFUSED),
    ({"attention.causal": False}, REFUSED),
    ({"attention.causal": True}, Same()),
    ({"attention.sliding_window": 7}, [Reads(config__sliding_window=7), REFUSED]),
    ({"attention.sliding_window": 0}, [Same(), REFUSED], OTHERS),
    ({"attention.sliding_window": DROPPED}, REFUSED, GEMMAS),
    ({"attention.sliding_window": 7, "attention.sliding_window_pattern": 3}, [Reads(config__sliding_window_pattern=3), REFUSED]),
    ({"attention.shared_kv_layers": 1}, REFUSED),
    ({"attention.q_lora_rank": 4}, REFUSED),
    ({"attention.kv_lora_rank": 4}, REFUSED),
    ({"attention.key_length_swa": 8}, REFUSED),
    ({"attention.layer_norm_rms_epsilon": 0.1}, Reads(config__rms_norm_eps=0.1)),
    ({"attention.layer_norm_rms_epsilon": DROPPED}, REFUSED),
    ({"attention.layer_norm_epsilon": 0.1, "attention.layer_norm_rms_epsilon": DROPPED}, REFUSED),
    ({"attn_logit_softcapping": 20.0}, Reads(config__attn_logit_softcapping=20.0), ["gemma2"]),
    ({"attn_logit_softcapping": 20.0}, REFUSED, ["llama", "qwen2", "qwen3", "gemma3"]),
    ({"final_logit_softcapping": 10.0}, Reads(config__final_logit_softcapping=10.0), GEMMAS),
    ({"final_logit_softcapping": 10.0}, REFUSED, OTHERS),
    ({"router_logit_softcapping": 10.0}, REFUSED),
    ({"logit_scale": 0.5}, REFUSED),
    ({"residual_scale": 0.5}, REFUSED),
    ({"embedding_scale": 3.0}, REFUSED),
    ({"expert_count": 4, "expert_used_count": 2}, REFUSED),
    ({"expert_count": 0}, Same()),
    ({"expert_gating_func": 2}, REFUSED),
    ({"expert_weights_scale": 2.5}, REFUSED),
    ({"leading_dense_block_count": 1}, REFUSED),
    ({"interleave_moe_layer_step": 2}, REFUSED),
    ({"use_parallel_residual": True}, REFUSED, ["llama", "qwen3", "gemma2", "gemma3"]),
    # Early converters wrote it into every file of Qwen2, whose graph in llama.cpp does not read it.
    ({"use_parallel_residual": True}, Same(), ["qwen2"]),
    ({"use_parallel_residual": False}, Same()),
    ({"swin_norm": True}, REFUSED),
    ({"pooling_type": 1}, REFUSED),
    ({"nextn_predict_layers": 1}, REFUSED),
    ({"n_deepstack_layers": 1}, REFUSED),
    ({"full_attention_interval": 2}, REFUSED),
    ({"activation_sparsity_scale": [0.5, 0.5]}, REFUSED),
    ({"embedding_length_per_layer_input": 8}, REFUSED),
    ({"tensor_data_layout": "Meta AI original pth"}, [Same(), REFUSED]),
    ({"vocab_size": 12}, Same()),
    ({"vocab_size": 40}, [Same(), REFUSED]),
    ({"context_length": 128}, Reads(config__max_position_embeddings=128)),
    ({"context_length": DROPPED}, REFUSED),
    ({"block_count": 3}, REFUSED),
    ({"feed_forward_length": [24, 24]}, [Same(), REFUSED]),
    ({"feed_forward_length": [24, 12]}, REFUSED),
    ({"attention.head_count": [4, 2]}, REFUSED),
    ({"attention.head_count_kv": [2, 1]}, REFUSED),
    ({"an_unknown_key": 1}, [Same(), REFUSED]),
    ({"general.type:": "adapter"}, REFUSED),
    ({"general.type:": "mmproj"}, REFUSED),
    ({"general.type:": "model", "general.name:": "x", "general.file_type:": 0, "general.quantization_version:": 2, "general.tags:": ["a"]}, Same()),
    ({"general.sampling.temp:": 0.6, "general.sampling.top_k:": 20}, [Same(), Reads(generation__temperature=0.6, generation__top_k=20)]),
    ({"split.no:": 0, "split.count:": 2, "split.tensors.count:": 40}, REFUSED),
    ({"split.no:": 0, "split.count:": 1}, Same()),
    ({"split.count:": 0}, Same()),
]
TOKENIZER = [
    ({"eos_token_id": 2}, Reads(generation__eos_token_id=2)),
    ({"eos_token_id": 2, "eot_token_id": 3}, Reads(generation__eos_token_id=[2, 3])),
    ({"eos_token_id": 2, "eom_token_id": 4}, Reads(generation__eos_token_id=[2, 4])),
    ({"eos_token_id": 2, "eot_token_id": 3, "eom_token_id": 4}, Reads(generation__eos_token_id=[2, 3, 4])),
    ({"eos_token_id": 2, "eot_token_id": 2}, [Reads(generation__eos_token_id=2), Reads(generation__eos_token_id=[2])]),
    ({"eos_token_id": DROPPED, "eot_token_id": 3}, [Reads(generation__eos_token_id=3), Reads(generation__eos_token_id=[3])]),
    ({"eos_token_id": DROPPED}, Reads(generation__eos_token_id=None)),
    ({"eot_token_id": 99}, REFUSED),
    ({"eom_token_id": 99}, REFUSED),
    ({"eos_token_id": 99}, REFUSED),
    ({"bos_token_id": 99}, REFUSED),
    ({"padding_token_id": 99}, REFUSED),
    ({"unknown_token_id": 99}, REFUSED),
    ({"bos_token_id": 3}, Reads(generation__bos_token_id=3, tokenizer__bos_token="<|eot|>")),
    ({"padding_token_id": 5}, Reads(generation__pad_token_id=5, tokenizer__pad_token="<pad>")),
    ({"unknown_token_id": 0}, Reads(tokenizer__unk_token="<unk>")),
    (
        {"seperator_token_id": 2, "mask_token_id": 3, "fim_pre_token_id": 3, "fim_suf_token_id": 4, "fim_mid_token_id": 5, "prefix_token_id": 3},
        Same(),
    ),
    ({"add_bos_token": True}, Reads(tokenizer__add_bos_token=True)),
    ({"add_bos_token": False}, Reads(tokenizer__add_bos_token=False)),
    ({"add_eos_token": True}, [Reads(tokenizer__add_eos_token=True), REFUSED]),
    ({"add_eos_token": False}, Reads(tokenizer__add_eos_token=False)),
    ({"add_sep_token": True}, REFUSED),
    ({"remove_extra_whitespaces": True}, REFUSED),
    ({"precompiled_charsmap": [1, 2, 3]}, REFUSED),
    ({"pre": "deepseek-llm"}, REFUSED),
    ({"pre": DROPPED}, REFUSED),
    ({"model": "bert"}, REFUSED),
    ({"model": "t5"}, REFUSED),
    ({"model": "rwkv"}, REFUSED),
    ({"merges": ["a b", "a c"]}, REFUSED),
    ({"merges": ["a b", "x y"]}, REFUSED),
    ({"merges": DROPPED}, REFUSED),
    ({"token_type": DROPPED}, [Same(), REFUSED]),
    ({"token_type": [3] * 5}, REFUSED),
    ({"tokenizer.chat_template:": "{{ 1 }}"}, Reads(template="{{ 1 }}")),
    (
        {"tokenizer.chat_template:": "{{ 1 }}", "tokenizer.chat_template.tool_use:": "{{ 2 }}", "tokenizer.chat_templates:": ["tool_use"]},
        [Reads(template="{{ 1 }}", tool_use="{{ 2 }}"), REFUSED],
    ),
    ({"tokenizer.huggingface.json:": "{}"}, [Same(), REFUSED]),
]


def kind_of(value):
    """The type of a value in files."""
    if isinstance(value, list):
        return Type.ARRAY
    kinds = {bool: Type.BOOL, int: Type.UINT32, float: Type.FLOAT32, str: Type.STRING}
    return kinds[type(value)]


def tensors(architecture):
    """Names and shapes of the tensors of the tiny model."""
    head = CHANNELS // HEADS
    norms = ["attn_norm", "ffn_norm"] + (["post_attention_norm", "post_ffw_norm"] if architecture in GEMMAS else [])
    yield "token_embd.weight", (len(TOKENS), CHANNELS)
    yield "output_norm.weight", (CHANNELS,)
    for i in range(LAYERS):
        block = f"blk.{i}"
        for norm in norms:
            yield f"{block}.{norm}.weight", (CHANNELS,)
        for name, rows in [
            ("attn_q", HEADS * head),
            ("attn_k", KV_HEADS * head),
            ("attn_v", KV_HEADS * head),
            ("ffn_gate", HIDDEN),
            ("ffn_up", HIDDEN),
        ]:
            yield f"{block}.{name}.weight", (rows, CHANNELS)
            if architecture == "qwen2" and name.startswith("attn"):
                yield f"{block}.{name}.bias", (rows,)
        if architecture in ("qwen3", "gemma3"):
            yield f"{block}.attn_q_norm.weight", (head,)
            yield f"{block}.attn_k_norm.weight", (head,)
        yield f"{block}.attn_output.weight", (CHANNELS, HEADS * head)
        yield f"{block}.ffn_down.weight", (CHANNELS, HIDDEN)


def write(path, architecture, changes):
    values = {
        "context_length": 64,
        "embedding_length": CHANNELS,
        "block_count": LAYERS,
        "feed_forward_length": HIDDEN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1000.0,
        "attention.key_length": 4,
        "attention.value_length": 4,
    }
    if architecture in GEMMAS:
        values["attention.sliding_window"] = 5
    values = {f"{architecture}.{key}": value for key, value in values.items()}
    values |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.token_type": TYPES}
    values |= {"tokenizer.ggml.merges": ["a b", "Ġ a"], "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    values |= changes
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in values.items():
        if value is not DROPPED:
            writer.add_key_value(key, value, kind_of(value), sub_type=kind_of(value[0]) if isinstance(value, list) else None)
    for name, shape in tensors(architecture):
        writer.add_tensor(name, seeded(name, list(shape)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class Case:
    def __init__(self, root, architecture, prefix, keys, right):
        self.architecture, self.right = architecture, right if isinstance(right, list) else [right]
        self.keys = {key.removesuffix(":") if key.endswith(":") else f"{prefix}.{key}": value for key, value in keys.items()}
        self.root = root

    def __str__(self):
        return f"{self.architecture} " + json.dumps({key: "missing" if value is DROPPED else value for key, value in self.keys.items()})

    def convert(self, program):
        """The files of the converted folder as objects, or the error."""
        with tempfile.TemporaryDirectory(dir=self.root) as folder:
            path, output = Path(folder) / "model.gguf", Path(folder) / "new"
            write(path, self.architecture, self.keys)
            status, _, error = program.run("convert", path, output)
            if status:
                self.found = message(error)
                return self
            load = lambda name: json.loads((output / name).read_text())
            text = lambda name: (output / name).read_text() if (output / name).exists() else None
            config = load("config.json")
            rope = config.get("rope_parameters", {})
            self.found = {"config": config, "generation": load("generation_config.json"), "tokenizer": load("tokenizer_config.json")}
            self.found |= {"rope": rope.get("full_attention", rope), "template": text("chat_template.jinja")}
            self.found["tool_use"] = text("additional_chat_templates/tool_use.jinja")
        return self


def judge(tally, case, plain):
    if isinstance(case.found, str):
        named = any(f"`{key}`" in case.found or f'"{key}"' in case.found for key in case.keys) or "is split" in case.found
        if REFUSED in case.right and named:
            tally.expect("refused by the key's name")
        else:
            tally.refuse(str(case), case.found)
        return
    differences = []
    for right in case.right:
        if right == REFUSED:
            differences.append("it must be refused by name")
            continue
        if isinstance(right, Same):
            found = [] if case.found == plain else ["the folder differs from one without the keys"]
        else:
            found = list(right.differences(case.found))
        if not found:
            return tally.hold()
        differences += found
    tally.fail(str(case), "converted: " + ", or ".join(differences))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    arguments = parser.parse_args()
    program, tally = Program(arguments.binary), Tally("metadata of GGUF files", REFUSALS)
    with tempfile.TemporaryDirectory() as root:
        for architecture in ARCHITECTURES:
            plain = Case(root, architecture, architecture, {}, Same()).convert(program).found
            assert isinstance(plain, dict), plain
            cases = [
                Case(root, architecture, architecture, keys, right) for keys, right, *of in CASES if architecture in (of[0] if of else ARCHITECTURES)
            ]
            cases += [Case(root, architecture, "tokenizer.ggml", keys, right) for keys, right in TOKENIZER]
            for case in in_parallel(lambda case: case.convert(program), cases):
                judge(tally, case, plain)
    return tally.report()


if __name__ == "__main__":
    sys.exit(main())
