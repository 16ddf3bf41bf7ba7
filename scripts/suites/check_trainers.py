#!/usr/bin/env python3
"""Compares the trainers of the Python module `ottava` with TRL: the same calls, with `trl` and with `ottava` as the module.

usage: check_trainers.py OTTAVA_BINARY

A small Llama with random weights trains for ten steps in F32. A step reads all records, because the two programs shuffle them differently. Losses of all steps
must agree within 1e-5. All arguments of TRL's configurations and of PEFT's LoraConfig, at their defaults, must be accepted.
"""

import dataclasses
import enum
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "python"))
os.environ["OTTAVA_BINARY"] = str(Path(sys.argv[1]).resolve())

import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification  # noqa: E402

import ottava  # noqa: E402

TOLERANCE = 1e-5
LETTERS = "\n" + "".join(map(chr, range(32, 127)))
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
RECORDS = range(8)
TEXTS = Dataset.from_list([{"text": f"line {i * i} of the text " * (1 + i % 3)} for i in RECORDS])
CHATS = Dataset.from_list([{"messages": [{"role": "user", "content": f"{i} + {i}?"}, {"role": "assistant", "content": f"It is {2 * i}."}]} for i in RECORDS])
COMPLETIONS = Dataset.from_list([{"prompt": f"{i} + {i} = ", "completion": f"{2 * i} of course" + "!" * i} for i in RECORDS])
PAIRS = Dataset.from_list([{"prompt": f"{i} + {i} = ", "chosen": f"{2 * i}", "rejected": f"{3 * i + 1} or so"} for i in RECORDS])
LABELS = Dataset.from_list([{"prompt": f"{i} + {i} = ", "completion": f"{2 * i}" + "." * i, "label": i % 2 == 0} for i in RECORDS])
CASES = {
    "texts": ("SFT", TEXTS, {}),
    "a cosine, weight decay, clipping and two micro-batches": (
        "SFT", TEXTS, dict(weight_decay=0.1, max_grad_norm=0.5, lr_scheduler_type="cosine", adam_beta2=0.95, per_device_train_batch_size=4, gradient_accumulation_steps=2),
    ),
    "epochs": ("SFT", TEXTS, dict(max_steps=-1, num_train_epochs=3)),
    "chats": ("SFT", CHATS, {}),
    "completions": ("SFT", COMPLETIONS, {}),
    "prompts too": ("SFT", COMPLETIONS, dict(completion_only_loss=False)),
    "DPO": ("DPO", PAIRS, {}),
    "IPO": ("DPO", PAIRS, dict(loss_type=["ipo"])),
    "KTO": ("KTO", LABELS, {}),
    "a reward model": ("Reward", PAIRS, {}),
    "centred rewards": ("Reward", PAIRS, dict(center_rewards_coefficient=0.01)),
}  # fmt: skip


def write_models():
    """The folders `model` and `reward-model`, with a tokenizer of characters."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=100,
        max_position_embeddings=256, bos_token_id=None, eos_token_id=0, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained("model")
    config.num_labels = 1
    LlamaForSequenceClassification(config).save_pretrained("reward-model")
    end = {"id": 0, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    vocabulary = {"<|endoftext|>": 0} | {letter: number for number, letter in enumerate(LETTERS, 1)}
    tokenizer = {"version": "1.0", "added_tokens": [end], "decoder": {"type": "Fuse"}, "model": {"type": "BPE", "vocab": vocabulary, "merges": []}}
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "chat_template": TEMPLATE}
    for folder in ("model", "reward-model"):
        Path(folder, "tokenizer.json").write_text(json.dumps(tokenizer))
        Path(folder, "tokenizer_config.json").write_text(json.dumps(names))


def losses(module, name, kind, data, given):
    """The losses of all steps."""
    given = {"max_steps": 10, "per_device_train_batch_size": len(RECORDS), **given}
    args = getattr(module, f"{kind}Config")(
        f"{module.__name__}/{name}", learning_rate=1e-3, logging_steps=1, bf16=False, use_cpu=True, report_to="none", save_strategy="no", max_length=128,
        **given,
    )  # fmt: skip
    # With validation data, KTO combines the records in their order in both programs.
    others = {"eval_dataset": data} if kind == "KTO" else {}
    model = "reward-model" if kind == "Reward" else "model"
    trainer = getattr(module, f"{kind}Trainer")(model=model, args=args, train_dataset=data, **others)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def defaults(config):
    """The arguments of a dataclass with their defaults, except those that are None."""
    for field in dataclasses.fields(config):
        made = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if made is not None and made is not dataclasses.MISSING:
            yield field.name, made.value if isinstance(made, enum.Enum) else made


def refused(kind):
    """What `ottava` says of all defaults of a trainer of TRL, or "" if it takes them."""
    given = dict(defaults(getattr(trl, f"{kind}Config")))
    rewards = {"reward_funcs": {"type": "length", "target": 1}} if kind == "GRPO" else {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            args = getattr(ottava, f"{kind}Config")(f"defaults/{kind}", **given)
            adapters = peft.LoraConfig(target_modules=["q_proj"])
            getattr(ottava, f"{kind}Trainer")("model", args=args, train_dataset=[{"prompt": "a"}], peft_config=adapters, **rewards)
    except ValueError as error:
        return str(error)
    return ""


def main():
    transformers.utils.logging.disable_progress_bar()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        write_models()
        for name, (kind, data, given) in CASES.items():
            theirs, ours = (losses(module, name, kind, data, dict(given)) for module in (trl, ottava))
            difference = max(abs(a - b) for a, b in zip(theirs, ours)) if len(theirs) == len(ours) else float("inf")
            wrong += difference > TOLERANCE
            print(f"{name}: {len(ours)} steps, from {ours[0]:.4f} to {ours[-1]:.4f}, largest difference {difference:.1e}", flush=True)
        for kind in ("SFT", "DPO", "KTO", "Reward", "GRPO"):
            reason = refused(kind)
            wrong += bool(reason)
            print(f"defaults of {kind}Config: {reason or 'accepted'}", flush=True)
        os.chdir(ROOT)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
