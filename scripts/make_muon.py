#!/usr/bin/env python3
"""Writes crates/ottava-train/tests/data/muon.json: updates of torch.optim.Muon, which the tests of Muon compare with.

usage: scripts/make_muon.py OUTPUT      (needs torch 2.9 or newer)

For each shape and `adjust_lr_fn`: the weights before, the gradients of three steps, and the weights after them.
"""

import json
import sys

import torch

LEARNING_RATE = 0.02
WEIGHT_DECAY = 0.1
MOMENTUM = 0.95
STEPS = 3


def updates(rows, columns, adjust, generator):
    """The weights after the steps, from random weights and gradients."""
    start = torch.randn(rows, columns, generator=generator)
    gradients = [torch.randn(rows, columns, generator=generator) for _ in range(STEPS)]
    weight = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.Muon(
        [weight],
        lr=LEARNING_RATE,
        weight_decay=WEIGHT_DECAY,
        momentum=MOMENTUM,
        nesterov=True,
        ns_steps=5,
        adjust_lr_fn=adjust,
    )
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    return {
        "shape": [rows, columns],
        "adjust_lr_fn": adjust,
        "start": start.flatten().tolist(),
        "gradients": [gradient.flatten().tolist() for gradient in gradients],
        "end": weight.detach().flatten().tolist(),
    }


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    generator = torch.Generator().manual_seed(29)
    shapes = [(6, 20), (20, 6), (12, 12)]
    cases = [updates(*shape, adjust, generator) for shape in shapes for adjust in ("match_rms_adamw", "original")]
    settings = {"torch": torch.__version__, "learning_rate": LEARNING_RATE, "weight_decay": WEIGHT_DECAY, "momentum": MOMENTUM}
    with open(sys.argv[1], "w", encoding="utf-8") as file:
        json.dump(settings | {"cases": cases}, file)
        file.write("\n")


main()
