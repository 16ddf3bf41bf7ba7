#!/usr/bin/env python3
"""Records what sentence-transformers computes for texts that belong together on a small model, in
crates/ottava-train/tests/data/referee_embedding.safetensors: losses of AdamW steps with MultipleNegativesRankingLoss, and the gradients of the first step.

Development only; the program itself needs no Python.
`pip install torch==2.15.0 transformers==5.24.0 sentence-transformers==6.2.0 safetensors==0.8.0 numpy`. Runs on the CPU in seconds.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from transformers import LlamaConfig, LlamaModel

FILE = Path(__file__).resolve().parent.parent / "crates/ottava-train/tests/data/referee_embedding.safetensors"
VOCABULARY, EXAMPLES, TOKENS, STEPS = 24, 4, 12, 8
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    max_position_embeddings=32, rope_theta=10000.0, initializer_range=0.2, use_cache=False,
)  # fmt: skip
# By the name of the case: the pooling, the texts of an example, and the scale, the reciprocal of the temperature.
CASES = {"mean": ("mean", 2, 20.0), "last": ("last", 2, 5.0), "negatives": ("mean", 4, 10.0)}


class Embedder(torch.nn.Module):
    """A model with the pooling of sentence-transformers, in the form that its losses call."""

    def __init__(self, model, pooling):
        super().__init__()
        self.model, self.pooling = model, pooling

    def forward(self, features):
        hidden = self.model(input_ids=features["input_ids"], attention_mask=features["attention_mask"]).last_hidden_state
        mask = features["attention_mask"].unsqueeze(-1).float()
        if self.pooling == "mean":
            pooled = (hidden * mask).sum(1) / mask.sum(1)
        else:
            pooled = hidden[torch.arange(len(hidden)), features["attention_mask"].sum(1) - 1]
        return {"sentence_embedding": pooled}


def record(name, pooling, texts, scale):
    torch.manual_seed(7)
    config = LlamaConfig(tie_word_embeddings=True, **SIZES)
    config.architectures = ["LlamaForCausalLM"]
    model = LlamaModel._from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.mul_(1 + 0.2 * torch.randn(parameter.shape))
    named = lambda: ((f"model.{n}", p) for n, p in model.named_parameters())
    found = {f"{name}/weights/{n}": p.detach().clone() for n, p in named()}
    loss_of = MultipleNegativesRankingLoss(Embedder(model, pooling), scale=scale)
    generator = torch.Generator().manual_seed(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    ids, lengths, losses = [], [], []
    for step in range(STEPS):
        features = []
        for _ in range(texts):
            length = torch.randint(2, TOKENS + 1, (EXAMPLES,), generator=generator)
            drawn = torch.randint(0, VOCABULARY, (EXAMPLES, TOKENS), generator=generator)
            mask = (torch.arange(TOKENS) < length.unsqueeze(-1)).long()
            features.append({"input_ids": drawn * mask, "attention_mask": mask})
            ids.append((drawn * mask).int())
            lengths.append(length.int())
        loss = loss_of(features, None)
        loss.backward()
        if step == 0:
            found |= {f"{name}/gradients/{n}": p.grad.detach().clone() for n, p in named()}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found |= {f"{name}/ids": torch.cat(ids), f"{name}/lengths": torch.cat(lengths), f"{name}/losses": torch.tensor(losses)}
    return found, config


def main():
    tensors, metadata = {}, {}
    for name, case in CASES.items():
        found, config = record(name, *case)
        tensors |= {key: value.contiguous() for key, value in found.items()}
        metadata[f"{name}/config"] = config.to_json_string(use_diff=False)
    save_file(tensors, FILE, metadata=metadata)
    print(FILE, sum(tensor.numel() for tensor in tensors.values()))


main()
