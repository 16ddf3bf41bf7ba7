"""Records `tests/data/megatron/` of ottava-train: small checkpoints in the layout of Megatron-LM's `GPTModel`, as its ranks save them, and SHA-256,
shape and first values of the weights of the same model in a Hugging Face folder, in F32. `NAME` has the format `torch`, a file for each rank;
`NAME-dist` has the same weights in the format `torch_dist`, which torch.distributed.checkpoint writes from a process for each rank. `NAME/logits.json`
has the logits of some tokens, which `forward` computes of the ranks' own tensors, as Megatron's GPTModel does and without a name of Hugging Face.

usage: make_megatron.py FOLDER    Needs `pip install torch==2.15.0 numpy`.

The layout is that of Megatron-LM's own converter (tools/checkpoint/loader_llama_mistral.py): rows of linear_qkv are, for each group of heads, its
queries, its key and its value; linear_fc1 of a rank is its share of gate and then its share of up; linear_proj and linear_fc2 are divided by
columns; tables are padded. Names and offsets of the format `torch_dist` are those of Megatron core's `sharded_state_dict`, whose tensors are the
model's: with blocks on a first axis and gate before up, or, as of `singleton_local_shards`, with a number and two names.
"""

import argparse
import hashlib
import io
import json
import os
import random
import sys
import tempfile
import types
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

# Metadata name the folder as it was given.
os.makedirs(sys.argv[1], exist_ok=True)
os.chdir(sys.argv[1])
folder = Path()

# Megatron's arguments hold members of its enumerations, whose classes need not be there to be read.
enums = types.ModuleType("megatron.core.enums")
sys.modules.update({"megatron": types.ModuleType("megatron"), "megatron.core": types.ModuleType("megatron.core"), "megatron.core.enums": enums})


class ModelType:
    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return (ModelType, (self.value,))


ModelType.__module__, ModelType.__qualname__, enums.ModelType = "megatron.core.enums", "ModelType", ModelType


class Planner(dcp.DefaultSavePlanner):
    """Writes a rank's shards, lists of offsets, shape of the whole and values by name, and objects that are bytes already."""

    def create_local_plan(self):
        items, self.parts = [], {}
        for name, value in self.state_dict.items():
            if isinstance(value, io.BytesIO):
                items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
                self.parts[items[-1].index] = value
                continue
            for offsets, shape, part in value:
                chunk = ChunkStorageMetadata(torch.Size(offsets), part.shape)
                data = TensorWriteData(chunk, TensorProperties.create_from_tensor(part), torch.Size(shape))
                items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
                self.parts[items[-1].index] = part
        return dcp.SavePlan(items)

    def lookup_object(self, index):
        return self.parts[index]

    def transform_object(self, write_item, object):
        return object


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file


def shards(key, part, axis, rank, tensor, block, layers, numbered):
    """Name, offsets, shape of the whole and values of the shards of a rank's tensor, which is one of `tensor` along `axis`."""
    parts = [(key, part, rank, tensor)]
    if key == "mlp.linear_fc1.weight":
        gate, up = part.chunk(2)
        parts = [(f"{key}_w", gate, rank, tensor), (f"{key}_v", up, rank, tensor)] if numbered else [(key, gate, rank, 2 * tensor), (key, up, rank + tensor, 2 * tensor)]
    for key, part, at, count in parts:
        offsets, shape = [0] * part.dim(), list(part.shape)
        if axis is not None:
            offsets[axis], shape[axis] = at * part.shape[axis], count * part.shape[axis]
        if block is None:
            yield key, offsets, shape, part
        elif numbered:
            yield f"decoder.layers.{block}.{key}", offsets, shape, part
        else:
            yield f"decoder.layers.{key}", [block, *offsets], [layers, *shape], part[None]


def save_rank(number, path, ranks, meeting):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=number, world_size=len(ranks))
    writer = dcp.FileSystemWriter(path, single_file_per_rank=True)
    dcp.save(ranks[number], storage_writer=writer, planner=Planner(flatten_state_dict=False))
    dist.destroy_process_group()


