#!/usr/bin/env python3
"""Trains small models for 20 steps with Ottava and with torch, on the same rows, and compares losses and weights.

usage: check_training.py OTTAVA_BINARY [NAME...]    NAME is one of OPTIONS in make_referee.py, by default one model of each family

Ottava trains in F32 on the CPU from a folder of random weights that transformers wrote, with AdamW, weight decay and clipping. torch trains the
same folder. A step has all rows, so their order does not matter. The last checkpoint is compared tensor by tensor, and transformers loads it
without a warning. `pip install torch==2.15.0 transformers==5.24.0 safetensors==0.8.0 numpy`. Some minutes on two cores.
"""

import copy
import json
import logging
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from make_referee import OPTIONS, random_weights

STEPS, ROWS, TOKENS, RATE, DECAY, CLIP, BETAS, EPS = 20, 4, 24, 1e-3, 0.1, 1.0, (0.9, 0.95), 1e-8
# The largest relative difference of a loss.
LOSS = 1e-4
# The largest difference of a tensor after the last step, as a share of its norm. AdamW divides a gradient by its size, so where a gradient is
# nearly zero, its rounding decides the update.
WEIGHTS = 1e-2
# Of the families that were there before this check, some are enough.
FIRST = list(OPTIONS).index("glm4")
# A norm divides the outputs of short states by their size, and with a small constant it amplifies roundings: with 1e-6, losses of Qwen3.5 agree to 1e-7 in
# the first step and differ by 1.8 % in the last. A larger constant does not change what is compared.
SHORT_STATES = {"rms_norm_eps": 1e-2, "layer_norm_epsilon": 1e-2}
HAS_STATES = ("qwen3_next", "qwen3_5", "bamba", "granitemoehybrid", "falcon_h1", "nemotron_h")
DEFAULT = ["gemma3", "mixtral", "deepseek_v3", *list(OPTIONS)[FIRST:]]


def write_tokenizer(folder, vocabulary):
    """A tokenizer with a word for each token."""
    words = {f"w{i}": i for i in range(vocabulary)}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"}}
    tokenizer |= dict(normalizer=None, pre_tokenizer={"type": "Whitespace"}, post_processor=None, decoder=None, truncation=None, padding=None)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1", "unk_token": "w0"}))


def ottava(binary, folder, rows, output):
    """The losses of the steps, and the folder of the last checkpoint."""
    (output / "rows.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows.tolist()))
    config = f"""output_dir = "{output}/run"
[model]
path = "{folder}"
[data]
train_files = ["{output}/rows.jsonl"]
val_set_size = 0
packing = "none"
max_length = {TOKENS}
[training]
max_steps = {STEPS}
per_device_train_batch_size = {ROWS}
max_grad_norm = {CLIP}
[optimizer]
learning_rate = {RATE}
weight_decay = {DECAY}
[lr_scheduler]
type = "constant"
warmup_steps = 0
[logging]
logging_steps = 1
[precision]
recipe = "fp32"
"""
    (output / "run.toml").write_text(config)
    done = subprocess.run([binary, "train", output / "run.toml", "--device", "cpu"], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{binary} ended with {done.returncode}: {done.stderr.strip()[-300:]}")
    lines = [json.loads(line) for line in (output / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line.get("loss") is not None]
    if len(losses) != STEPS:
        raise RuntimeError(f"{len(losses)} losses of {STEPS} steps")
    return losses, output / f"run/checkpoints/checkpoint-{STEPS}"


def beside_torch(model, text_model, rows):
    """The losses of the steps of `text_model`, which is a part of `model`."""
    named = dict(model.named_parameters())
    # As in Ottava, vectors have no decay.
    decays = {n: p.dim() >= 2 for n, p in named.items()}
    groups = [{"params": [p for n, p in named.items() if decays[n] is own], "weight_decay": DECAY if own else 0.0} for own in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS)
    losses = []
    for _ in range(STEPS):
        logits = text_model(input_ids=rows, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def load(kind, folder):
    """The model of a folder, and what transformers says about it."""
    complaints = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: complaints.append(record.getMessage())
    logger = transformers.utils.logging.get_logger("transformers")
    logger.addHandler(handler)
    model, info = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    logger.removeHandler(handler)
    return model.eval(), complaints + [f"{what}: {keys}" for what, keys in info.items() if keys]


def compare(binary, name):
    """The largest differences of losses and of weights, and the complaints of transformers."""
    kind, kind_of_config, keys = OPTIONS[name]
    torch.manual_seed(17)
    generator = torch.Generator().manual_seed(18)
    keys = copy.deepcopy(keys)
    if name.startswith(HAS_STATES):
        keys.get("text_config", keys).update(SHORT_STATES)
    config = kind_of_config(**keys)
    vocabulary = keys.get("text_config", keys)["vocab_size"]
    with tempfile.TemporaryDirectory() as output:
        output = Path(output)
        model = kind._from_config(config, dtype=torch.float32, attn_implementation="eager")
        random_weights(model, generator)
        model.save_pretrained(output / "model")
        # It may name tokens of the published tokenizer.
        (output / "model/generation_config.json").unlink(missing_ok=True)
        write_tokenizer(output / "model", vocabulary)
        rows = torch.randint(vocabulary, (ROWS, TOKENS), generator=generator)
        # The embedding of a padding token has no gradient in torch.
        pad = config.get_text_config().pad_token_id
        rows = torch.where(rows == (-1 if pad is None else pad), 1 if pad == 0 else 0, rows)
        losses, checkpoint = ottava(binary, output / "model", rows, output)
        model, _ = load(kind, output / "model")
        text_model = model.language_model if name == "llama4_vl" else model
        expected = beside_torch(model, text_model, rows)
        model.save_pretrained(output / "expected")
        tensors, found = ({n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()} for folder in (output / "expected", checkpoint))
        _, complaints = load(kind, checkpoint)
    missing = sorted(tensors.keys() ^ found.keys())
    apart = {n: ((found[n].float() - t.float()).norm() / t.float().norm().clamp_min(1e-30)).item() for n, t in tensors.items() if n in found}
    worst = max(apart, key=apart.get)
    loss = max(abs(a / b - 1) for a, b in zip(losses, expected))
    return loss, expected, apart[worst], worst, complaints + ([f"other tensors: {missing}"] if missing else [])


def main(binary, names):
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {STEPS} steps of {ROWS} x {TOKENS} tokens, AdamW")
    print("| model | first loss | last loss | losses apart | weights apart | of tensor | seconds |")
    print("|---|---|---|---|---|---|---|")
    failed = []
    for name in names:
        start = time.monotonic()
        try:
            loss, losses, weights, worst, complaints = compare(binary, name)
        except RuntimeError as error:
            print(f"| {name} | | | | | {error} | |", flush=True)
            failed.append(name)
            continue
        seconds = time.monotonic() - start
        print(f"| {name} | {losses[0]:.4f} | {losses[-1]:.4f} | {loss:.1e} | {weights:.1e} | `{worst}` | {seconds:.0f} |", flush=True)
        for complaint in complaints:
            print(f"{name}: {complaint}", file=sys.stderr)
        # A comparison with NaN is false.
        if not (loss <= LOSS and weights <= WEIGHTS) or complaints:
            failed.append(name)
    print("all agree" if not failed else f"FAILED: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:] or DEFAULT) if len(sys.argv) > 1 else __doc__)
