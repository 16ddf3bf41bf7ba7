#!/usr/bin/env python3
"""Records what transformers computes for classifiers on a small model, in crates/ottava-train/tests/data/referee_classification.safetensors: losses of
AdamW steps, and the gradients of the first step, for each problem type.

Development only; the program itself needs no Python.
`pip install torch==2.15.0 transformers==5.24.0 safetensors==0.8.0 numpy`. Runs on the CPU in seconds.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForSequenceClassification

FILE = Path(__file__).resolve().parent.parent / "crates/ottava-train/tests/data/referee_classification.safetensors"
VOCABULARY, ROWS, TOKENS, STEPS, PAD = 24, 4, 16, 12, 0
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    max_position_embeddings=32, rope_theta=10000.0, initializer_range=0.2, pad_token_id=PAD, use_cache=False,
)  # fmt: skip
# By the name of the case: the problem type and the number of labels.
CASES = {
    "single": ("single_label_classification", 3),
    "multi": ("multi_label_classification", 3),
    "reranker": ("multi_label_classification", 1),
    "number": ("regression", 1),
    "numbers": ("regression", 2),
}


def texts():
    """Rows of ids that end with padding. Some texts have the padding token inside or as their last token."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.full((STEPS, ROWS, TOKENS), PAD, dtype=torch.int32)
    for row in ids.view(-1, TOKENS):
        length = int(torch.randint(3, TOKENS + 1, (1,), generator=generator))
        row[:length] = torch.randint(0, VOCABULARY, (length,), generator=generator)
        row[0] = 1
    return ids


def labels_of(problem, count, ids):
    generator = torch.Generator().manual_seed(6)
    shape = (STEPS, ROWS, count)
    if problem == "single_label_classification":
        drawn = torch.randint(0, count, (STEPS, ROWS), generator=generator)
        return drawn, torch.nn.functional.one_hot(drawn, count).float()
    if problem == "multi_label_classification":
        drawn = torch.rand(shape, generator=generator).round(decimals=1)
        return drawn, drawn
    drawn = torch.randn(shape, generator=generator)
    return (drawn.squeeze(-1) if count == 1 else drawn), drawn


def record(name, problem, count, ids):
    torch.manual_seed(7)
    config = LlamaConfig(num_labels=count, problem_type=problem, tie_word_embeddings=False, **SIZES)
    config.architectures = ["LlamaForSequenceClassification"]
    model = LlamaForSequenceClassification._from_config(config, dtype=torch.float32, attn_implementation="eager")
    # transformers keeps the row of the padding token at zero, and trains every other row. Here all rows are trained.
    model.model.embed_tokens.padding_idx = None
    torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.2)
    with torch.no_grad():  # ones would hide the gradient of norms
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.mul_(1 + 0.2 * torch.randn(parameter.shape))
    found = {f"{name}/weights/{n}": p.detach().clone() for n, p in model.named_parameters()}
    given, recorded = labels_of(problem, count, ids)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        # The mask shows all tokens, so the padding token alone says where a text ends.
        out = model(input_ids=ids[step].long(), attention_mask=torch.ones_like(ids[step]).long(), labels=given[step])
        out.loss.backward()
        if step == 0:
            found |= {f"{name}/gradients/{n}": p.grad.detach().clone() for n, p in model.named_parameters()}
            found[f"{name}/scores"] = out.logits.detach().clone()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(out.loss.item())
    return found | {f"{name}/labels": recorded, f"{name}/losses": torch.tensor(losses)}, config


def main():
    ids = texts()
    tensors, metadata = {"ids": ids}, {}
    for name, (problem, count) in CASES.items():
        found, config = record(name, problem, count, ids)
        tensors |= {key: value.contiguous() for key, value in found.items()}
        metadata[f"{name}/config"] = config.to_json_string(use_diff=False)
        tensors[f"{name}/ids"] = ids.clone()
    del tensors["ids"]
    save_file(tensors, FILE, metadata=metadata)
    print(FILE, sum(tensor.numel() for tensor in tensors.values()))


main()
