#!/usr/bin/env python3
"""Rates of Transformer Engine and transformers on one GPU, to compare with `ottava bench` in the same run.

    bench_peers.py train [--recipes delayed,current,block,bf16]    training steps of Llama-2-7B's shape with Transformer Engine
    bench_peers.py decode [--batches 1,16,64,256]                  decoding of Llama-3-8B's shape with transformers, in BF16
    bench_peers.py qlora                                           adapters on Llama-2-70B's shape in NF4, with PEFT and bitsandbytes

Weights and tokens are random. Training: two sequences of 4,096 tokens per step, TransformerLayer with fused norms, QKV and SwiGLU, cuDNN attention,
fused AdamW with BF16 states, head and loss in BF16 under torch.compile. `--clip` adds the clipping of gradients by their norm, as `ottava` does it.
Adapters: one sequence of 2,048 tokens per step, r 16 on all linears of the blocks, gradient checkpointing, fused AdamW. Decoding: greedy, each sequence after a context of 1,024 random keys and values. `--compile` takes a static cache and compiles the forward pass.
"""
import argparse
import gc
import statistics
import time

import torch


def integers(text):
    return [int(part) for part in text.split(",")]


def seconds(work):
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def train(recipe, steps, clip):
    from importlib.metadata import version

    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    hidden, intermediate, heads, layers, vocabulary, batch, sequence = 4096, 11008, 32, 32, 32000, 2, 4096
    scaling = {
        "delayed": lambda: recipes.DelayedScaling(fp8_format=recipes.Format.HYBRID, amax_history_len=16, amax_compute_algo="max"),
        "current": recipes.Float8CurrentScaling,
        "block": recipes.Float8BlockScaling,
        "bf16": lambda: None,
    }[recipe]()
    options = dict(hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm", activation="swiglu", bias=False, fuse_qkv_params=True)
    options |= dict(attn_input_format="bshd", params_dtype=torch.bfloat16, device="cuda")
    blocks = torch.nn.ModuleList(
        te.TransformerLayer(hidden, intermediate, heads, layer_number=index + 1, **options) for index in range(layers)
    )
    embedding = torch.nn.Embedding(vocabulary, hidden, device="cuda", dtype=torch.bfloat16)
    norm = te.RMSNorm(hidden, params_dtype=torch.bfloat16, device="cuda")
    head = torch.nn.Linear(hidden, vocabulary, bias=False, device="cuda", dtype=torch.bfloat16)
    model = torch.nn.ModuleList([embedding, blocks, norm, head])
    rotation = te.RotaryPositionEmbedding(hidden // heads)(sequence).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    @torch.compile
    def loss_of(x, targets):
        return torch.nn.functional.cross_entropy(head(x).float().view(-1, vocabulary), targets.view(-1))

    def step():
        ids = torch.randint(0, vocabulary, (batch, sequence), device="cuda")
        x = embedding(ids)
        with te.autocast(enabled=scaling is not None, recipe=scaling):
            for block in blocks:
                x = block(x, rotary_pos_emb=rotation)
        loss_of(norm(x), ids).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    first = seconds(step)
    for _ in range(3):
        step()
    torch.cuda.reset_peak_memory_stats()
    median = statistics.median(seconds(step) for _ in range(steps))
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(
        f"Transformer Engine {version('transformer_engine')} {recipe}{', clipped' if clip else ''}: "
        f"{batch * sequence / median:.0f} tokens/s, {1e3 * median:.1f} ms, {peak:.1f} GiB, first step {first:.1f} s",
        flush=True,
    )


def decode(batches, compiled, context=1024, steps=20):
    import transformers
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        max_position_embeddings=8192, rope_theta=500000.0, attn_implementation="sdpa", dtype=torch.bfloat16,
    )
    with torch.device("cuda"), torch.no_grad():
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True) if compiled else model.forward
    for batch in batches:
        cache = StaticCache(config, max_cache_len=context + steps + 8) if compiled else DynamicCache(config=config)
        ids = torch.randint(0, config.vocab_size, (batch, 1), device="cuda")

        @torch.no_grad()
        def step(position):
            nonlocal ids
            places = torch.full((batch, 1), position, device="cuda")
            logits = forward(input_ids=ids, past_key_values=cache, position_ids=places, cache_position=places[0]).logits
            ids = logits[:, -1].argmax(-1, keepdim=True)

        with torch.no_grad():
            for index in range(config.num_hidden_layers):
                keys = torch.randn(batch, 8, context, 128, device="cuda", dtype=torch.bfloat16)
                cache.update(keys, keys.clone(), index, {"cache_position": torch.arange(context, device="cuda")})
        for warm in range(4):
            step(context + warm)
        median = statistics.median(seconds(lambda: step(context + 4 + index)) for index in range(steps))
        print(
            f"transformers {transformers.__version__}{', static cache, compiled' if compiled else ''}, batch {batch}: "
            f"{batch / median:.0f} tokens/s, {1e3 * median:.2f} ms",
            flush=True,
        )
        del cache
        gc.collect()
        torch.cuda.empty_cache()


