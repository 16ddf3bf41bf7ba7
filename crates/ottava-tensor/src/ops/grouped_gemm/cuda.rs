//! The kernels for all types and GPUs. If the kernels for tensor cores support a product, they are used instead.

use super::{Sizes, Stack};
use crate::cuda::{Arg, CudaDevice};
use crate::granularity::ScaleLayout;
use crate::ops::declaration::{kernels, pack};
use crate::ops::dequantize::block_values;
use crate::ops::gemm::wgmma::{Product, Shape};
use crate::ops::groups::Groups;
use crate::ops::launch::{BLOCK, Defines};
use crate::ops::operand::{Accumulation, Operand};
use crate::{DType, Error, Result, Tensor};

kernels! {
    static SOURCE = { file: "grouped_gemm", variants: VARIANTS };
    kernel grouped_gemm(
        y: *mut X, offsets: *const i32, counts: *const i32, groups: i32, columns: i32, terms: i32, b_rows: i32, b_k: i32, of: Sides
    );
    kernel grouped_wgrad(
        into: *mut X, offsets: *const i32, counts: *const i32, rows: i32, columns: i32, add: i32, of: Sides
    );
}

/// The types of the operands and of the result.
const VARIANTS: &[Defines] = &[
    &[("A", "f32"), ("B", "f32"), ("X", "f32")],
    &[("A", "f16"), ("B", "f16"), ("X", "f16")],
    &[("A", "f16"), ("B", "f16"), ("X", "f32")],
    &[("A", "bf16"), ("B", "bf16"), ("X", "bf16")],
    &[("A", "bf16"), ("B", "bf16"), ("X", "f32")],
    &[("A", "e4m3"), ("B", "e4m3"), ("X", "bf16")],
    &[("A", "e4m3"), ("B", "e4m3"), ("X", "f16")],
    &[("A", "e4m3"), ("B", "e4m3"), ("X", "f32")],
    &[("A", "e5m2"), ("B", "e4m3"), ("X", "bf16")],
    &[("A", "e5m2"), ("B", "e4m3"), ("X", "f16")],
    &[("A", "e5m2"), ("B", "e4m3"), ("X", "f32")],
];

/// The number of rows, and the number of columns, of a tile.
const SIDE: usize = 64;

pub(super) fn grouped_gemm(
    gpu: &CudaDevice,
    a: Operand,
    b: Operand,
    groups: &Groups,
    sizes: Sizes,
    y: &mut Tensor,
    accumulation: Accumulation,
) -> Result<()> {
    let Sizes { stack, p, n, k } = sizes;
    if !p.is_multiple_of(Groups::ALIGNMENT) {
        return Err(Error::Value(format!("grouped_gemm: {p} rows are not a multiple of {}", Groups::ALIGNMENT)));
    }
    let (b_rows, b_k) = match stack {
        Stack::Rows => (n, 0),
        Stack::Contracted => (0, k),
    };
    if let Some([x, z]) = dequantized(a, b)? {
        return by_tiles(gpu, [Operand::plain(&x), Operand::plain(&z)], groups, [p, n, k], [b_rows, b_k], y);
    }
    let shape = Shape::of_rows(p, n);
    if let Some(product) = Product::plan(gpu, a, b, y.dtype(), shape, accumulation) {
        return product.enqueue(gpu, groups, [k, b_rows, b_k], y);
    }
    by_tiles(gpu, [a, b], groups, [p, n, k], [b_rows, b_k], y)
}

/// Returns the values of operands in a format with small blocks, which no product reads.
fn dequantized(a: Operand, b: Operand) -> Result<Option<[Tensor; 2]>> {
    let is_emulated = a.scale_inv().is_some_and(|(_, granularity)| granularity.microscaling().is_some());
    is_emulated.then(|| Ok([block_values(a)?, block_values(b)?])).transpose()
}

