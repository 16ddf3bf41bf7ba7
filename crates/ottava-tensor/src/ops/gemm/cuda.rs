use super::skinny::Skinny;
use super::{Addend, emulated};
use crate::cuda::{CudaDevice, GemmPointers, GemmSpec, Major, ScaleMode};
use crate::granularity::Granularity;
use crate::ops::declaration::{Address, kernels};
use crate::ops::gemm::wgmma::Product;
use crate::ops::launch::{self, BLOCK};
use crate::ops::operand::{Accumulation, Operand};
use crate::{DType, Device, Result, Tensor};
use std::sync::Arc;

kernels! {
    static SOURCE = { file: "gemm", variants: launch::STORAGE };
    kernel crop(out: *mut X, padded: *const X, columns: i32, padded_columns: i32, add: i32);
    kernel scale_and_add(
        out: *mut X, sums: *const f32, a_scale: *const f32, b_scale: *const f32, addend: *const X, columns: i32, padded_columns: i32
    );
}

pub(super) fn gemm(
    gpu: &Arc<CudaDevice>,
    a: Operand,
    b: Operand,
    out: &mut Tensor,
    accumulation: Accumulation,
    addend: Addend,
) -> Result<()> {
    let [m, n] = out.dims("gemm: out")?;
    if a.size("gemm: a")?.1 == 0 {
        return match addend {
            Addend::None => out.fill_zero(),
            Addend::Out => Ok(()),
            Addend::Tensor(c) => out.copy_from(0, c),
        };
    }
    if let Some((_, granularity)) = a.scale_inv()
        && granularity.microscaling().is_some()
    {
        return emulated::gemm(gpu, a, b, out, addend);
    }
    // In training, only products of forward contract the rows of both operands.
    let is_ordered = gpu.is_batch_invariant() && a.is_rows() && b.is_rows();
    if let Some(product) = Skinny::plan(gpu, a, b, [m, n], out.dtype(), is_ordered) {
        return product.enqueue(gpu, out, addend);
    }
    if is_ordered {
        if let Some(product) = Product::single(gpu, a, b, [m, n], out.dtype()) {
            let addend = addend_address(out, addend);
            return product.enqueue_single(gpu, a.size("gemm: a")?.1, out, addend);
        }
        if let (Operand::Plain { x, transposed: false }, true) = (a, m != CHUNK) {
            return by_chunks(gpu, x, b, out, accumulation, addend);
        }
    }
    by_library(gpu, a, b, out, accumulation, addend)
}

/// The number of rows of each product of [`by_chunks`].
const CHUNK: usize = 64;

/// Computes the product by the library, for [`CHUNK`] rows at a time. The library selects its algorithm by the shape, so each row has the same bits in
/// products of all sizes.
fn by_chunks(
    gpu: &Arc<CudaDevice>,
    x: &Tensor,
    b: Operand,
    out: &mut Tensor,
    accumulation: Accumulation,
    addend: Addend,
) -> Result<()> {
    let ([m, n], [_, k]) = (out.dims("gemm: out")?, x.dims("gemm: a")?);
    let mut rows = Tensor::zeros(x.device(), &[CHUNK, k], x.dtype())?;
    let mut sums = Tensor::empty(x.device(), &[CHUNK, n], out.dtype())?;
    for start in (0..m).step_by(CHUNK) {
        let end = m.min(start + CHUNK);
        rows.copy_from(0, &x.rows(start, end)?)?;
        let of_chunk = match addend {
            Addend::None => Addend::None,
            Addend::Out => {
                sums.copy_from(0, &out.rows(start, end)?)?;
                Addend::Out
            }
            Addend::Tensor(c) => {
                sums.copy_from(0, &c.rows(start, end)?)?;
                Addend::Out
            }
        };
        by_library(gpu, Operand::plain(&rows), b, &mut sums, accumulation, of_chunk)?;
        out.copy_from(start, &sums.rows(0, end - start)?)?;
    }
    Ok(())
}

