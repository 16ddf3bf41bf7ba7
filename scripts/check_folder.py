"""Loads a model folder with transformers, and an adapter with peft if one is named, without a warning, and compares its loss with that of
`ottava eval`.

usage: check_folder.py OTTAVA_BINARY MODEL_FOLDER TEXT_FILE SEQ_LEN [DEVICE [ADAPTER]]
"""
import json
import logging
import subprocess
import sys
import warnings

import torch
import transformers

binary, folder, text_file, seq_len = sys.argv[1:4] + [int(sys.argv[4])]
device = sys.argv[5] if len(sys.argv) > 5 else "cpu"
adapter = sys.argv[6] if len(sys.argv) > 6 else None

complaints = []
handler = logging.Handler(logging.WARNING)
handler.emit = lambda record: complaints.append(record.getMessage())
transformers.utils.logging.get_logger("transformers").addHandler(handler)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    # The text model of a vision-language model is read inside the whole model.
    is_whole = hasattr(transformers.AutoConfig.from_pretrained(folder), "text_config")
    kind = transformers.AutoModelForImageTextToText if is_whole else transformers.AutoModelForCausalLM
    model, info = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    if adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter).eval()
complaints += [str(w.message) for w in caught if "transformers" in str(w.filename) and not (adapter and w.category is FutureWarning)]
complaints += [f"{kind}: {keys}" for kind, keys in info.items() if keys]
print("warnings while loading:", complaints or "none")

command = [binary, "eval", folder, "--data", text_file, "--max-length", str(seq_len), "--recipe", "fp32", "--device", device, "--json"]
command += ["--adapter", adapter] if adapter else []
ours = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

# As `ottava eval` does: the end of the text before is the context of the first token, and the text is cut into windows.
eos = ours["preceding_id"]
with open(text_file, encoding="utf-8") as file:
    ids = [eos] + tokenizer(file.read(), add_special_tokens=False)["input_ids"] + [eos]
total, count = 0.0, 0
with torch.no_grad():
    for start in range(0, len(ids) - 1, seq_len):
        window = torch.tensor([ids[start : start + seq_len + 1]])
        logits = model(window[:, :-1]).logits
        total += torch.nn.functional.cross_entropy(logits[0].double(), window[0, 1:], reduction="sum").item()
        count += window.shape[1] - 1
theirs = total / count
print(f"transformers {theirs:.7f} over {count} tokens, ottava {ours['loss']:.7f} over {ours['tokens']} tokens")
difference = abs(theirs - ours["loss"]) / theirs
print(f"relative difference {difference:.2e}")
sys.exit(0 if not complaints and count == ours["tokens"] and difference < 1e-5 else 1)
