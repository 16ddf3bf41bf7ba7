#!/usr/bin/env python3
"""Six measurements of NCCL on two GPUs of one host.
   python3 -u measure_nccl.py OUT_DIR [--only m1_ce,m2,...] [--budget SECONDS]
Writes OUT_DIR/results.jsonl, table.txt, log.txt, system.txt.
The parent never touches CUDA; each measurement is a pair of subprocesses with a time limit."""
import argparse, ctypes as C, glob, json, math, os, re, shutil, signal, socket, struct, subprocess, sys
import tempfile, threading, time, traceback

MIB = 1 << 20
BLOCK = 12288 * 4096 + 4096 * 4096 + 22016 * 4096 + 4096 * 11008      # 202,375,168 codes
SIZES = [("202MB", BLOCK), ("16", 16 * MIB), ("1024", 1024 * MIB), ("64", 64 * MIB), ("256", 256 * MIB)]
# name, seconds allowed, environment; order = importance, the faults last (they may leave the GPUs unwell)
PLAN = [
    ("m1_ce", 60, {}), ("m1_sym", 60, {}), ("m1_ring", 90, {}), ("m2", 75, {}), ("m6", 45, {}),
    ("m1_reg", 60, {}), ("m3", 45, {}),
    ("m5_mix1", 40, {"NCCL_GRAPH_MIXING_SUPPORT": "1"}), ("m5_mix0", 40, {"NCCL_GRAPH_MIXING_SUPPORT": "0"}),
    ("m5_mix1_order", 40, {"NCCL_GRAPH_MIXING_SUPPORT": "1", "NCCL_LAUNCH_ORDER_IMPLICIT": "1"}),
    ("m4_kill", 70, {}), ("m4_stop", 70, {}), ("m4_killce", 60, {}),
]
I8, U8, I32, F32, BF16, SUM = 0, 1, 2, 7, 9, 0
UNDEF = -2147483648

# ------------------------------------------------------------------------------------------ NCCL by ctypes
class UniqueId(C.Structure):
    _fields_ = [("b", C.c_char * 128)]

class Config(C.Structure):
    _fields_ = [("size", C.c_size_t), ("magic", C.c_uint), ("version", C.c_uint), ("blocking", C.c_int),
                ("cgaClusterSize", C.c_int), ("minCTAs", C.c_int), ("maxCTAs", C.c_int), ("netName", C.c_void_p),
                ("splitShare", C.c_int), ("trafficClass", C.c_int), ("commName", C.c_void_p),
                ("collnetEnable", C.c_int), ("CTAPolicy", C.c_int), ("shrinkShare", C.c_int), ("nvlsCTAs", C.c_int),
                ("nChannelsPerNetPeer", C.c_int), ("nvlinkCentricSched", C.c_int)]
assert C.sizeof(Config) == 80 and C.sizeof(UniqueId) == 128

def config(**kw):
    c = Config(80, 0xcafebeef, 22803, UNDEF, UNDEF, UNDEF, UNDEF, None, UNDEF, UNDEF, None,
               UNDEF, UNDEF, UNDEF, UNDEF, UNDEF, UNDEF)
    for k, v in kw.items():
        if v is not None:
            setattr(c, k, v)
    return c

def find_nccl():
    try:                                        # the very file torch has loaded
        with open("/proc/self/maps") as f:
            for line in f:
                if "libnccl.so" in line:
                    return line.split(None, 5)[-1].strip()
    except OSError:
        pass
    for p in sys.path:
        for f in glob.glob(os.path.join(p, "nvidia", "nccl", "lib", "libnccl.so.2")):
            return f
    return "libnccl.so.2"

class Nccl:
    def __init__(s):
        s.path = find_nccl()
        L = s.L = C.CDLL(s.path)
        vp, sz, i, pp = C.c_void_p, C.c_size_t, C.c_int, C.POINTER(C.c_void_p)
        sig = {
            "ncclGetVersion": [C.POINTER(i)], "ncclGetUniqueId": [C.POINTER(UniqueId)],
            "ncclCommInitRankConfig": [pp, i, UniqueId, i, C.POINTER(Config)],
            "ncclCommSplit": [vp, i, i, pp, C.POINTER(Config)],
            "ncclCommGetAsyncError": [vp, C.POINTER(i)],
            "ncclAllReduce": [vp, vp, sz, i, i, vp, vp], "ncclReduceScatter": [vp, vp, sz, i, i, vp, vp],
            "ncclAllGather": [vp, vp, sz, i, vp, vp], "ncclAlltoAll": [vp, vp, sz, i, vp, vp],
            "ncclSend": [vp, sz, i, i, vp, vp], "ncclRecv": [vp, sz, i, i, vp, vp],
            "ncclGroupStart": [], "ncclGroupEnd": [],
            "ncclMemAlloc": [pp, sz], "ncclCommRegister": [vp, vp, sz, pp],
            "ncclCommWindowRegister": [vp, vp, sz, pp, i],
        }
        s.missing = []
        for name, a in sig.items():
            try:
                f = getattr(L, name)
            except AttributeError:
                s.missing.append(name)
                continue
            f.argtypes, f.restype = a, C.c_int
        L.ncclGetErrorString.argtypes, L.ncclGetErrorString.restype = [C.c_int], C.c_char_p
        try:
            L.ncclGetLastError.argtypes, L.ncclGetLastError.restype = [C.c_void_p], C.c_char_p
        except AttributeError:
            pass
        v = C.c_int()
        L.ncclGetVersion(C.byref(v))
        s.version = v.value

    def has(s, name):
        return name not in s.missing

    def __call__(s, name, *a):
        if name in s.missing:
            raise RuntimeError("%s is not in this NCCL (%d)" % (name, s.version))
        r = getattr(s.L, name)(*a)
        if r != 0:
            last = ""
            try:
                last = (s.L.ncclGetLastError(None) or b"").decode(errors="replace").strip()
            except Exception:
                pass
            raise RuntimeError("%s: %d %s %s" % (name, r, s.L.ncclGetErrorString(r).decode(), last))

class Peer:
    """A Unix socket between the two ranks: barriers and small JSON messages."""
    def __init__(s, rank, path, limit):
        s.rank = rank
        end = time.time() + limit
        if rank == 0:
            srv = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            srv.bind(path)
            srv.listen(1)
            srv.settimeout(limit)
            s.c, _ = srv.accept()
        else:
            while True:
                s.c = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                try:
                    s.c.connect(path)
                    break
                except OSError:
                    s.c.close()
                    if time.time() > end:
                        raise
                    time.sleep(0.05)
        s.c.settimeout(limit)

    def send(s, o):
        b = json.dumps(o).encode()
        s.c.sendall(struct.pack("<I", len(b)) + b)

    def _rd(s, n):
        b = b""
        while len(b) < n:
            x = s.c.recv(n - len(b))
            if not x:
                raise RuntimeError("the other rank is gone")
            b += x
        return b

    def recv(s):
        return json.loads(s._rd(struct.unpack("<I", s._rd(4))[0]))

    def gather(s, o):
        """[rank 0's, rank 1's] on both."""
        if s.rank == 0:
            s.send(o)
            return [o, s.recv()]
        a = s.recv()
        s.send(o)
        return [a, o]

    def bcast(s, o):
        return s.gather(o)[0]

    barrier = lambda s: s.gather(0)