/// Computes the product by cuBLASLt.
fn by_library(
    gpu: &Arc<CudaDevice>,
    a: Operand,
    b: Operand,
    out: &mut Tensor,
    accumulation: Accumulation,
    addend: Addend,
) -> Result<()> {
    let [m, n] = out.dims("gemm: out")?;
    let spec = spec_of(a, b, out.dtype(), accumulation)?;
    let operands = addresses(a, b)?;
    if is_scaled_afterwards(gpu, &spec) {
        return unscaled_product(gpu, spec, operands, out, addend);
    }
    let padded = (spec.m, spec.n) != (m, n);
    let mut temporary = None;
    if padded {
        temporary = Some(Tensor::empty(out.device(), &[spec.m, spec.n], out.dtype())?);
        if let Addend::Tensor(c) = addend {
            out.copy_from(0, c)?;
        }
    }
    let into = temporary.as_mut().unwrap_or(out).device_ptr_mut();
    let addend_at = if let (Addend::Tensor(c), false) = (addend, padded) { c.device_ptr() } else { into };
    let pointers = GemmPointers { addend: addend_at, out: into, ..operands };
    let spec = GemmSpec { accumulate: !padded && !matches!(addend, Addend::None), ..spec };
    // SAFETY: the spec's sizes and leading dimensions belong to the tensors whose addresses are passed. The contract has checked
    // the shapes of scales. The addend has the shape of `out`.
    unsafe { gpu.gemm(&spec, &pointers)? };
    match temporary {
        Some(temporary) => crop(gpu, &temporary, out, !matches!(addend, Addend::None)),
        None => Ok(()),
    }
}

/// Returns the spec of the library's product without an addend. Its matrices have their stored, padded sizes.
fn spec_of(a: Operand, b: Operand, out: DType, accumulation: Accumulation) -> Result<GemmSpec> {
    let ((x, x_transposed), (y, y_transposed)) = (a.matrix("gemm: a")?, b.matrix("gemm: b")?);
    let rows_and_k = |t: &Tensor, transposed: bool| match transposed {
        true => (t.shape()[1], t.shape()[0]),
        false => (t.shape()[0], t.shape()[1]),
    };
    let ((rows, k), (columns, _)) = (rows_and_k(x, x_transposed), rows_and_k(y, y_transposed));
    let major = |transposed| if transposed { Major::MN } else { Major::K };
    Ok(GemmSpec {
        m: rows,
        n: columns,
        k,
        a: x.dtype(),
        b: y.dtype(),
        out,
        a_layout: major(x_transposed),
        b_layout: major(y_transposed),
        lda: x.shape()[1],
        ldb: y.shape()[1],
        ldc: columns,
        scale: scale_mode(a, b),
        fast_accumulation: accumulation == Accumulation::Fast && x.dtype().is_fp8(),
        accumulate: false,
    })
}

/// Returns the addresses of the operands and of their inverse scales (0 without scales). The addresses of addend and output are 0.
fn addresses(a: Operand, b: Operand) -> Result<GemmPointers> {
    let [a_scale, b_scale] =
        [a, b].map(|operand| operand.scale_inv().map_or(0, |(scale_inv, _)| scale_inv.device_ptr()));
    let [a, b] = [a.matrix("gemm: a")?.0, b.matrix("gemm: b")?.0].map(Tensor::device_ptr);
    Ok(GemmPointers { a, b, a_scale, b_scale, addend: 0, out: 0 })
}

/// Returns whether `unscaled_product` is faster for this product in inference. With row scales, cuBLASLt 13.1 only has tiles of 128 x 128 and no
/// split-K, so a product with few tiles leaves at least half of the multiprocessors idle. Without scales, cuBLASLt has smaller tiles.
fn is_scaled_afterwards(gpu: &CudaDevice, spec: &GemmSpec) -> bool {
    let tiles = spec.m.div_ceil(128) * spec.n.div_ceil(128);
    leaves_scales(gpu, spec) && 2 * tiles <= gpu.sm_count()
}

/// Returns whether another kernel may apply the scales of this product: row scales, in inference.
fn leaves_scales(gpu: &CudaDevice, spec: &GemmSpec) -> bool {
    let is_fast = gpu.has_constant_weights() && !gpu.is_batch_invariant();
    is_fast && spec.scale == ScaleMode::PerRow && spec.out == DType::BF16
}

/// The number of threads per block of the kernel that applies scales. Each thread has eight columns.
const SCALING_THREADS: u32 = 128;

/// Computes the product of this spec without scales, in type `out`.
fn unscaled_sums(gpu: &Arc<CudaDevice>, spec: GemmSpec, operands: GemmPointers, out: DType) -> Result<Tensor> {
    let mut sums = Tensor::empty(&Device::Cuda(gpu.clone()), &[spec.m, spec.n], out)?;
    let into = sums.device_ptr_mut();
    let pointers = GemmPointers { a_scale: 0, b_scale: 0, addend: into, out: into, ..operands };
    // SAFETY: as in `gemm`; `sums` has the sizes of the spec.
    unsafe { gpu.gemm(&GemmSpec { out, scale: ScaleMode::None, ..spec }, &pointers)? };
    Ok(sums)
}

