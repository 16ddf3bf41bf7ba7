"""Writes a tiny model, its tokenizer, text and the file of a run into a folder, for scripts that check the surroundings of a run."""

import json
import pathlib

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 100, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip

RUN = """output_dir = "run"
device = "cpu"
[model]
path = "model"
init = "random"
[data]
train_files = ["text.txt"]
val_set_size = 2
max_length = 16
[data.records]
text_documents = "line"
[training]
max_steps = 6
per_device_train_batch_size = 2
[lr_scheduler]
warmup_steps = 1
"""


def write(folder):
    """Writes the files into `folder`."""
    folder = pathlib.Path(folder)
    (folder / "model").mkdir(parents=True)
    vocab = {"<|endoftext|>": 0} | {chr(code): number for number, code in enumerate([*range(32, 127), 10], 1)}
    end = {"id": 0, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {"version": "1.0", "added_tokens": [end], "model": {"type": "BPE", "vocab": vocab, "merges": []}}
    (folder / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    (folder / "text.txt").write_text("".join(f"line {i * i} of the text\n" for i in range(30)))
    (folder / "run.toml").write_text(RUN)
