#!/usr/bin/env python3
"""Compares small random models that `ottava export --format gguf` wrote, as llama.cpp computes them, with the same folders in `ottava serve`.

usage: check_gguf_llama_cpp.py PROGRAM

PROGRAM is the built `ottava`. The models are a Llama, a Gemma 2 and a Gemma 3 with tokenizers of SentencePiece
(crates/ottava-train/tests/data/sentencepiece.json); prompts are longer than the window of attention. Prints how many prompts have the same tokens,
and how far log-probabilities of the next token are apart in F32. Needs `pip install numpy safetensors xllamacpp`, which contains llama.cpp.
"""

import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import numpy as np
import xllamacpp
from safetensors.numpy import save_file

PROGRAM = sys.argv[1]
RECORDED = json.loads((Path(__file__).resolve().parent.parent / "crates/ottava-train/tests/data/sentencepiece.json").read_text())
CHANNELS, HIDDEN, HEADS, KV_HEADS, HEAD, ROWS = 96, 160, 6, 2, 32, 602
PROMPTS = RECORDED["texts"] + ["the otter is a mammal that lives in water and eats fish; it has webbed feet, a long tail  and brown fur. " * 2]
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 16, "query_pre_attn_scalar": HEAD, "tie_word_embeddings": True}
MODELS = {
    "llama": ("llama", {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2}),
    "gemma2": ("gemma", {**GEMMA, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "num_hidden_layers": 4,
                         "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("gemma", {**GEMMA, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 7,
                         "rope_theta": 1e6, "rope_local_base_freq": 1e4}),
}


def tensors(name, config):
    random = np.random.default_rng(1)
    shapes = {"model.embed_tokens.weight": (ROWS, CHANNELS), "model.norm.weight": (CHANNELS,)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    if name != "llama":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    else:
        shapes["lm_head.weight"] = (ROWS, CHANNELS)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.{norm}.weight": (CHANNELS,) for norm in norms}
        for linear, rows in [("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)]:
            shapes[f"{layer}.self_attn.{linear}_proj.weight"] = (rows * HEAD, CHANNELS)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (CHANNELS, HEADS * HEAD)
        shapes |= {f"{layer}.mlp.{linear}_proj.weight": (HIDDEN, CHANNELS) for linear in ["gate", "up"]}
        shapes[f"{layer}.mlp.down_proj.weight"] = (CHANNELS, HIDDEN)
        if name == "gemma3":
            shapes |= {f"{layer}.self_attn.{norm}_norm.weight": (HEAD,) for norm in "qk"}
    return {name: random.normal(scale=0.2, size=shape).astype(np.float32) for name, shape in shapes.items()}


def write(folder, name):
    tokenizer, config = MODELS[name]
    folder.mkdir()
    config = {"hidden_size": CHANNELS, "intermediate_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
              "head_dim": HEAD, "vocab_size": ROWS, "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2,
              "dtype": "float32", **config}
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    for file, content in [("config.json", config), ("tokenizer.json", RECORDED[tokenizer]["tokenizer"]), ("tokenizer_config.json", names)]:
        (folder / file).write_text(json.dumps(content))
    save_file(tensors(name, config), folder / "model.safetensors", {"format": "pt"})


def post(address, path, body):
    request = urllib.request.Request(address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.loads(urllib.request.urlopen(request).read())


def ours(folder):
    """Tokens of each prompt, and the log-probabilities of its 20 likeliest next tokens."""
    server = subprocess.Popen([PROGRAM, "serve", folder, "--device", "cpu", "--port", "0", "--recipe", "fp32"], stderr=subprocess.PIPE, text=True)
    address = next(found[0] for line in server.stderr if (found := re.search(r"http://\S+", line)))
    for prompt in PROMPTS:
        ids = post(address, "/tokenize", {"prompt": prompt})["tokens"]
        body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": 20}
        top = post(address, "/v1/completions", body)["choices"][0]["logprobs"]["top_logprobs"][0]
        yield ids, list(top.values())
    server.terminate()


def theirs(file):
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.warmup, params.n_gpu_layers = str(file), 256, False, 0
    params.cpuparams.n_threads = params.n_parallel = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    for prompt in PROMPTS:
        ids = post(server.listening_address, "/tokenize", {"content": prompt, "add_special": True})["tokens"]
        done = post(server.listening_address, "/completion", {"prompt": ids, "n_predict": 1, "temperature": -1.0, "n_probs": 20})
        # llama.cpp leaves them out if the next token has no text.
        yield ids, [entry["logprob"] for of_token in done.get("completion_probabilities", []) for entry in of_token["top_logprobs"]]


with tempfile.TemporaryDirectory() as root:
    for name in MODELS:
        folder, output = Path(root) / name, Path(root) / f"{name}-gguf"
        write(folder, name)
        subprocess.run([PROGRAM, "export", folder, output, "--format", "gguf", "--dtype", "float32"], check=True, stdout=subprocess.DEVNULL)
        expected, found = list(ours(folder)), list(theirs(output / "model.gguf"))
        same = sum(ours == theirs for (ours, _), (theirs, _) in zip(expected, found))
        # The answer of `serve` has one of several tokens with the same text, such as incomplete bytes.
        pairs = [(ours, theirs) for (_, ours), (_, theirs) in zip(expected, found) if theirs]
        apart = max(np.abs(np.subtract.outer(ours, theirs)).min(axis=1).max() for ours, theirs in pairs)
        longest = max(len(ids) for ids, _ in expected)
        print(f"{name}: {same} of {len(PROMPTS)} prompts of up to {longest} tokens have the same ids; "
              f"log-probabilities after {len(pairs)} of them differ by at most {apart:.2g}")