/// The numbers of rows for which the reader of a product applies its scales. With row scales, cuBLASLt 13.1 only has tiles of 128 x 128. With these
/// numbers of rows, it is faster without scales, and with more rows it is not (benchmarks/2026-11-27-decode-kernels.md). Products of fewer rows use
/// `Skinny`.
const READER_SCALES: std::ops::RangeInclusive<usize> = 129..=256;

/// Returns the sums for `gemm::unscaled`.
pub(super) fn unscaled(
    gpu: &Arc<CudaDevice>,
    a: Operand,
    b: Operand,
    [m, n]: [usize; 2],
    out: DType,
    accumulation: Accumulation,
) -> Result<Option<Tensor>> {
    let spec = spec_of(a, b, out, accumulation)?;
    let is_faster = leaves_scales(gpu, &spec) && READER_SCALES.contains(&m) && spec.n == n && spec.k > 0;
    is_faster.then(|| unscaled_sums(gpu, spec, addresses(a, b)?, out)).transpose()
}

/// Computes the product without scales in F32. Then a kernel applies the scales, adds the addend and rounds `out` once.
fn unscaled_product(
    gpu: &Arc<CudaDevice>,
    spec: GemmSpec,
    operands: GemmPointers,
    out: &mut Tensor,
    addend: Addend,
) -> Result<()> {
    let GemmPointers { a_scale, b_scale, .. } = operands;
    let sums = unscaled_sums(gpu, spec, operands, DType::F32)?;
    let [m, n] = out.dims("gemm: out")?;
    let (addend, defines) = (addend_address(out, addend), launch::storage(out.dtype())?);
    let entry = kernel::scale_and_add(out, &sums, Address(a_scale), Address(b_scale), addend, n, spec.n);
    let kernel = SOURCE.kernel(defines, entry);
    let grid = [n.div_ceil(8 * SCALING_THREADS as usize) as u32, m as u32, 1];
    // SAFETY: `sums` has at least as many rows and columns as `out`, the addend has the shape of `out`, and each row and each column has a scale.
    // Before it waits, the kernel reads only scales of `b`, which are constants if the kernel starts early.
    unsafe { gpu.launch_early(&kernel, grid, SCALING_THREADS, 0) }
}

/// Computes `out = sums · (a_scale · b_scale) + addend` for `sums` F32 `[M, N]` with scales for each row of `a` and of `b`.
pub(super) fn scale_and_add(
    gpu: &Arc<CudaDevice>,
    sums: &Tensor,
    [a_scale, b_scale]: [&Tensor; 2],
    out: &mut Tensor,
    addend: Addend,
) -> Result<()> {
    let [m, n] = out.dims("gemm: out")?;
    let (addend, defines) = (addend_address(out, addend), launch::storage(out.dtype())?);
    let kernel = SOURCE.kernel(defines, kernel::scale_and_add(out, sums, a_scale, b_scale, addend, n, n));
    let grid = [n.div_ceil(8 * SCALING_THREADS as usize) as u32, m as u32, 1];
    // SAFETY: `sums`, `out` and the addend have `m · n` elements, and each row and each column has a scale.
    unsafe { gpu.launch(&kernel, grid, SCALING_THREADS, 0) }
}

/// Returns the address of the addend, or 0 without an addend.
pub(super) fn addend_address(out: &Tensor, addend: Addend) -> Address {
    Address(match addend {
        Addend::None => 0,
        Addend::Out => out.device_ptr(),
        Addend::Tensor(c) => c.device_ptr(),
    })
}

fn scale_mode(a: Operand, b: Operand) -> ScaleMode {
    match (a.scale_inv(), b.scale_inv()) {
        (Some((_, Granularity::PerTensor)), _) => ScaleMode::PerTensor,
        (Some((_, Granularity::PerRow)), _) => ScaleMode::PerRow,
        (Some((_, a)), Some((_, b))) => ScaleMode::Blocks { a, b },
        _ => ScaleMode::None,
    }
}

fn crop(gpu: &CudaDevice, padded: &Tensor, out: &mut Tensor, add: bool) -> Result<()> {
    let [rows, columns] = out.dims("gemm: out")?;
    let defines = launch::storage(out.dtype())?;
    let kernel = SOURCE.kernel(defines, kernel::crop(out, padded, columns, padded.shape()[1], add));
    // SAFETY: `padded` has at least as many rows and columns as `out`. Both have the type in the defines.
    unsafe { gpu.launch(&kernel, [rows as u32, 1, 1], BLOCK, 0) }
}
