"""Measures whether overlapping the optimizer update with the next forward pass saves time: FP8 products and attention of blocks of Llama-2-7B with 8192
tokens, and a kernel that reads and writes 20 bytes per parameter, sequentially and overlapped, in CUDA graphs under load. Needs torch >= 2.10 and one
H100 or H200. Two minutes.

usage: scripts/probe_overlap.py
"""

import ctypes
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

BLOCKS, PARAMETERS, TOKENS = 16, 202_375_168, 8192
SHAPES = [(12288, 4096), (4096, 4096), (22016, 4096), (4096, 11008)]
UPDATE = r"""
extern "C" __global__ void __launch_bounds__(512) update(uint4* g, uint4* w, uint4* rest, uint4* m, uint4* v, uint2* codes, long from, long n, float lr) {
  for (long i = from + blockIdx.x * (long)blockDim.x + threadIdx.x; i < from + n; i += (long)gridDim.x * blockDim.x) {
    uint4 raw[5] = {g[i], w[i], rest[i], m[i], v[i]};
    unsigned (*x)[4] = (unsigned (*)[4])raw, code[2] = {0, 0};
#pragma unroll
    for (int k = 0; k < 8; k++) {
      const int at = k / 2, shift = k % 2 * 16;
      float grad = __uint_as_float(x[0][at] >> shift << 16), first = __uint_as_float(x[3][at] >> shift << 16), second = __uint_as_float(x[4][at] >> shift << 16);
      float weight = __uint_as_float(x[1][at] >> shift << 16 | x[2][at] >> shift & 0xffff);
      first = 0.9f * first + 0.1f * grad;
      second = 0.95f * second + 0.05f * grad * grad;
      weight -= lr * (first / (sqrtf(second) + 1e-8f) + 0.1f * weight);
      const unsigned bits[5] = {0, __float_as_uint(weight) >> 16, __float_as_uint(weight) & 0xffff, __float_as_uint(first) >> 16, __float_as_uint(second) >> 16};
      for (int t = 1; t < 5; t++) x[t][at] = x[t][at] & 0xffff0000u >> shift | bits[t] << shift;
      code[k / 4] |= (bits[1] >> 4 & 0xff) << k % 4 * 8;
    }
    w[i] = raw[1]; rest[i] = raw[2]; m[i] = raw[3]; v[i] = raw[4]; codes[i] = make_uint2(code[0], code[1]);
  }
}"""

nvml = ctypes.CDLL("libnvidia-ml.so.1")
nvml.nvmlInit_v2()
gpu = ctypes.c_void_p()
nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(gpu))


def joules():
    millijoules = ctypes.c_ulonglong()
    nvml.nvmlDeviceGetTotalEnergyConsumption(gpu, ctypes.byref(millijoules))
    return millijoules.value / 1e3


def megahertz():
    clock = ctypes.c_uint()
    nvml.nvmlDeviceGetClockInfo(gpu, 1, ctypes.byref(clock))
    return clock.value


update = torch.cuda._compile_kernel(UPDATE, "update")
random = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
codes = lambda *shape: random(*shape).to(torch.float8_e4m3fn)
inputs = {width: codes(TOKENS, width) for width in (4096, 11008)}
weights = [[codes(*shape) for shape in SHAPES] for _ in range(4)]
query, key, value = (random(2, 32, 4096, 128) for _ in range(3))
hidden, one = random(TOKENS, 22016), torch.ones((), device="cuda")
eights = PARAMETERS // 8
states = [torch.zeros(4 * eights * size, device="cuda", dtype=torch.uint8) for size in (16, 16, 16, 16, 16, 8)]
side = torch.cuda.Stream(priority=-1)


def block(i):
    for weight, (outputs, width) in zip(weights[i % 4], SHAPES):
        torch._scaled_mm(inputs[width], weight.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
        if outputs == 12288:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        if outputs == 22016:
            hidden[:, :11008] * hidden[:, 11008:]


def update_of(i, thread_blocks):
    update(grid=(thread_blocks, 1, 1), block=(512, 1, 1), args=[*states, i % 4 * eights, eights, 1e-3])


def beside(thread_blocks):
    main = torch.cuda.current_stream()
    for i in range(BLOCKS):
        side.wait_stream(main)
        with torch.cuda.stream(side):
            update_of(i, thread_blocks)
        block(i)
        main.wait_stream(side)


def serial():
    for i in range(BLOCKS):
        update_of(i, 528)
        block(i)


def measure(name, work, free=None):
    """Milliseconds, watts, joules and clock of `work`, whose products leave so many multiprocessors `free`."""
    torch._C._set_sm_carveout_experimental(free)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            work()
    torch._C._set_sm_carveout_experimental(None)

    def run(seconds):
        count, start = 0, time.time()
        while time.time() - start < seconds:
            for _ in range(4):
                graph.replay()
            torch.cuda.synchronize()
            count += 4 * BLOCKS
        return count, time.time() - start

    run(1.5)
    before = joules()
    count, seconds = run(4)
    used = joules() - before
    print(f"{name:52} {seconds / count * 1e3:7.3f} ms, {used / seconds:4.0f} W, {used / count:6.3f} J per block, {megahertz()} MHz", flush=True)


print(torch.cuda.get_device_name(), torch.__version__)
measure("products and attention", lambda: [block(i) for i in range(BLOCKS)])
for free in (8, 16, 24):
    measure(f"the same, with {free} multiprocessors free", lambda: [block(i) for i in range(BLOCKS)], free)
measure("update", lambda: [update_of(i, 528) for i in range(BLOCKS)])
measure("sequential", serial)
for free in (8, 12, 16, 24):
    measure(f"overlapped, update on {free} multiprocessors", lambda: beside(4 * free), free)
measure("products and attention again", lambda: [block(i) for i in range(BLOCKS)])
