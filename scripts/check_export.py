"""Exports a model folder in each FP8 and FP4 format and compares what transformers and compressed-tensors make of it on the CPU with `ottava`: every
weight, and the loss of a text. transformers dequantizes fp8-block, and the package compressed-tensors its own formats.

usage: check_export.py OTTAVA_BINARY MODEL_OR_RUN TEXT_FILE SEQ_LEN
Needs `pip install torch==2.15.0 transformers==5.23.0 compressed-tensors==0.20.0 accelerate safetensors==0.8.0`.

Formats whose blocks the sizes of the model do not have are skipped, aloud. Static scales of inputs take a run with fp8-delayed.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

transformers.utils.logging.disable_progress_bar()
binary, folder, text_file, seq_len = sys.argv[1:4] + [int(sys.argv[4])]
FORMATS = [
    ("fp8-block", []),
    ("compressed-tensors", ["--scheme", "dynamic"]),
    ("compressed-tensors", ["--scheme", "static"]),
    ("compressed-tensors", ["--scheme", "block"]),
    ("nvfp4", []),
    ("mxfp4", []),
]


def ottava(*args):
    done = subprocess.run([binary, *map(str, args)], capture_output=True, text=True)
    return done.stdout if done.returncode == 0 else None, done.stderr


def load(exported, method):
    if method == "fp8-block":
        config = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(128, 128))
    else:
        config = transformers.CompressedTensorsConfig(dequantize=True)
    # Both packages round dequantized weights to BF16.
    return transformers.AutoModelForCausalLM.from_pretrained(exported, quantization_config=config).eval().float()


def loss(model, tokenizer, preceding_id):
    """As `ottava eval` does: the end of the text before is the context of the first token, and the text is cut into windows."""
    ids = [preceding_id] + tokenizer(Path(text_file).read_text(), add_special_tokens=False)["input_ids"] + [preceding_id]
    total, count = 0.0, 0
    for start in range(0, len(ids) - 1, seq_len):
        window = torch.tensor([ids[start : start + seq_len + 1]])
        logits = model(window[:, :-1]).logits
        total += torch.nn.functional.cross_entropy(logits[0].double(), window[0, 1:], reduction="sum").item()
        count += window.shape[1] - 1
    return total / count, count


failed = False
with torch.no_grad(), tempfile.TemporaryDirectory() as work:
    for i, (method, scheme) in enumerate(FORMATS):
        name = " ".join([method, *scheme[1:]])
        exported, plain = Path(work) / f"exported-{i}", Path(work) / f"plain-{i}"
        report, error = ottava("export", folder, exported, "--format", method, *scheme, "--json")
        if report is None:
            print(f"{name}: not exported: {error.strip().splitlines()[-1]}")
            continue
        assert ottava("export", exported, plain, "--format", "bf16")[0] is not None
        model, ours = load(exported, method), load_file(plain / "model.safetensors")
        theirs = {key: value for key, value in model.state_dict().items() if key in ours}
        wrong = [key for key in ours if key not in theirs or not torch.equal(ours[key], theirs[key].float().bfloat16())]
        text, error = ottava("eval", plain, "--data", text_file, "--max-length", seq_len, "--recipe", "fp32", "--device", "cpu", "--json")
        evaluated = json.loads(text)
        expected, count = loss(model, transformers.AutoTokenizer.from_pretrained(exported), evaluated["preceding_id"])
        difference = abs(evaluated["loss"] / expected - 1)
        worst = max(linear["relative_error"] for linear in json.loads(report)["linears"])
        failed |= bool(wrong) or count != evaluated["tokens"] or not difference < 1e-5
        print(
            f"{name}: {len(ours)} weights, {len(wrong)} differ {wrong[:3]}; loss of {count} tokens: transformers {expected:.7f}, "
            f"ottava {evaluated['loss']:.7f}, relative difference {difference:.1e}; casts lose up to {worst:.4f}",
            flush=True,
        )
sys.exit(failed)
