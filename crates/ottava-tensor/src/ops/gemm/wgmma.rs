//! Products on Hopper's tensor cores (`wgmma.cu`), which two ops share: products of grouped rows (`grouped_gemm/`), and products without groups
//! (`gemm/`).

use crate::cuda::{Arg, CudaDevice, TensorMap};
use crate::granularity::Shared;
use crate::ops::declaration::{Address, kernels, pack};
use crate::ops::groups::Groups;
use crate::ops::launch::Defines;
use crate::ops::operand::{Accumulation, Operand};
use crate::{DType, Result, Tensor};

kernels! {
    static SOURCE = {
        file: "wgmma", headers: ["hopper.cuh"], needs: [Wgmma, BulkCopies, Multicast], constants: [SIDE, STEP, SHARED],
        variants: &variants().collect::<Vec<_>>()
    };
    kernel wgmma(map_a: TensorMap, map_b: TensorMap, map_addend: TensorMap, map_out: TensorMap, of: Arguments);
}

/// The number of rows of a tile.
const SIDE: usize = 128;
/// The numbers of columns of a tile, for variants with exact sums and for others. A kernel has variants of one or both widths.
pub(in crate::ops) const EXACT_WIDTHS: [usize; 2] = [192, 128];
pub(in crate::ops) const WIDTHS: [usize; 2] = [256, 128];
/// The number of bytes of each row of the operands in a stage.
const STEP: usize = TensorMap::BOX_BYTES;
/// The maximum number of bytes of stages, their scales and a result in shared memory.
const SHARED: usize = 224 << 10;
const THREADS: u32 = 3 * 128;

macro_rules! variant {
    ($x:literal $bits:literal, $a:literal, $b:literal, $scaled:literal, $a_scales:literal, $b_scales:literal, $a_mn:literal, $b_mn:literal,
     $wgrad:literal, $promotes:literal, $columns:literal, $single:literal) => {
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
            ("SINGLE", $single),
            ("SCALED", $scaled),
            ("OUT_BITS", $bits),
        ]
    };
}

/// Variants of both widths for both types of results: BF16 results, and gradients in F32.
macro_rules! wide {
    ($($columns:literal),*) => { &[$(
        variant!("bf16" "16", "bf16", "bf16", "0", "AT_END", "AT_END", "0", "0", "0", "0", $columns, "0"),
        variant!("bf16" "16", "bf16", "bf16", "0", "AT_END", "AT_END", "0", "1", "0", "0", $columns, "0"),
        variant!("bf16" "16", "bf16", "bf16", "0", "AT_END", "AT_END", "1", "1", "1", "0", $columns, "0"),
        variant!("bf16" "16", "e4m3", "e4m3", "1", "AT_END", "AT_END", "0", "0", "0", "0", $columns, "0"),
        variant!("bf16" "16", "e4m3", "e4m3", "1", "AT_END", "AT_END", "0", "0", "1", "0", $columns, "0"),
        variant!("bf16" "16", "e5m2", "e4m3", "1", "AT_END", "AT_END", "0", "0", "1", "0", $columns, "0"),
        variant!("f32" "32", "bf16", "bf16", "0", "AT_END", "AT_END", "1", "1", "1", "0", $columns, "0"),
        variant!("f32" "32", "e4m3", "e4m3", "1", "AT_END", "AT_END", "0", "0", "1", "0", $columns, "0"),
        variant!("f32" "32", "e5m2", "e4m3", "1", "AT_END", "AT_END", "0", "0", "1", "0", $columns, "0"),
    )*] };
}

/// Variants with exact sums.
macro_rules! narrow {
    ($($x:literal $bits:literal),*) => { &[$(
        variant!($x $bits, "e4m3", "e4m3", "1", "AT_END", "AT_END", "0", "0", "0", "1", "128", "0"),
        variant!($x $bits, "e4m3", "e4m3", "1", "AT_END", "AT_END", "0", "0", "0", "1", "192", "0"),
        variant!($x $bits, "e4m3", "e4m3", "1", "AT_END", "AT_END", "0", "0", "1", "1", "128", "0"),
        variant!($x $bits, "e5m2", "e4m3", "1", "AT_END", "AT_END", "0", "0", "0", "1", "128", "0"),
        variant!($x $bits, "e5m2", "e4m3", "1", "AT_END", "AT_END", "0", "0", "0", "1", "192", "0"),
        variant!($x $bits, "e5m2", "e4m3", "1", "AT_END", "AT_END", "0", "0", "1", "1", "128", "0"),
        variant!($x $bits, "e4m3", "e4m3", "1", "STRIPS", "SQUARES", "0", "0", "0", "1", "128", "0"),
        variant!($x $bits, "e4m3", "e4m3", "1", "STRIPS", "SQUARES", "0", "0", "0", "1", "192", "0"),
        variant!($x $bits, "e4m3", "e4m3", "1", "STRIPS", "STRIPS", "0", "0", "1", "1", "128", "0"),
        variant!($x $bits, "e4m3", "e4m3", "1", "SQUARES", "STRIPS", "0", "0", "1", "1", "128", "0"),
    )*] };
}

