"""Tokenizes the texts of llama.cpp's test of GPT-2's vocabulary with `ottava prepare`, compares the ids with those recorded there from
transformers, decodes them again, and trains a step of a tiny GPT-2 whose folder must come out with the same tokenizer.

usage: check_gpt2_tokenizer.py OTTAVA SDIST    SDIST: `pip download --no-deps --no-binary llama-cpp-python llama-cpp-python==0.3.2`, whose
vendored llama.cpp (MIT) has the vocabulary. Needs `pip install gguf==0.19.0 tokenizers`.
"""

import array
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import gguf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

ottava, sdist = sys.argv[1:]
work = Path(tempfile.mkdtemp())
with tarfile.open(sdist) as archive:
    for member in archive.getmembers():
        if "models/ggml-vocab-gpt-2.gguf" in member.name:
            (work / Path(member.name).name).write_bytes(archive.extractfile(member).read())

fields = gguf.GGUFReader(work / "ggml-vocab-gpt-2.gguf").fields
tokens, merges = (fields[f"tokenizer.ggml.{key}"].contents() for key in ["tokens", "merges"])
model = models.BPE(
    {token: i for i, token in enumerate(tokens)}, [tuple(merge.split(" ")) for merge in merges]
)
tokenizer = Tokenizer(model)
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_special_tokens(["<|endoftext|>"])
gpt2 = work / "gpt2"
gpt2.mkdir()
tokenizer.save(str(gpt2 / "tokenizer.json"))
end = tokens.index("<|endoftext|>")
config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": len(tokens), "n_positions": 64, "n_embd": 16}
config |= {"n_layer": 1, "n_head": 2, "eos_token_id": end, "bos_token_id": end, "layer_norm_epsilon": 1e-5}
(gpt2 / "config.json").write_text(json.dumps(config))

texts = (work / "ggml-vocab-gpt-2.gguf.inp").read_text().split("\n__ggml_vocab_test__\n")
recorded = [[int(i) for i in line.split()] for line in (work / "ggml-vocab-gpt-2.gguf.out").read_text().split("\n")]
pairs = [(text, ids) for text, ids in zip(texts, recorded) if text]
(work / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text, _ in pairs))
(work / "run.toml").write_text(
    f"""output_dir = "{work}/run"
device = "cpu"
[model]
path = "{gpt2}"
init = "random"
[data]
train_files = ["{work}/texts.jsonl"]
cache_dir = "{work}/tokens"
val_set_size = 0
max_length = 32
[training]
max_steps = 1
"""
)
subprocess.run([ottava, "train", work / "run.toml"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
(folder,) = (work / "tokens").glob("tokens-*")
ids = array.array("H", (folder / "tokens-00000.bin").read_bytes())
starts = array.array("Q", (folder / "documents.bin").read_bytes())
assert len(starts) == len(pairs) + 1, f"{len(starts) - 1} documents of {len(pairs)}"
for (text, expected), start, stop in zip(pairs, starts, starts[1:]):
    found = list(ids[start:stop])
    assert found == expected + [end], f"{text!r}: {found}, recorded are {expected}"
    assert tokenizer.decode(found[:-1]) == text, f"{text!r} does not come back"
written = [path.read_bytes() == (gpt2 / "tokenizer.json").read_bytes() for path in (work / "run").rglob("tokenizer.json")]
assert written and all(written), "the tokenizer of the written folder differs"
print(f"{len(pairs)} texts have the ids that are recorded, and come back; the written folder has the same tokenizer")
