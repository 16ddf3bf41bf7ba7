"""Runs the algorithms that cuBLASLt proposes in two processes at once on one GPU, and reports which shapes of clusters fail or change results.

The driver switches the GPU between the processes. On Hopper, some kernels of cuBLASLt that add to a matrix with clusters of eight blocks do not
survive that: they end with CUDA_ERROR_LAUNCH_FAILED. First, the fastest time of each shape of clusters is printed for the products of a 7B model.

usage: scripts/stress_gemm.py [SECONDS]    seconds for each shape of clusters and kind of elements, 4 by default. Needs torch and one GPU.
"""

import ctypes
import glob
import os
import pickle
import sys
import tempfile
import time

import torch

F32, BF16, E4M3, E5M2 = 0, 14, 28, 29
TORCH = {F32: torch.float32, BF16: torch.bfloat16, E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
# cublasLtClusterShape_t.
CLUSTERS = {0: "auto", 2: "1x1", 3: "2x1", 4: "4x1", 5: "1x2", 6: "2x2", 7: "4x2", 8: "1x4", 9: "2x4", 10: "4x4", 11: "8x1", 12: "1x8", 13: "8x2", 14: "2x8", 15: "16x1", 16: "1x16"}
CONFIG_CLUSTER, WORKSPACE = 8, 32 << 20

# (m, n, k, a, b, out, fast accumulation) of `out[m, n] = a[m, k] · b[n, k]ᵀ`, plus an addend in the test under load.
SMALL = [(20480, 960, 576), (20480, 576, 576), (20480, 3072, 576), (20480, 576, 1536)]
BACK = [(20480, 576, 960), (20480, 1536, 576), (20480, 576, 3072)]
WGRAD = [(960, 576, 20480), (3072, 576, 20480), (576, 1536, 20480)]
LARGE = [(8192, 12288, 4096), (8192, 4096, 4096), (8192, 22016, 4096), (8192, 4096, 11008)]
LARGE_BACK = [(8192, 4096, 12288), (8192, 4096, 22016), (8192, 11008, 4096)]
LARGE_WGRAD = [(12288, 4096, 8192), (22016, 4096, 8192), (4096, 11008, 8192)]


def products(fprop, dgrad, wgrad):
    fp8 = [(*s, E4M3, E4M3, BF16, 1) for s in fprop]
    fp8 += [(*s, E5M2, E4M3, BF16, 0) for s in dgrad]
    fp8 += [(*s, E5M2, E4M3, F32, 0) for s in wgrad]
    bf16 = [(*s, BF16, BF16, BF16, 0) for s in fprop + dgrad] + [(*s, BF16, BF16, F32, 0) for s in wgrad]
    return {"fp8": fp8, "bf16": bf16}


class Candidate(ctypes.Structure):
    _fields_ = [("algo", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("state", ctypes.c_int), ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4)]


class Product:
    """A product with its operands on the GPU."""

    def __init__(self, lt, spec):
        m, n, k, a, b, out, fast = spec
        generator = torch.Generator("cuda").manual_seed(0)
        values = lambda rows, dtype: torch.randn(rows, k, device="cuda", generator=generator).to(TORCH[dtype])
        self.lt, self.a, self.b = lt, values(m, a), values(n, b)
        self.out = torch.empty(m, n, device="cuda", dtype=TORCH[out])
        self.addend = torch.randn(m, n, device="cuda", generator=generator).to(TORCH[out])
        self.factors = [ctypes.c_float(0), ctypes.c_float(1)]
        self.scale = torch.ones(4, device="cuda")
        self.workspace = torch.empty(WORKSPACE, device="cuda", dtype=torch.uint8)
        self.desc = self.made("cublasLtMatmulDescCreate", 68, F32)
        self.set(3, ctypes.c_int32(1))
        if a != BF16:
            for attribute in (17, 18):
                self.set(attribute, ctypes.c_void_p(self.scale.data_ptr()))
            self.set(25, ctypes.c_int8(fast))
        layout = lambda dtype, rows, columns: self.made("cublasLtMatrixLayoutCreate", dtype, ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows))
        self.layouts = [layout(b, k, n), layout(a, k, m), layout(out, n, m)]

    def made(self, create, *args):
        handle = ctypes.c_void_p()
        assert getattr(self.lt.library, create)(ctypes.byref(handle), *args) == 0, create
        return handle

    def set(self, attribute, value):
        assert self.lt.library.cublasLtMatmulDescSetAttribute(self.desc, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))) == 0

    def proposals(self):
        preference = self.made("cublasLtMatmulPreferenceCreate")
        for attribute, value in ((1, ctypes.c_size_t(WORKSPACE)), (3, ctypes.c_uint32(2))):
            self.lt.library.cublasLtMatmulPreferenceSetAttribute(preference, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))
        found, count = (Candidate * 32)(), ctypes.c_int()
        first, second, out = self.layouts
        self.lt.library.cublasLtMatmulAlgoGetHeuristic(self.lt.handle, self.desc, first, second, out, out, preference, 32, found, ctypes.byref(count))
        return [list(candidate.algo) for candidate in found[: count.value] if candidate.state == 0]

    def run(self, algorithm, add):
        first, second, out = self.layouts
        pointer = lambda tensor: ctypes.c_void_p(tensor.data_ptr())
        return self.lt.library.cublasLtMatmul(
            self.lt.handle, self.desc, ctypes.byref(self.factors[1]), pointer(self.b), first, pointer(self.a), second, ctypes.byref(self.factors[add]), pointer(self.addend), out,
            pointer(self.out), out, ctypes.byref((ctypes.c_uint64 * 8)(*algorithm)), pointer(self.workspace), ctypes.c_size_t(WORKSPACE),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))


