#!/usr/bin/env python3
"""Compares the kernels of the gated delta rule in chunks with the recurrence in torch, in F64, and times each kernel.

Needs torch with CUDA on a Hopper GPU. usage: scripts/check_delta_kernels.py [check] [time]    by default both
"""
import math, sys
import torch
from kernel_check import compare, compiled, empty, launch, time

C, D, ST, PITCH = 64, 128, 3, 68  # the tokens of a chunk, the size of a head, stages in shared memory, and floats of a column
EPS = 1e-6
FOLDER, HEADERS = "gated_delta_rule", ["hopper.cuh", "chunk_panels.cuh", "gated_delta_rule/delta_chunks.cuh"]
module = lambda name, **defines: compiled(f"{FOLDER}/{name}.cu", HEADERS, CHUNK=C, PITCH=PITCH, STAGES=ST, **defines)
TABLE = compiled(f"{FOLDER}/chunk_table.cu", ["segments.cuh"], CHUNK=C)
PLAIN, KEEPING, BACKWARD = module("delta_chunks", KEEPS=0), module("delta_chunks", KEEPS=1), module("delta_chunks_backward")
P, S = C * 128, D * 128
PREPARE = 6 * P + C * PITCH * 4
STATES = ST * (8 * P + C * 4) + S + P
GRADIENTS = 19 * P + 4 * S


class Op:
    """The op on packed segments; `at` has their offsets."""

    def __init__(s, qkv, g, beta, at, hk, hv):
        s.qkv, s.g, s.beta, s.at, s.hk, s.hv = qkv, g, beta, at, hk, hv
        s.T, s.N = qkv.shape[0], at.numel() - 1
        s.max = s.T // C + s.N
        s.of, s.segments = empty(s.max, 2, dtype=torch.int32), empty(s.N, 2, dtype=torch.int32)
        s.keys, s.heads = empty(s.max, hk, 4 * P), empty(s.max, hv, 6 * P)
        s.gates, s.rstd = empty(s.max, hv, 2 * C, dtype=torch.float32), empty(s.max, hk, 2 * C, dtype=torch.float32)
        s.o = torch.full((s.T, hv * D), float("nan"), dtype=torch.bfloat16, device="cuda")
        s.kept = [empty(s.max, hv, 2 * size) for size in (S, P, S, P)]
        s.dqkv, s.dg, s.dbeta = (torch.full_like(x, float("nan")) for x in (qkv, g, g))
        s.dbefore = torch.full((s.N, hv, D, D), float("nan"), device="cuda")

    def table(s):
        launch(TABLE, "chunk_table", (1, 1, 1), 1024, 0, s.of, s.segments, s.at, s.N, s.T, s.max)

    def prepare(s, keeps_inverse):
        images = (s.keys, s.heads, s.gates, s.rstd, s.qkv, s.g, s.beta, s.of)
        launch(PLAIN, "delta_prepare", (s.max, s.hv, 1), 128, PREPARE, *images, s.hk, s.hv, EPS, keeps_inverse)

    def states(s, keeps, before=None):
        to = (None, *s.kept[:2]) if keeps else (s.o, None, None)
        inputs = (s.keys, s.heads, s.gates, before, s.of, s.segments, s.at, s.N, s.T, s.hk, s.hv)
        launch(KEEPING if keeps else PLAIN, "delta_states", (s.N + 1 - keeps, s.hv, 2), 160, STATES, *to, *inputs)

    def state_gradients(s, do, gradient=None):
        inputs = (do, s.keys, s.heads, s.gates, gradient, s.of, s.segments, s.hk, s.hv)
        launch(BACKWARD, "delta_state_gradients", (s.N, s.hv, 2), 160, STATES, *s.kept[2:], s.dbefore, *inputs)

    def gradients(s, do):
        inputs = (do, s.qkv, s.keys, s.heads, *s.kept, s.gates, s.rstd, s.of, s.at, s.N, s.T, s.hk, s.hv)
        launch(BACKWARD, "delta_gradients", (s.max + 1, s.hk, 1), 256, GRADIENTS, s.dqkv, s.dg, s.dbeta, *inputs)

    def forward(s):
        s.table(), s.prepare(0), s.states(0)

    def backward(s, do, before=None, gradient=None):
        s.table(), s.prepare(1), s.states(1, before), s.state_gradients(do, gradient), s.gradients(do)


