#!/usr/bin/env python3
"""Trains SmolLM2 by DPO with Ottava and with TRL, on the CPU, in F32, on the same pairs in the same order, and compares 20 steps.

usage: check_dpo.py OTTAVA_BINARY FOLDER [RECIPE]    FOLDER is that of scripts/fetch-smollm2.sh; RECIPE of Ottava, by default fp32

Needs `pip install torch==2.15.0 transformers==5.23.0 trl==1.16.0`. Some ten minutes on two cores.
"""

import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

DATA = Path(__file__).resolve().parent.parent / "data/preferences.jsonl.gz"
STEPS, PAIRS, HELD_OUT, SEED, BETA, RATE = 20, 2, 8, 42, 0.1, 1e-5
METRICS = ["loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected"]
MASK = (1 << 64) - 1


def mix(value):
    z = (value + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def permutation(length, seed, epoch):
    """As data/order.rs."""
    half = max(1, -(-max(length - 1, 0).bit_length() // 2))
    key, mask = mix((mix(seed) + epoch) & MASK), (1 << half) - 1

    def network(value):
        left, right = value >> half, value & mask
        for round in range(8):
            left, right = right, left ^ (mix(key ^ (round << 56) ^ right) & mask)
        return left << half | right

    def get(index):
        value = network(index)
        while value >= length:
            value = network(value)
        return value

    return get


class InOrder(DPOTrainer):
    def _get_train_sampler(self, dataset=None):
        return SequentialSampler(self.train_dataset)


def ottava(binary, folder, recipe, output):
    config = f"""output_dir = "{output}/run"
seed = {SEED}
[model]
path = "{folder}"
[data]
train_files = ["{DATA}"]
val_set_size = {HELD_OUT}
max_length = 96
[preference]
beta = {BETA}
[training]
max_steps = {STEPS}
per_device_train_batch_size = {PAIRS}
learning_rate = {RATE}
lr_scheduler_type = "constant"
warmup_steps = 0
weight_decay = 0.0
logging_steps = 1
[precision]
recipe = "{recipe}"
skip_slow_linears = false
"""
    path = Path(output) / "dpo.toml"
    path.write_text(config)
    subprocess.run([binary, "train", path, "--device", "cpu"], check=True)
    lines = [json.loads(line) for line in (Path(output) / "run/metrics.jsonl").read_text().splitlines()]
    held_out = [(line["step"], line["eval_loss"], line.get("eval_rewards/margins")) for line in lines if "eval_loss" in line]
    return [line for line in lines if "loss" in line], held_out


def trl(folder, output):
    with gzip.open(DATA, "rt", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    split = permutation(len(records), 0x6F7474617661, 0)
    train = [records[split(HELD_OUT + i)] for i in range(len(records) - HELD_OUT)]
    order = permutation(len(train), SEED, 0)
    train = [train[order(i)] for i in range(STEPS * PAIRS)]
    arguments = DPOConfig(
        output_dir=output, max_steps=STEPS, per_device_train_batch_size=PAIRS, learning_rate=RATE, beta=BETA,
        lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.0, adam_beta1=0.9, adam_beta2=0.95, max_grad_norm=1.0,
        logging_steps=1, report_to="none", save_strategy="no", use_cpu=True, bf16=False, max_length=None,
        precompute_ref_log_probs=True, gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    run = InOrder(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(train),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    run.train()
    return [log for log in run.state.log_history if "loss" in log]


def main():
    binary, folder, recipe = sys.argv[1], Path(sys.argv[2]).resolve(), (sys.argv[3:] + ["fp32"])[0]
    with tempfile.TemporaryDirectory() as output:
        expected = trl(folder, output)
        found, held_out = ottava(binary, folder, recipe, output)
    assert len(found) == len(expected) == STEPS, (len(found), len(expected))
    for metric in METRICS:
        apart = max(abs(a[metric] - b[metric]) for a, b in zip(found, expected))
        print(f"{metric}: at most {apart:.1e} apart; TRL {expected[0][metric]:.4f} to {expected[-1][metric]:.4f}")
    for step, loss, margin in held_out:
        print(f"held-out pairs after step {step}: loss {loss:.4f}, margin {margin}")


main()
