#!/usr/bin/env python3
"""Records the divergence of TRL's GKDTrainer from given logits, and its gradients by the student's logits, in
crates/ottava-train/tests/data/referee_divergence.json.

Development only; the program itself needs no Python. `pip install torch==2.15.0 transformers==5.24.0 trl==1.16.0`. Runs on the CPU in seconds.
"""

import json
from pathlib import Path

import torch
from trl.experimental.gkd import GKDTrainer

FILE = Path(__file__).resolve().parent.parent / "crates/ottava-train/tests/data/referee_divergence.json"
TOKENS, VOCABULARY = 4, 9


def main():
    torch.manual_seed(5)
    student, teacher = (2.0 * torch.randn(1, TOKENS, VOCABULARY, dtype=torch.float64) for _ in range(2))
    labels = torch.tensor([[3, -100, 0, 8]])
    cases = []
    for beta in [0, 0.1, 0.5, 1]:
        for temperature in [1.0, 0.9]:
            logits = student.clone().requires_grad_()
            loss = GKDTrainer.generalized_jsd_loss(logits, teacher, labels=labels, beta=beta, temperature=temperature)
            loss.backward()
            cases.append({
                "beta": beta, "temperature": temperature, "loss": loss.item(), "gradient": logits.grad.flatten().tolist(),
            })  # fmt: skip
    recorded = {
        "student": student.flatten().tolist(), "teacher": teacher.flatten().tolist(), "labels": labels[0].tolist(), "cases": cases,
    }  # fmt: skip
    FILE.write_text(json.dumps(recorded, indent=1) + "\n")


main()