def qlora(steps, tokens=2048):
    import bitsandbytes
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        max_position_embeddings=4096, attn_implementation="sdpa", dtype=torch.bfloat16, use_cache=False,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        for layer in model.model.layers:
            for part in (layer.self_attn, layer.mlp):
                for name, linear in list(part.named_children()):
                    if isinstance(linear, torch.nn.Linear):
                        sizes = (linear.in_features, linear.out_features)
                        in_nf4 = bitsandbytes.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4")
                        setattr(part, name, in_nf4)
    model.is_loaded_in_4bit = True
    # The layers are made one by one, because a layer of 16-bit weights fits beside the quantized layers, and the whole model does not.
    for name, module in list(model.named_modules()):
        for of, parameter in list(module.named_parameters(recurse=False)):
            values = torch.randn(parameter.shape, device="cuda", dtype=torch.bfloat16) * 0.02
            if isinstance(module, bitsandbytes.nn.Linear4bit):
                values = bitsandbytes.nn.Params4bit(
                    values, requires_grad=False, quant_type="nf4", compress_statistics=True, module=module
                ).to("cuda")
            else:
                values = torch.nn.Parameter(torch.ones_like(values) if values.dim() == 1 else values, requires_grad=False)
            setattr(module, of, values)
        for of, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, of, torch.ones_like(buffer, device="cuda") / 2)
    torch.set_default_dtype(torch.float32)
    linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules=linears))
    model.train()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-4, fused=True)

    def step():
        ids = torch.randint(0, config.vocab_size, (1, tokens), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    torch.cuda.reset_peak_memory_stats()
    median = statistics.median(seconds(step) for _ in range(steps))
    peak = torch.cuda.max_memory_allocated() / 2**30
    versions = f"PEFT {peft.__version__}, bitsandbytes {bitsandbytes.__version__}"
    print(f"{versions}: {tokens / median:.0f} tokens/s, {1e3 * median:.1f} ms, {peak:.1f} GiB", flush=True)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("what", choices=["train", "decode", "qlora"])
parser.add_argument("--recipes", default="delayed,current,block,bf16")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--clip", action="store_true")
parser.add_argument("--batches", type=integers, default=[1, 16, 64, 256])
parser.add_argument("--compile", action="store_true")
arguments = parser.parse_args()
if not torch.cuda.is_available():
    parser.exit(1, "bench_peers.py needs a GPU, and torch finds none\n")
torch.manual_seed(0)
if arguments.what == "train":
    for recipe in arguments.recipes.split(","):
        train(recipe, arguments.steps, arguments.clip)
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
elif arguments.what == "qlora":
    qlora(arguments.steps)
else:
    decode(arguments.batches, arguments.compile)
