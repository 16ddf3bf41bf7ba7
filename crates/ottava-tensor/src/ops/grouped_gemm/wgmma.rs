//! The kernels for Hopper's tensor cores: grouped products in BF16 and FP8.

use super::{Groups, Sizes, Stack};
use crate::cuda::{Arg, CudaDevice, TensorMap};
use crate::granularity::Shared;
use crate::ops::declaration::{kernels, pack};
use crate::ops::gemm::{Accumulation, Operand};
use crate::ops::launch::Defines;
use crate::{DType, Result, Tensor};

kernels! {
    static SOURCE = {
        file: "grouped_wgmma", headers: ["hopper.cuh"], needs: [Wgmma, BulkCopies, Multicast], constants: [SIDE, STEP, SHARED],
        variants: &variants().collect::<Vec<_>>()
    };
    kernel grouped_wgmma(map_a: TensorMap, map_b: TensorMap, map_out: TensorMap, of: Arguments);
}

/// The number of rows of a tile.
const SIDE: usize = 128;
/// The numbers of columns of a tile, if a kernel has variants of both widths.
pub(super) const WIDTHS: [usize; 2] = [256, 128];
/// The number of bytes of each row of the operands in a stage.
const STEP: usize = TensorMap::BOX_BYTES;
/// The maximum number of bytes of stages, their scales and a result in shared memory.
const SHARED: usize = 224 << 10;
const THREADS: u32 = 3 * 128;

macro_rules! variant {
    ($x:literal $bits:literal, $a:literal, $b:literal, $scaled:literal, $a_scales:literal, $b_scales:literal, $a_mn:literal, $b_mn:literal,
     $wgrad:literal, $promotes:literal, $columns:literal) => {
        &[
            ("X", $x),
            ("A", $a),
            ("B", $b),
            ("A_SCALES", $a_scales),
            ("B_SCALES", $b_scales),
            ("A_MN", $a_mn),
            ("B_MN", $b_mn),
            ("WGRAD", $wgrad),
            ("PROMOTES", $promotes),
            ("COLUMNS", $columns),
            ("SCALED", $scaled),
            ("OUT_BITS", $bits),
        ]
    };
}

/// Variants of both widths for both types of results: BF16 results, and gradients in F32.
macro_rules! wide {
    ($($columns:literal),*) => { &[$(
        variant!("bf16" "16", "bf16", "bf16", "0", "AT_END", "AT_END", "0", "0", "0", "0", $columns),
        variant!("bf16" "16", "bf16", "bf16", "0", "AT_END", "AT_END", "0", "1", "0", "0", $columns),
        variant!("bf16" "16", "bf16", "bf16", "0", "AT_END", "AT_END", "1", "1", "1", "0", $columns),
        variant!("bf16" "16", "e4m3", "e4m3", "1", "AT_END", "AT_END", "0", "0", "0", "0", $columns),
        variant!("bf16" "16", "e4m3", "e4m3", "1", "AT_END", "AT_END", "0", "0", "1", "0", $columns),
        variant!("bf16" "16", "e5m2", "e4m3", "1", "AT_END", "AT_END", "0", "0", "1", "0", $columns),
        variant!("f32" "32", "bf16", "bf16", "0", "AT_END", "AT_END", "1", "1", "1", "0", $columns),
        variant!("f32" "32", "e4m3", "e4m3", "1", "AT_END", "AT_END", "0", "0", "1", "0", $columns),
        variant!("f32" "32", "e5m2", "e4m3", "1", "AT_END", "AT_END", "0", "0", "1", "0", $columns),
    )*] };
}

/// Variants of one width, with exact sums.
macro_rules! narrow {
    ($($x:literal $bits:literal),*) => { &[$(
        variant!($x $bits, "e4m3", "e4m3", "1", "AT_END", "AT_END", "0", "0", "0", "1", "128"),
        variant!($x $bits, "e4m3", "e4m3", "1", "AT_END", "AT_END", "0", "0", "1", "1", "128"),
        variant!($x $bits, "e5m2", "e4m3", "1", "AT_END", "AT_END", "0", "0", "0", "1", "128"),
        variant!($x $bits, "e5m2", "e4m3", "1", "AT_END", "AT_END", "0", "0", "1", "1", "128"),
        variant!($x $bits, "e4m3", "e4m3", "1", "STRIPS", "SQUARES", "0", "0", "0", "1", "128"),
        variant!($x $bits, "e4m3", "e4m3", "1", "STRIPS", "STRIPS", "0", "0", "1", "1", "128"),
        variant!($x $bits, "e4m3", "e4m3", "1", "SQUARES", "STRIPS", "0", "0", "1", "1", "128"),
    )*] };
}

