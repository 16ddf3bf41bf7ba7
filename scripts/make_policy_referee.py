#!/usr/bin/env python3
"""Records what TRL's GRPOTrainer computes from given log-probabilities: losses, and their gradients by the log-probabilities, in
crates/ottava-train/tests/data/referee_policy.json.

Development only; the program itself needs no Python. `pip install torch==2.11.0 trl==1.16.0`. Runs on the CPU in seconds.
"""

import json
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from tokenizers import Tokenizer, models
from trl import GRPOConfig, GRPOTrainer

FILE = Path(__file__).resolve().parent.parent / "crates/ottava-train/tests/data/referee_policy.json"
LENGTHS, MOST = [6, 3, 5, 1], 8
# By name: the keys of `[reinforcement.loss]`, and the options of TRL that mean the same.
CASES = {
    "grpo": ({"loss_type": "grpo", "epsilon_high": 0.28}, {"loss_type": "grpo", "epsilon_high": 0.28}),
    "dapo": ({"loss_type": "dapo", "epsilon_high": 0.28}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"loss_type": "dr_grpo"}),
    "dual clip": ({"loss_type": "grpo", "delta": 1.3}, {"loss_type": "grpo", "delta": 1.3}),
    "gspo": (
        {"loss_type": "gspo", "epsilon": 0.03, "epsilon_high": 0.04},
        {"loss_type": "grpo", "epsilon": 0.03, "epsilon_high": 0.04, "importance_sampling_level": "sequence"},
    ),
    "cispo": ({"loss_type": "cispo", "epsilon": 1.0, "epsilon_high": 0.25}, {"loss_type": "cispo", "epsilon_high": 1.25}),
    "k3": ({"loss_type": "grpo", "beta": 0.3, "kl_estimator": "k3"}, {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": False}),
    "weighted k3": (
        {"loss_type": "dapo", "beta": 0.3, "kl_estimator": "weighted_k3"},
        {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": True},
    ),
}


def trainer(folder, options):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({f"t{i}": i for i in range(8)}, unk_token="t0")), eos_token="t1", pad_token="t2"
    )
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1))
    # The reference log-probabilities are given, so no reference model is made.
    beta = options.pop("beta", 0.0)
    config = GRPOConfig(
        output_dir=folder, report_to=[], use_cpu=True, bf16=False, num_generations=2, per_device_train_batch_size=4,
        max_completion_length=MOST, beta=0.0, gradient_accumulation_steps=1, **options,
    )
    data = Dataset.from_list([{"prompt": "t3"}] * 4)
    made = GRPOTrainer(model=model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config, train_dataset=data,
                       processing_class=tokenizer)
    made.beta = beta
    made.current_gradient_accumulation_steps = 1
    return made


def main():
    torch.manual_seed(3)
    rows, columns = len(LENGTHS), max(LENGTHS)
    mask = torch.tensor([[1] * length + [0] * (columns - length) for length in LENGTHS])
    log_probs = -torch.rand(rows, columns, dtype=torch.float64) * 3 - 0.1
    old = log_probs + 0.3 * torch.randn(rows, columns, dtype=torch.float64)
    reference = log_probs + 0.4 * torch.randn(rows, columns, dtype=torch.float64)
    advantages = torch.tensor([1.2, -0.7, 0.4, -1.5], dtype=torch.float64)
    recorded = {"trl": __import__("trl").__version__, "lengths": LENGTHS, "most": MOST, "advantages": advantages.tolist(),
                "log_probs": log_probs.tolist(), "old": old.tolist(), "reference": reference.tolist(), "cases": []}
    for name, (settings, options) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            made = trainer(folder, dict(options))
        leaf = log_probs.clone().requires_grad_()
        made._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, torch.zeros_like(leaf), None)
        ids = torch.zeros(rows, columns, dtype=torch.long)
        inputs = {
            "prompt_ids": torch.zeros(rows, 2, dtype=torch.long), "prompt_mask": torch.ones(rows, 2, dtype=torch.long),
            "completion_ids": ids, "completion_mask": mask, "advantages": advantages, "num_items_in_batch": mask.sum(),
            "old_per_token_logps": old, "ref_per_token_logps": reference,
        }
        loss = made._compute_loss(made.model, inputs)
        loss.backward()
        recorded["cases"].append({"name": name, "settings": settings, "loss": loss.item(), "gradient": leaf.grad.tolist()})
        print(f"{name}: {loss.item():.6f}")
    FILE.write_text(json.dumps(recorded, indent=1) + "\n")


main()