class KernelParams(C.Structure):                 # CUDA_KERNEL_NODE_PARAMS_v2 and spare room
    _fields_ = [("func", C.c_void_p), ("gx", C.c_uint), ("gy", C.c_uint), ("gz", C.c_uint), ("bx", C.c_uint),
                ("by", C.c_uint), ("bz", C.c_uint), ("shmem", C.c_uint), ("params", C.c_void_p), ("extra", C.c_void_p),
                ("kern", C.c_void_p), ("ctx", C.c_void_p), ("spare", C.c_char * 128)]

NODE = {0: "kernel", 1: "memcpy", 2: "memset", 3: "host", 4: "graph", 5: "empty", 6: "wait_event", 7: "record_event",
        12: "batch_mem_op"}

# ------------------------------------------------------------------------------------------ one rank
class Worker:
    def __init__(s, a):
        s.name, s.rank, s.tmp, s.t0, s.limit = a.worker, a.rank, a.tmp, time.time(), a.limit
        s.res = open(os.path.join(s.tmp, "res_%s_%d.jsonl" % (s.name, s.rank)), "a")
        s.peer = Peer(s.rank, os.path.join(s.tmp, s.name + ".sock"), s.limit)
        import torch
        s.torch = torch
        torch.cuda.set_device(s.rank)
        s.dummy = torch.zeros(1024, device="cuda")
        torch.cuda.synchronize()
        s.n = Nccl()
        s.cu = C.CDLL("libcuda.so.1")
        s.cu.cuMemcpyDtoD_v2.argtypes = [C.c_uint64, C.c_uint64, C.c_size_t]
        s.cu.cuMemsetD32_v2.argtypes = [C.c_uint64, C.c_uint, C.c_size_t]
        s.cu.cuStreamSynchronize.argtypes = [C.c_void_p]
        s.cu.cuCtxSetCurrent.argtypes = [C.c_void_p]
        s.cu.cuCtxGetCurrent.argtypes = [C.POINTER(C.c_void_p)]
        s.gs = torch.cuda.Stream()                       # products, and the root of captures
        s.cs = torch.cuda.Stream(priority=-1)            # communication, high priority
        s.ncomm = 0
        s.scratch = None
        if s.rank == 0:
            s.emit(kind="init", nccl=s.n.version, lib=s.n.path, missing=s.n.missing, torch=torch.__version__,
                   gpu=torch.cuda.get_device_name(0), start_s=round(time.time() - s.t0, 1))

    def emit(s, **kw):
        s.res.write(json.dumps(dict(m=s.name, rank=s.rank, **kw)) + "\n")
        s.res.flush()

    def log(s, *a):
        print("[%s r%d %.1fs]" % (s.name, s.rank, time.time() - s.t0), *a, flush=True)

    def left(s):
        return s.limit - (time.time() - s.t0)

    def more(s, reserve=6):
        """The same answer on both ranks: is there time for another configuration?"""
        return s.peer.bcast(s.left() > reserve)

    def cuda(s, name, *a):
        r = getattr(s.cu, name)(*a)
        if r:
            raise RuntimeError("%s: CUDA error %d" % (name, r))

    # communicators
    def comm(s, **kw):
        f = os.path.join(s.tmp, "%s.uid%d" % (s.name, s.ncomm))
        s.ncomm += 1
        uid = UniqueId()
        if s.rank == 0:
            s.n("ncclGetUniqueId", C.byref(uid))
            with open(f + ".w", "wb") as h:
                h.write(C.string_at(C.byref(uid), 128))
            os.rename(f + ".w", f)
        else:
            end = time.time() + 30
            while not os.path.exists(f):
                if time.time() > end:
                    raise RuntimeError("no unique id from rank 0")
                time.sleep(0.002)
            C.memmove(C.byref(uid), open(f, "rb").read(), 128)
        c, cfg = C.c_void_p(), config(**kw)
        s.n("ncclCommInitRankConfig", C.byref(c), 2, uid, s.rank, C.byref(cfg))
        return c

    def split(s, parent, **kw):
        c, cfg = C.c_void_p(), config(**kw)
        s.n("ncclCommSplit", parent, 0, s.rank, C.byref(c), C.byref(cfg))
        return c

    def alloc(s, n):
        p = C.c_void_p()
        s.n("ncclMemAlloc", C.byref(p), n)
        return p.value

    def window(s, c, p, n):
        w = C.c_void_p()
        s.n("ncclCommWindowRegister", c, p, n, C.byref(w), 1)
        return w.value

    def register(s, c, p, n):
        h = C.c_void_p()
        s.n("ncclCommRegister", c, p, n, C.byref(h))
        return h.value

    # collectives (on a torch stream)
    def ag(s, c, send, recv, n, st, ty=U8):
        s.n("ncclAllGather", send, recv, n, ty, c, st.cuda_stream)

    def rs(s, c, send, recv, n, ty, st):
        s.n("ncclReduceScatter", send, recv, n, ty, SUM, c, st.cuda_stream)

    def ar(s, c, send, recv, n, ty, st):
        s.n("ncclAllReduce", send, recv, n, ty, SUM, c, st.cuda_stream)

    def a2a(s, c, send, recv, n, st):
        if s.n.has("ncclAlltoAll"):
            s.n("ncclAlltoAll", send, recv, n, U8, c, st.cuda_stream)
            return
        s.n("ncclGroupStart")
        for r in range(2):
            s.n("ncclSend", send + r * n, n, U8, r, c, st.cuda_stream)
            s.n("ncclRecv", recv + r * n, n, U8, r, c, st.cuda_stream)
        s.n("ncclGroupEnd")

    # raw memory
    def pattern(s, n, seed):
        return s.torch.arange(n // 4, dtype=s.torch.int32, device="cuda").mul_(3).add_(seed)

    def fill(s, p, n, seed):
        t = s.pattern(n, seed)
        s.torch.cuda.synchronize()
        s.cuda("cuMemcpyDtoD_v2", p, t.data_ptr(), n)
        s.torch.cuda.synchronize()

    def check(s, p, n, seed):
        t = s.torch.empty(n // 4, dtype=s.torch.int32, device="cuda")
        s.torch.cuda.synchronize()
        s.cuda("cuMemcpyDtoD_v2", t.data_ptr(), p, n)
        s.torch.cuda.synchronize()
        return bool(s.torch.equal(t, s.pattern(n, seed)))

    def zero(s, p, n):
        s.cuda("cuMemsetD32_v2", p, 0, n // 4)
        s.torch.cuda.synchronize()

    def put(s, p, t):
        s.torch.cuda.synchronize()
        s.cuda("cuMemcpyDtoD_v2", p, t.data_ptr(), t.numel() * t.element_size())
        s.torch.cuda.synchronize()

    def get(s, p, n, dtype):
        t = s.torch.empty(n, dtype=dtype, device="cuda")
        s.torch.cuda.synchronize()
        s.cuda("cuMemcpyDtoD_v2", t.data_ptr(), p, n * t.element_size())
        s.torch.cuda.synchronize()
        return t

    # graphs
    def capture(s, fn, side=None):
        """Capture fn with root stream gs and side streams forked and joined by events."""
        torch, side = s.torch, ([s.cs] if side is None else side)
        torch.cuda.synchronize()
        try:
            g, keep = torch.cuda.CUDAGraph(keep_graph=True), True
        except TypeError:
            g, keep = torch.cuda.CUDAGraph(), False
        with torch.cuda.stream(s.gs):
            g.capture_begin(capture_error_mode="relaxed")
            try:
                e = torch.cuda.Event()
                e.record(s.gs)
                for x in side:
                    x.wait_event(e)
                fn()
                for x in side:
                    e = torch.cuda.Event()
                    e.record(x)
                    s.gs.wait_event(e)
            except BaseException:
                try:
                    g.capture_end()
                except Exception:
                    pass
                raise
            g.capture_end()
        what = None
        if keep:
            g.instantiate()
            try:
                what = s.describe(int(g.raw_cuda_graph()))
            except Exception as x:
                what = {"describe_failed": str(x)[:100]}
        torch.cuda.synchronize()
        return g, what

    def describe(s, graph):
        """Kinds of nodes; names and CTAs of NCCL's kernels."""
        n = C.c_size_t(0)
        G = C.c_void_p(graph)
        s.cuda("cuGraphGetNodes", G, None, C.byref(n))
        nodes = (C.c_void_p * max(1, n.value))()
        s.cuda("cuGraphGetNodes", G, nodes, C.byref(n))
        count, kernels = {}, {}
        for k in range(n.value):
            t = C.c_int()
            s.cuda("cuGraphNodeGetType", C.c_void_p(nodes[k]), C.byref(t))
            key = NODE.get(t.value, str(t.value))
            count[key] = count.get(key, 0) + 1
            if t.value == 0:
                p, name = KernelParams(), C.c_char_p()
                if s.cu.cuGraphKernelNodeGetParams_v2(C.c_void_p(nodes[k]), C.byref(p)):
                    continue
                r = 1
                if p.func:
                    r = s.cu.cuFuncGetName(C.byref(name), C.c_void_p(p.func))
                elif p.kern:
                    r = s.cu.cuKernelGetName(C.byref(name), C.c_void_p(p.kern))
                if r == 0 and name.value and b"nccl" in name.value:
                    nm = name.value.decode(errors="replace")
                    z = re.match(r"_Z(\d+)", nm)
                    if z:
                        nm = nm[z.end():z.end() + int(z.group(1))]
                    key = "%s x%d" % (nm[:70], p.gx)
                    kernels[key] = kernels.get(key, 0) + 1
        return {"nodes": count, "nccl_kernels": kernels}

    def replay(s, g, st):
        with s.torch.cuda.stream(st):
            g.replay()

    # timing
    def ev(s):
        return s.torch.cuda.Event(enable_timing=True)

    def time_fn(s, fn, st, est=None, budget=0.02, lo=10, hi=200, warm=3):
        """ms per call, host us per call; ranks meet on the device by one call before the first event."""
        torch = s.torch
        for _ in range(warm):
            fn()
        torch.cuda.synchronize()
        if est is None:
            a, b = s.ev(), s.ev()
            s.peer.barrier()
            fn()
            a.record(st)
            for _ in range(3):
                fn()
            b.record(st)
            torch.cuda.synchronize()
            est = a.elapsed_time(b) / 3e3
        n = s.peer.bcast(int(min(hi, max(lo, budget / max(est, 1e-6)))))
        a, b = s.ev(), s.ev()
        s.peer.barrier()
        fn()
        a.record(st)
        h0 = time.perf_counter()
        for _ in range(n):
            fn()
        h1 = time.perf_counter()
        b.record(st)
        torch.cuda.synchronize()
        return a.elapsed_time(b) / n, (h1 - h0) / n * 1e6

    def gemms(s):
        """name -> callable launching one product of 8192x4096x11008 on the current stream."""
        torch = s.torch
        M, N, K = 8192, 4096, 11008
        a, b = torch.randn(M, K, device="cuda", dtype=torch.bfloat16), torch.randn(N, K, device="cuda", dtype=torch.bfloat16)
        o = torch.empty(M, N, device="cuda", dtype=torch.bfloat16)
        out = {"bf16": lambda: torch.matmul(a, b.t(), out=o)}
        try:
            out["fp8"] = s.fp8(a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), o)
        except Exception as x:
            s.log("no FP8 product:", x)
        for f in out.values():
            with torch.cuda.stream(s.gs):
                for _ in range(3):
                    f()
        torch.cuda.synchronize()
        return out

    def fp8(s, a, b, o):
        """One product a [M,K] x b [N,K]^T in E4M3 into o (or a fresh output, where out= is refused)."""
        torch = s.torch
        one = torch.ones((), device="cuda", dtype=torch.float32)
        kw = dict(scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
        f = lambda: torch._scaled_mm(a, b.t(), out=o, **kw)
        try:
            with torch.cuda.stream(s.gs):
                f()
        except Exception as x:
            s.log("_scaled_mm out= refused:", str(x)[:120])
            f = lambda: torch._scaled_mm(a, b.t(), **kw)
            with torch.cuda.stream(s.gs):
                f()
        torch.cuda.synchronize()
        return f

    def gate(s, ms=6):
        with s.torch.cuda.stream(s.gs):
            s.torch.cuda._sleep(int(ms * 1.8e6))
        e = s.torch.cuda.Event()
        e.record(s.gs)
        return e

    def gemm_alone(s, f, n):
        torch = s.torch
        s.peer.barrier()
        s.gate(2)
        a = s.ev()
        a.record(s.gs)
        es = [s.ev() for _ in range(n)]
        with torch.cuda.stream(s.gs):
            for e in es:
                f()
                e.record(s.gs)
        torch.cuda.synchronize()
        return a.elapsed_time(es[-1]) / n

    def beside(s, fn, t_fn, per, f):
        """fn (ms t_fn alone, moving per bytes of bus traffic) in a row on cs, beside products f in a row on gs.
        Both are counted up to the moment when the first of the two streams ran dry."""
        torch = s.torch
        n0 = s.peer.bcast(int(max(8, 24.0 / max(0.2, s.gemm_alone(f, 8)))))
        t_g = s.gemm_alone(f, n0)
        T = max(20.0, 8 * t_fn) * 1.3
        M, N = s.peer.bcast([int(min(400, max(6, math.ceil(T / t_fn)))), int(math.ceil(T / t_g))])
        N = max(N, 8)
        ec, eg, e0 = [s.ev() for _ in range(M)], [s.ev() for _ in range(N)], s.ev()
        torch.cuda.synchronize()
        s.peer.barrier()
        go = s.gate(6)
        s.cs.wait_event(go)
        fn()                                             # ranks meet here
        e0.record(s.cs)
        s.gs.wait_event(e0)
        with torch.cuda.stream(s.gs):
            for e in eg:
                f()
                e.record(s.gs)
        for e in ec:
            fn()
            e.record(s.cs)
        torch.cuda.synchronize()
        tc, tg = [e0.elapsed_time(e) for e in ec], [e0.elapsed_time(e) for e in eg]
        end = min(tc[-1], tg[-1])
        k, g = sum(t <= end for t in tc), sum(t <= end for t in tg)
        r = dict(gbs=round(k * per / tc[k - 1] / 1e6, 1) if k else None, coll=k, gemms=g,
                 gemm_alone_us=round(t_g * 1e3, 1),
                 slow_pct=round((tg[g - 1] / g / t_g - 1) * 100, 1) if g else None)
        both = s.peer.gather(r)
        r = dict(both[0])
        r["slow_pct_rank1"] = both[1]["slow_pct"]
        return r

# ------------------------------------------------------------------------------------------ 1
def m1(w):
    kind = w.name.split("_")[1]
    torch, R = w.torch, w.rank
    modes = {"ring": [4, 8, 16, None], "reg": [4, 8, None], "sym": [None, 8, 4], "ce": [None]}[kind]
    half = 1024 * MIB
    if kind == "ring":
        hold = torch.zeros(2 * half + 4096, dtype=torch.uint8, device="cuda")
        base = hold.data_ptr()
    else:
        base = w.alloc(2 * half)
    send, recv = base, base + half
    comms = {}
    for k in modes:
        t = time.time()
        c = w.comm(maxCTAs=k, CTAPolicy=2 if kind == "ce" else None)
        if kind in ("sym", "ce"):
            win = w.window(c, base, 2 * half)
            if not win:
                w.emit(kind="note", note="ncclCommWindowRegister gave no window: no symmetric support here", maxctas=k)
        elif kind == "reg":
            w.register(c, base, 2 * half)
        comms[k] = c
        w.log("comm", kind, k, "%.2f s" % (time.time() - t))
    gemm = w.gemms()
    for label, S in SIZES:
        h = S // 2
        ops = ["ag", "a2a"] + (["ag_oop"] if label == "202MB" else [])
        for op in ops:
            for k in modes:
                if not w.more():
                    if R == 0:
                        w.emit(kind="truncated", at=[label, op, k])
                    return
                row = dict(kind="m1", mode=kind, maxctas=k, op=op, size=label, bytes=S)
                err = None
                try:
                    c = comms[k]
                    if op == "ag":
                        fn = lambda: w.ag(c, recv + R * h, recv, h, w.cs)
                    elif op == "ag_oop":
                        fn = lambda: w.ag(c, send, recv, h, w.cs)
                    else:
                        fn = lambda: w.a2a(c, send, recv, h, w.cs)

                    def verify(run):
                        w.zero(recv, S)
                        if op == "ag":
                            w.fill(recv + R * h, h, 1000 * (R + 1))
                            want = [1000, 2000]
                        elif op == "ag_oop":
                            w.fill(send, h, 1000 * (R + 1))
                            want = [1000, 2000]
                        else:
                            for j in range(2):
                                w.fill(send + j * h, h, 100 * R + 10 * j + 7)
                            want = [100 * i + 10 * R + 7 for i in range(2)]
                        w.peer.barrier()
                        run()
                        torch.cuda.synchronize()
                        return all([w.check(recv + i * h, h, want[i]) for i in range(2)])

                    for capt in (False, True):
                        K, run, what = 1, fn, None
                        if capt:
                            K = 4 if S <= 64 * MIB else 1
                            g, what = w.capture(lambda: [fn() for _ in range(K)])
                            run = lambda: w.replay(g, w.cs)
                        ok = w.peer.gather(verify(run))
                        t, host = w.time_fn(run, w.cs)
                        r = dict(row, captured=capt, ok=all(ok), gbs=round(K * h / t / 1e6, 1),
                                 us=round(t / K * 1e3, 1), host_us=round(host / K, 1), graph=what)
                        for gname, f in gemm.items():
                            r["beside_" + gname] = w.beside(run, t, K * h, f)
                        if R == 0:
                            w.emit(**r)
                        if capt:
                            torch.cuda.synchronize()
                            g.reset()
                            del g, run
                except Exception as x:
                    err = "%s: %s" % (type(x).__name__, str(x)[:300])
                    traceback.print_exc()
                errs = w.peer.gather(err)
                if any(errs):
                    if R == 0:
                        w.emit(**dict(row, error=errs))

# ------------------------------------------------------------------------------------------ 2
def m2(w):
    torch, R = w.torch, w.rank
    T, L = 8192, 4
    f8, bf = torch.float8_e4m3fn, torch.bfloat16
    rnd = lambda m, n: torch.randn(m, n, device="cuda", dtype=bf).to(f8)
    x, hid = rnd(T, 4096), rnd(T, 11008)
    fs = []
    for n, a in ((12288, x), (4096, x), (22016, x), (4096, hid)):
        fs.append(w.fp8(a, rnd(n, a.shape[1]), torch.empty(T, n, device="cuda", dtype=bf)))
    up = lambda n: (n + 2 * MIB - 1) // (2 * MIB) * (2 * MIB)
    o_in, o_out, total = up(BLOCK), up(BLOCK) + up(2 * BLOCK), up(BLOCK) + up(2 * BLOCK) + up(BLOCK)
    hold = torch.zeros(total, dtype=torch.uint8, device="cuda")
    plain, arena = hold.data_ptr(), w.alloc(total)
    comms, bases = {}, {}
    for kind, k in (("ring", 4), ("ring", 8), ("ring", 16), ("ring", None), ("reg", 4), ("reg", 8), ("sym", None),
                    ("sym", 8), ("ce", None)):
        name = kind + (str(k) if k else "")
        c, err = None, None
        try:
            c = w.comm(maxCTAs=k, CTAPolicy=2 if kind == "ce" else None)
            if kind in ("sym", "ce"):
                w.window(c, arena, total)
            elif kind == "reg":
                w.register(c, arena, total)
        except Exception as x2:
            err = str(x2)[:300]
            traceback.print_exc()
        errs = w.peer.gather(err)
        if any(errs):
            w.emit(kind="error", what="comm " + name, error=errs)
        else:
            comms[name], bases[name] = c, plain if kind == "ring" else arena

    def ag_of(name):
        c, b = comms[name], bases[name]
        return lambda: w.ag(c, b + R * (BLOCK // 2), b, BLOCK // 2, w.cs)

    def rs_of(name):
        c, b = comms[name], bases[name]
        return lambda: w.rs(c, b + o_in, b + o_out, BLOCK // 2, BF16, w.cs)

    def chain(fns, products=True):
        with torch.cuda.stream(w.gs):
            for _ in range(L):
                if fns:
                    e = torch.cuda.Event()
                    e.record(w.gs)
                    w.cs.wait_event(e)
                for f in fns:
                    f()
                if products:
                    for f in fs:
                        f()
                if fns:
                    e = torch.cuda.Event()
                    e.record(w.cs)
                    w.gs.wait_event(e)

    cases = [("ag", n, None) for n in comms] + [("rs", None, n) for n in comms if n != "ce"]
    cases += [("ag+rs", a, b) for a, b in (("ring8", "ring8"), ("ring", "ring"), ("ce", "ring8"), ("ce", "ring4"),
                                           ("ce", "reg4"), ("ce", "sym8"), ("sym8", "sym8"), ("sym", "sym"))
              if a in comms and b in comms]
    g0, _ = w.capture(lambda: chain([]), side=[])
    for what, a, b in cases:
        if not w.more():
            if R == 0:
                w.emit(kind="truncated", at=[what, a, b])
            return
        err = None
        row = dict(kind="m2", op=what, ag=a, rs=b)
        try:
            fns = ([ag_of(a)] if a else []) + ([rs_of(b)] if b else [])
            ok = True
            if b:
                p = bases[b]
                w.put(p + o_in, torch.full((BLOCK,), float(R + 1), device="cuda", dtype=bf))
                w.zero(p + o_out, BLOCK)
            if a:
                w.zero(bases[a], BLOCK)
                w.fill(bases[a] + R * (BLOCK // 2), BLOCK // 2, 1000 * (R + 1))
            w.peer.barrier()
            chain(fns)
            torch.cuda.synchronize()
            if b:
                ok = bool((w.get(bases[b] + o_out, BLOCK // 2, bf) == 3).all())
            if a:
                ok = ok and all([w.check(bases[a] + i * (BLOCK // 2), BLOCK // 2, 1000 * (i + 1)) for i in range(2)])
            oks = w.peer.gather(ok)
            for capt in (False, True):
                if capt:
                    g1, _ = w.capture(lambda: chain(fns, False))
                    g2, gw = w.capture(lambda: chain(fns))
                    alone, comm, both = (lambda: w.replay(g0, w.gs)), (lambda: w.replay(g1, w.gs)), (lambda: w.replay(g2, w.gs))
                else:
                    alone, comm, both = (lambda: chain([])), (lambda: chain(fns, False)), (lambda: chain(fns))
                    gw = None
                t = [w.time_fn(f, w.gs, budget=0.1, lo=10, hi=20, warm=2)[0] / L * 1e3 for f in (alone, comm, both)]
                ts = w.peer.gather(t)
                if R == 0:
                    w.emit(**dict(row, captured=capt, ok=all(oks), products_us=round(t[0], 1), comm_us=round(t[1], 1),
                                  together_us=round(t[2], 1), exposed_us=round(t[2] - t[0], 1),
                                  exposed_us_rank1=round(ts[1][2] - ts[1][0], 1),
                                  exposed_pct=round((t[2] / t[0] - 1) * 100, 1),
                                  kernels=(gw or {}).get("nccl_kernels"), nodes=(gw or {}).get("nodes")))
                if capt:
                    torch.cuda.synchronize()
                    g1.reset()
                    g2.reset()
        except Exception as x2:
            err = "%s: %s" % (type(x2).__name__, str(x2)[:300])
            traceback.print_exc()
        errs = w.peer.gather(err)
        if any(errs) and R == 0:
            w.emit(**dict(row, error=errs))

# ------------------------------------------------------------------------------------------ 3
def m3(w):
    torch = w.torch
    big = 64 * MIB
    a, b = torch.zeros(big, dtype=torch.uint8, device="cuda"), torch.zeros(big, dtype=torch.uint8, device="cuda")
    last = [None]

    def mem(step, group, t=None):
        torch.cuda.synchronize()
        w.peer.barrier()
        f, tot = torch.cuda.mem_get_info()
        u = (tot - f) / MIB
        d = 0 if last[0] is None else u - last[0]
        last[0] = u
        w.emit(kind="m3", group=group, step=step, used_mib=round(u, 1), delta_mib=round(d, 1),
               ms=None if t is None else round((time.time() - t) * 1e3, 1))
        w.peer.barrier()

    def ops(c, group, p, q):
        for n, tag in ((MIB, "1M"), (big, "64M")):
            for name, f in (("all-gather", lambda: w.ag(c, p, q, n // 2, w.cs)),
                            ("reduce-scatter", lambda: w.rs(c, p, q, n // 4, BF16, w.cs)),
                            ("all-reduce", lambda: w.ar(c, p, q, n // 2, BF16, w.cs)),
                            ("all-to-all", lambda: w.a2a(c, p, q, n // 2, w.cs))):
                t = time.time()
                try:
                    f()
                    mem("first " + name + " " + tag, group, t)
                except Exception as x:
                    w.emit(kind="error", what="m3 %s %s" % (group, name), error=str(x)[:300])
                    raise

    def group(name, make, p=None, q=None):
        t = time.time()
        c = make()
        mem("init", name, t)
        ops(c, name, p or a.data_ptr(), q or b.data_ptr())
        return c

    mem("start", "none")
    A = group("A default", lambda: w.comm())
    if w.more(10):
        group("B split of A, splitShare 1", lambda: w.split(A, splitShare=1))
    if w.more(10):
        group("C split of A, splitShare 0", lambda: w.split(A, splitShare=0))
    if w.more(10):
        D = group("D maxCTAs 8", lambda: w.comm(maxCTAs=8))
        group("E split of D, splitShare 1", lambda: w.split(D, splitShare=1))
    if w.more(10):
        t = time.time()
        p = w.alloc(256 * MIB)
        mem("ncclMemAlloc 256 MiB", "arena", t)
        for name, kw in (("F windows, default policy", {}), ("G windows, zero CTA", {"CTAPolicy": 2}),
                         ("H windows, maxCTAs 8", {"maxCTAs": 8})):
            def make():
                c = w.comm(**kw)
                mem("init alone", name)
                w.window(c, p, 256 * MIB)
                return c
            group(name + " (init = window)", make, p, p + 128 * MIB)

# ------------------------------------------------------------------------------------------ 4 (rank side)
def touch(path, text=""):
    with open(path + ".w", "w") as f:
        f.write(text)
    os.rename(path + ".w", path)

def m4(w):
    torch, R, ce = w.torch, w.rank, w.name.endswith("ce")
    n = 64 * MIB
    p = w.alloc(4 * n)
    c = w.comm(CTAPolicy=2 if ce else None)
    if ce:
        w.window(c, p, 4 * n)
    gemm = w.gemms()["bf16"]

    def step():
        if ce:
            w.ag(c, p + R * (n // 2), p, n // 2, w.cs)
            w.a2a(c, p + n, p + 2 * n, n // 2, w.cs)
        else:
            w.ag(c, p + R * (n // 2), p, n // 2, w.cs)
            w.ar(c, p + n, p + 2 * n, n // 2, BF16, w.cs)
        with torch.cuda.stream(w.gs):
            for _ in range(3):
                gemm()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    g, what = w.capture(step)
    w.peer.barrier()
    i, stalled, err = 0, False, None
    t = t_begin = time.time()
    e = torch.cuda.Event()
    while not stalled:
        try:
            w.replay(g, w.gs)
            e.record(w.gs)
            t = time.time()
            while not e.query():
                if time.time() - t > 2.0:
                    stalled = True
                    break
                time.sleep(0.0002)
        except Exception as x:
            err = "%s: %s" % (type(x).__name__, str(x)[:300])
            break
        i += 1
        if i == 50:
            touch(os.path.join(w.tmp, "%s.ready%d" % (w.name, R)), str(os.getpid()))
        if time.time() - t_begin > 30:
            break
    if R == 1:
        os._exit(5)          # the victim gets here only if nothing was sent to it
    out = dict(kind="m4", stalled=stalled, steps=i, replay_error=err, graph=what, t_last_progress=t)
    look, seen, q = (10 if ce else 20), [], None
    t1, code = time.time(), C.c_int()
    while time.time() - t1 < look:
        r = w.n.L.ncclCommGetAsyncError(c, C.byref(code))
        if r or code.value:
            seen.append([round(time.time() - t1 + 2, 2), r, code.value])
            if len(seen) > 5:
                break
        try:
            if e.query():
                q = "step finished after %.1f s" % (time.time() - t)
                break
        except Exception as x:
            q = "query raised after %.1f s: %s" % (time.time() - t, str(x)[:200])
            break
        time.sleep(0.1)
    out.update(async_errors=seen, watched_s=round(time.time() - t1, 1), stream_query=q)
    ctx, done = C.c_void_p(), []
    w.cu.cuCtxGetCurrent(C.byref(ctx))

    def sync():
        w.cu.cuCtxSetCurrent(ctx)
        done.append(w.cu.cuStreamSynchronize(C.c_void_p(w.gs.cuda_stream)))
    th = threading.Thread(target=sync, daemon=True)
    th.start()
    th.join(5)
    out.update(sync_hangs_5s=th.is_alive(), sync_result=done[0] if done else None)
    w.emit(**out)
    w.log("leaving by _exit")
    touch(os.path.join(w.tmp, w.name + ".exit"), repr(time.time()))
    os._exit(3)

# ------------------------------------------------------------------------------------------ 5
def m5(w):
    torch, R = w.torch, w.rank
    n = 64 * MIB
    bf = torch.bfloat16
    A = w.comm()
    buf = torch.zeros(n, dtype=torch.uint8, device="cuda")
    src = torch.full((n // 2,), float(R + 1), dtype=bf, device="cuda")
    dst, small = torch.zeros_like(src), torch.full((1 << 20,), float(R + 1), dtype=torch.float32, device="cuda")
    so, sb = torch.zeros_like(small), torch.zeros_like(small)
    s1, s2 = w.cs, torch.cuda.Stream(priority=-1)
    gemm = w.gemms()["bf16"]
    bp, h = buf.data_ptr(), n // 2

    def wait(tag, seconds=6):
        e = [torch.cuda.Event() for _ in range(3)]
        for x, st in zip(e, (w.gs, s1, s2)):
            x.record(st)
        end = time.time() + seconds
        while not all(x.query() for x in e):
            if time.time() > end:
                code = C.c_int()
                w.n.L.ncclCommGetAsyncError(A, C.byref(code))
                w.emit(kind="m5", variant=tag, hang=True, async_error=code.value)
                w.log("hang in", tag)
                os._exit(4)
            time.sleep(0.0001)

    def order(a, b):
        e = torch.cuda.Event()
        e.record(a)
        b.wait_event(e)

    for share in (1, 0):
        B = w.split(A, splitShare=share)
        for c, st in ((A, s1), (B, s2)):                # first calls, with connection, before capture
            for _ in range(3):
                w.ag(c, bp + R * h, bp, h, st)
                w.ar(c, src.data_ptr(), dst.data_ptr(), n // 2, BF16, st)
                w.ar(c, small.data_ptr(), so.data_ptr(), small.numel(), F32, st)
                wait("warm share%d" % share, 10)

        def step():
            w.ag(A, bp + R * h, bp, h, s1)
            w.ar(B, src.data_ptr(), dst.data_ptr(), n // 2, BF16, s2)
            with torch.cuda.stream(w.gs):
                gemm()
                gemm()

        g, what = w.capture(step, side=[s1, s2])
        eagerA = lambda: w.ar(A, small.data_ptr(), so.data_ptr(), small.numel(), F32, s1)
        eagerB = lambda: w.ar(B, small.data_ptr(), sb.data_ptr(), small.numel(), F32, s2)

        def v_plain():
            w.replay(g, w.gs)

        def v_sync():
            w.replay(g, w.gs)
            wait("share%d: inner, after replay" % share)
            eagerA()
            wait("share%d: inner, after eager" % share)

        def v_ordered():
            w.replay(g, w.gs)
            order(w.gs, s1)
            order(w.gs, s2)
            eagerA()
            eagerB()
            order(s1, w.gs)
            order(s2, w.gs)

        def v_free():                                   # eager call not ordered against the replay by the caller
            w.replay(g, w.gs)
            eagerA()

        todo = [("replay only", v_plain), ("eager between, host sync", v_sync), ("eager on both, ordered on device", v_ordered)]
        if share == 0:
            todo.append(("eager not ordered against replay", v_free))
        for tag, f in todo:
            if not w.more(8):
                if R == 0:
                    w.emit(kind="truncated", at=[share, tag])
                return
            w.zero(bp, n)
            w.fill(bp + R * h, h, 1000 * (R + 1))
            dst.zero_(), so.zero_(), sb.zero_()
            torch.cuda.synchronize()
            w.peer.barrier()
            full = "share%d: %s" % (share, tag)
            for _ in range(3):
                f()
            wait(full)
            a, b = w.ev(), w.ev()
            w.peer.barrier()
            a.record(w.gs)
            for _ in range(20):
                f()
            order(s1, w.gs), order(s2, w.gs)
            b.record(w.gs)
            wait(full)
            ok = all([w.check(bp + i * h, h, 1000 * (i + 1)) for i in range(2)]) and bool((dst == 3).all())
            if tag != "replay only":
                ok = ok and bool((so == 3).all())
            oks = w.peer.gather(ok)
            if R == 0:
                w.emit(kind="m5", variant=full, hang=False, ok=all(oks), us_per_step=round(a.elapsed_time(b) / 20 * 1e3, 1),
                       graph=what if tag == "replay only" else None)

# ------------------------------------------------------------------------------------------ 6
def m6(w):
    torch, R = w.torch, w.rank
    size = 64 * MIB
    arena = w.alloc(2 * size)
    hold = torch.zeros(2 * size, dtype=torch.uint8, device="cuda")
    gemm = w.gemms()["bf16"]
    hashes = {}
    for kind, k in (("ring", None), ("ring", 4), ("ring", 8), ("ring", 16), ("sym", None), ("sym", 8), ("ce", None)):
        if not w.more():
            if R == 0:
                w.emit(kind="truncated", at=[kind, k])
            return
        c, err = None, None
        base = hold.data_ptr() if kind == "ring" else arena
        try:
            c = w.comm(maxCTAs=k, CTAPolicy=2 if kind == "ce" else None)
            if kind != "ring":
                w.window(c, arena, 2 * size)
        except Exception as x:
            err = str(x)[:300]
        errs = w.peer.gather(err)
        if any(errs):
            w.emit(kind="error", what="m6 %s %s" % (kind, k), error=errs)
            continue
        for dname, dt, ty, it in (("bf16", torch.bfloat16, BF16, torch.int16), ("fp32", torch.float32, F32, torch.int32)):
            n = size // (2 if dname == "bf16" else 4)
            cnt = n // 2
            xs = []
            for r in range(2):
                gen = torch.Generator(device="cuda").manual_seed(100 + r)
                x = torch.randn(n, generator=gen, device="cuda") * torch.exp2(
                    torch.randint(-8, 9, (n,), generator=gen, device="cuda").float())
                xs.append(x.to(dt))
            sl = slice(R * cnt, (R + 1) * cnt)
            ref = (xs[0][sl].float() + xs[1][sl].float()).to(dt).view(it)
            w.put(base, xs[R])
            fn = lambda: w.rs(c, base, base + size, cnt, ty, w.cs)

            def shot(run, load=False):
                w.zero(base + size, size // 2)
                w.peer.barrier()
                if load:
                    with torch.cuda.stream(w.gs):
                        for _ in range(3):
                            gemm()
                run()
                torch.cuda.synchronize()
                return w.get(base + size, cnt, dt).view(it)

            first = shot(fn)
            eager = [int((shot(fn) != first).sum()) for _ in range(10)]
            loaded = [int((shot(fn, True) != first).sum()) for _ in range(10)]
            g, what = w.capture(fn)
            capt = [int((shot(lambda: w.replay(g, w.cs)) != first).sum()) for _ in range(10)]
            t_e = w.time_fn(fn, w.cs)[0]
            t_c = w.time_fn(lambda: w.replay(g, w.cs), w.cs)[0]
            mine = dict(eager_diff=sum(eager), loaded_diff=sum(loaded), captured_diff=sum(capt),
                        ref_diff=int((first != ref).sum()), hash=int(first.long().mul(
                            torch.arange(cnt, device="cuda") % 65521 + 1).sum()))
            both = w.peer.gather(mine)
            if R == 0:
                tot = {q: both[0][q] + both[1][q] for q in ("eager_diff", "loaded_diff", "captured_diff", "ref_diff")}
                hs = [both[0]["hash"], both[1]["hash"]]
                same = hashes.setdefault(dname, hs) == hs
                w.emit(kind="m6", mode=kind, maxctas=k, dtype=dname, elements=cnt, same_as_first_mode=same,
                       eager_gbs=round(size / 2 / t_e / 1e6, 1), captured_gbs=round(size / 2 / t_c / 1e6, 1),
                       graph=what, **tot)
            torch.cuda.synchronize()
            g.reset()

def worker(a):
    code = 0
    w = None
    try:
        if a.worker == "info":
            import torch
            torch.cuda.init()
            n = Nccl()
            print("INFO torch %s, CUDA %s, devices %s, NCCL %d at %s, missing %s" % (
                torch.__version__, torch.version.cuda, [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
                n.version, n.path, n.missing), flush=True)
        else:
            w = Worker(a)
            {"m1": m1, "m2": m2, "m3": m3, "m4": m4, "m5": m5, "m6": m6}[a.worker.split("_")[0]](w)
            w.emit(kind="done", seconds=round(time.time() - w.t0, 1))
    except BaseException as x:
        traceback.print_exc()
        code = 1
        line = dict(m=a.worker, rank=a.rank, kind="failed", error="%s: %s" % (type(x).__name__, str(x)[:400]))
        try:
            with open(os.path.join(a.tmp, "res_%s_%d.jsonl" % (a.worker, a.rank)), "a") as f:
                f.write(json.dumps(line) + "\n")
        except Exception:
            pass
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)           # no teardown: communicators still have graphs, and some measurements hang on purpose

# ------------------------------------------------------------------------------------------ parent
def sh(cmd, limit=20):
    try:
        r = subprocess.run(cmd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=limit)
        return r.stdout.decode(errors="replace")
    except Exception as x:
        return "%s: %s\n" % (" ".join(cmd), x)

def smi_used():
    out = sh(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"])
    v = [int(x) for x in re.findall(r"^\s*(\d+)\s*$", out, re.M)]
    return v if len(v) >= 2 else None

class Parent:
    def __init__(s, a):
        s.out, s.t0, s.budget = a.out, time.time(), a.budget
        os.makedirs(s.out, exist_ok=True)
        s.tmp = tempfile.mkdtemp(prefix="ncclm_")
        s.res = open(os.path.join(s.out, "results.jsonl"), "w")
        s.logf = open(os.path.join(s.out, "log.txt"), "w")
        s.rows = []

    def left(s):
        return s.budget - (time.time() - s.t0)

    def row(s, r):
        s.rows.append(r)
        line = json.dumps(r)
        s.res.write(line + "\n")
        s.res.flush()
        print(line, flush=True)

    def start(s, name, rank, limit, env):
        e = dict(os.environ)
        e.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NVSHMEM_DISABLE_NVLS="1",
                 CUDA_DEVICE_ORDER="PCI_BUS_ID", NCCL_DEBUG="WARN", NCCL_RAS_ENABLE="0", PYTHONUNBUFFERED="1")
        if os.path.isdir("/sys/class/net/lo"):
            e.setdefault("NCCL_SOCKET_IFNAME", "lo")
        for k in ("NCCL_GRAPH_MIXING_SUPPORT", "NCCL_LAUNCH_ORDER_IMPLICIT", "NCCL_MAX_CTAS", "NCCL_MIN_CTAS", "NCCL_CTA_POLICY"):
            e.pop(k, None)
        e.update(env)
        f = open(os.path.join(s.tmp, "log_%s_%d.txt" % (name, rank)), "w")
        return subprocess.Popen([sys.executable, "-u", os.path.abspath(__file__), s.out, "--worker", name, "--rank", str(rank),
                                 "--tmp", s.tmp, "--limit", str(limit)], stdout=f, stderr=subprocess.STDOUT, env=e,
                                stdin=subprocess.DEVNULL)

    def collect(s, name):
        for r in (0, 1):
            p = os.path.join(s.tmp, "res_%s_%d.jsonl" % (name, r))
            if os.path.exists(p):
                for line in open(p):
                    try:
                        s.row(json.loads(line))
                    except ValueError:
                        pass
            p = os.path.join(s.tmp, "log_%s_%d.txt" % (name, r))
            if os.path.exists(p):
                t = open(p, errors="replace").read()
                if len(t) > 200000:
                    t = t[:100000] + "\n... cut ...\n" + t[-100000:]
                s.logf.write("===== %s rank %d\n%s\n" % (name, r, t))
                s.logf.flush()

    def stop(s, ps):
        for p in ps:                                     # only our own children; SIGKILL works on stopped ones too
            if p.poll() is None:
                p.kill()
        for p in ps:
            try:
                p.wait(15)
            except subprocess.TimeoutExpired:
                s.row(dict(m="parent", kind="error", what="process %d survives SIGKILL" % p.pid))

    def pair(s, name, limit, env):
        t0 = time.time()
        ps = [s.start(name, r, limit - 4, env) for r in (0, 1)]
        end, one = t0 + limit, None
        while time.time() < end:
            st = [p.poll() for p in ps]
            if None not in st:
                break
            if st != [None, None] and one is None:
                one = time.time()
            if one and time.time() - one > 12:           # one ended; the other gets 12 s
                break
            time.sleep(0.05)
        codes = [p.poll() for p in ps]
        s.stop(ps)
        s.collect(name)
        s.row(dict(m=name, kind="end", exit_codes=codes, killed=None in codes, wall_s=round(time.time() - t0, 1)))

    def fault(s, name, limit, env):
        t0 = time.time()
        base = smi_used()
        ps = [s.start(name, r, limit - 4, env) for r in (0, 1)]
        end = t0 + limit
        r = dict(m=name, kind="m4_parent", base_mib=base)
        try:
            ready = [os.path.join(s.tmp, "%s.ready%d" % (name, i)) for i in (0, 1)]
            while not all(os.path.exists(x) for x in ready):
                if any(p.poll() is not None for p in ps) or time.time() > end - 30:
                    raise RuntimeError("the pair did not reach its loop")
                time.sleep(0.05)
            time.sleep(0.5)
            r["running_mib"] = smi_used()
            sig = signal.SIGSTOP if "stop" in name else signal.SIGKILL
            t_sig = time.time()
            ps[1].send_signal(sig)
            died = []

            def reap():                                  # blocking wait: the exact moment of the survivor's end
                ps[0].wait()
                died.append(time.time())
            th = threading.Thread(target=reap, daemon=True)
            th.start()
            time.sleep(4)
            ps[1].poll()                                 # reap a killed victim
            r["mib_4s_after_signal"] = smi_used()
            mark = os.path.join(s.tmp, name + ".exit")
            while not os.path.exists(mark) and not died and time.time() < end - 12:
                time.sleep(0.02)
            if os.path.exists(mark):
                t_exit = float(open(mark).read())
                th.join(12)
                r["signal_to_exit_call_s"] = round(t_exit - t_sig, 2)
                r["exit_ms"] = round((died[0] - t_exit) * 1e3, 1) if died else None
                r["exit_hung"] = not died
                freed = None
                for _ in range(40):
                    u = smi_used()
                    if u and base and u[0] < base[0] + 200:
                        freed = round(time.time() - t_exit, 2)
                        break
                    if time.time() - t_exit > 15:
                        break
                    time.sleep(0.1)
                r["gpu0_free_after_exit_s"] = freed
                r["mib_after_exit"] = smi_used()
                r["survivor_code"] = ps[0].poll()
            else:
                r["error"] = "the survivor ended early or never left" + (" (code %s)" % ps[0].poll())
        except Exception as x:
            r["error"] = str(x)[:300]
        s.stop(ps)
        time.sleep(0.5)
        r["mib_at_end"] = smi_used()
        s.collect(name)
        for q in s.rows:                                 # when did the signal come, against the last step seen
            if q.get("m") == name and q.get("kind") == "m4" and "t_last_progress" in q and "error" not in r:
                r["last_replay_minus_signal_s"] = round(q["t_last_progress"] - t_sig, 3)
        s.row(r)
        s.row(dict(m=name, kind="end", wall_s=round(time.time() - t0, 1)))

    # the table ------------------------------------------------------------------------------
    def table(s, full):
        o = []
        f = lambda v: "-" if v is None else str(v)
        mode = lambda r: r.get("mode", "?") + (str(r["maxctas"]) if r.get("maxctas") else "")
        rows = [r for r in s.rows if r.get("kind") == "m1"]
        if rows:
            o.append("1. bus GB/s | beside bf16, fp8 products: GB/s and slowdown of products % (e eager, c captured)")
            o.append("%-6s %-6s %-6s %2s %6s %5s | %6s %6s | %6s %6s | %s" % (
                "op", "size", "mode", "", "GB/s", "ok", "bf16", "slow%", "fp8", "slow%", "graph"))
            order = {x[0]: i for i, x in enumerate(sorted(SIZES, key=lambda x: x[1]))}
            for r in sorted(rows, key=lambda r: (r["op"], order[r["size"]], r["mode"], r["maxctas"] or 99, r.get("captured", False))):
                if not full and (r["size"] != "202MB" or r["op"] == "ag_oop" or not r.get("captured", True)):
                    continue
                if "error" in r:
                    o.append("%-6s %-6s %-6s ERROR %s" % (r["op"], r["size"], mode(r), str(r["error"])[:80]))
                    continue
                b, q, g = r.get("beside_bf16", {}), r.get("beside_fp8", {}), r.get("graph") or {}
                ks = ",".join(k.replace("ncclDevKernel_", "").replace("ncclSymkDevKernel_", "sym:") for k in g.get("nccl_kernels", {}))
                if not ks and "nodes" in g:
                    ks = "memcpy %s" % g["nodes"].get("memcpy", 0)
                o.append("%-6s %-6s %-6s %2s %6s %5s | %6s %6s | %6s %6s | %s" % (
                    r["op"], r["size"], mode(r), "c" if r["captured"] else "e", f(r["gbs"]), r["ok"], f(b.get("gbs")),
                    f(b.get("slow_pct")), f(q.get("gbs")), f(q.get("slow_pct")), ks[:60 if full else 34]))
        rows = [r for r in s.rows if r.get("kind") == "m2"]
        if rows:
            o.append("\n2. one 7B block, us (eager / captured): products, communication alone, together, exposed")
            seen = {}
            for r in rows:
                seen.setdefault((r["op"], r["ag"], r["rs"]), []).append(r)
            for (op, a, b), rs in seen.items():
                o.append("%-6s %-6s %-6s " % (op, a or "", b or "") + " | ".join(
                    "%s %s %s exp %s%s" % (f(r.get("products_us")), f(r.get("comm_us")), f(r.get("together_us")), f(r.get("exposed_us")),
                                           "" if r.get("ok") else " NOT OK") if "error" not in r else "ERROR " + str(r["error"])[:80] for r in rs))
        rows = [r for r in s.rows if r.get("kind") == "m3" and r["rank"] == 0]
        if rows:
            o.append("\n3. device memory, rank 0, MiB (change per step)")
            seen = {}
            for r in rows:
                seen.setdefault(r["group"], []).append(r)
            for g, rs in seen.items():
                o.append("%-40s %s  total %.1f" % (g, " ".join(
                    "%s %+g" % (r["step"].replace("first ", "").replace("all-gather", "ag").replace("reduce-scatter", "rs")
                                .replace("all-reduce", "ar").replace("all-to-all", "a2a"), r["delta_mib"])
                    for r in rs if r["delta_mib"] or full), sum(r["delta_mib"] for r in rs)))
        rows = [r for r in s.rows if r.get("kind") in ("m4", "m4_parent")]
        if rows:
            o.append("\n4. faults")
            for r in rows:
                o.append("%s: %s" % (r["m"], ", ".join("%s=%s" % (k, v) for k, v in r.items()
                                                       if k not in ("m", "rank", "kind", "graph", "t_last_progress"))))
        rows = [r for r in s.rows if r.get("kind") == "m5"]
        if rows:
            o.append("\n5. two communicators in one graph")
            for r in rows:
                if r["rank"] == 0 or r.get("hang"):
                    o.append("%-14s r%d %-44s %s" % (r["m"], r["rank"], r["variant"], "HANGS" if r.get("hang") else "ok=%s %s us" % (r["ok"], r["us_per_step"])))
        rows = [r for r in s.rows if r.get("kind") == "m6"]
        if rows:
            o.append("\n6. reduce-scatter 64 MiB: differing elements (both ranks) eager x10, beside load x10, captured x10, against a+b; GB/s e/c")
            for r in rows:
                o.append("%-6s %-5s %d %d %d %d  same bits as first mode: %s  %s/%s" % (
                    mode(r), r["dtype"], r["eager_diff"], r["loaded_diff"], r["captured_diff"], r["ref_diff"],
                    r["same_as_first_mode"], r["eager_gbs"], r["captured_gbs"]))
        bad = [r for r in s.rows if r.get("kind") in ("failed", "error", "truncated", "note", "skipped")
               or (r.get("kind") == "end" and r.get("killed"))]
        if bad:
            o.append("\nfailures and notes")
            o += [json.dumps(r)[:400 if full else 220] for r in (bad if full else bad[:15])]
        return "\n".join(o) + "\n"

    def run(s, only):
        sysinfo = sh(["nvidia-smi", "--query-gpu=index,name,driver_version,memory.total,pci.bus_id", "--format=csv"]) + \
            sh(["nvidia-smi", "topo", "-m"]) + "NCCL env: %s\n" % {k: v for k, v in os.environ.items() if k.startswith("NCCL")}
        t = time.time()
        p = s.start("info", 0, 90, {})
        try:
            p.wait(100)
        except subprocess.TimeoutExpired:
            p.kill()
        sysinfo += open(os.path.join(s.tmp, "log_info_0.txt"), errors="replace").read() + "import took %.1f s\n" % (time.time() - t)
        print(sysinfo, flush=True)
        with open(os.path.join(s.out, "system.txt"), "w") as f:
            f.write(sysinfo)
        for name, limit, env in PLAN:
            if only and not any(name == x or name.startswith(x + "_") for x in only):
                continue
            lim = min(limit, s.left() - 4)
            if lim < 22:
                s.row(dict(m=name, kind="skipped", why="no time left"))
                continue
            print("--- %s (limit %d s, %d s gone)" % (name, lim, time.time() - s.t0), flush=True)
            try:
                (s.fault if name.startswith("m4") else s.pair)(name, lim, env)
            except Exception as x:
                traceback.print_exc()
                s.row(dict(m=name, kind="failed", error=str(x)[:300]))
            try:
                with open(os.path.join(s.out, "table.txt"), "w") as f:
                    f.write(s.table(True))
            except Exception:
                traceback.print_exc()
        try:
            short = s.table(False)
        except Exception:
            short = traceback.format_exc()
        print("\n" + short + "\ntotal %.0f s; full table in table.txt" % (time.time() - s.t0), flush=True)
        shutil.rmtree(s.tmp, ignore_errors=True)

def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("out")
    ap.add_argument("--only", default="")
    ap.add_argument("--budget", type=float, default=465)
    ap.add_argument("--worker")
    ap.add_argument("--rank", type=int, default=0)
    ap.add_argument("--tmp")
    ap.add_argument("--limit", type=float, default=60)
    a = ap.parse_args()
    if a.worker:
        worker(a)
    else:
        Parent(a).run([x for x in a.only.split(",") if x])

if __name__ == "__main__":
    main()
