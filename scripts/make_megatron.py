"""Records `tests/data/megatron/` of ottava-lm: small checkpoints in the layout of Megatron-LM's `GPTModel` (format `torch`), each rank's file as
Megatron saves it, and SHA-256, shape and first values of the weights of the same model in a Hugging Face folder, in F32.

usage: make_megatron.py FOLDER    Needs `pip install torch==2.15.0 numpy`.

The layout is that of Megatron-LM's own converter (tools/checkpoint/loader_llama_mistral.py): rows of linear_qkv are, for each group of heads, its
queries, its key and its value; linear_fc1 of a rank is its share of gate and then its share of up; linear_proj and linear_fc2 are divided by
columns; tables are padded.
"""

import argparse
import hashlib
import io
import json
import os
import random
import sys
import types
from pathlib import Path

import numpy as np
import torch

folder = Path(sys.argv[1])

# Megatron's arguments hold members of its enumerations, whose classes need not be there to be read.
enums = types.ModuleType("megatron.core.enums")
sys.modules.update({"megatron": types.ModuleType("megatron"), "megatron.core": types.ModuleType("megatron.core"), "megatron.core.enums": enums})


class ModelType:
    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return (ModelType, (self.value,))


ModelType.__module__, ModelType.__qualname__, enums.ModelType = "megatron.core.enums", "ModelType", ModelType


def record(name, layers, hidden, heads, groups, dim, ffn, vocab, tensor, pipeline, tied, qk_norm, qkv_bias, fused_norms):
    torch.manual_seed(7)
    weights = {}

    def new(key, *shape):
        weights[key] = (torch.randn(*shape) * 0.1).bfloat16()
        return weights[key]

    padded = -(-vocab // (8 * tensor)) * 8 * tensor
    pad = lambda table: torch.cat([table, torch.zeros(padded - vocab, hidden).bfloat16()])
    embedding = new("model.embed_tokens.weight", vocab, hidden)
    stages = [[{} for _ in range(tensor)] for _ in range(pipeline)]

    def put(stage, key, parts):
        for rank, part in zip(stages[stage], parts):
            rank[key] = part.contiguous()

    put(0, "embedding.word_embeddings.weight", pad(embedding).chunk(tensor))
    for layer in range(layers):
        stage, local = layer // (layers // pipeline), layer % (layers // pipeline)
        theirs, ours = f"decoder.layers.{local}.", f"model.layers.{layer}."
        norms = ["self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"]
        norms = norms if fused_norms else ["input_layernorm.weight", "pre_mlp_layernorm.weight"]
        for key, own in zip(norms, ["input_layernorm", "post_attention_layernorm"]):
            put(stage, theirs + key, [new(f"{ours}{own}.weight", hidden)] * tensor)
        for kind, width in [("weight", [hidden])] + ([("bias", [])] if qkv_bias else []):
            q, k, v = (new(f"{ours}self_attn.{p}_proj.{kind}", n * dim, *width) for p, n in [("q", heads), ("k", groups), ("v", groups)])
            qkv = torch.cat([q.reshape(groups, heads // groups * dim, *width), k.reshape(groups, dim, *width), v.reshape(groups, dim, *width)], 1)
            put(stage, f"{theirs}self_attention.linear_qkv.{kind}", qkv.reshape(-1, *width).chunk(tensor))
        if qk_norm:
            for p in "qk":
                put(stage, f"{theirs}self_attention.{p}_layernorm.weight", [new(f"{ours}self_attn.{p}_norm.weight", dim)] * tensor)
        put(stage, theirs + "self_attention.linear_proj.weight", new(ours + "self_attn.o_proj.weight", hidden, heads * dim).chunk(tensor, 1))
        gate, up = (new(f"{ours}mlp.{p}_proj.weight", ffn, hidden).chunk(tensor) for p in ["gate", "up"])
        put(stage, theirs + "mlp.linear_fc1.weight", [torch.cat(pair) for pair in zip(gate, up)])
        put(stage, theirs + "mlp.linear_fc2.weight", new(ours + "mlp.down_proj.weight", hidden, ffn).chunk(tensor, 1))
        if fused_norms:
            put(stage, theirs + "self_attention.linear_qkv._extra_state", [torch.empty(0, dtype=torch.uint8)] * tensor)
    put(pipeline - 1, "decoder.final_layernorm.weight", [new("model.norm.weight", hidden)] * tensor)
    if not tied:
        put(pipeline - 1, "output_layer.weight", pad(new("lm_head.weight", vocab, hidden)).chunk(tensor))
    elif pipeline > 1:
        put(pipeline - 1, "output_layer.weight", pad(embedding).chunk(tensor))

    args = argparse.Namespace(
        num_layers=layers, hidden_size=hidden, ffn_hidden_size=ffn, num_attention_heads=heads, group_query_attention=groups != heads,
        num_query_groups=groups, kv_channels=dim, max_position_embeddings=64, norm_epsilon=1e-6, rotary_base=10000, rotary_percent=1.0,
        normalization="RMSNorm", swiglu=True, position_embedding_type="rope", add_bias_linear=False, add_qkv_bias=qkv_bias,
        qk_layernorm=qk_norm, untie_embeddings_and_output_weights=not tied, padded_vocab_size=padded, vocab_size=vocab,
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, params_dtype=torch.bfloat16,
        model_type=ModelType(1), data_path=["a", "b"], lr=1e-4, world_size=tensor * pipeline, rampup_batch_size=None,
    )
    for stage, ranks in enumerate(stages):
        for rank, model in enumerate(ranks):
            path = folder / name / "iter_0000005" / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pipeline > 1 else ""))
            path.mkdir(parents=True, exist_ok=True)
            rng = {"random_rng_state": random.getstate()[:1], "np_rng_state": np.random.RandomState(1).randn(2), "torch_rng_state": torch.zeros(4, dtype=torch.uint8)}
            state = {"args": args, "checkpoint_version": 3.0, "iteration": 5, "model": model, "opt_param_scheduler": {"lr": 1e-4}, "rng_state": [rng], "extra": io.BytesIO(b"x")}
            torch.save(state, path / "model_optim_rng.pt")
    (folder / name / "latest_checkpointed_iteration.txt").write_text("5")
    expected = {}
    for key, value in weights.items():
        value = value.float()
        digest = hashlib.sha256(value.numpy().tobytes()).hexdigest()
        expected[key] = {"shape": list(value.shape), "sha256": digest, "first": value.flatten()[:4].tolist()}
    (folder / name / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


os.makedirs(folder, exist_ok=True)
record("tp2-pp2", 4, 16, 8, 4, 4, 24, 30, 2, 2, tied=False, qk_norm=True, qkv_bias=False, fused_norms=True)
record("tp2", 2, 16, 4, 2, 4, 24, 30, 2, 1, tied=True, qk_norm=False, qkv_bias=True, fused_norms=False)
