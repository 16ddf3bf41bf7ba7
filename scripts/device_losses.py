#!/usr/bin/env python3
"""Compares losses of CPU and GPU for two layers of known models with their true widths.

usage: scripts/device_losses.py run OTTAVA DEVICE FILE [NAME...]    trains each model (or those called NAME) on DEVICE (`cpu` or `cuda`) for STEPS steps,
                                                                     and writes the losses to FILE
       scripts/device_losses.py compare FILE FILE                    prints the losses of both files, and fails where they differ by more than BARS

Hidden sizes, heads, states and expert widths are those of the models; the vocabulary is that of the bundled tokenizer, and there are eight experts, so that
the weights fit in the memory of a small machine. The rows are the first of the bundled text. Python's standard library is enough.
"""
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS, LENGTH = 2, 64
# Relative differences; losses of random weights are about ln(4096) = 8.3. FP8 products of a GPU accumulate with fewer bits than F32.
BARS = {"fp32": 1e-5, "bf16": 1e-3, "fp8-row": 4e-3, "fp8-block": 4e-3}
ROOT = Path(__file__).resolve().parent.parent


def sizes(family, hidden, mlp, heads, kv_heads, **more):
    keys = {"model_type": family, "vocab_size": 4096, "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": 2}
    return keys | {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "max_position_embeddings": 4096} | more


# The second layer of Qwen3.5 is one of attention here, so that two layers have both kinds.
BOTH = {"layer_types": ["linear_attention", "full_attention"]}
EXPERTS = {"n_routed_experts": 8, "n_group": 1, "topk_group": 1}
MODELS = {
    "qwen3-8b": sizes("qwen3", 4096, 12_288, 32, 8, head_dim=128),
    "qwen3.5-4b": sizes("qwen3_5_text", 2560, 9216, 16, 4, **BOTH),
    "qwen3.5-9b": sizes("qwen3_5_text", 4096, 12_288, 16, 4, **BOTH),
    "nemotron-3-nano, M and E": sizes(
        "nemotron_h", 2688, 1856, 32, 2, head_dim=128, hybrid_override_pattern="ME", mamba_num_heads=64, moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712, num_experts_per_tok=6, routed_scaling_factor=2.5, **EXPERTS,
    ),
    "nemotron-3-nano, M and *": sizes("nemotron_h", 2688, 1856, 32, 2, head_dim=128, hybrid_override_pattern="M*", mamba_num_heads=64),
    "glm-4.5-air": sizes("glm4_moe", 4096, 10_944, 96, 8, head_dim=128, attention_bias=True, first_k_dense_replace=1, **EXPERTS),
}


def losses(ottava, device, keys, recipe):
    """Returns the training losses of a run."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "model.json")
        config.write_text(json.dumps(keys))
        settings = {
            "model.path": config, "output_dir": Path(folder, "run"), "recipe": recipe, "max_steps": 1000, "per_device_train_batch_size": 1,
            "data.max_length": LENGTH, "logging_steps": 1, "save_steps": "end", "eval_steps": "end", "val_set_size": 0, "learning_rate": 1e-4,
            "warmup_steps": 0, "device": device,
        }
        command = [ottava, "train", "configs/quickstart.toml"]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        metrics, found = Path(folder, "run", "metrics.jsonl"), []
        with open(Path(folder, "log"), "w+") as log, subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as process:
            while len(found) < STEPS:
                time.sleep(0.2)
                lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
                found = [line["loss"] for line in map(json.loads, (line for line in lines if line.endswith("\n"))) if "loss" in line]
                if process.poll() is not None and len(found) < STEPS:
                    sys.exit(f"{' '.join(map(str, command))}\n{Path(log.name).read_text()[-2000:]}")
            # A checkpoint, which the end of a run writes, would take longer than the steps.
            process.kill()
        return found[:STEPS]


def run(ottava, device, file, *names):
    found = {}
    for name, keys in MODELS.items():
        for recipe in BARS if not names or name in names else []:
            found[f"{name} | {recipe}"] = losses(ottava, device, keys, recipe)
            print(name, recipe, found[f"{name} | {recipe}"], flush=True)
            Path(file).write_text(json.dumps(found, indent=1))


def compare(first, second):
    first, second = (json.loads(Path(file).read_text()) for file in (first, second))
    assert first.keys() == second.keys(), "both files have the same runs"
    failed = False
    print("| model | recipe | losses of the first file | of the second | largest relative difference |\n|---|---|---|---|---|")
    for name, a in first.items():
        b = second[name]
        differences = [abs(x - y) / x for x, y in zip(a, b, strict=True)]
        difference = math.nan if any(map(math.isnan, differences)) else max(differences)
        failed |= not difference <= BARS[name.split(" | ")[1]]
        print(f"| {name} | {' '.join(f'{x:.5f}' for x in a)} | {' '.join(f'{x:.5f}' for x in b)} | {difference:.1e} |")
    sys.exit(failed)


if __name__ == "__main__":
    {"run": run, "compare": compare}[sys.argv[1]](*sys.argv[2:])
