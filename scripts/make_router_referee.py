#!/usr/bin/env python3
"""Records the gradient norms of steps whose loss includes the losses of routers, as transformers and PyTorch compute them, in
crates/ottava-train/tests/data/router_losses.json: masked prompts, padding, packed documents, several micro-batches, and DPO.

Development only; the program itself needs no Python. `pip install torch==2.15.0 transformers==5.24.0 safetensors==0.8.0`. Runs on the CPU in seconds.
"""

import json
import math

import torch
import torch.nn.functional as F
from safetensors import safe_open
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from make_referee import FOLDER

BALANCE, Z, BETA = 0.5, 0.1, 0.3
TOKENS = 16
VOCABULARY = 40


def model():
    with safe_open(FOLDER / "referee_qwen3_moe.safetensors", "pt") as file:
        config = json.loads(file.metadata()["qwen3_moe/config"])
        start = "qwen3_moe/weights/"
        weights = {name[len(start) :]: file.get_tensor(name) for name in file.keys() if name.startswith(start)}
    config = Qwen3MoeConfig(**{key: config[key] for key in config if key not in ("architectures", "dtype", "transformers_version")})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    whole = Qwen3MoeForCausalLM(config)
    experts = config.num_experts
    stacked = {}
    for layer in range(config.num_hidden_layers):
        of_layer = f"model.layers.{layer}.mlp.experts"
        if f"{of_layer}.0.gate_proj.weight" not in weights:
            continue
        part = lambda linear: [weights.pop(f"{of_layer}.{e}.{linear}.weight") for e in range(experts)]
        gate, up, down = part("gate_proj"), part("up_proj"), part("down_proj")
        stacked[f"{of_layer}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up)])
        stacked[f"{of_layer}.down_proj"] = torch.stack(down)
    missing, unexpected = whole.load_state_dict({**weights, **stacked}, strict=False)
    assert not missing and not unexpected, (missing, unexpected)
    return whole.to(torch.float64)


def document(generator, length, first_target):
    """Ids of a document, and which of its tokens after the first are targets."""
    ids = torch.randint(0, VOCABULARY, (length + 1,), generator=generator).tolist()
    return {"ids": ids, "first_target": first_target}


def forward(whole, documents):
    """Log-probabilities of the targets of each document, and the router losses of a micro-batch of all its documents."""
    log_probs, of_layers = [], None
    for it in documents:
        ids = torch.tensor([it["ids"]])
        # A router may return scores under the name of logits, so they are computed from its input.
        logits, hooks = [], []
        for layer in whole.model.layers:
            if hasattr(layer.mlp, "gate"):
                hook = lambda gate, inputs: logits.append(F.linear(inputs[0].reshape(-1, inputs[0].shape[-1]), gate.weight))
                hooks.append(layer.mlp.gate.register_forward_pre_hook(hook))
        out = whole(input_ids=ids[:, :-1])
        for hook in hooks:
            hook.remove()
        each = -F.cross_entropy(out.logits[0], ids[0, 1:], reduction="none")
        log_probs.append(each[it["first_target"] - 1 :])
        of_layers = [[one] for one in logits] if of_layers is None else [all + [one] for all, one in zip(of_layers, logits)]
    config = whole.config
    losses = 0
    for layer in of_layers:
        logits = torch.cat(layer)
        # The loss of transformers counts each token once for each of its choices.
        balance = load_balancing_loss_func((logits,), config.num_experts, config.num_experts_per_tok)
        losses = losses + BALANCE * balance / config.num_experts_per_tok
        losses = losses + Z * logits.logsumexp(-1).square().mean()
    return log_probs, losses


def norm(whole, loss):
    whole.zero_grad()
    loss.backward()
    return math.sqrt(sum(p.grad.square().sum().item() for p in whole.parameters() if p.grad is not None))


def next_token(whole, micro_batches):
    runs = [forward(whole, documents) for documents in micro_batches]
    targets = torch.cat([each for log_probs, _ in runs for each in log_probs])
    return norm(whole, -targets.mean() + sum(losses for _, losses in runs) / len(runs))


def dpo(whole, micro_batches, reference):
    pairs, losses = [], 0
    for documents, of_reference in zip(micro_batches, reference):
        log_probs, of_routers = forward(whole, documents)
        ratios = [each.sum() - by for each, by in zip(log_probs, of_reference)]
        pairs += [-F.logsigmoid(BETA * (chosen - rejected)) for chosen, rejected in zip(ratios[::2], ratios[1::2])]
        losses = losses + of_routers
    return norm(whole, torch.stack(pairs).mean() + losses / len(micro_batches))


def main():
    whole = model()
    generator = torch.Generator().manual_seed(7)
    rows = lambda lengths, first: [document(generator, length, first(length)) for length in lengths]
    whole_row, half = lambda _: 1, lambda length: length - length // 3
    cases = {
        "plain": [rows([TOKENS] * 3, whole_row)],
        "masked": [rows([TOKENS] * 3, half)],
        "padded": [rows([TOKENS, 3, 7], half)],
        # Two documents share the first row.
        "packed": [rows([9, 6, 11], half)],
        "four micro-batches": [rows(lengths, half) for lengths in ([16, 16, 16], [16, 2, 5], [4, 4, 4], [16, 9, 16])],
    }
    recorded = {"balance": BALANCE, "z": Z, "beta": BETA, "cases": []}
    for name, micro_batches in cases.items():
        recorded["cases"].append({"name": name, "micro_batches": micro_batches, "grad_norm": next_token(whole, micro_batches)})
    micro_batches = [rows(lengths, half) for lengths in ([16, 5, 7, 3], [4, 4, 12, 16])]
    reference = [[-20.0 - row for row in range(4)], [-31.0 + row for row in range(4)]]
    recorded["cases"].append(
        {"name": "dpo", "micro_batches": micro_batches, "reference": reference, "grad_norm": dpo(whole, micro_batches, reference)}
    )
    (FOLDER / "router_losses.json").write_text(json.dumps(recorded) + "\n")
    print({case["name"]: case["grad_norm"] for case in recorded["cases"]})


if __name__ == "__main__":
    main()
