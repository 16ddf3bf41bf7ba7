"""Compares every weight of a folder that `ottava convert` wrote from a GGUF file of a Llama with what the package gguf dequantizes.

usage: check_gguf.py FILE.gguf FOLDER    Needs `pip install gguf==0.19.0`.
"""

import json
import struct
import sys
from pathlib import Path

import gguf
import numpy as np

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def name_of(theirs):
    parts = theirs.removesuffix(".weight").split(".")
    block = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
    return f"{block}{NAMES[parts[-1]]}.weight"


reader = gguf.GGUFReader(sys.argv[1])
heads = {key: reader.fields[f"llama.attention.{key}"].contents() for key in ["head_count", "head_count_kv"]}
file = np.memmap(Path(sys.argv[2]) / "model.safetensors", mode="r")
(length,) = struct.unpack("<Q", file[:8].tobytes())
header = json.loads(file[8 : 8 + length].tobytes())
header.pop("__metadata__")

for tensor in reader.tensors:
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    values = values.reshape([int(n) for n in reversed(tensor.shape)])
    if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
        count = heads["head_count" if ".attn_q." in tensor.name else "head_count_kv"]
        values = values.reshape(count, values.shape[0] // count // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)
    entry = header.pop(name_of(tensor.name))
    start, end = entry["data_offsets"]
    stored = file[8 + length + start : 8 + length + end]
    bits = np.ascontiguousarray(values).view(np.uint32)
    if entry["dtype"] == "BF16":
        # Rounded to nearest even.
        bits = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    if entry["shape"] != list(values.shape) or not np.array_equal(bits.reshape(-1).view(np.uint8), stored):
        sys.exit(f"{tensor.name}: the folder holds other values")
if header:
    sys.exit(f"the folder holds tensors that the file does not: {list(header)}")
print(f"{len(reader.tensors)} tensors have the bits that gguf gives")
