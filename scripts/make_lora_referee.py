#!/usr/bin/env python3
"""Records what PEFT computes for adapters beside a small model, in crates/ottava-train/tests/data: referee_lora.safetensors; with magnitudes
and the scale of rank-stabilized adapters referee_dora.safetensors; with modules that are trained whole, of a model whose head and embedding are tied,
referee_modules.safetensors (embedding and norms) and referee_head.safetensors (embedding and head).

Development only; the program itself needs no Python.
`pip install torch==2.15.0 transformers==5.23.0 peft==0.21.2 safetensors==0.8.0 numpy`. Runs on the CPU in seconds.
`make_lora_referee.py modules head` records only the named files.
"""

import sys

import peft
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from make_referee import FOLDER, ROWS, SIZES, TOKENS, VOCABULARY, loss_of

STEPS = 20
# Neither the rank nor the scales, 4/3 and 8/sqrt(6), are powers of two.
COMMON = dict(r=6, lora_alpha=8, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM")
CASES = {
    "lora": LoraConfig(**COMMON),
    "dora": LoraConfig(use_dora=True, use_rslora=True, **COMMON),
    "modules": LoraConfig(modules_to_save=["embed_tokens", "norm"], **COMMON),
    "head": LoraConfig(modules_to_save=["embed_tokens", "lm_head"], **COMMON),
}


def folder_name(name):
    """The name of a parameter in a folder of PEFT."""
    name = name.replace(".default", "").replace(".modules_to_save", "")
    return name.removesuffix(".weight") if ".lora_magnitude_vector." in name else name


def record(case, lora):
    torch.manual_seed(19)
    generator = torch.Generator().manual_seed(20)
    config = LlamaConfig(
        num_hidden_layers=2, tie_word_embeddings=bool(lora.modules_to_save), **{**SIZES, "hidden_size": 32, "intermediate_size": 56}
    )
    config.architectures = ["LlamaForCausalLM"]
    base = LlamaForCausalLM._from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    tensors = {f"{case}/weights/{n}": p.detach().clone() for n, p in base.named_parameters()}
    if config.tie_word_embeddings:  # what the head starts from once the embedding or the head has weights of its own
        tensors[f"{case}/weights/lm_head.weight"] = base.lm_head.weight.detach().clone()
    model = get_peft_model(base, lora)
    names, trained = zip(*[(folder_name(n), p) for n, p in model.named_parameters() if p.requires_grad])
    # Norms of the rows of the base weights, which new magnitudes are.
    of_adapters = [(n, p) for n, p in zip(names, trained) if ".lora_" in n]
    tensors |= {f"{case}/norms/{n}": p.detach().clone() for n, p in of_adapters if p.dim() == 1}
    with torch.no_grad():  # zeros would hide the scale in the first losses, and all of A; norms, a magnitude that is not read
        for n, p in of_adapters:
            if ".lora_B." in n:
                p.normal_(std=0.1, generator=generator)
            if p.dim() == 1:
                p.mul_(1 + 0.2 * torch.randn(p.shape, generator=generator))
    tensors |= {f"{case}/weights/{n}": p.detach().clone() for n, p in zip(names, trained)}
    ids = torch.randint(VOCABULARY, (STEPS, ROWS, TOKENS + 1), generator=generator)
    for t in range(TOKENS):
        ids[..., t + 1] = (5 * ids[..., t] + 7) % VOCABULARY
    # Vectors do not decay.
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step, batch in enumerate(ids):
        optimizer.zero_grad()
        _, loss = loss_of(model, batch)
        loss.backward()
        if step == 0:
            tensors |= {f"{case}/gradients/{n}": p.grad.clone() for n, p in zip(names, trained)}
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.detach())
    tensors |= {f"{case}/trained/{n}": p.detach().clone() for n, p in zip(names, trained) if ".lora_" not in n}
    tensors[f"{case}/ids"] = ids.to(torch.int32)
    tensors[f"{case}/losses"] = torch.stack(losses)
    metadata = {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__}
    metadata |= {f"{case}/config": config.to_json_string(use_diff=False)}
    save_file(tensors, FOLDER / f"referee_{case}.safetensors", metadata)
    print(f"{case}: losses {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    for case, lora in CASES.items():
        if case in (sys.argv[1:] or CASES):
            record(case, lora)
