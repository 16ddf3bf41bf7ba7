#!/usr/bin/env python3
"""Trains a model by DPO for 20 steps, on the same pairs in the same order, and compares losses and rewards.

usage: check_dpo.py OTTAVA_BINARY FOLDER trl [RECIPE]                Ottava in RECIPE, by default fp32, with TRL in F32, on the CPU
       check_dpo.py OTTAVA_BINARY FOLDER recipes DEVICE [ARGUMENT]...    recipes of Ottava with its F32, on "cpu" or "cuda"

An ARGUMENT is a recipe, by default all, which may have settings behind it ("fp8-row,power_of_two_scales=true"), or a setting of all runs
("lora.r=16").
FOLDER is that of scripts/fetch-smollm2.sh, or another model with a chat template. The first form needs `pip install torch==2.15.0
transformers==5.23.0 trl==1.16.0` and some ten minutes on two cores; the second one needs no packages.
"""

import gzip
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

DATA = Path(__file__).resolve().parent.parent / "data/preferences.jsonl.gz"
STEPS, PAIRS, HELD_OUT, SEED, BETA, RATE = 20, 2, 8, 42, 0.1, 1e-5
METRICS = ["loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected"]
MASK = (1 << 64) - 1
RECIPES = ["bf16", "fp8-delayed", "fp8-current", "fp8-row", "fp8-block"]
# The largest difference of a loss from F32.
ALLOWED = 0.01


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


def ottava(binary, folder, recipe, device, output, common=()):
    """The metrics of the steps, and of the held-out pairs."""
    recipe, *settings = recipe.split(",")
    output = Path(tempfile.mkdtemp(dir=output))
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
[optimizer]
learning_rate = {RATE}
weight_decay = 0.0
[lr_scheduler]
type = "constant"
warmup_steps = 0
[logging]
logging_steps = 1
[precision]
recipe = "{recipe}"
skip_slow_linears = false
"""
    path = output / "dpo.toml"
    path.write_text(config)
    subprocess.run([binary, "train", path, "--device", device, *(f"--set={setting}" for setting in [*common, *settings])], check=True)
    lines = [json.loads(line) for line in (output / "run/metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(output)
    steps = [line for line in lines if "loss" in line]
    assert len(steps) == STEPS, len(steps)
    return steps, [line for line in lines if "eval_loss" in line]


def trl(folder, output):
    from datasets import Dataset
    from torch import float32
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    class InOrder(DPOTrainer):
        def _get_train_sampler(self, dataset=None):
            return SequentialSampler(self.train_dataset)

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
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=float32)
    run = InOrder(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(train),
        processing_class=AutoTokenizer.from_pretrained(folder),
    )
    run.train()
    return [log for log in run.state.log_history if "loss" in log]


def tell_held_out(lines):
    for line in lines:
        print(f"held-out pairs after step {line['step']}: loss {line['eval_loss']:.4f}, margin {line['eval_rewards/margins']:.4f}", flush=True)


def compare_with_trl(binary, folder, recipe):
    with tempfile.TemporaryDirectory() as output:
        expected = trl(folder, output)
        found, held_out = ottava(binary, folder, recipe, "cpu", output)
    assert len(expected) == STEPS, len(expected)
    for metric in METRICS:
        apart = max(abs(a[metric] - b[metric]) for a, b in zip(found, expected))
        print(f"{metric}: at most {apart:.1e} apart; TRL {expected[0][metric]:.4f} to {expected[-1][metric]:.4f}")
    tell_held_out(held_out)


def compare_recipes(binary, folder, device, arguments):
    # A setting has no recipe before it.
    common = [argument for argument in arguments if "=" in argument.split(",")[0]]
    recipes = [argument for argument in arguments if argument not in common] or RECIPES
    with tempfile.TemporaryDirectory() as output:
        exact, held_out = ottava(binary, folder, "fp32", device, output, common)
        print("fp32: losses", " ".join(f"{line['loss']:.4f}" for line in exact), flush=True)
        tell_held_out(held_out)
        too_far = []
        for recipe in recipes:
            found, held_out = ottava(binary, folder, recipe, device, output, common)
            pairs = list(zip(found, exact))
            losses = [a["loss"] - b["loss"] for a, b in pairs]
            rewards = [max(abs(a[key] - b[key]) for key in ["rewards/chosen", "rewards/rejected"]) for a, b in pairs]
            largest = max(map(abs, losses))
            error = statistics.stdev(losses) / math.sqrt(len(losses))
            print(f"{recipe}: losses at most {largest:.4f} apart from fp32, rewards {max(rewards):.4f}")
            print(f"  mean difference of the losses {statistics.mean(losses):+.4f}, standard error {error:.4f}")
            print("  losses, by step: ", " ".join(f"{apart:+.4f}" for apart in losses))
            print("  rewards, by step:", " ".join(f"{apart:.4f}" for apart in rewards))
            tell_held_out(held_out)
            too_far += [recipe] if largest > ALLOWED else []
    # Few pairs are noisy: docs/numerics.md.
    if too_far:
        sys.exit(f"more than {ALLOWED} apart from fp32: {', '.join(too_far)}")


def main():
    binary, folder, against, *rest = [sys.argv[1], Path(sys.argv[2]).resolve(), *sys.argv[3:]]
    match against:
        case "trl":
            compare_with_trl(binary, folder, (rest + ["fp32"])[0])
        case "recipes":
            compare_recipes(binary, folder, rest[0], rest[1:])


main()
