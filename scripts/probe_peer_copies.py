#!/usr/bin/env python3
"""Copies between two GPUs by their copy engines, alone and beside products, eager and in a CUDA graph. Needs torch and two GPUs of one machine.

Each process opens the other's memory (cuIpcOpenMemHandle). A gather is: tell the peer that its memory may be written, wait for the peer's word, copy to it,
tell it that the copy is complete, and wait for its word. Words are 32-bit flags in device memory, written and awaited by the stream
(cuStreamWriteValue32, cuStreamWaitValue32), so a gather takes no multiprocessor.
"""
import ctypes, os, sys, time
import torch, torch.multiprocessing as mp

MEGABYTES = [1, 4, 16, 32, 64]


class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 64)]


def worker(rank, folder):
    torch.cuda.set_device(rank)
    torch.zeros(1, device="cuda")
    cu = ctypes.CDLL("libcuda.so.1")
    u64, u32, ptr = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p
    cu.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(u64), Handle, u32]
    cu.cuStreamWriteValue32_v2.argtypes = cu.cuStreamWaitValue32_v2.argtypes = [ptr, u64, u32, u32]
    cu.cuMemcpyDtoDAsync_v2.argtypes = [u64, u64, ctypes.c_size_t, ptr]

    def check(status, what):
        if status:
            name = ctypes.c_char_p()
            cu.cuGetErrorName(status, ctypes.byref(name))
            raise RuntimeError(f"rank {rank}: {what}: {name.value}")

    def shared(bytes):
        own = u64()
        check(cu.cuMemAlloc_v2(ctypes.byref(own), ctypes.c_size_t(bytes)), "cuMemAlloc")
        check(cu.cuMemsetD8_v2(own, 0, ctypes.c_size_t(bytes)), "cuMemset")
        torch.cuda.synchronize()
        handle = Handle()
        check(cu.cuIpcGetMemHandle(ctypes.byref(handle), own), "cuIpcGetMemHandle")
        tag = shared.count
        shared.count += 1
        with open(f"{folder}/{tag}.{rank}.tmp", "wb") as f:
            f.write(bytes_of(handle))
        os.rename(f"{folder}/{tag}.{rank}.tmp", f"{folder}/{tag}.{rank}")
        other = f"{folder}/{tag}.{1 - rank}"
        while not os.path.exists(other):
            time.sleep(0.01)
        peer_handle = Handle.from_buffer_copy(open(other, "rb").read())
        peer = u64()
        check(cu.cuIpcOpenMemHandle_v2(ctypes.byref(peer), peer_handle, 1), "cuIpcOpenMemHandle")
        return own.value, peer.value

    bytes_of = lambda x: ctypes.string_at(ctypes.addressof(x), 64)
    shared.count = 0
    own, peer = shared(256 << 20)
    own_flags, peer_flags = shared(4096)
    copies = torch.cuda.Stream(priority=-1)
    source = torch.full((64 << 20,), rank + 1, dtype=torch.uint8, device="cuda")

    def gather(bytes, stream, pull=False):
        s = stream.cuda_stream
        write = lambda at: check(cu.cuStreamWriteValue32_v2(s, at, 1, 0), "write")
        def wait(at):
            check(cu.cuStreamWaitValue32_v2(s, at, 1, 1), "wait")
            check(cu.cuStreamWriteValue32_v2(s, at, 0, 0), "reset")
        write(peer_flags)
        wait(own_flags)
        if pull:
            check(cu.cuMemcpyDtoDAsync_v2(source.data_ptr(), peer, bytes, s), "copy")
        else:
            check(cu.cuMemcpyDtoDAsync_v2(peer, source.data_ptr(), bytes, s), "copy")
        write(peer_flags + 64)
        wait(own_flags + 64)

    def timed(work, repeat):
        torch.cuda.synchronize()
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record()
        for _ in range(repeat):
            work()
        b.record()
        torch.cuda.synchronize()
        return a.elapsed_time(b) / repeat

    def say(*text):
        if rank == 0:
            print(*text, flush=True)

    gather(1 << 20, copies)
    torch.cuda.synchronize()
    got = ctypes.create_string_buffer(16)
    check(cu.cuMemcpyDtoH_v2(got, u64(own), ctypes.c_size_t(16)), "read")
    assert got.raw == bytes([2 - rank]) * 16, got.raw
    say("IPC, peer copies and stream memory operations work")
    def alone(bytes, pull=False):
        def run():
            copies.wait_stream(torch.cuda.current_stream())
            for _ in range(20):
                gather(bytes, copies, pull)
            torch.cuda.current_stream().wait_stream(copies)
        run()
        return timed(run, 3) / 20
    for mb in MEGABYTES:
        push, pulled = alone(mb << 20), alone(mb << 20, True)
        say(f"{mb:3d} MiB each way: push {push * 1e3:6.1f} us, {(mb << 20) / push / 1e6:5.0f} GB/s; pull {pulled * 1e3:6.1f} us, {(mb << 20) / pulled / 1e6:5.0f} GB/s")
    local = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    t = timed(lambda: check(cu.cuMemcpyDtoDAsync_v2(local.data_ptr(), source.data_ptr(), 32 << 20, torch.cuda.current_stream().cuda_stream), "local"), 50)
    say(f"local copy of 32 MiB: {t * 1e3:.1f} us")

    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(6144, 4096, device="cuda", dtype=torch.bfloat16)
        one = torch.ones(1, device="cuda")
        if dtype == torch.bfloat16:
            product = lambda: torch.mm(x, w.t())
        else:
            x8, w8 = x.to(dtype), w.to(dtype)
            product = lambda: torch._scaled_mm(x8, w8.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
        def step(gathers, products, megabytes):
            def run():
                for _ in range(10):
                    if gathers:
                        copies.wait_stream(torch.cuda.current_stream())
                        gather(megabytes << 20, copies)
                    for _ in range(products):
                        product()
                    if gathers:
                        torch.cuda.current_stream().wait_stream(copies)
            return run
        megabytes = 32 if dtype == torch.bfloat16 else 16
        for captured in (False, True):
            rows = []
            for gathers, products in ((True, 0), (False, 1), (True, 1), (False, 2), (True, 2)):
                run = step(gathers, products, megabytes)
                run()
                torch.cuda.synchronize()
                if captured:
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
                        run()
                    run = graph.replay
                timed(run, 20)
                rows.append(timed(run, 60) / 10 * 1e3)
            say(f"{dtype}, {'captured' if captured else 'eager'}: gather of {megabytes} MiB {rows[0]:.1f} us; one product {rows[1]:.1f}, with the gather {rows[2]:.1f}; "
                f"two products {rows[3]:.1f}, with the gather {rows[4]:.1f}")
    # A one-thread wait costs no SM; a sum of two halves by a kernel does.
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    say(f"sum of two times 32 MiB: {timed(lambda: torch.add(a, b, out=a), 50) * 1e3:.1f} us")
    time.sleep(1)
    os._exit(0)


if __name__ == "__main__":
    import tempfile
    if torch.cuda.device_count() < 2:
        sys.exit(f"probe_peer_copies.py needs two GPUs of one machine, and {torch.cuda.device_count()} can be used; is CUDA_VISIBLE_DEVICES set?")
    mp.spawn(worker, (tempfile.mkdtemp(),), nprocs=2, join=True)