def save_distributed(path, stages, axes, layers, state, numbered, prefix=""):
    path.mkdir(parents=True, exist_ok=True)
    tensor, ranks = len(stages[0]), []
    for stage, of_stage in enumerate(stages):
        for rank, model in enumerate(of_stage):
            entries = {}
            for key, part in model.items():
                block, own = None, key
                if key.startswith("decoder.layers."):
                    local, own = key.removeprefix("decoder.layers.").split(".", 1)
                    block = stage * (layers // len(stages)) + int(local)
                if key.endswith("_extra_state"):
                    entries[f"{prefix}decoder.layers.{own}/shard_{block}_{layers}"] = saved([part])
                # Ranks that have the same whole leave it to the first.
                elif axes[key] is not None or rank == 0:
                    for name, *shard in shards(own, part, axes[key], rank, tensor, block, layers, numbered):
                        entries.setdefault(prefix + name, []).append(shard)
            entries[f"rng_state/shard_{stage}.{rank}_{len(stages)}.{tensor}"] = saved([state["rng_state"]])
            ranks.append(entries)
    ranks[0]["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = [([0], [3], torch.zeros(3))]
    ranks[0]["chained_0.optimizer.state.step"] = [([0], [1], torch.tensor([5]))]
    common = {key: value for key, value in state.items() if key not in ["model", "rng_state"]}
    if numbered:
        ranks[0]["common_state/shard_0_1"] = saved([common])
    else:
        torch.save(common, path / "common.pt")
    with tempfile.TemporaryDirectory() as meeting:
        torch.multiprocessing.start_processes(save_rank, (path, ranks, f"{meeting}/file"), len(ranks), start_method="fork")
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))


def normalized(x, weight, epsilon):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + epsilon) * weight