const NARROW: &[Defines] = narrow!("bf16" "16", "f32" "32");
const WIDE: &[Defines] = wide!("256", "128");
const PLAIN: &[Defines] = &[
    variant!("f32" "32", "bf16", "bf16", "0", "AT_END", "AT_END", "0", "0", "0", "0", "128"),
    variant!("f32" "32", "bf16", "bf16", "0", "AT_END", "AT_END", "0", "1", "0", "0", "128"),
];

/// Returns the variants: types, scales and layouts of the operands and of the result, kind of sums, and width of tiles.
fn variants() -> impl Iterator<Item = Defines> {
    [NARROW, WIDE, PLAIN].into_iter().flatten().copied()
}

/// An operand in the form that the kernel reads.
struct Side {
    map: TensorMap,
    name: &'static str,
    scales: &'static str,
    is_transposed: bool,
    /// The inverse scales, their pitch, and whether each row has a scale.
    inverse: (u64, usize, usize),
}

impl Side {
    /// Returns `None` if the kernel cannot read `operand`.
    fn new(operand: Operand, rows_of_box: usize) -> Option<Side> {
        let (x, is_transposed) = operand.matrix("grouped_gemm").ok()?;
        let name = match x.dtype() {
            DType::BF16 => "bf16",
            DType::E4M3 => "e4m3",
            DType::E5M2 => "e5m2",
            _ => return None,
        };
        let (rows, pitch) = (x.shape()[0], x.shape()[1] * x.dtype().size());
        let (scales, inverse) = match operand.scale_inv() {
            None => ("AT_END", (0, 1, 0)),
            Some((scale_inv, granularity)) => {
                let (address, shape) = (scale_inv.device_ptr(), scale_inv.shape());
                match granularity.info().shared {
                    Shared::Tensor => ("AT_END", (address, 1, 0)),
                    Shared::Row => ("AT_END", (address, shape[0], 1)),
                    Shared::Strip(128) => ("STRIPS", (address, shape[1], 0)),
                    Shared::Square(128) => ("SQUARES", (address, shape[1], 0)),
                    Shared::Strip(_) | Shared::Square(_) => return None,
                }
            }
        };
        let fits = x.device_ptr().is_multiple_of(16) && pitch.is_multiple_of(16) && inverse.0.is_multiple_of(16);
        let box_rows = if is_transposed { SIDE / 2 } else { rows_of_box };
        let map = TensorMap { address: x.device_ptr(), rows, row_bytes: pitch, pitch, box_rows };
        fits.then_some(Side { map, name, scales, is_transposed, inverse })
    }
}

/// A grouped product that the tensor cores of this GPU compute.
pub(super) struct Product {
    defines: Defines,
    shape: Shape,
    width: usize,
    a: Side,
    b: Side,
}

/// The result of a product, for [`Product::plan`].
#[derive(Clone, Copy)]
pub(super) struct Shape {
    /// The number of groups if the rows of groups are contracted; then the result has a matrix for each group.
    matrices: Option<usize>,
    /// The number of rows of the result, or of each matrix.
    rows: usize,
    columns: usize,
}

impl Shape {
    /// Returns the shape of a result of grouped rows.
    pub fn of_rows(rows: usize, columns: usize) -> Shape {
        Shape { matrices: None, rows, columns }
    }

    /// Returns the shape of a result with a matrix for each group.
    pub fn of_weights(groups: usize, rows: usize, columns: usize) -> Shape {
        Shape { matrices: Some(groups), rows, columns }
    }

    /// Returns the number of pairs of tiles of `width` columns. A cluster computes a pair, one tile per block.
    fn pairs(self, width: usize) -> usize {
        match self.matrices {
            None => self.rows.div_ceil(SIDE) * self.columns.div_ceil(2 * width),
            Some(groups) => groups * self.rows.div_ceil(2 * SIDE) * self.columns.div_ceil(width),
        }
    }

    /// Returns the estimated time with tiles of `width` columns on `clusters`. The unit is a column of a tile; the end of a tile takes as long as 32
    /// columns.
    fn cost(self, width: usize, clusters: usize) -> usize {
        self.pairs(width).div_ceil(clusters) * (width + 32)
    }
}

