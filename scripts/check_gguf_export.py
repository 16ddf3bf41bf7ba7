"""Compares a GGUF file that `ottava export --format gguf` wrote with the folder that it was written from.

usage: check_gguf_export.py MODEL FOLDER

MODEL is the exported folder, FOLDER has model.gguf. Reads the file with the package gguf: each tensor must have the bytes that gguf makes of the
folder's weight, in the row order of llama.cpp, norms of Gemma with 1 added. Then loads both with transformers and prints how many texts have the same tokens and how far logits
are apart: 0 for float32, and for bfloat16 of a BF16 model. transformers 5.23 reads neither the pre-tokenizer of a Qwen file, nor the factors of
rotary frequencies, nor heads of another size than 128 in Qwen3. Needs `pip install gguf==0.19.0 torch transformers`.
"""

import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, AutoTokenizer

MODEL, FOLDER = sys.argv[1:]
TEXTS = ["The 12 brown foxes'll jump, 345 times  over\n\n the lazy dog.", "if x == 3:\n    return y", "ça va? 你好"]

reader = gguf.GGUFReader(Path(FOLDER) / "model.gguf")
value = lambda key: reader.fields[key].contents()
architecture = value("general.architecture")
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
names = gguf.get_tensor_name_map(kinds[architecture], value(f"{architecture}.block_count"))
heads = {"q": value(f"{architecture}.attention.head_count"), "k": value(f"{architecture}.attention.head_count_kv")}

expected = {}
for name, weight in model.state_dict().items():
    if name == "lm_head.weight" and model.config.tie_word_embeddings:
        continue
    weight = weight.numpy()
    for which, count in heads.items():
        if architecture == "llama" and f"{which}_proj." in name:
            weight = weight.reshape(count, 2, weight.shape[0] // count // 2, -1).swapaxes(1, 2).reshape(weight.shape)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        weight = weight + 1
    expected[names.get_name(name, try_suffixes=(".weight", ".bias"))] = np.ascontiguousarray(weight)

for tensor in reader.tensors:
    if tensor.name == "rope_freqs.weight":
        continue
    weight = expected.pop(tensor.name)
    assert [int(n) for n in reversed(tensor.shape)] == list(weight.shape), tensor.name
    assert (tensor.tensor_type == Kind.F32) or weight.ndim == 2, tensor.name
    stored = gguf.quants.quantize(weight, tensor.tensor_type)
    assert np.array_equal(stored.reshape(-1).view(np.uint8), tensor.data.reshape(-1).view(np.uint8)), tensor.name
assert not expected, list(expected)
of_kind = {"gpt2": ["merges"], "llama": ["scores", "add_space_prefix"]}[value("tokenizer.ggml.model")]
for key in ["tokens", "token_type", "pre", "eos_token_id", "add_bos_token", *of_kind]:
    value(f"tokenizer.ggml.{key}")
print(f"{len(reader.tensors)} tensors have the bytes of gguf; architecture {architecture}")

theirs = AutoTokenizer.from_pretrained(MODEL)
ours = AutoTokenizer.from_pretrained(FOLDER, gguf_file="model.gguf")
assert theirs.chat_template == ours.chat_template
same = sum(theirs.encode(text) == ours.encode(text) for text in TEXTS)
loaded = AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file="model.gguf", dtype=torch.float32)
ids = torch.tensor([theirs.encode(TEXTS[0])])
with torch.no_grad():
    expected, found = model(ids).logits, loaded(ids).logits
print(f"transformers: {same} of {len(TEXTS)} texts have the same tokens; logits differ by at most {(expected - found).abs().max():.3g} of {expected.abs().max():.3g}")
