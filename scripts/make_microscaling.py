#!/usr/bin/env python3
"""Records what torchao and the reference of Transformer Engine cast to MXFP8 and NVFP4, in crates/ottava-tensor/tests/data/microscaling.safetensors.

Development only; the program itself needs no Python. `pip install torch==2.15.0 safetensors==0.8.0 numpy && pip install --no-deps torchao==0.18.0`.
The reference of Transformer Engine is one Python file that needs no GPU:
`pip download --no-deps transformer-engine==2.20.2`, unpack the wheel, and give its folder:
`make_microscaling.py FOLDER`. Runs in seconds. For x [R, C]:

- `mx/TYPE/x`; `mx/TYPE/FORMAT/rows` are codes and `.../row_scales` E8M0 exponents; the same for `columns`, of the transpose. From torchao, "rceil".
- `nvfp4/CASE/x`; `rows` and `columns` are E2M1 codes, one per byte; `row_scales` and `column_scales` E4M3; `row_amax` and `column_amax` F32 [1].
  The cases are `1d` (blocks of 1x16), `2d` (16x16) and `rht` (1x16, and columns after the Hadamard transform).
"""

import importlib.util
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import save_file
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx

OUT = Path(__file__).parent.parent / "crates/ottava-tensor/tests/data/microscaling.safetensors"
ROWS, COLUMNS = 64, 96
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def reference(folder: Path) -> types.ModuleType:
    """Loads Transformer Engine's reference, without the package around it, which needs CUDA."""
    here = folder / "transformer_engine/pytorch/custom_recipes"
    package = "transformer_engine.pytorch"
    for name in ["transformer_engine", package, f"{package}.custom_recipes", f"{package}.quantized_tensor"]:
        sys.modules[name] = types.ModuleType(name)
    empty = type("Empty", (), {"__init__": lambda self, rowwise=True, columnwise=True: None})
    sys.modules[f"{package}.quantized_tensor"].QuantizedTensorStorage = empty
    sys.modules[f"{package}.quantized_tensor"].Quantizer = empty
    # The reference only names these types.
    products = types.ModuleType(f"{package}.custom_recipes.gemm")
    products.MMParams, products.GEMMType = object, types.SimpleNamespace(FPROP=None)
    sys.modules[f"{package}.custom_recipes"].gemm = sys.modules[products.__name__] = products
    for name in ["reference_utils", "reference_nvfp4"]:
        spec = importlib.util.spec_from_file_location(f"{package}.custom_recipes.{name}", here / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        setattr(sys.modules[f"{package}.custom_recipes"], name, module)
        spec.loader.exec_module(module)
    return module


def values(dtype: torch.dtype, edges: bool) -> torch.Tensor:
    """Returns normal values whose rows have different sizes, with blocks of zeros, extremes, powers of two and ties."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(ROWS, COLUMNS, generator=generator) * torch.exp2(torch.arange(ROWS) % 11 - 6.0)[:, None]
    if edges:
        x[3], x[4, :48], x[4, 48:] = 0.0, -0.0, 1e-30
        x[5, :32], x[5, 32:64], x[5, 64:] = 448.0, 449.0, 447.0
        # With 2^-119 and E4M3 or 2^-112 and E5M2, torchao has the smallest scale, 2^-127, but does not divide by it. Transformer Engine does.
        x[6], x[7] = 2.0 ** -108, -(2.0 ** -110)
        x[8] = torch.exp2(torch.arange(COLUMNS) % 16 - 8.0)
        x[9, :32] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -6.0] * 2)
        x[10, 32:64] = torch.linspace(-448.0, 448.0, 32)
        # The amax of the tensor, for which the scale of the tensor is 1.
        x[16, 0] = 2688.0
    return x.to(dtype)


def unpacked(codes: torch.Tensor) -> torch.Tensor:
    """Returns one code per byte from two per byte, the first in the low half."""
    return torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)


def mx(arrays: dict):
    for name, dtype in [("f32", torch.float32), ("bf16", torch.bfloat16)]:
        x = values(dtype, edges=True)
        arrays[f"mx/{name}/x"] = x
        for format_name, of in FORMATS.items():
            for copy, matrix in [("row", x), ("column", x.t().contiguous())]:
                scales, codes = to_mx(matrix, of, 32, ScaleCalculationMode.RCEIL)
                arrays[f"mx/{name}/{format_name}/{copy}s"] = codes.reshape(matrix.shape).view(torch.uint8)
                arrays[f"mx/{name}/{format_name}/{copy}_scales"] = scales.view(torch.uint8).reshape(matrix.shape[0], -1)


def nvfp4(arrays: dict, te: types.ModuleType):
    for case, tile, rotated in [("1d", (1, 16), False), ("2d", (16, 16), False), ("rht", (1, 16), True)]:
        quantizer = te.NVFP4QuantizerRef(te.reference_utils.Fp4Formats.E2M1, quant_tile_shape=tile, with_rht=rotated)
        quantizer.rowwise_usage = quantizer.columnwise_usage = True
        x = values(torch.bfloat16, edges=not rotated)
        rows, row_scales, columns, column_scales, row_amax, column_amax = quantizer._quantize(x)
        arrays |= {
            f"nvfp4/{case}/x": x,
            f"nvfp4/{case}/rows": unpacked(rows),
            f"nvfp4/{case}/row_scales": row_scales.view(torch.uint8),
            f"nvfp4/{case}/row_amax": row_amax,
            f"nvfp4/{case}/columns": unpacked(columns),
            f"nvfp4/{case}/column_scales": column_scales.view(torch.uint8),
            f"nvfp4/{case}/column_amax": column_amax,
        }


def main():
    arrays = {}
    mx(arrays)
    nvfp4(arrays, reference(Path(sys.argv[1])))
    save_file({name: array.contiguous() for name, array in arrays.items()}, OUT)
    print(f"{OUT.name}: {len(arrays)} arrays, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