const NARROW: &[Defines] = narrow!("bf16" "16", "f32" "32");
const WIDE: &[Defines] = wide!("256", "128");
const PLAIN: &[Defines] = &[
    variant!("f32" "32", "bf16", "bf16", "0", "AT_END", "AT_END", "0", "0", "0", "0", "128", "0"),
    variant!("f32" "32", "bf16", "bf16", "0", "AT_END", "AT_END", "0", "1", "0", "0", "128", "0"),
];

/// Variants of products without groups.
const SINGLE: &[Defines] = &[
    variant!("bf16" "16", "bf16", "bf16", "0", "AT_END", "AT_END", "0", "0", "0", "0", "256", "1"),
    variant!("bf16" "16", "bf16", "bf16", "0", "AT_END", "AT_END", "0", "0", "0", "0", "128", "1"),
    variant!("f32" "32", "bf16", "bf16", "0", "AT_END", "AT_END", "0", "0", "0", "0", "256", "1"),
    variant!("f32" "32", "bf16", "bf16", "0", "AT_END", "AT_END", "0", "0", "0", "0", "128", "1"),
    variant!("bf16" "16", "e4m3", "e4m3", "1", "AT_END", "AT_END", "0", "0", "0", "1", "128", "1"),
    variant!("bf16" "16", "e4m3", "e4m3", "1", "AT_END", "AT_END", "0", "0", "0", "1", "192", "1"),
    variant!("bf16" "16", "e4m3", "e4m3", "1", "STRIPS", "SQUARES", "0", "0", "0", "1", "128", "1"),
    variant!("bf16" "16", "e4m3", "e4m3", "1", "STRIPS", "SQUARES", "0", "0", "0", "1", "192", "1"),
];

/// Returns the variants: types, scales and layouts of the operands and of the result, kind of sums, width of tiles, and whether there are no groups.
fn variants() -> impl Iterator<Item = Defines> {
    [NARROW, WIDE, PLAIN, SINGLE].into_iter().flatten().copied()
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
        let map = TensorMap::matrix(x.device_ptr(), rows, pitch, pitch, box_rows);
        fits.then_some(Side { map, name, scales, is_transposed, inverse })
    }
}

/// A product that the tensor cores of this GPU compute.
pub(in crate::ops) struct Product {
    defines: Defines,
    shape: Shape,
    width: usize,
    a: Side,
    b: Side,
}

/// The result of a product, for [`Product::plan`].
#[derive(Clone, Copy)]
pub(in crate::ops) struct Shape {
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
    pub fn plan(
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
        let is_exact = accumulation == Accumulation::Exact && a.scale_inv().is_some();
        let of = |is_exact| Product::fastest(gpu, a, b, out, shape, is_exact, false);
        // If a product with fast accumulation has no such variant, a variant with exact sums is used.
        if is_exact { of(true) } else { of(false).or_else(|| of(true)) }
    }

    /// Returns the variant whose width is estimated to be the fastest.
    fn fastest(
        gpu: &CudaDevice,
        a: Operand,
        b: Operand,
        out: DType,
        shape: Shape,
        is_exact: bool,
        is_single: bool,
    ) -> Option<Product> {
        let mut widths = if is_exact { EXACT_WIDTHS } else { WIDTHS };
        widths.sort_by_key(|&width| shape.cost(width, gpu.sm_count() / 2));
        widths.into_iter().find_map(|width| Product::of(a, b, out, shape, width, is_exact, is_single))
    }

    /// Plans the product `a · bᵀ` without groups `[m, n]` in type `out`, whose sums have the order that `gemm/mod.rs` states. Returns `None` as
    /// [`Product::plan`].
    pub fn single(gpu: &CudaDevice, a: Operand, b: Operand, [m, n]: [usize; 2], out: DType) -> Option<Product> {
        if !gpu.runs(&SOURCE) {
            return None;
        }
        Product::fastest(gpu, a, b, out, Shape::of_rows(m, n), a.scale_inv().is_some(), true)
    }