class Lt:
    def __init__(self):
        torch.cuda.init()
        torch.zeros(1, device="cuda")
        folders = [os.path.join(os.path.dirname(torch.__file__), "..", "nvidia"), os.path.join(os.path.dirname(torch.__file__), "lib"), "/usr/local/cuda/lib64"]
        files = [file for folder in folders for file in glob.glob(folder + "/**/libcublasLt.so.1?", recursive=True)]
        self.library = ctypes.CDLL(files[0])
        self.handle = ctypes.c_void_p()
        assert self.library.cublasLtCreate(ctypes.byref(self.handle)) == 0

    def cluster(self, algorithm):
        value, written = ctypes.c_uint16(), ctypes.c_size_t()
        self.library.cublasLtMatmulAlgoConfigGetAttribute(ctypes.byref((ctypes.c_uint64 * 8)(*algorithm)), CONFIG_CLUSTER, ctypes.byref(value), ctypes.c_size_t(2), ctypes.byref(written))
        return value.value


def child(work, *args):
    """The id of a new process that does `work`, with a GPU context of its own."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work(*args)
            code = 0
        except BaseException as error:
            print("   ", str(error).splitlines()[0], flush=True)
        os._exit(code)
    return pid


def listed(file):
    lt = Lt()
    groups = {}
    for kind, specs in products(SMALL, BACK, WGRAD).items():
        for spec in specs:
            for algorithm in Product(lt, spec).proposals():
                groups.setdefault((kind, lt.cluster(algorithm)), {}).setdefault(spec, []).append(algorithm)
    print("cuBLASLt", lt.library.cublasLtGetVersion(), torch.cuda.get_device_name())
    for kind, specs in products(LARGE, LARGE_BACK, LARGE_WGRAD).items():
        for spec in specs:
            product, best = Product(lt, spec), {}
            for algorithm in product.proposals():
                if product.run(algorithm, add=False):
                    continue
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                events[0].record()
                for _ in range(10):
                    product.run(algorithm, add=False)
                events[1].record()
                torch.cuda.synchronize()
                cluster = CLUSTERS.get(lt.cluster(algorithm), "?")
                best[cluster] = min(best.get(cluster, 1e9), events[0].elapsed_time(events[1]) / 10)
            print(kind, spec[:3], " ".join(f"{cluster} {time:.3f}" for cluster, time in sorted(best.items(), key=lambda x: x[1])), "ms", flush=True)
            del product
    pickle.dump(groups, open(file, "wb"))


def repeated(group, seconds):
    lt = Lt()
    work, end, runs = [], time.time() + seconds, 0
    for spec, algorithms in group.items():
        product = Product(lt, spec)
        for algorithm in algorithms:
            if product.run(algorithm, add=True) == 0:
                torch.cuda.synchronize()
                work.append((spec, algorithm, product, product.out.clone()))
    wrong = torch.zeros(len(work), device="cuda", dtype=torch.int64)
    # Without waiting, so that the queue stays full and the driver has to interrupt kernels.
    while time.time() < end:
        for i, (_, algorithm, product, expected) in enumerate(work):
            for _ in range(20):
                product.run(algorithm, add=True)
            wrong[i] += (product.out != expected).sum()
            runs += 20
    for (spec, algorithm, *_), count in zip(work, wrong.tolist()):
        if count:
            print(f"    other values: {spec} {count} elements", flush=True)
    print(f"    {runs} runs of {len(work)} algorithms", flush=True)
    assert not wrong.any(), "wrong results"


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 4
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "groups")
        os.waitpid(child(listed, file), 0)
        groups = pickle.load(open(file, "rb"))
        for (kind, cluster), group in sorted(groups.items(), reverse=True):
            print(f"{kind} cluster {CLUSTERS.get(cluster, cluster)}: {sum(map(len, group.values()))} algorithms", flush=True)
            pids = [child(repeated, group, seconds) for _ in range(2)]
            failed = [pid for pid in pids if os.waitpid(pid, 0)[1] != 0]
            print(f"    {len(failed)} of 2 processes failed", flush=True)


main()