impl Product {
    /// Plans a product. Returns `None` if no variant supports these operands, or if the GPU lacks a feature that the kernel needs.
    pub(super) fn plan(
        gpu: &CudaDevice,
        a: Operand,
        b: Operand,
        out: DType,
        shape: Shape,
        accumulation: Accumulation,
    ) -> Option<Product> {
        // The scales of columns are copied in units of 16 bytes.
        if !gpu.runs(&SOURCE) || !shape.columns.is_multiple_of(4) {
            return None;
        }
        let exact = || Product::of(a, b, out, shape, SIDE, true);
        if accumulation == Accumulation::Exact && a.scale_inv().is_some() {
            return exact();
        }
        let mut widths = WIDTHS;
        widths.sort_by_key(|&width| shape.cost(width, gpu.sm_count() / 2));
        // If a product with fast accumulation has no such variant, a variant with exact sums is used.
        widths.into_iter().find_map(|width| Product::of(a, b, out, shape, width, false)).or_else(exact)
    }

    /// Returns the variant for these operands, with tiles of `width` columns.
    pub fn of(a: Operand, b: Operand, out: DType, shape: Shape, width: usize, promotes: bool) -> Option<Product> {
        let is_wgrad = shape.matrices.is_some();
        // The numbers of rows that a block copies.
        let [of_a, of_b] = if is_wgrad { [SIDE, width / 2] } else { [SIDE / 2, width] };
        let (a, b) = (Side::new(a, of_a)?, Side::new(b, of_b)?);
        let x = match out {
            DType::BF16 => "bf16",
            DType::F32 => "f32",
            _ => return None,
        };
        let flag = |value| if value { "1" } else { "0" };
        let [a_mn, b_mn, wgrad, promotes] = [a.is_transposed, b.is_transposed, is_wgrad, promotes].map(flag);
        let wanted = [x, a.name, b.name, a.scales, b.scales, a_mn, b_mn, wgrad, promotes, &width.to_string()];
        let defines = variants().find(|variant| variant.iter().zip(wanted).all(|(have, want)| have.1 == want))?;
        Some(Product { defines, shape, width, a, b })
    }

    /// Enqueues `y[r] = a[r] · b[g]ᵀ`.
    pub(super) fn enqueue(
        &self,
        gpu: &CudaDevice,
        groups: &Groups,
        Sizes { stack, n, k, .. }: Sizes,
        y: &mut Tensor,
    ) -> Result<()> {
        let [b_rows, b_terms] = match stack {
            Stack::Rows => [n, 0],
            Stack::Contracted => [0, k],
        };
        self.launch(gpu, groups, y, [k, b_rows, b_terms, 0])
    }

    /// Enqueues `into[g] = a[:, rows of g] · b[:, rows of g]ᵀ`. With `add`, the products are added to `into`.
    pub(super) fn enqueue_wgrad(&self, gpu: &CudaDevice, groups: &Groups, into: &mut Tensor, add: bool) -> Result<()> {
        self.launch(gpu, groups, into, [0, 0, 0, usize::from(add)])
    }

    fn launch(
        &self,
        gpu: &CudaDevice,
        groups: &Groups,
        out: &mut Tensor,
        [terms, b_rows, b_terms, adds]: [usize; 4],
    ) -> Result<()> {
        let Shape { rows, columns, .. } = self.shape;
        let two = |low: usize, high: usize| pack(low as u32, high as u32);
        let pitch = columns * out.dtype().size();
        let (address, of_out) = (out.device_ptr_mut(), out.shape()[0]);
        let map_out = TensorMap { address, rows: of_out, row_bytes: pitch, pitch, box_rows: SIDE / 2 };
        // The kernel reads this map only if rows of the result are multiples of 16 bytes.
        let map_out = if pitch.is_multiple_of(16) { map_out } else { self.a.map };
        let mut args = Vec::new();
        // The `Arguments` of the kernel, its last parameter, in 64-bit words.
        for (address, pitch, by_row) in [self.a.inverse, self.b.inverse] {
            args.extend([Arg::Ptr(address), two(pitch, by_row)]);
        }
        args.push(Arg::Ptr(address));
        args.extend([Arg::Ptr(groups.offsets.device_ptr()), Arg::Ptr(groups.counts.device_ptr())]);
        args.extend([two(groups.len(), rows), two(columns, terms), two(b_rows, b_terms), two(adds, 0)]);
        // 1 KiB aligns the stages. The factors of a tile follow the stages.
        let shared = 1024 + SHARED + (SIDE + self.width) * DType::F32.size();
        let blocks = 2 * self.shape.pairs(self.width).min(gpu.sm_count() / 2);
        let entry = kernel::grouped_wgmma(self.a.map, self.b.map, map_out, args);
        let kernel = SOURCE.kernel(self.defines, entry);
        // SAFETY: the maps and scales belong to the operands, and `check` and `wgrad` have compared the sizes of the operands with `out`. Offsets and
        // counts lie within the rows of the operands, as the contract demands.
        unsafe { gpu.launch_early(&kernel, [blocks as u32, 1, 1], THREADS, shared as u32) }
    }
}
