#!/usr/bin/env python3
"""Trains reward models with Ottava from small random models, on the CPU, and compares them with transformers and PEFT: `ottava eval` of each
folder with the rewards of `AutoModelForSequenceClassification`, in batches with padding.

usage: check_reward.py OTTAVA_BINARY

Needs `pip install torch==2.15.0 transformers==5.23.0 peft==0.21.2`. Two minutes on two cores.
"""

import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
PAIRS, LENGTH = 12, 96
SIZES = dict(hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
# The names of the sizes of GPT-2.
GPT2 = dict(n_embd=32, n_inner=56, n_layer=2, n_head=4, n_positions=128)
FAMILIES = {
    "llama": SIZES, "mistral": SIZES, "qwen2": SIZES, "qwen3": SIZES, "gemma2": SIZES, "gemma3_text": SIZES, "phi3": SIZES, "olmo2": SIZES,
    "smollm3": SIZES, "gpt2": GPT2,
}  # fmt: skip


def records():
    """Texts, some of which end in the token that is also the padding, as Ottava and TRL add it."""
    with gzip.open(ROOT / "data/preferences.jsonl.gz", "rt", encoding="utf-8") as file:
        for line in list(file)[:PAIRS]:
            record = json.loads(line)
            yield {key: record[key][0]["content"] if key == "prompt" else " " + record[key][0]["content"] for key in record}


def ottava(binary, *arguments):
    return subprocess.run([binary, *map(str, arguments)], check=True, capture_output=True, text=True).stdout


def train(binary, model, pairs, output, lora):
    settings = f"""output_dir = "{output}"
[model]
path = "{model}"
[lora]
r = {lora}
[data]
train_files = ["{pairs}"]
val_set_size = 2
max_length = {LENGTH}
[preference]
loss_type = "bradley_terry"
[training]
max_steps = 6
per_device_train_batch_size = 4
[optimizer]
learning_rate = 5e-3
[lr_scheduler]
warmup_steps = 0
[precision]
recipe = "fp32"
"""
    path = Path(f"{output}.toml")
    path.write_text(settings)
    ottava(binary, "train", path, "--device", "cpu")
    return Path(output) / "checkpoints/checkpoint-6"


def rewards(model, tokenizer, pairs):
    """Rewards of chosen and of rejected texts, all in one batch with padding at the right."""
    end = tokenizer.eos_token
    texts = [pair["prompt"] + pair[key] + end for pair in pairs for key in ["chosen", "rejected"]]
    tokenizer.padding_side = "right"
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.no_grad():
        logits = model.eval()(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return logits[0::2, 0].double(), logits[1::2, 0].double()


def compare(name, binary, model, tokenizer, pairs, *arguments):
    chosen, rejected = rewards(model, tokenizer, pairs)
    both = torch.cat([chosen, rejected])
    theirs = {
        "loss": -torch.nn.functional.logsigmoid(chosen - rejected).mean().item(), "accuracy": (chosen > rejected).double().mean().item(),
        "margin": (chosen - rejected).mean().item(), "mean_reward": both.mean().item(), "min_reward": both.min().item(),
        "max_reward": both.max().item(),
    }  # fmt: skip
    ours = json.loads(ottava(binary, "eval", *arguments, "--max-length", LENGTH, "--recipe", "fp32", "--device", "cpu", "--json"))
    assert ours["pairs"] == len(pairs) and ours["left_out"] == 0, ours
    apart = max(abs(ours[key] - theirs[key]) for key in theirs)
    print(f"{name}: rewards {theirs['min_reward']:.4f} to {theirs['max_reward']:.4f}, at most {apart:.1e} apart")
    assert apart < 1e-5, (ours, theirs)


def main():
    binary = sys.argv[1]
    transformers.utils.logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data/tokenizer")
    tokenizer.pad_token = tokenizer.eos_token
    with tempfile.TemporaryDirectory() as work:
        work, pairs = Path(work), list(records())
        file = work / "pairs.jsonl"
        file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        for family, sizes in FAMILIES.items():
            torch.manual_seed(5)
            ids = dict(bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=None)
            config = AutoConfig.for_model(family, vocab_size=len(tokenizer), **ids, **sizes)
            config.pad_token_id = None
            base = work / family
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(base)
            tokenizer.save_pretrained(base)
            for kind, lora in [("whole", 0), ("adapters", 4)]:
                folder = train(binary, base, file, work / f"{family}-{kind}", lora)
                if lora:
                    from peft import PeftModel

                    pad = dict(num_labels=1, pad_token_id=tokenizer.pad_token_id)
                    model = AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float32, **pad)
                    model = PeftModel.from_pretrained(model, folder)
                    compare(f"{family}, adapters", binary, model, tokenizer, pairs, base, "--adapter", folder, "--data", file)
                    continue
                model, info = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
                assert not any(info.values()), info
                compare(family, binary, model, tokenizer, pairs, folder, "--data", file)
                # As transformers saves it again.
                again = work / f"{family}-again"
                model.save_pretrained(again)
                tokenizer.save_pretrained(again)
                compare(f"{family}, saved by transformers", binary, model, tokenizer, pairs, again, "--data", file)


main()
