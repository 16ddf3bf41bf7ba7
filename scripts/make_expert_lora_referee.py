#!/usr/bin/env python3
"""Records what PEFT computes for adapters of experts and routers, in crates/ottava-train/tests/data/referee_expert_lora.safetensors: for each small
model the tensors of its folder, the tensors and settings of its adapter as PEFT writes them, the gradients of the first step, and the losses of some
AdamW steps.

`make_expert_lora_referee.py check MODEL ADAPTER TEXT` loads a folder of a model and an adapter's folder of Ottava in PEFT, and prints the loss of the
token ids in the JSON file TEXT. It errors if PEFT finds no place for a tensor, or no tensor for a place, or if the merged model has another loss.

Development only; the program itself needs no Python.
`pip install torch==2.15.0 transformers==5.24.0 peft==0.21.2 safetensors==0.8.0 numpy`. Runs on the CPU in seconds.
"""

import json
import sys
import tempfile
import warnings
from pathlib import Path

import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from make_referee import FOLDER

STEPS, ROWS, TOKENS, VOCABULARY = 8, 4, 24, 64
COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.08,
    num_experts_per_tok=2,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
    tie_word_embeddings=False,
)
# The type of the model, its sizes, and the targets of its adapters. Neither the rank nor the factors are powers of two.
CASES = {
    "qwen3_moe": (
        "qwen3_moe",
        dict(head_dim=8, moe_intermediate_size=16, num_experts=4, decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True),
        dict(target_modules="all-linear"),
    ),
    "mixtral": (
        "mixtral",
        dict(head_dim=8, num_local_experts=4, sliding_window=None),
        dict(target_modules=["q_proj", "w1", "w2", "w3"], use_rslora=True),
    ),
    "gpt_oss": (
        "gpt_oss",
        dict(head_dim=8, num_local_experts=4, sliding_window=8, layer_types=["sliding_attention", "full_attention"], initial_context_length=64),
        dict(target_modules=["v_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj", "router.weight"]),
    ),
    "llama4": (
        "llama4_text",
        dict(
            head_dim=8, num_local_experts=4, num_experts_per_tok=1, intermediate_size_mlp=40, interleave_moe_layer_step=1,
            no_rope_layers=[1, 1], attn_temperature_tuning=False, use_qk_norm=False, attention_chunk_size=64,
        ),
        dict(target_modules=["o_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
    ),
    "deepseek_v3": (
        "deepseek_v3",
        dict(
            num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1,
            q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, norm_topk_prob=True,
        ),
        dict(target_modules=[], target_parameters=["mlp.experts.down_proj"], rank_pattern={"experts.down_proj": 5}, alpha_pattern={"down_proj": 7}),
    ),
}
# The names that linears of experts had in transformers 4.
LINEARS = {
    "qwen3_moe": dict(mixture="mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    "mixtral": dict(mixture="block_sparse_moe", gate="w1", up="w3", down="w2"),
}
LORA = dict(r=6, lora_alpha=8, lora_dropout=0.0, task_type="CAUSAL_LM")


def loss_of(model, ids):
    logits = model(input_ids=ids[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def file_name(name):
    """The name of a parameter in a file of PEFT."""
    return name.replace(".default", "")


def written(model, kind):
    """The tensors that a model writes, without settings, by their names in the recording."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        file = Path(folder) / ("adapter_model.safetensors" if isinstance(model, PeftModel) else "model.safetensors")
        return {f"{kind}/{n}": t for n, t in load_file(file).items()}


def record(case):
    model_type, sizes, targets = CASES[case]
    torch.manual_seed(23)
    generator = torch.Generator().manual_seed(24)
    config = AutoConfig.for_model(model_type, **(COMMON | sizes))
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    config.architectures = [type(base).__name__]
    with torch.no_grad():  # parameters that no one initializes, and biases of zeros
        for n, p in base.named_parameters():
            if "expert" in n or "router" in n or n.endswith("bias") or "gate.weight" in n:
                p.normal_(std=0.1, generator=generator)
    tensors = {f"{case}/{n}": t for n, t in written(base, "weights").items()}
    model = get_peft_model(base, LoraConfig(**LORA, **targets))
    names, trained = zip(*[(file_name(n), p) for n, p in model.named_parameters() if p.requires_grad])
    with torch.no_grad():  # zeros would hide the factor in the first losses, and all of A
        for n, p in zip(names, trained):
            if ".lora_B." in n:
                p.normal_(std=0.1, generator=generator)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        settings = json.loads((Path(folder) / "adapter_config.json").read_text())
    tensors |= {f"{case}/{n}": t for n, t in written(model, "adapter").items()}
    ids = torch.randint(VOCABULARY, (STEPS, ROWS, TOKENS + 1), generator=generator)
    for t in range(TOKENS):
        ids[..., t + 1] = torch.where(ids[..., t + 1] % 3 == 0, ids[..., t + 1], (5 * ids[..., t] + 7) % VOCABULARY)
    optimizer = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses = []
    for step, batch in enumerate(ids):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        if step == 0:
            tensors |= {f"{case}/gradients/{n}": p.grad.clone() for n, p in zip(names, trained)}
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.detach())
    tensors |= {f"{case}/ids": ids.to(torch.int32), f"{case}/losses": torch.stack(losses)}
    print(f"{case}: losses {losses[0]:.4f} to {losses[-1]:.4f}")
    if case in LINEARS:
        tensors |= {f"{case}/{n}": t for n, t in record_linears(case, config, tensors, ids[0], generator).items()}
    return tensors, {f"{case}/config": config.to_json_string(use_diff=False), f"{case}/adapter_config": json.dumps(settings)}


def record_linears(case, config, tensors, ids, generator):
    """An adapter of the linears that each expert had in transformers 4, and PEFT's loss with it."""
    names, width = LINEARS[case], {"hidden": config.hidden_size, "inner": tensors_width(case, config)}
    linears = {"gate": ("hidden", "inner"), "up": ("hidden", "inner"), "down": ("inner", "hidden")}
    adapter, prefix = {}, "base_model.model.model.layers"
    for layer in range(config.num_hidden_layers):
        for expert in range(4):
            for role, (inputs, outputs) in linears.items():
                name = f"{prefix}.{layer}.{names['mixture']}.experts.{expert}.{names[role]}"
                adapter[f"{name}.lora_A.weight"] = torch.randn(LORA["r"], width[inputs], generator=generator) * 0.1
                adapter[f"{name}.lora_B.weight"] = torch.randn(width[outputs], LORA["r"], generator=generator) * 0.1
        name = f"{prefix}.{layer}.{names['mixture']}.gate"
        adapter[f"{name}.lora_A.weight"] = torch.randn(LORA["r"], config.hidden_size, generator=generator) * 0.1
        adapter[f"{name}.lora_B.weight"] = torch.randn(4, LORA["r"], generator=generator) * 0.1
    with tempfile.TemporaryDirectory() as root:
        base, folder = Path(root) / "base", Path(root) / "adapter"
        base.mkdir(), folder.mkdir()
        (base / "config.json").write_text(config.to_json_string(use_diff=False))
        weights = {n.removeprefix(f"{case}/weights/"): t for n, t in tensors.items() if n.startswith(f"{case}/weights/")}
        save_file(weights, base / "model.safetensors", {"format": "pt"})
        save_file(adapter, folder / "adapter_model.safetensors", {"format": "pt"})
        targets = [names[role] for role in linears] + ["gate"]
        settings = dict(peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path="base", target_modules=targets, bias="none")
        (folder / "adapter_config.json").write_text(json.dumps(settings | dict(r=LORA["r"], lora_alpha=LORA["lora_alpha"], lora_dropout=0.0)))
        loss = loss_in_peft(base, folder, ids)
    print(f"{case}: {loss:.4f} with an adapter of linears")
    return {f"linears/{n}": t for n, t in adapter.items()} | {"loss_of_linears": torch.tensor([loss])}


def tensors_width(case, config):
    return config.moe_intermediate_size if case == "qwen3_moe" else config.intermediate_size


def loss_in_peft(model, adapter, ids):
    """The loss of an adapter's folder. Errors if PEFT finds no place for a tensor, or no tensor for a place."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        adapted = PeftModel.from_pretrained(base, adapter).eval()
    for warning in caught:
        assert "adapter keys" not in str(warning.message), warning.message
    read = load_file(Path(adapter) / "adapter_model.safetensors")
    values = sum(t.numel() for t in read.values())
    held = sum(p.numel() for n, p in adapted.named_parameters() if ".lora_" in n)
    assert held >= values, f"PEFT has {held} values of adapters, and the file has {values}"
    assert all(p.abs().sum() > 0 for n, p in adapted.named_parameters() if ".lora_" in n), "a tensor was not loaded"
    with torch.no_grad():
        loss = loss_of(adapted, ids).item()
        merged = loss_of(adapted.merge_and_unload(), ids).item()
    assert abs(loss - merged) < 1e-4, (loss, merged)
    return loss


def check(model, adapter, text):
    ids = torch.tensor([json.loads(Path(text).read_text())])
    print(json.dumps({"loss": loss_in_peft(model, adapter, ids)}))


def main():
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if sys.argv[1:2] == ["check"]:
        return check(*sys.argv[2:])
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__}
    tensors, metadata = {}, versions
    for case in CASES:
        of_case, settings = record(case)
        tensors |= of_case
        metadata |= settings
    save_file({n: t.contiguous() for n, t in tensors.items()}, FOLDER / "referee_expert_lora.safetensors", metadata)


if __name__ == "__main__":
    main()