def rotated(x, base, interleaved):
    """Rotary positions of `x` [tokens, ..., dim], of the halves of a head or of neighbours in it: `_rotate_half` and `get_emb` of Megatron core."""
    tokens, dim = x.shape[0], x.shape[-1]
    angles = np.arange(tokens)[:, None] / base ** (np.arange(0, dim, 2) / dim)
    turned = np.empty_like(x)
    if interleaved:
        angles = np.repeat(angles, 2, 1)
        turned[..., 0::2], turned[..., 1::2] = -x[..., 1::2], x[..., 0::2]
    else:
        angles = np.concatenate([angles, angles], 1)
        turned[..., : dim // 2], turned[..., dim // 2 :] = -x[..., dim // 2 :], x[..., : dim // 2]
    angles = angles.reshape(tokens, *[1] * (x.ndim - 2), dim)
    return x * np.cos(angles) + turned * np.sin(angles)


def forward(stages, args, ids):
    """Logits [tokens, vocabulary] of GPTModel in binary64, each rank with its own tensors: shares of heads and of the MLP are added up."""
    stages = [[{key: value.double().numpy() for key, value in rank.items()} for rank in ranks] for ranks in stages]
    tensor, dim, epsilon = len(stages[0]), args.kv_channels, args.norm_epsilon
    x = np.concatenate([rank["embedding.word_embeddings.weight"] for rank in stages[0]])[ids]
    causal = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
    for ranks in stages:
        for layer in range(args.num_layers // len(stages)):
            own = [{key.removeprefix(f"decoder.layers.{layer}."): value for key, value in rank.items()} for rank in ranks]
            norms = [("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"), ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")]
            norms = [own[0][fused] if fused in own[0] else own[0][alone] for fused, alone in norms]
            read, sums = normalized(x, norms[0], epsilon), 0
            for rank in own:
                mixed = read @ rank["self_attention.linear_qkv.weight"].T + rank.get("self_attention.linear_qkv.bias", 0)
                groups = args.num_query_groups // tensor
                mixed = mixed.reshape(len(ids), groups, -1, dim)
                q, k, v = mixed[:, :, :-2], mixed[:, :, -2:-1], mixed[:, :, -1]
                if args.qk_layernorm:
                    q, k = (normalized(value, rank[f"self_attention.{name}_layernorm.weight"], epsilon) for value, name in [(q, "q"), (k, "k")])
                q, k = (rotated(value, args.rotary_base, args.rotary_interleaved) for value in [q, k])
                scores = np.einsum("tghd,sgd->ghts", q, k[:, :, 0]) / np.sqrt(dim) + causal
                shares = np.exp(scores - scores.max(-1, keepdims=True))
                shares /= shares.sum(-1, keepdims=True)
                heads = np.einsum("ghts,sgd->tghd", shares, v).reshape(len(ids), -1)
                sums = sums + heads @ rank["self_attention.linear_proj.weight"].T
            x = x + sums
            read, sums = normalized(x, norms[1], epsilon), 0
            for rank in own:
                gate, up = np.split(read @ rank["mlp.linear_fc1.weight"].T, 2, -1)
                sums = sums + (gate / (1 + np.exp(-gate)) * up) @ rank["mlp.linear_fc2.weight"].T
            x = x + sums
    last = stages[-1]
    x = normalized(x, last[0]["decoder.final_layernorm.weight"], epsilon)
    tables = [rank["output_layer.weight"] if args.untie_embeddings_and_output_weights else rank["embedding.word_embeddings.weight"] for rank in last]
    return x @ np.concatenate(tables)[: args.vocab_size].T


def record(name, layers, hidden, heads, groups, dim, ffn, vocab, tensor, pipeline, tied, qk_norm, qkv_bias, fused_norms, numbered, interleaved=None, prefix="", nemo=False):
    """`interleaved` says which channels of a head rotary positions turn, in a model whose attention depends on them, with its logits. Names begin
    with `prefix`. A checkpoint of NeMo has a prefix, no arguments and the folder `weights`."""
    torch.manual_seed(7)
    weights, axes = {}, {}

    def new(key, *shape):
        value = torch.randn(*shape) * (0.1 if interleaved is None else 0.35)
        weights[key] = (value + 1 if interleaved is not None and "norm" in key else value).bfloat16()
        return weights[key]

    padded = -(-vocab // (8 * tensor)) * 8 * tensor
    pad = lambda table: torch.cat([table, torch.zeros(padded - vocab, hidden).bfloat16()])
    embedding = new("model.embed_tokens.weight", vocab, hidden)
    stages = [[{} for _ in range(tensor)] for _ in range(pipeline)]

    def put(stage, key, parts, axis=None):
        axes[key] = axis
        for rank, part in zip(stages[stage], parts):
            rank[key] = part.contiguous()

    put(0, "embedding.word_embeddings.weight", pad(embedding).chunk(tensor), 0)
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
            put(stage, f"{theirs}self_attention.linear_qkv.{kind}", qkv.reshape(-1, *width).chunk(tensor), 0)
        if qk_norm:
            for p in "qk":
                put(stage, f"{theirs}self_attention.{p}_layernorm.weight", [new(f"{ours}self_attn.{p}_norm.weight", dim)] * tensor)
        put(stage, theirs + "self_attention.linear_proj.weight", new(ours + "self_attn.o_proj.weight", hidden, heads * dim).chunk(tensor, 1), 1)
        gate, up = (new(f"{ours}mlp.{p}_proj.weight", ffn, hidden).chunk(tensor) for p in ["gate", "up"])
        put(stage, theirs + "mlp.linear_fc1.weight", [torch.cat(pair) for pair in zip(gate, up)], 0)
        put(stage, theirs + "mlp.linear_fc2.weight", new(ours + "mlp.down_proj.weight", hidden, ffn).chunk(tensor, 1), 1)
        if fused_norms:
            put(stage, theirs + "self_attention.linear_qkv._extra_state", [torch.empty(0, dtype=torch.uint8)] * tensor)
    put(pipeline - 1, "decoder.final_layernorm.weight", [new("model.norm.weight", hidden)] * tensor)
    if not tied:
        put(pipeline - 1, "output_layer.weight", pad(new("lm_head.weight", vocab, hidden)).chunk(tensor), 0)
    elif pipeline > 1:
        put(pipeline - 1, "output_layer.weight", pad(embedding).chunk(tensor), 0)

    args = argparse.Namespace(
        num_layers=layers, hidden_size=hidden, ffn_hidden_size=ffn, num_attention_heads=heads, group_query_attention=groups != heads,
        num_query_groups=groups, kv_channels=dim, max_position_embeddings=64, norm_epsilon=1e-6, rotary_base=10000, rotary_percent=1.0,
        normalization="RMSNorm", swiglu=True, position_embedding_type="rope", add_bias_linear=False, add_qkv_bias=qkv_bias,
        qk_layernorm=qk_norm, untie_embeddings_and_output_weights=not tied, padded_vocab_size=padded, vocab_size=vocab,
        tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, params_dtype=torch.bfloat16,
        model_type=ModelType(1), data_path=["a", "b"], lr=1e-4, world_size=tensor * pipeline, rampup_batch_size=None,
    )
    if interleaved is not None:
        args.rotary_interleaved = interleaved
    rng = {"random_rng_state": random.getstate()[:1], "np_rng_state": np.random.RandomState(1).randn(2), "torch_rng_state": torch.zeros(4, dtype=torch.uint8)}
    state = {"args": args, "checkpoint_version": 3.0, "iteration": 5, "model": None, "opt_param_scheduler": {"lr": 1e-4}, "rng_state": [rng], "extra": io.BytesIO(b"x")}
    for stage, ranks in enumerate(stages):
        for rank, model in enumerate(ranks):
            path = folder / name / "iter_0000005" / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pipeline > 1 else ""))
            path.mkdir(parents=True, exist_ok=True)
            torch.save({**state, "model": {prefix + key: value for key, value in model.items()}}, path / "model_optim_rng.pt")
    (folder / name / "latest_checkpointed_iteration.txt").write_text("5")
    if interleaved is not None:
        ids = [3, 1, 4, 1, 5, 9, 2, 6]
        logits = [[round(value, 7) for value in row] for row in forward(stages, args, ids).tolist()]
        (folder / name / "logits.json").write_text(json.dumps({"ids": ids, "logits": logits}) + "\n")
        if nemo:
            state.pop("args")
            save_distributed(folder / "nemo" / "weights", stages, axes, layers, state, numbered, "module.")
        return
    save_distributed(folder / f"{name}-dist" / "iter_0000005", stages, axes, layers, state, numbered)
    (folder / f"{name}-dist" / "latest_checkpointed_iteration.txt").write_text("5")
    expected = {}
    for key, value in weights.items():
        value = value.float()
        digest = hashlib.sha256(value.numpy().tobytes()).hexdigest()
        expected[key] = {"shape": list(value.shape), "sha256": digest, "first": value.flatten()[:4].tolist()}
    (folder / name / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


record("tp2-pp2", 4, 16, 8, 4, 4, 24, 30, 2, 2, tied=False, qk_norm=True, qkv_bias=False, fused_norms=True, numbered=False)
record("tp2", 2, 16, 4, 2, 4, 24, 30, 2, 1, tied=True, qk_norm=False, qkv_bias=True, fused_norms=False, numbered=True)
record("halves", 2, 16, 8, 4, 8, 24, 30, 2, 2, tied=False, qk_norm=True, qkv_bias=False, fused_norms=True, numbered=False, interleaved=False, nemo=True)
record("interleaved-norm", 1, 16, 8, 4, 8, 24, 30, 2, 1, tied=False, qk_norm=True, qkv_bias=False, fused_norms=True, numbered=False, interleaved=True)
record("interleaved-bias", 1, 16, 4, 2, 8, 24, 30, 2, 1, tied=True, qk_norm=False, qkv_bias=True, fused_norms=False, numbered=True, interleaved=True, prefix="module.")
