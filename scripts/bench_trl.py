#!/usr/bin/env python3
"""Times a generation and a step of TRL's GRPOTrainer, which draws with transformers, at the load of `ottava bench rollouts`: random weights, prompts of
random tokens, and completions whose lengths have a long tail.

usage: bench_trl.py FOLDER [--prompts N] [--prompt-length N] [--mean-length N] [--max-length N]

FOLDER has the model, such as that of make_random_llama.py. Needs torch, transformers and trl. A first generation with completions of 4 tokens is not timed.
"""

import argparse
import json
import math
import random
import tempfile
import time

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--prompts", type=int, default=8)
parser.add_argument("--prompt-length", type=int, default=512)
parser.add_argument("--mean-length", type=int, default=1024)
parser.add_argument("--max-length", type=int, default=4096)
args = parser.parse_args()
GROUP, WARM_UP = 8, 4
count, most = args.prompts * GROUP, args.max_length - args.prompt_length


def lengths():
    """Quantiles of a log-logistic distribution of shape 4, cut at the longest completion, in an order without a pattern."""
    scale = args.mean_length * math.sin(math.pi / 4) / (math.pi / 4)
    shares = [(i + 0.5) / count for i in range(count)]
    quantiles = [min(most, max(1, round(scale * (share / (1 - share)) ** 0.25))) for share in shares]
    random.Random(0).shuffle(quantiles)
    return quantiles


class Ends(LogitsProcessor):
    """Ends each row at its length, and not before."""

    def __init__(self, prompt, lengths, end):
        self.prompt, self.lengths, self.end = prompt, lengths, end

    def __call__(self, ids, scores):
        ends = self.lengths == ids.shape[1] - self.prompt + 1
        scores[:, self.end] = torch.where(ends, scores[:, self.end], -math.inf)
        scores[ends] = -math.inf
        scores[ends, self.end] = 0.0
        return scores


class Times(TrainerCallback):
    """The seconds of each step, with its draws."""

    def __init__(self):
        self.steps = []

    def on_step_begin(self, *_, **__):
        torch.cuda.synchronize() if torch.cuda.is_available() else None
        self.begin = time.perf_counter()

    def on_step_end(self, *_, **__):
        torch.cuda.synchronize() if torch.cuda.is_available() else None
        self.steps.append(time.perf_counter() - self.begin)


device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(args.folder)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.bfloat16).to(device)
planned = [[WARM_UP] * count, lengths()]
draws, generate = [], model.generate


def timed(input_ids, **kwargs):
    of = torch.tensor(planned[len(draws)], device=input_ids.device)
    ends = LogitsProcessorList([Ends(input_ids.shape[1], of, tokenizer.eos_token_id)])
    begin = time.perf_counter()
    drawn = generate(input_ids=input_ids, logits_processor=ends, **kwargs)
    torch.cuda.synchronize() if torch.cuda.is_available() else None
    draws.append(time.perf_counter() - begin)
    return drawn


model.generate = timed
times = Times()
config = GRPOConfig(
    output_dir=tempfile.mkdtemp(), max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=count // 2, num_generations=GROUP,
    max_completion_length=most, learning_rate=1e-6, report_to=[], save_strategy="no", optim="adamw_torch_fused", use_cpu=device == "cpu",
)
trainer = GRPOTrainer(
    model, reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))], args=config,
    train_dataset=Dataset.from_dict({"prompt": [str(i) for i in range(2 * args.prompts)]}), processing_class=tokenizer, callbacks=[times],
)
draw = random.Random(1)
tokens = {str(i): [draw.randrange(model.config.vocab_size) for _ in range(args.prompt_length)] for i in range(2 * args.prompts)}
trainer._tokenize_prompts = lambda prompts: ([tokens[prompt] for prompt in prompts], None, {})
trainer.train()
drawn = sum(planned[1])
print(json.dumps({
    "trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__, "completions": count, "drawn_tokens": drawn,
    "longest": max(planned[1]), "draw_seconds": round(draws[1], 2), "drawn_per_second": round(drawn / draws[1]), "step_seconds": round(times.steps[1] - draws[1], 2),
    "seconds": round(times.steps[1], 2), "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device == "cuda" else None,
}))
