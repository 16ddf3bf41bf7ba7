#!/usr/bin/env python3
"""Records what transformers computes for small encoders, in crates/ottava-train/tests/data/referee_encoder.safetensors: losses of AdamW steps, and the
gradients of the first step, of classifiers and of embedding models.

Development only; the program itself needs no Python.
`pip install torch==2.15.0 transformers==5.24.0 safetensors==0.8.0 numpy`. Runs on the CPU in seconds.
"""

from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

FILE = Path(__file__).resolve().parent.parent / "crates/ottava-train/tests/data/referee_encoder.safetensors"
VOCABULARY, ROWS, TOKENS, STEPS, PAD, LABELS, SCALE = 24, 4, 16, 8, 1, 3, 10.0
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_attention_heads=2, max_position_embeddings=32, initializer_range=0.2,
    pad_token_id=PAD,
)  # fmt: skip
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
BERT = dict(num_hidden_layers=2, **NO_DROPOUT)
# Five tokens see each other in local layers, and texts are longer.
MODERN = dict(num_hidden_layers=3, local_attention=4, global_attn_every_n_layers=3)
# By the name of the case: the family, its settings, and what the rows are trained for.
CASES = {
    "bert": ("Bert", BERT, "labels"),
    "roberta": ("Roberta", dict(BERT, type_vocab_size=1), "labels"),
    "modernbert": ("ModernBert", dict(MODERN, classifier_pooling="cls"), "labels"),
    "modernbert_mean": ("ModernBert", dict(MODERN, classifier_pooling="mean", norm_bias=True, attention_bias=True, mlp_bias=True, classifier_bias=True), "labels"),
    "bert_cls": ("Bert", BERT, "cls"),
    "modernbert_embedding": ("ModernBert", MODERN, "mean"),
}  # fmt: skip
PREFIXES = {"Bert": "bert.", "Roberta": "roberta.", "ModernBert": "model."}


def texts():
    """Rows of ids that end with padding. The second half of the rows of a step belong to the first half."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.full((STEPS, ROWS, TOKENS), PAD, dtype=torch.int32)
    for row in ids.view(-1, TOKENS):
        length = int(torch.randint(3, TOKENS + 1, (1,), generator=generator))
        row[:length] = torch.randint(2, VOCABULARY, (length,), generator=generator)
        row[0] = 0
    return ids


def embedding_loss(hidden, mask, pooling):
    weights = mask.float() / mask.sum(1, keepdim=True) if pooling == "mean" else torch.eye(TOKENS)[:1].expand(len(mask), TOKENS)
    pooled = torch.nn.functional.normalize((hidden * weights.unsqueeze(-1)).sum(1), dim=-1)
    half = len(pooled) // 2
    return torch.nn.functional.cross_entropy(SCALE * pooled[:half] @ pooled[half:].T, torch.arange(half))


def record(name, family, settings, kind, ids):
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(num_labels=LABELS, problem_type="single_label_classification", **SIZES, **settings)
    form = f"{family}ForSequenceClassification" if kind == "labels" else f"{family}Model"
    config.architectures = [form]
    model = getattr(transformers, form)._from_config(config, dtype=torch.float32, attn_implementation="eager")
    for module in model.modules():
        # transformers keeps the row of the padding token at zero, and trains every other row. Here all rows are trained.
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
            torch.nn.init.normal_(module.weight, std=0.2)
    with torch.no_grad():  # ones and zeros would hide gradients
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.mul_(1 + 0.2 * torch.randn(parameter.shape)).add_(0.1 * torch.randn(parameter.shape))
    prefix = "" if kind == "labels" else PREFIXES[family]
    named = lambda: ((prefix + n, p) for n, p in model.named_parameters())
    found = {f"{name}/weights/{n}": p.detach().clone() for n, p in named()}
    labels = torch.randint(0, LABELS, (STEPS, ROWS), generator=torch.Generator().manual_seed(6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        mask = (ids[step] != PAD).long()
        inputs = dict(input_ids=ids[step].long(), attention_mask=mask)
        if kind == "labels":
            out = model(labels=labels[step], **inputs)
            loss = out.loss
        else:
            loss = embedding_loss(model(**inputs).last_hidden_state, mask, kind)
        loss.backward()
        if step == 0:
            found |= {f"{name}/gradients/{n}": p.grad.detach().clone() for n, p in named() if p.grad is not None}
            if kind == "labels":
                found[f"{name}/scores"] = out.logits.detach().clone()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    one_hot = torch.nn.functional.one_hot(labels, LABELS).float()
    return found | {f"{name}/labels": one_hot, f"{name}/losses": torch.tensor(losses), f"{name}/ids": ids.clone()}, config


def main():
    ids, tensors, metadata = texts(), {}, {}
    for name, case in CASES.items():
        found, config = record(name, *case, ids)
        tensors |= {key: value.contiguous() for key, value in found.items()}
        metadata[f"{name}/config"] = config.to_json_string(use_diff=False)
    save_file(tensors, FILE, metadata=metadata)
    print(FILE, sum(tensor.numel() for tensor in tensors.values()))


main()
