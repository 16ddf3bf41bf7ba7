#!/usr/bin/env python3
"""Rates of torch and transformers for mixtures of experts on one GPU, to compare with `ottava bench` in the same run.

    torch_experts.py products [--tokens 16384]      grouped GEMMs in BF16 and in FP8 with per-row scales (all 1)
    torch_experts.py train [--micro-batch 4]        training steps of OLMoE-1B-7B's shape with transformers in BF16
    torch_experts.py gpt-oss [--micro-batch 1]      decoding of gpt-oss-20b's shape, and steps of adapters on its attention with PEFT, in BF16

Group sizes are those of `ottava bench gemm --model`: 0.3 to 1.7 times the mean. Rates do not count padding. Training uses random tokens, grouped GEMMs,
torch.compile and fused AdamW; weights and optimizer states are BF16. gpt-oss has eager attention, which is the implementation of transformers that
supports its sinks without further packages; a step of adapters has rows of 4,096 tokens and gradient checkpointing.
"""
import argparse
import time

import torch

SHAPES = {
    "OLMoE gate and up": (64, 8, 2048, 2048),
    "OLMoE down": (64, 8, 2048, 1024),
    "Qwen3 gate and up": (128, 8, 1536, 2048),
    "Qwen3 down": (128, 8, 2048, 768),
}
ALIGNMENT = 128


def counts_of(rows, groups):
    weights = [300 + group * 7919 % 1401 for group in range(groups)]
    counts = [rows * weight // sum(weights) for weight in weights]
    counts[0] += rows - sum(counts)
    return counts


def milliseconds(work, at_least=40.0, rounds=10):
    """The median of rounds that take at least so many milliseconds each."""
    work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    repeats = max(1, int(at_least / 1e3 / (time.perf_counter() - start)))
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / repeats)
    return sorted(times)[rounds // 2]


def products(tokens):
    for name, (groups, chosen, outputs, inputs) in SHAPES.items():
        pairs = tokens * chosen
        counts = [-(-count // ALIGNMENT) * ALIGNMENT for count in counts_of(pairs, groups)]
        ends = torch.tensor(counts, device="cuda").cumsum(0).int()
        rows = int(ends[-1])
        x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        dy = torch.randn(rows, outputs, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(groups, outputs, inputs, device="cuda", dtype=torch.bfloat16)
        cases = {
            "bf16 fprop": lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends),
            "bf16 dgrad": lambda: torch._grouped_mm(dy, w, offs=ends),
            "bf16 wgrad": lambda: torch._grouped_mm(dy.t(), x, offs=ends),
        }

        def scaled(a, b, a_scale, b_scale, fast):
            return lambda: torch._scaled_grouped_mm(
                a, b, a_scale, b_scale, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast
            )

        one = lambda *shape: torch.ones(*shape, device="cuda")
        code = lambda t: t.to(torch.float8_e4m3fn)
        of_fprop = (code(x), code(w).transpose(1, 2), one(rows), one(groups, outputs))
        columns = code(w.transpose(1, 2).contiguous()).transpose(1, 2)
        of_dgrad = (code(dy), columns, one(rows), one(groups, inputs))
        transposed = (code(dy.t().contiguous()), code(x.t().contiguous()).t())
        of_wgrad = (*transposed, one(groups * outputs), one(groups * inputs))
        for fast in (True, False):
            sums = "fast" if fast else "exact"
            for product, operands in (("fprop", of_fprop), ("dgrad", of_dgrad), ("wgrad", of_wgrad)):
                cases[f"fp8 by rows {product}, {sums}"] = scaled(*operands, fast)
        for case, work in cases.items():
            try:
                rate = 2 * pairs * outputs * inputs / milliseconds(work) / 1e9
                print(f"{name}, {outputs} x {inputs}: {case} {rate:.0f} TFLOP/s", flush=True)
            except Exception as error:
                print(f"{name}: {case} failed: {str(error).splitlines()[0]}", flush=True)
                torch.cuda.synchronize()


def train(micro_batch, sequence=4096, steps=8):
    import transformers
    from transformers import OlmoeConfig, OlmoeForCausalLM

    config = OlmoeConfig(intermediate_size=1024, attn_implementation="sdpa", experts_implementation="grouped_mm", use_cache=False)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = OlmoeForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    model.train()
    # Head and loss are those of transformers, which does not chunk the logits.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    compiled = torch.compile(model)
    times = []
    for step in range(steps):
        ids = torch.randint(0, config.vocab_size, (micro_batch, sequence), device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        print(f"step {step}: loss {loss.item():.3f}, {1e3 * times[-1]:.1f} ms", flush=True)
    median = sorted(times[3:])[len(times[3:]) // 2]
    peak = torch.cuda.max_memory_allocated() / 2**30
    parameters = sum(p.numel() for p in model.parameters()) / 1e9
    print(
        f"transformers {transformers.__version__}, torch {torch.__version__}, {parameters:.2f} G parameters, micro-batch {micro_batch}: "
        f"{micro_batch * sequence / median:.0f} tokens/s, {1e3 * median:.1f} ms, {peak:.1f} GiB"
    )


def gpt_oss(micro_batch, sequence=4096, steps=6, context=1024):
    import transformers
    from transformers import DynamicCache, GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        num_hidden_layers=24, num_local_experts=32, num_experts_per_tok=4, vocab_size=201088, hidden_size=2880, intermediate_size=2880, head_dim=64,
        num_attention_heads=64, num_key_value_heads=8, sliding_window=128, attn_implementation="eager", experts_implementation="grouped_mm",
    )
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = GptOssForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    model.eval()
    for batch in (1, 16, 64):
        cache = DynamicCache(config=config)
        ids = torch.randint(0, config.vocab_size, (batch, context), device="cuda")
        with torch.no_grad():
            for start in range(0, context, 256):
                model(input_ids=ids[:, start : start + 256], past_key_values=cache, logits_to_keep=1)
            times = []
            for _ in range(12):
                torch.cuda.synchronize()
                start = time.perf_counter()
                model(input_ids=ids[:, :1], past_key_values=cache)
                torch.cuda.synchronize()
                times.append(time.perf_counter() - start)
        median = sorted(times)[len(times) // 2]
        print(f"transformers {transformers.__version__}, batch {batch}: {batch / median:.0f} tokens/s, {1e3 * median:.2f} ms", flush=True)
        del cache
        torch.cuda.empty_cache()
    import peft

    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    model.train()
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-4, fused=True)
    times = []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(steps):
        ids = torch.randint(0, config.vocab_size, (micro_batch, sequence), device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    median, peak = sorted(times[2:])[len(times[2:]) // 2], torch.cuda.max_memory_allocated() / 2**30
    print(f"PEFT {peft.__version__}: {micro_batch * sequence / median:.0f} tokens/s, {1e3 * median:.1f} ms, {peak:.1f} GiB", flush=True)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("what", choices=["products", "train", "gpt-oss"])
parser.add_argument("--tokens", type=int, default=16384)
parser.add_argument("--micro-batch", type=int)
arguments = parser.parse_args()
if not torch.cuda.is_available():
    parser.exit(1, "torch_experts.py needs a GPU, and torch finds none\n")
torch.manual_seed(0)
if arguments.what == "products":
    products(arguments.tokens)
elif arguments.what == "gpt-oss":
    gpt_oss(arguments.micro_batch or 1)
else:
    train(arguments.micro_batch or 4)
