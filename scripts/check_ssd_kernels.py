#!/usr/bin/env python3
"""Compares the kernels of the state space duality in chunks with the recurrence in torch, in F64, and times each kernel.

Needs torch with CUDA on a Hopper GPU.
usage: scripts/check_ssd_kernels.py [check] [time]    by default both
"""
import sys
import torch
from kernel_check import Long, compare, compiled, empty, launch, time

C, P = 64, 64  # the tokens of a chunk, and the size of a head
LIMITS = (0.0, 3.0)
PANEL, STEPS, SCAN_STAGES = C * 128, 2 * C * 4, 4
HEADERS = ["hopper.cuh", "chunk_panels.cuh", "softplus.cuh", "ssd/time_step.cuh"]
module = lambda name, **defines: compiled(f"ssd/{name}.cu", HEADERS, CHUNK=C, STAGES=SCAN_STAGES, **defines)
TABLE = compiled("gated_delta_rule/chunk_table.cu", ["segments.cuh"], CHUNK=C)
FORWARD = {panels: module("ssd_chunks", PANELS=panels) for panels in (2, 4)}
BACKWARD = {panels: module("ssd_chunks_backward", PANELS=panels, HEAD_STAGES=4 // panels) for panels in (2, 4)}
SCAN = SCAN_STAGES * (2 * PANEL + STEPS) + 2 * PANEL
GRADIENTS = {2: 17 * PANEL + 2 * STEPS, 4: 19 * PANEL + STEPS}


class Op:
    """The op on packed segments; `at` has their offsets."""

    def __init__(s, xbc, dt, a_log, bias, d, at, heads, groups):
        s.xbc, s.dt, s.a_log, s.bias, s.d, s.at, s.heads, s.groups = xbc, dt, a_log, bias, d, at, heads, groups
        s.T, s.N, s.width = xbc.shape[0], at.numel() - 1, xbc.shape[1]
        s.panels = (s.width - heads * P) // (2 * groups * 64)
        s.max = s.T // C + s.N
        s.of, s.segments = empty(s.max, 2, dtype=torch.int32), empty(s.N, 2, dtype=torch.int32)
        s.steps = empty(s.max, heads, 2 * C, dtype=torch.float32)
        s.states, s.gradients = (empty(s.max, heads, s.panels * PANEL) for _ in range(2))
        s.y = torch.full((s.T, heads * P), float("nan"), dtype=torch.bfloat16, device="cuda")
        s.dxbc, s.ddt = torch.full_like(xbc, float("nan")), torch.full_like(dt, float("nan"))
        s.partial = empty(3, s.max, heads, dtype=torch.float32)
        s.dbefore = torch.full((s.N, heads, P, 64 * s.panels), float("nan"), device="cuda")
        s.each = next(n for n in (8, 4, 3, 2, 1) if (heads // groups) % n == 0)

    def prepare(s):
        launch(TABLE, "chunk_table", (1, 1, 1), 1024, 0, s.of, s.segments, s.at, s.N, s.T, s.max)
        launch(FORWARD[s.panels], "ssd_steps", (s.max, (s.heads + 7) // 8, 1), 256, 0, s.steps, s.dt, s.a_log, s.bias, s.of, s.heads, *LIMITS)

    def scan(s, back, values, start=None, to=None):
        terms = s.heads * P + (s.groups * s.panels * 64 if back else 0)
        args = (s.gradients if back else s.states, to, values, Long(values.shape[1]), s.xbc, Long(s.width), terms, s.steps, start, s.of, s.segments)
        launch(FORWARD[s.panels], "ssd_scan", (s.N, s.heads, s.panels), 256, SCAN, *args, s.heads, s.groups, back)

    def output(s):
        shared = 2 * s.panels * PANEL + 2 * ((1 + s.panels) * PANEL + STEPS)
        args = (s.y, s.xbc, s.states, s.steps, s.d, s.of, s.at, s.N, s.T, s.heads, s.groups, s.each)
        launch(FORWARD[s.panels], "ssd_output", (s.max + 1, s.heads // s.each, 1), 128, shared, *args)

    def gradient(s, dy):
        args = (s.dxbc, s.ddt, s.partial, dy, s.xbc, s.dt, s.a_log, s.bias, s.d, s.states, s.gradients, s.steps, s.of, s.at, s.N, s.T)
        launch(BACKWARD[s.panels], "ssd_gradients", (s.max + 1, s.groups, s.panels // 2), 256, GRADIENTS[s.panels], *args, s.heads, s.groups, *LIMITS)

    def forward(s):
        s.prepare(), s.scan(0, s.xbc), s.output()

    def backward(s, dy, before=None, gradient=None):
        s.prepare(), s.scan(0, s.xbc, before), s.scan(1, dy, gradient, s.dbefore), s.gradient(dy)


def recurrence(xbc, dt, a_log, bias, d, bounds, heads, groups, before=None):
    """Returns outputs and states after the segments, token by token."""
    T, n = xbc.shape[0], (xbc.shape[1] - heads * P) // (2 * groups)
    x, b, c = xbc.split([heads * P, groups * n, groups * n], 1)
    x, (b, c) = x.view(T, heads, P), (v.view(T, groups, n).repeat_interleave(heads // groups, 1) for v in (b, c))
    dt = torch.nn.functional.softplus(dt + bias).clamp(*LIMITS)
    decay = (-a_log.exp() * dt).exp()
    outputs, states = [torch.zeros(heads * P, device=xbc.device, dtype=xbc.dtype)] * T, []
    for s in range(len(bounds) - 1):
        state = torch.zeros(heads, P, n, device=xbc.device, dtype=xbc.dtype) if before is None else before[s]
        for t in range(bounds[s], bounds[s + 1]):
            state = state * decay[t][:, None, None] + (dt[t][:, None] * x[t])[:, :, None] * b[t][:, None, :]
            outputs[t] = (torch.einsum("hpn,hn->hp", state, c[t]) + d[:, None] * x[t]).reshape(-1)
        states.append(state)
    return torch.stack(outputs), torch.stack(states)


def inputs(T, heads, groups, n):
    """Returns random inputs; the limit replaces some time steps."""
    torch.manual_seed(0)
    xbc = torch.randn(T, heads * P + 2 * groups * n, device="cuda").bfloat16()
    dt = (torch.randn(T, heads, device="cuda") * 1.5 - 1).bfloat16()
    dt[torch.rand(T, heads, device="cuda") < 0.02] = 5.0
    return xbc, dt, torch.rand(heads, device="cuda") * 3 - 2, torch.randn(heads, device="cuda") * 0.3, torch.randn(heads, device="cuda")


def check(bounds, T, heads, groups, n):
    all_inputs = inputs(T, heads, groups, n)
    N, dy = len(bounds) - 1, torch.randn(T, heads * P, device="cuda").bfloat16()
    op = Op(*all_inputs, torch.tensor(bounds, dtype=torch.int32, device="cuda"), heads, groups)
    before, gradient = (torch.randn(N, heads, P, n, device="cuda") for _ in range(2))
    leaves = [x.double().requires_grad_() for x in (*all_inputs, before)]
    op.forward()
    compared = [("y", op.y, recurrence(*leaves[:5], bounds, heads, groups)[0])]
    y, after = recurrence(*leaves[:5], bounds, heads, groups, leaves[5])
    ((y * dy.double()).sum() + (after * gradient.double()).sum()).backward()
    op.backward(dy, before, gradient)
    parts = [heads * P, groups * n, groups * n]
    compared += zip(("dx", "dB", "dC"), op.dxbc.split(parts, 1), leaves[0].grad.split(parts, 1))
    compared += [("ddt", op.ddt, leaves[1].grad), ("dbefore", op.dbefore, leaves[5].grad)]
    compared += zip(("da_log", "ddt_bias", "dd"), op.partial.sum(1), (leaf.grad for leaf in leaves[2:5]))
    compare(f"segments {bounds}, {heads} heads, {groups} groups, {n} columns", compared)


print(torch.cuda.get_device_name())
wanted = sys.argv[1:] or ["check", "time"]
if "check" in wanted:
    for case in (([0, 64], 64, 1, 1, 128), ([0, 1, 1, 70, 134, 262, 301], 305, 8, 2, 128), ([0, 500], 500, 3, 1, 128), ([0, 150, 190], 200, 4, 2, 256)):
        check(*case)
if "time" in wanted:
    for T, heads, groups, n in ((8192, 64, 8, 128), (32768, 64, 8, 128), (8192, 48, 1, 128), (8192, 128, 1, 128), (8192, 48, 1, 256)):
        op = Op(*inputs(T, heads, groups, n), torch.tensor([0, T], dtype=torch.int32, device="cuda"), heads, groups)
        dy = torch.randn(T, heads * P, device="cuda").bfloat16()
        works = dict(prepare=op.prepare, scan=lambda: op.scan(0, op.xbc), output=op.output, forward=op.forward)
        works |= dict(scan_back=lambda: op.scan(1, dy), gradients=lambda: op.gradient(dy), backward=lambda: op.backward(dy))
        print(f"{T} tokens, {heads} heads, {groups} groups, {n} columns, ms:", {name: round(time(work), 4) for name, work in works.items()})