    /// Returns the variant for these operands, with tiles of `width` columns.
    pub fn of(
        a: Operand,
        b: Operand,
        out: DType,
        shape: Shape,
        width: usize,
        promotes: bool,
        is_single: bool,
    ) -> Option<Product> {
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
        let [a_mn, b_mn, wgrad, promotes, single] =
            [a.is_transposed, b.is_transposed, is_wgrad, promotes, is_single].map(flag);
        let width_text = width.to_string();
        let wanted = [x, a.name, b.name, a.scales, b.scales, a_mn, b_mn, wgrad, promotes, &width_text, single];
        let defines = variants().find(|variant| variant.iter().zip(wanted).all(|(have, want)| have.1 == want))?;
        Some(Product { defines, shape, width, a, b })
    }

    /// Enqueues `y[r] = a[r] · b[g]ᵀ` over `terms` terms. `b` of group g begins at row `g · b_rows` and term `g · b_terms`.
    pub fn enqueue(
        &self,
        gpu: &CudaDevice,
        groups: &Groups,
        [terms, b_rows, b_terms]: [usize; 3],
        y: &mut Tensor,
    ) -> Result<()> {
        self.launch(gpu, Some(groups), y, [terms, b_rows, b_terms], Address(0))
    }

    /// Enqueues `out = a · bᵀ + addend` over `terms` terms, for a plan of [`Product::single`]. `addend` is 0, or the address of a tensor of the shape
    /// and type of `out`, which may be `out`.
    pub fn enqueue_single(&self, gpu: &CudaDevice, terms: usize, out: &mut Tensor, addend: Address) -> Result<()> {
        self.launch(gpu, None, out, [terms, 0, 0], addend)
    }

    /// Enqueues `into[g] = a[:, rows of g] · b[:, rows of g]ᵀ`. With `add`, the products are added to `into`.
    pub fn enqueue_wgrad(&self, gpu: &CudaDevice, groups: &Groups, into: &mut Tensor, add: bool) -> Result<()> {
        let addend = Address(if add { into.device_ptr() } else { 0 });
        self.launch(gpu, Some(groups), into, [0; 3], addend)
    }

    fn launch(
        &self,
        gpu: &CudaDevice,
        groups: Option<&Groups>,
        out: &mut Tensor,
        [terms, b_rows, b_terms]: [usize; 3],
        Address(addend): Address,
    ) -> Result<()> {
        let Shape { rows, columns, .. } = self.shape;
        let two = |low: usize, high: usize| pack(low as u32, high as u32);
        let pitch = columns * out.dtype().size();
        let (address, of_out) = (out.device_ptr_mut(), out.shape()[0]);
        // The kernel reads these maps only if rows of the result are multiples of 16 bytes, and the map of the addend only if there is an addend.
        let map = |address| match pitch.is_multiple_of(16) && address != 0 {
            true => TensorMap::matrix(address, of_out, pitch, pitch, SIDE / 2),
            false => self.a.map,
        };
        let mut args = Vec::new();
        // The `Arguments` of the kernel, its last parameter, in 64-bit words.
        for (address, pitch, by_row) in [self.a.inverse, self.b.inverse] {
            args.extend([Arg::Ptr(address), two(pitch, by_row)]);
        }
        args.push(Arg::Ptr(address));
        let [offsets, counts] = groups.map_or([0; 2], |of| [of.offsets.device_ptr(), of.counts.device_ptr()]);
        args.extend([Arg::Ptr(offsets), Arg::Ptr(counts)]);
        args.extend([two(groups.map_or(1, Groups::len), rows), two(columns, terms), two(b_rows, b_terms)]);
        args.push(Arg::Ptr(addend));
        // 1 KiB aligns the stages. The factors of a tile follow the stages.
        let shared = 1024 + SHARED + (SIDE + self.width) * DType::F32.size();
        let blocks = 2 * self.shape.pairs(self.width).min(gpu.sm_count() / 2);
        let entry = kernel::wgmma(self.a.map, self.b.map, map(addend), map(address), args);
        let kernel = SOURCE.kernel(self.defines, entry);
        // SAFETY: the maps and scales belong to the operands, and `check` and `wgrad` have compared the sizes of the operands with `out`. Offsets and
        // counts lie within the rows of the operands, as the contract demands.
        unsafe { gpu.launch_early(&kernel, [blocks as u32, 1, 1], THREADS, shared as u32) }
    }
}
