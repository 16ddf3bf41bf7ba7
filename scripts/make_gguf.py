#!/usr/bin/env python3
"""Records crates/ottava-convert/tests/data/llama.gguf, a small random model of all block types that `ottava convert` reads, llama_gguf.json,
the SHA-256 of each of its weights as `gguf` dequantizes them, in the row order of Hugging Face, and gguf_q8_0.json, values and the bytes to
which `gguf` quantizes them, which `ottava export` has to write.

usage: make_gguf.py

Development only; `pip install gguf==0.19.0 numpy`. The same bytes every time.
"""

import hashlib
import json
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

FOLDER = Path(__file__).resolve().parent.parent / "crates/ottava-train/tests/data"
CHANNELS, HIDDEN, HEADS, KV_HEADS, LAYERS, THETA = 32, 256, 4, 2, 3, 500000.0
HEAD = CHANNELS // HEADS
# Control, user-defined and plain tokens, and one without a use.
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"] + list("abc12Ġ") + ["Ċ", "ab", "Ġab", "12", "[PAD14]", "[PAD15]"]
TYPES = [3, 3, 3, 4] + [1] * 10 + [5] * 2
MERGES = ["a b", "Ġ ab", "1 2"]
# Bytes at which a block has scales of F16.
SCALES = {Kind.Q4_0: [0], Kind.Q4_1: [0, 2], Kind.Q5_0: [0], Kind.Q8_0: [0], Kind.Q4_K: [0, 2], Kind.Q5_K: [0, 2], Kind.Q6_K: [208]}

random = np.random.default_rng(1)


def stored(rows, columns, kind):
    """Random bytes of a tensor, and its values."""
    if kind == Kind.F32:
        values = random.standard_normal((rows, columns), dtype=np.float32)
        return values, values
    if kind == Kind.F16:
        values = random.standard_normal((rows, columns)).astype(np.float16)
        return values, values.astype(np.float32)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if kind == Kind.BF16:
        data = random.standard_normal((rows, columns), dtype=np.float32).view(np.uint8).reshape(rows, columns, 4)[..., 2:]
        data = np.ascontiguousarray(data).reshape(rows, -1)
    else:
        blocks = random.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
        for at in SCALES[kind]:
            scales = (random.standard_normal(blocks.shape[:2]) / 50).astype(np.float16)
            blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
        data = blocks.reshape(rows, -1)
    return data, gguf.quants.dequantize(data, kind)


def hugging_face_rows(values, heads):
    """Undoes LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py."""
    return values.reshape(heads, values.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)


writer = gguf.GGUFWriter(FOLDER / "llama.gguf", "llama")
writer.add_block_count(LAYERS)
writer.add_context_length(131072)
writer.add_embedding_length(CHANNELS)
writer.add_feed_forward_length(HIDDEN)
writer.add_head_count(HEADS)
writer.add_head_count_kv(KV_HEADS)
writer.add_rope_freq_base(THETA)
writer.add_rope_dimension_count(HEAD)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("smollm")
writer.add_token_list(TOKENS)
writer.add_token_types(TYPES)
writer.add_token_merges(MERGES)
writer.add_bos_token_id(1)
writer.add_eos_token_id(2)
writer.add_unk_token_id(0)
writer.add_pad_token_id(2)
writer.add_add_bos_token(True)
writer.add_chat_template("{% for message in messages %}{{ message['content'] }}\n{% endfor %}")
writer.add_array("ottava.ignored", [[1, 2], [3, 4]])

expected = {}


def add(name, ours, rows, columns, kind, heads=None):
    data, values = stored(rows, columns, kind)
    vector = rows == 1
    writer.add_tensor(name, data[0] if vector else data, raw_dtype=kind)
    values = hugging_face_rows(values, heads) if heads else values
    values = np.ascontiguousarray(values[0] if vector else values)
    first = [float(v) for v in values.reshape(-1)[:4]]
    expected[ours] = {"shape": values.shape, "sha256": hashlib.sha256(values.tobytes()).hexdigest(), "first": first}


add("token_embd.weight", "model.embed_tokens.weight", len(TOKENS), CHANNELS, Kind.Q8_0)
KINDS = [
    (Kind.Q4_1, Kind.Q4_0, Kind.Q5_0, Kind.F16, Kind.Q4_1, Kind.Q6_K),
    (Kind.Q5_0, Kind.Q8_0, Kind.BF16, Kind.F32, Kind.Q4_0, Kind.Q4_K),
    (Kind.Q4_0, Kind.Q4_0, Kind.Q4_0, Kind.Q4_0, Kind.Q4_0, Kind.Q5_K),
]
for i, (q, k, v, o, up, down) in enumerate(KINDS):
    theirs, ours = f"blk.{i}", f"model.layers.{i}"
    add(f"{theirs}.attn_norm.weight", f"{ours}.input_layernorm.weight", 1, CHANNELS, Kind.F32)
    add(f"{theirs}.attn_q.weight", f"{ours}.self_attn.q_proj.weight", CHANNELS, CHANNELS, q, HEADS)
    add(f"{theirs}.attn_k.weight", f"{ours}.self_attn.k_proj.weight", KV_HEADS * HEAD, CHANNELS, k, KV_HEADS)
    add(f"{theirs}.attn_v.weight", f"{ours}.self_attn.v_proj.weight", KV_HEADS * HEAD, CHANNELS, v)
    add(f"{theirs}.attn_output.weight", f"{ours}.self_attn.o_proj.weight", CHANNELS, CHANNELS, o)
    add(f"{theirs}.ffn_norm.weight", f"{ours}.post_attention_layernorm.weight", 1, CHANNELS, Kind.F32)
    add(f"{theirs}.ffn_gate.weight", f"{ours}.mlp.gate_proj.weight", HIDDEN, CHANNELS, Kind.Q4_0)
    add(f"{theirs}.ffn_up.weight", f"{ours}.mlp.up_proj.weight", HIDDEN, CHANNELS, up)
    add(f"{theirs}.ffn_down.weight", f"{ours}.mlp.down_proj.weight", CHANNELS, HIDDEN, down)
add("output_norm.weight", "model.norm.weight", 1, CHANNELS, Kind.F32)

# As convert_hf_to_gguf.py writes the rotary scaling of Llama 3.1.
factors = []
for frequency in 1.0 / THETA ** (np.arange(0, HEAD, 2) / HEAD):
    wavelength = 2 * np.pi / frequency
    if wavelength < 8192 / 4.0:
        factors.append(1.0)
    elif wavelength > 8192 / 1.0:
        factors.append(8.0)
    else:
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        factors.append(1 / ((1 - smooth) / 8.0 + smooth))
writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))

writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
(FOLDER / "llama_gguf.json").write_text(json.dumps(expected, indent=0) + "\n")

# Ties between two integers, zeros, subnormal scales, and random values.
blocks = random.standard_normal((5, 32), dtype=np.float32)
blocks[0] = np.arange(32) - 15.5
blocks[0, 0] = 127.0
blocks[1] = 0.0
blocks[2] *= 1e-6
blocks[3] *= 1e4
quantized = {"values": [float(v) for v in blocks.reshape(-1)], "bytes": gguf.quants.quantize(blocks, Kind.Q8_0).reshape(-1).tolist()}
(FOLDER / "gguf_q8_0.json").write_text(json.dumps(quantized) + "\n")
print(f"{len(expected)} weights, {(FOLDER / 'llama.gguf').stat().st_size} bytes")
