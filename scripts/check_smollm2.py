"""Compares SmolLM2, as scripts/fetch-smollm2.sh makes it, in `ottava` and in transformers, both in F32 on the CPU: loss of English text with
and without a beginning-of-sequence token and with strided windows, and 64 tokens of greedy text. Writes transformers.safetensors into the
folder, with which `cargo test -p ottava-train --test promises real_model -- --ignored` compares logits.

usage: check_smollm2.py OTTAVA_BINARY FOLDER [BYTES]    Needs `pip install torch==2.15.0 transformers==5.23.0 safetensors==0.8.0`.
BYTES of the bundled text are evaluated, by default 100,000, which takes ten minutes on two cores.
"""

import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

binary, folder = sys.argv[1], Path(sys.argv[2])
count = int(sys.argv[3]) if len(sys.argv) > 3 else 100_000
root = Path(__file__).resolve().parent.parent
text = gzip.open(root / "data/wordnet-glosses.txt.gz").read(count).decode()
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
cross_entropy = torch.nn.functional.cross_entropy


def ottava(*args):
    command = [binary, *args, "--recipe", "fp32", "--device", "cpu", "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def strided(ids, max_length, stride):
    """Loss and tokens counted, as the perplexity script of transformers' documentation has it."""
    total, tokens, counted = 0.0, 0, 1
    for begin in range(0, len(ids), stride):
        end = min(begin + max_length, len(ids))
        window = torch.tensor(ids[begin:end])
        fresh = end - counted
        if fresh > 0:
            logits = model(window[None]).logits[0, :-1].double()
            total += cross_entropy(logits[-fresh:], window[1:][-fresh:], reduction="sum").item()
            tokens, counted = tokens + fresh, end
        if end == len(ids):
            return total / tokens, tokens


failed = False


def compare(name, ours, theirs, limit):
    global failed
    error = abs(ours - theirs) / abs(theirs)
    failed |= not error <= limit
    print(f"{name}: ottava {ours:.7f}, transformers {theirs:.7f}, relative difference {error:.1e}", flush=True)


with torch.no_grad(), tempfile.TemporaryDirectory() as work:
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"][:64])
    logits = model(ids[None]).logits[0]
    save_file({"ids": ids.int(), "logits": logits.contiguous()}, folder / "transformers.safetensors")

    prompt = "Once upon a time there was a small otter who"
    start = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    greedy = model.generate(**start, do_sample=False, max_new_tokens=64)[0, start["input_ids"].shape[1] :]
    theirs = tokenizer.decode(greedy, skip_special_tokens=True)
    ours = ottava("generate", str(folder), "--prompt", prompt, "--max-new-tokens", "64")["text"]
    failed |= ours != theirs
    print(f"greedy text of {len(greedy)} tokens is {'identical' if ours == theirs else 'not identical'}: {theirs!r}", flush=True)
    if ours != theirs:
        print(f"ottava: {ours!r}")

    # BOS is the first token of the document where it stands in its text.
    for name, document, windows in [
        ("loss", text, ["--max-length", "1024"]),
        ("loss with BOS", tokenizer.bos_token + text, ["--max-length", "1024"]),
        ("loss in strides of 256", text[: count // 5], ["--max-length", "512", "--stride", "256"]),
    ]:
        path = Path(work) / "text.txt"
        path.write_text(document)
        ours = ottava("eval", str(folder), "--data", str(path), *windows)
        end = ours["preceding_id"]
        ids = [end] + tokenizer(document, add_special_tokens=False)["input_ids"] + [end]
        # A window of transformers has its last target too.
        loss, tokens = strided(ids, ours["max_length"] + 1, ours["stride"])
        assert tokens == ours["tokens"], f"{tokens} tokens, ottava counts {ours['tokens']}"
        compare(f"{name} of {tokens} tokens", ours["loss"], loss, 1e-5)
sys.exit(failed)
