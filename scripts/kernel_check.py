"""Compiles kernel files of this project by the NVRTC that torch has loaded, and launches them, for scripts that compare kernels with torch."""
import ctypes, glob, os, sys
import torch

OPS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../crates/ottava-tensor/src/ops")
cuda = ctypes.CDLL("libcuda.so.1")
torch.zeros(1, device="cuda")


def ok(result, what):
    if result:
        raise SystemExit(f"{what}: error {result}")


def nvrtc():
    for folder in sys.path:
        for found in glob.glob(f"{folder}/nvidia/*/lib/libnvrtc.so.*[0-9]"):
            if "builtins" not in found and "alt" not in found:
                return ctypes.CDLL(found)
    return ctypes.CDLL("libnvrtc.so")


def compiled(file, headers, **defines):
    """Returns a module of a kernel file in the folder of the ops, compiled with the options of `cuda/nvrtc.rs`."""
    read = lambda path: open(os.path.join(OPS, path)).read() + "\n"
    text = "".join(map(read, ["common.cuh", *headers, file])).encode()
    lib, program, size = nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    ok(lib.nvrtcCreateProgram(ctypes.byref(program), text, b"kernels.cu", 0, None, None), file)
    options = ["--gpu-architecture=sm_90a", "-std=c++17", "--fmad=false", "-default-device", "-DTILE=128"]
    options += ["-DMAX_F16=65504.0f", "-DMAX_E4M3=448.0f", "-DMAX_E5M2=57344.0f"] + [f"-D{key}={value}" for key, value in defines.items()]
    texts = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
    ok(lib.nvrtcCompileProgram(program, len(options), texts), f"compiling {file}")
    ok(lib.nvrtcGetCUBINSize(program, ctypes.byref(size)), file)
    binary, module = ctypes.create_string_buffer(size.value), ctypes.c_void_p()
    ok(lib.nvrtcGetCUBIN(program, binary), file)
    ok(cuda.cuModuleLoadData(ctypes.byref(module), binary), file)
    return module


class Long(int):
    """An argument of 64 bits. Other integers have 32 bits."""


def launch(module, name, grid, block, shared, *args):
    function, values = ctypes.c_void_p(), []
    ok(cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), name)
    if shared > 48 << 10:
        ok(cuda.cuFuncSetAttribute(function, 8, shared), name)
    for a in args:
        if a is None or isinstance(a, torch.Tensor):
            values.append(ctypes.c_uint64(0 if a is None else a.data_ptr()))
        elif isinstance(a, float):
            values.append(ctypes.c_float(a))
        else:
            values.append(ctypes.c_uint64(a) if isinstance(a, Long) else ctypes.c_int(a))
    pointers = (ctypes.c_void_p * len(values))(*[ctypes.cast(ctypes.pointer(v), ctypes.c_void_p) for v in values])
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    ok(cuda.cuLaunchKernel(function, *grid, block, 1, 1, shared, stream, pointers, None), name)


def empty(*shape, dtype=torch.uint8):
    return torch.empty(*shape, dtype=dtype, device="cuda")


def compare(case, compared, bound=1e-2):
    """Prints how much each kernel's result differs from the expected, and fails above the bound."""
    for name, seen, expected in compared:
        error = ((seen.double() - expected).norm() / expected.norm()).item()
        print(f"{case}: {name} differs by {error:.1e} of its norm")
        assert error < bound


def time(work, runs=20):
    """Returns the mean milliseconds of a run."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    start.record()
    for _ in range(runs):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / runs
