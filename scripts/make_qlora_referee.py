#!/usr/bin/env python3
"""Records in crates/ottava-train/tests/data/referee_qlora.safetensors what bitsandbytes makes of weights in four bits, and what PEFT computes for
adapters beside such weights.

On a CPU, bitsandbytes 0.50.2 dequantizes matrices whose columns are no multiple of 64 by the scales of other blocks, so the large matrices here have
whole blocks in each row.

Development only; the program itself needs no Python.
`pip install torch==2.15.0 transformers==5.24.0 peft==0.21.2 bitsandbytes==0.50.2 safetensors==0.8.0 numpy`. Runs on the CPU in seconds.
"""

import bitsandbytes as bnb
import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from make_lora_referee import folder_name
from make_referee import FOLDER, ROWS, SIZES, TOKENS, VOCABULARY, loss_of

CASE, STEPS = "qlora", 20
LORA = LoraConfig(r=6, lora_alpha=8, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")


def record_matrix(tensors, name, x):
    """Records a matrix, its codes and its values."""
    codes, state = bnb.functional.quantize_4bit(x, blocksize=64, compress_statistics=True, quant_type="nf4")
    tensors[f"{CASE}/matrices/{name}"] = x.float()
    tensors[f"{CASE}/codes/{name}"] = codes.flatten()
    tensors[f"{CASE}/scales/{name}"] = state.absmax
    tensors[f"{CASE}/groups/{name}"] = state.state2.absmax
    tensors[f"{CASE}/mean/{name}"] = state.offset.reshape(1)
    for dtype in (torch.float32, torch.bfloat16):
        state.dtype = dtype
        values = bnb.functional.dequantize_4bit(codes, state)
        tensors[f"{CASE}/values/{str(dtype).removeprefix('torch.')}/{name}"] = values.float()


def in_four_bits(model):
    """Replaces the linears of the blocks."""
    for module in list(model.model.layers.modules()):
        for name, linear in list(module.named_children()):
            if isinstance(linear, torch.nn.Linear):
                packed = bnb.nn.Linear4bit(
                    linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
                )
                packed.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
                setattr(module, name, packed.to("cpu"))


torch.manual_seed(29)
generator = torch.Generator().manual_seed(30)
tensors = {}
for name, shape, dtype in [
    ("wide", (150, 128), torch.float32),
    ("odd", (33, 50), torch.float32),
    ("rounded", (64, 320), torch.bfloat16),
]:
    scale = torch.logspace(-2, 1, shape[0])[:, None]
    record_matrix(tensors, name, (torch.randn(shape, generator=generator) * scale).to(dtype))
tensors[f"{CASE}/levels"] = bnb.functional.create_dynamic_map()
config = LlamaConfig(
    num_hidden_layers=2, tie_word_embeddings=False, **{**SIZES, "hidden_size": 64, "intermediate_size": 128}
)
config.architectures = ["LlamaForCausalLM"]
base = LlamaForCausalLM._from_config(config, dtype=torch.float32, attn_implementation="sdpa")
tensors |= {f"{CASE}/weights/{n}": p.detach().clone() for n, p in base.named_parameters()}
in_four_bits(base)
tensors |= {f"{CASE}/folder/{n}": t.detach().clone() for n, t in base.state_dict().items()}
for n, p in base.named_parameters():
    if isinstance(p, bnb.nn.Params4bit):
        tensors[f"{CASE}/stored/{n}"] = bnb.functional.dequantize_4bit(p.data, p.quant_state)
model = get_peft_model(base, LORA)
names, trained = zip(*[(folder_name(n), p) for n, p in model.named_parameters() if p.requires_grad])
with torch.no_grad():  # zeros would hide the scale in the first losses, and all of A
    for n, p in zip(names, trained):
        if ".lora_B." in n:
            p.normal_(std=0.1, generator=generator)
tensors |= {f"{CASE}/weights/{n}": p.detach().clone() for n, p in zip(names, trained)}
ids = torch.randint(VOCABULARY, (STEPS, ROWS, TOKENS + 1), generator=generator)
for t in range(TOKENS):
    ids[..., t + 1] = (5 * ids[..., t] + 7) % VOCABULARY
optimizer = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
losses = []
for step, batch in enumerate(ids):
    optimizer.zero_grad()
    _, loss = loss_of(model, batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    losses.append(loss.detach())
tensors[f"{CASE}/ids"] = ids.to(torch.int32)
tensors[f"{CASE}/losses"] = torch.stack(losses)
metadata = {"torch": torch.__version__, "peft": peft.__version__, "bitsandbytes": bnb.__version__}
metadata |= {"transformers": transformers.__version__, f"{CASE}/config": config.to_json_string(use_diff=False)}
save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, FOLDER / "referee_qlora.safetensors", metadata)
print(f"losses {losses[0]:.4f} to {losses[-1]:.4f}")
