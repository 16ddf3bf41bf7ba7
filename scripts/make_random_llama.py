"""Writes a model folder with the shape of Llama-3-8B, random weights in BF16, and a tokenizer whose tokens are numbered words.

usage: make_random_llama.py FOLDER
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

folder = Path(sys.argv[1])
config = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500_000.0,
    "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}
(folder / "config.json").write_text(json.dumps(config))
# Each token has a text, so a server streams each of them.
tokens = {f"{number} ": number for number in range(config["vocab_size"])}
model = {"type": "BPE", "vocab": tokens, "merges": []}
(folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1)
C, H, KV = config["hidden_size"], config["intermediate_size"], 1024
matrices = {
    "self_attn.q_proj": (C, C), "self_attn.k_proj": (KV, C), "self_attn.v_proj": (KV, C), "self_attn.o_proj": (C, C),
    "mlp.gate_proj": (H, C), "mlp.up_proj": (H, C), "mlp.down_proj": (C, H),
}


def random(*shape):
    return (torch.randn(*shape, device=device, dtype=torch.bfloat16) * 0.02).cpu()


ones = lambda: torch.ones(C, dtype=torch.bfloat16)
files, weight_map = [], {}
for first in range(0, 32, 8):
    tensors = {}
    for layer in range(first, first + 8):
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}{name}.weight": random(*shape) for name, shape in matrices.items()}
        tensors |= {f"{prefix}{name}.weight": ones() for name in ("input_layernorm", "post_attention_layernorm")}
    if first == 0:
        tensors |= {"model.embed_tokens.weight": random(config["vocab_size"], C)}
    if first == 24:
        tensors |= {"lm_head.weight": random(config["vocab_size"], C), "model.norm.weight": ones()}
    name = f"model-{first // 8 + 1:05}-of-00004.safetensors"
    save_file(tensors, folder / name, metadata={"format": "pt"})
    weight_map |= {key: name for key in tensors}
(folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