/// Computes [`grouped_gemm`] by the kernel for all types.
fn by_tiles(
    gpu: &CudaDevice,
    [a, b]: [Operand; 2],
    groups: &Groups,
    [p, n, k]: [usize; 3],
    [b_rows, b_k]: [usize; 2],
    y: &mut Tensor,
) -> Result<()> {
    let defines = variant(a, b, y.dtype())?;
    let (Groups { offsets, counts }, sides) = (groups, [side(a)?, side(b)?].concat());
    let entry = kernel::grouped_gemm(y, offsets, counts, groups.len(), n, k, b_rows, b_k, sides);
    let kernel = SOURCE.kernel(defines, entry);
    let grid = [n.div_ceil(SIDE) as u32, (p / SIDE) as u32, 1];
    // SAFETY: `y` is `[p, n]` in whole tiles of rows, and `check` has compared the operands with these sizes. Offsets and counts lie within `p` rows,
    // as the contract demands.
    unsafe { gpu.launch(&kernel, grid, BLOCK, 0) }
}

pub(super) fn grouped_wgrad(
    gpu: &CudaDevice,
    a: Operand,
    b: Operand,
    groups: &Groups,
    into: &mut Tensor,
    accumulation: Accumulation,
    add: bool,
) -> Result<()> {
    if let Some([x, y]) = dequantized(a, b)? {
        return wgrad_by_tiles(gpu, [Operand::plain(&x), Operand::plain(&y)], groups, into, add);
    }
    let (m, n) = (into.shape()[0] / groups.len(), into.shape()[1]);
    let shape = Shape::of_weights(groups.len(), m, n);
    if let Some(product) = Product::plan(gpu, a, b, into.dtype(), shape, accumulation) {
        return product.enqueue_wgrad(gpu, groups, into, add);
    }
    wgrad_by_tiles(gpu, [a, b], groups, into, add)
}

/// Computes [`grouped_wgrad`] by the kernel for all types.
fn wgrad_by_tiles(gpu: &CudaDevice, [a, b]: [Operand; 2], groups: &Groups, into: &mut Tensor, add: bool) -> Result<()> {
    let (m, n) = (into.shape()[0] / groups.len(), into.shape()[1]);
    let defines = variant(a, b, into.dtype())?;
    let (Groups { offsets, counts }, sides) = (groups, [side(a)?, side(b)?].concat());
    let kernel = SOURCE.kernel(defines, kernel::grouped_wgrad(into, offsets, counts, m, n, add, sides));
    let grid = [n.div_ceil(SIDE) as u32, m.div_ceil(SIDE) as u32, groups.len() as u32];
    // SAFETY: `into` is `[groups · m, n]`, and the operands are `[m, P]` and `[n, P]`. Offsets and counts lie within `P` rows, as the contract
    // demands.
    unsafe { gpu.launch(&kernel, grid, BLOCK, 0) }
}

fn variant(a: Operand, b: Operand, out: DType) -> Result<Defines> {
    let name = |dtype| match dtype {
        DType::F32 => "f32",
        DType::F16 => "f16",
        DType::BF16 => "bf16",
        DType::E4M3 => "e4m3",
        DType::E5M2 => "e5m2",
        _ => "",
    };
    let (x, y) = (a.matrix("grouped_gemm: a")?.0.dtype(), b.matrix("grouped_gemm: b")?.0.dtype());
    let wanted = [("A", name(x)), ("B", name(y)), ("X", name(out))];
    let found = VARIANTS.iter().find(|variant| **variant == wanted);
    found.copied().ok_or_else(|| Error::Value(format!("grouped_gemm: there is no kernel for {x} · {y} into {out}")))
}

/// Returns the `Side` of the kernel, a part of its last parameter, as consecutive 64-bit arguments.
fn side(operand: Operand) -> Result<[Arg; 6]> {
    let (x, transposed) = operand.matrix("grouped_gemm")?;
    let pitch = x.shape()[1] as i64;
    let [row_step, k_step] = if transposed { [1, pitch] } else { [pitch, 1] };
    let (scale_inv, shared, steps) = match operand.scale_inv() {
        None => (0, [1, 1], [0, 0]),
        Some((scale_inv, granularity)) => {
            let ScaleLayout { shared, steps } = granularity.scale_layout(scale_inv.shape());
            (scale_inv.device_ptr(), shared, steps)
        }
    };
    Ok([
        Arg::Ptr(x.device_ptr()),
        Arg::I64(row_step),
        Arg::I64(k_step),
        Arg::Ptr(scale_inv),
        pack(shared[0] as u32, shared[1] as u32),
        pack(steps[0] as u32, steps[1] as u32),
    ])
}