def recurrence(qkv, g, beta, bounds, hk, hv, before=None):
    """Returns outputs and states after the segments, token by token."""
    T, r = qkv.shape[0], hv // hk
    q, k, v = qkv.split([hk * D, hk * D, hv * D], 1)
    unit = lambda x: x.view(T, hk, D) * torch.rsqrt((x.view(T, hk, D) ** 2).sum(-1, keepdim=True) + EPS)
    q, k, v = (unit(q) / math.sqrt(D)).repeat_interleave(r, 1), unit(k).repeat_interleave(r, 1), v.view(T, hv, D)
    outputs, states = [torch.zeros(hv * D, device=qkv.device, dtype=qkv.dtype)] * T, []
    for n in range(len(bounds) - 1):
        state = torch.zeros(hv, D, D, device=qkv.device, dtype=qkv.dtype) if before is None else before[n]
        for t in range(bounds[n], bounds[n + 1]):
            state = state * g[t].exp()[:, None, None]
            d = beta[t][:, None] * (v[t] - torch.einsum("hij,hi->hj", state, k[t]))
            state = state + k[t][:, :, None] * d[:, None, :]
            outputs[t] = torch.einsum("hij,hi->hj", state, q[t]).reshape(-1)
        states.append(state)
    return torch.stack(outputs), torch.stack(states)


def inputs(T, hk, hv):
    """Returns random queries, keys and values, and gates; some gates `g` are 0 or -20."""
    torch.manual_seed(0)
    qkv = torch.randn(T, (2 * hk + hv) * D, device="cuda").bfloat16()
    g = -torch.nn.functional.softplus(torch.randn(T, hv, device="cuda")) * torch.rand(hv, device="cuda") * 0.5
    g[torch.rand(T, hv, device="cuda") < 0.02] = -20.0
    g[torch.rand(T, hv, device="cuda") < 0.1] = 0.0
    return qkv, g.contiguous(), torch.rand(T, hv, device="cuda")


def check(bounds, T, hk, hv):
    qkv, g, beta = inputs(T, hk, hv)
    N, do = len(bounds) - 1, torch.randn(T, hv * D, device="cuda").bfloat16()
    op = Op(qkv, g, beta, torch.tensor(bounds, dtype=torch.int32, device="cuda"), hk, hv)
    before, gradient = (torch.randn(N, hv, D, D, device="cuda") * 0.3 for _ in range(2))
    leaves = [x.double().requires_grad_() for x in (qkv, g, beta, before)]
    op.forward()
    compared = [("o", op.o, recurrence(*leaves[:3], bounds, hk, hv)[0])]
    o, after = recurrence(*leaves[:3], bounds, hk, hv, leaves[3])
    ((o * do.double()).sum() + (after * gradient.double()).sum()).backward()
    op.backward(do, before, gradient)
    parts = [hk * D, hk * D, hv * D]
    compared += zip(("dq", "dk", "dv"), op.dqkv.split(parts, 1), leaves[0].grad.split(parts, 1))
    compared += [("dg", op.dg, leaves[1].grad), ("dbeta", op.dbeta, leaves[2].grad), ("dbefore", op.dbefore, leaves[3].grad)]
    compare(f"segments {bounds}, {hk} and {hv} heads", compared)


print(torch.cuda.get_device_name())
wanted = sys.argv[1:] or ["check", "time"]
if "check" in wanted:
    for case in (([0, 64], 64, 1, 1), ([0, 1, 1, 70, 134, 262, 301], 305, 2, 4), ([0, 300], 300, 1, 3)):
        check(*case)
if "time" in wanted:
    for T, hk, hv in ((8192, 16, 32), (32768, 16, 32)):
        op = Op(*inputs(T, hk, hv), torch.tensor([0, T], dtype=torch.int32, device="cuda"), hk, hv)
        do = torch.randn(T, hv * D, device="cuda").bfloat16()
        op.table()
        works = dict(prepare=lambda: op.prepare(0), states=lambda: op.states(0), forward=op.forward, prepare_and_keep=lambda: op.prepare(1))
        works |= dict(keep_states=lambda: op.states(1), state_gradients=lambda: op.state_gradients(do), gradients=lambda: op.gradients(do))
        works |= dict(backward=lambda: op.backward(do))
        print(f"{T} tokens, {hk} and {hv} heads, ms:", {name: round(time(work), 4) for name, work in works.items()})
