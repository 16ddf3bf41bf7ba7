use super::{Accumulation, Addend, Operand};
use crate::cuda::{CudaDevice, Entry, GemmPointers, GemmSpec, Major, ScaleMode, TensorMap};
use crate::granularity::Granularity;
use crate::ops::declaration::{Address, kernels};
use crate::ops::launch::{self, BLOCK, Defines};
use crate::{DType, Device, Result, Tensor};
use std::sync::Arc;

kernels! {
    static SOURCE = { file: "gemm", variants: launch::STORAGE };
    static SKINNY = {
        file: "gemm", headers: ["hopper.cuh", "gemm/skinny.cuh"], needs: [Wgmma, BulkCopies, Clusters],
        constants: [LINES, STEP, GROUP, SHARED_BYTES], variants: SKINNY_VARIANTS
    };
    kernel crop(out: *mut X, padded: *const X, columns: i32, padded_columns: i32, add: i32);
    kernel scale_and_add(
        out: *mut X, sums: *const f32, a_scale: *const f32, b_scale: *const f32, addend: *const X, columns: i32, padded_columns: i32
    );
    kernel skinny_8, skinny_16, skinny_32, skinny_64, skinny_32_alone, skinny_64_alone, skinny_128_alone(
        a: TensorMap, b: TensorMap, out: *mut X, addend: *const X, a_scale: *const f32, b_scale: *const f32, rows: i32, columns: i32,
        steps: i32, steps_of_part: i32, rows_of_part: i32, a_stride: i32, b_stride: i32
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
    if let Some(product) = Skinny::plan(gpu, a, b, [m, n], out.dtype()) {
        return product.enqueue(gpu, out, addend);
    }
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
    gpu.has_constant_weights() && spec.scale == ScaleMode::PerRow && spec.out == DType::BF16
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

/// Returns the address of the addend, or 0 without an addend.
fn addend_address(out: &Tensor, addend: Addend) -> Address {
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

/// The variants of products of few rows: the type of the result, the type of the operands, and the bits of an operand's element.
const SKINNY_VARIANTS: &[Defines] = &[
    &[("X", "bf16"), ("IN", "e4m3"), ("IN_BITS", "8")],
    &[("X", "bf16"), ("IN", "bf16"), ("IN_BITS", "16")],
    &[("X", "f32"), ("IN", "bf16"), ("IN_BITS", "16")],
];

/// The kernels by the maximum number of rows: a kernel with one block per multiprocessor, and a kernel with two. If both exist, the first is faster
/// for tiles that are divided into parts.
const KERNELS: [(usize, [Option<&str>; 2]); 5] = [
    (8, [None, Some("skinny_8")]),
    (16, [None, Some("skinny_16")]),
    (32, [Some("skinny_32_alone"), Some("skinny_32")]),
    (64, [Some("skinny_64_alone"), Some("skinny_64")]),
    (128, [Some("skinny_128_alone"), None]),
];
/// The maximum number of rows for plain operands. With more rows, the library is faster, but it is not used if rows must not depend on other rows.
const MOST_PLAIN_ROWS: usize = 32;

/// The number of result columns in a tile, and the number of bytes that a step reads from each row.
const LINES: usize = 128;
const STEP: usize = TensorMap::BOX_BYTES;
/// The number of threads of a warp group. A block has two warp groups, and a warp that copies.
const GROUP: u32 = 128;
const THREADS: u32 = 2 * GROUP + 32;
/// The bytes of shared memory for all blocks of a multiprocessor. The rest is for the kernels before and after.
const SHARED_BYTES: u32 = 200 << 10;
/// The maximum number of parts of a tile, and the minimum number of steps of a part, by the number of blocks per multiprocessor. With fewer steps,
/// adding the parts would take longer than reading them.
const MOST_PARTS: usize = 6;
const LEAST_STEPS: [usize; 2] = [16, 8];

/// A product of few rows in inference (`skinny.cuh`). It takes as long as reading `b`.
struct Skinny {
    defines: Defines,
    entries: [Option<&'static str>; 2],
    rows: usize,
    columns: usize,
    a: TensorMap,
    b: TensorMap,
    scales: [Option<(u64, i32)>; 2],
}

impl Skinny {
    /// Plans the product `a · bᵀ` `[m, n]` in `out`. Returns `None` unless this is a product of few rows in inference, with types and addresses that
    /// the kernel supports.
    fn plan(gpu: &CudaDevice, a: Operand, b: Operand, [m, n]: [usize; 2], out: DType) -> Option<Skinny> {
        let (Ok(((x, false), (_, k))), Ok((y, false))) =
            (a.matrix("").and_then(|x| Ok((x, a.size("")?))), b.matrix(""))
        else {
            return None;
        };
        let name = |dtype| match dtype {
            DType::E4M3 => "e4m3",
            DType::BF16 => "bf16",
            DType::F32 => "f32",
            _ => "",
        };
        let defines = SKINNY_VARIANTS.iter().find(|v| v[0].1 == name(out) && v[1].1 == name(x.dtype()))?;
        let scale = |operand: Operand| match operand.scale_inv() {
            None => Some(None),
            Some((scale_inv, Granularity::PerTensor)) => Some(Some((scale_inv.device_ptr(), 0))),
            Some((scale_inv, Granularity::PerRow)) => Some(Some((scale_inv.device_ptr(), 1))),
            Some(_) => None,
        };
        let scales = [scale(a)?, scale(b)?];
        let (rows, entries) = KERNELS.into_iter().find(|&(rows, _)| m <= rows)?;
        let map = |t: &Tensor, rows: usize, box_rows: usize| {
            let (size, pitch) = (t.dtype().size(), t.shape()[1] * t.dtype().size());
            let fits = t.device_ptr().is_multiple_of(16) && pitch.is_multiple_of(16);
            fits.then_some(TensorMap { address: t.device_ptr(), rows, row_bytes: k * size, pitch, box_rows })
        };
        let (a, b) = (map(x, m, rows)?, map(y, n, LINES)?);
        let fits = gpu.has_constant_weights()
            && y.dtype() == x.dtype()
            && (x.dtype().is_fp8() || m <= MOST_PLAIN_ROWS || gpu.is_batch_invariant())
            && gpu.runs(&SKINNY);
        fits.then_some(Skinny { defines, entries, rows: m, columns: n, a, b, scales })
    }

    /// Enqueues the product.
    fn enqueue(&self, gpu: &CudaDevice, out: &mut Tensor, addend: Addend) -> Result<()> {
        let Skinny { defines, entries, rows, columns, a, b, scales } = self;
        let (steps, tiles) = (a.row_bytes.div_ceil(STEP), columns.div_ceil(LINES));
        // Tiles are divided as far as all blocks still run at once. Clusters of more than two blocks leave up to a seventh of the multiprocessors
        // without a block.
        let parts_of = |blocks: usize| {
            let at_once = gpu.sm_count() * blocks;
            let clusters = |parts: usize| if parts > 2 { at_once * 6 / 7 / parts } else { at_once / parts };
            let most = (steps / LEAST_STEPS[blocks - 1]).min(MOST_PARTS);
            (2..=most).rev().find(|&parts| tiles <= clusters(parts)).unwrap_or(1)
        };
        let (blocks, name) = match *entries {
            [Some(alone), None] => (1, alone),
            [Some(alone), _] if parts_of(1) > 1 => (1, alone),
            [_, Some(shared)] => (2, shared),
            [None, None] => unreachable!("each number of rows has a kernel"),
        };
        let parts = parts_of(blocks);
        let [(a_scale, a_stride), (b_scale, b_stride)] = scales.map(|scale| scale.unwrap_or((0, 0)));
        let [a_scale_at, b_scale_at] = [a_scale, b_scale].map(Address);
        let (addend, of_part) = (addend_address(out, addend), steps.div_ceil(parts));
        // All kernels for products of few rows have the same parameters.
        let entry = kernel::skinny_8(
            *a,
            *b,
            out,
            addend,
            a_scale_at,
            b_scale_at,
            *rows,
            *columns,
            steps,
            of_part,
            rows.div_ceil(parts),
            a_stride,
            b_stride,
        );
        let kernel = SKINNY.kernel(defines, Entry { name, ..entry });
        // SAFETY: the maps belong to the operands, scales have one element or one per row, and the addend has the shape and type of `out`. Before it
        // waits, the kernel reads only `b` and its scales, which are constants if the kernel starts early.
        unsafe {
            let grid = [(tiles * parts) as u32, 1, 1];
            gpu.launch_early_in_clusters(&kernel, grid, parts as u32, THREADS, SHARED_BYTES / blocks as u32)
        }
    }
}
