//! Products of few rows in inference (`skinny.cu`). They take as long as reading `b`.

use super::Addend;
use super::cuda::addend_address;
use crate::cuda::{CudaDevice, Entry, TensorMap};
use crate::granularity::Shared;
use crate::ops::declaration::{Address, kernels};
use crate::ops::launch::Defines;
use crate::ops::operand::Operand;
use crate::{DType, Result, Tensor};

kernels! {
    static SKINNY = {
        file: "skinny", headers: ["hopper.cuh"], needs: [Wgmma, BulkCopies, Multicast],
        constants: [STEP, GROUP, MOST_SLOTS], variants: VARIANTS
    };
    kernel skinny_16_32, skinny_16_64, skinny_16_64_shared, skinny_16_128_shared, skinny_64_32, skinny_64_64, skinny_64_64_shared,
        skinny_64_128, skinny_128_32, skinny_128_64, skinny_128_128(
        a: TensorMap, b: TensorMap, out: *mut X, addend: *const X, a_scale: *const f32, b_scale: *const f32, rows: i32, columns: i32,
        steps: i32, slots: i32, a_stride: i32, b_stride: i32
    );
}

/// The variants of products of few rows: the type of the result, the type of the operands, and the bits of an operand's element.
const VARIANTS: &[Defines] = &[
    &[("X", "bf16"), ("IN", "e4m3"), ("STRIPS", "0"), ("IN_BITS", "8")],
    &[("X", "bf16"), ("IN", "e4m3"), ("STRIPS", "1"), ("IN_BITS", "8")],
    &[("X", "bf16"), ("IN", "bf16"), ("STRIPS", "0"), ("IN_BITS", "16")],
    &[("X", "f32"), ("IN", "bf16"), ("STRIPS", "0"), ("IN_BITS", "16")],
];

/// A kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tile {
    name: &'static str,
    /// The maximum number of rows of a product.
    rows: usize,
    /// The number of columns of a block.
    columns: usize,
    /// The number of warp groups that multiply.
    groups: u32,
    /// The number of steps of a slot.
    span: usize,
    /// The number of blocks that share a multiprocessor.
    blocks: usize,
}

macro_rules! tiles {
    ($($name:literal: $rows:literal x $columns:literal, $groups:literal, $span:literal, $blocks:literal;)*) => {
        &[$(Tile { name: $name, rows: $rows, columns: $columns, groups: $groups, span: $span, blocks: $blocks }),*]
    };
}

/// The kernels: rows x columns, warp groups, steps of a slot, and blocks of a multiprocessor, by rows and then by columns.
/// benchmarks/2026-11-29-order-of-sums.md has measurements.
const TILES: &[Tile] = tiles![
    "skinny_16_32": 16 x 32, 1, 4, 1;
    "skinny_16_64": 16 x 64, 2, 4, 1;
    "skinny_16_64_shared": 16 x 64, 2, 2, 2;
    "skinny_16_128_shared": 16 x 128, 2, 1, 2;
    "skinny_64_32": 64 x 32, 1, 4, 1;
    "skinny_64_64": 64 x 64, 2, 2, 1;
    "skinny_64_64_shared": 64 x 64, 2, 1, 2;
    "skinny_64_128": 64 x 128, 2, 1, 1;
    "skinny_128_32": 128 x 32, 2, 2, 1;
    "skinny_128_64": 128 x 64, 2, 1, 1;
    "skinny_128_128": 128 x 128, 2, 1, 1;
];

impl Tile {
    /// Returns the bytes of a slot of the ring, and of the scales of its rows.
    fn slot(self) -> [usize; 2] {
        [self.span * (self.rows + self.columns) * STEP, self.span * self.rows * DType::F32.size()]
    }
}

/// The maximum number of rows with which these kernels are faster than the library, for plain operands and for operands whose blocks share a scale.
/// With more rows, they are only used if rows must not depend on other rows.
const MOST_PLAIN_ROWS: usize = 32;
const MOST_ROWS_OF_BLOCKS: usize = 64;

/// The number of bytes that a step reads from each row.
const STEP: usize = TensorMap::BOX_BYTES;
/// The number of threads of a warp group.
const GROUP: u32 = 128;
/// The bytes of shared memory for all blocks of a multiprocessor. The rest is for the kernels before and after.
const SHARED_BYTES: usize = 200 << 10;
/// The maximum number of slots of the ring.
const MOST_SLOTS: usize = 32;

/// Returns whether the GPU has the features that the kernels need. These include the features of `wgmma.cu`.
pub(super) fn is_supported(gpu: &CudaDevice) -> bool {
    gpu.runs(&SKINNY)
}

/// A planned product.
pub(super) struct Skinny {
    defines: Defines,
    tile: Tile,
    rows: usize,
    columns: usize,
    a: TensorMap,
    b: TensorMap,
    /// The scales of both operands and their strides, as the kernel reads them.
    scales: [(u64, usize); 2],
    steps: usize,
}

impl Skinny {
    /// Plans the product `a · bᵀ` `[m, n]` in `out`. Returns `None` unless this is a product of few rows in inference or `is_exact`, with types and
    /// addresses that the kernel supports. With `is_exact`, no faster kernel may compute it.
    pub fn plan(
        gpu: &CudaDevice,
        a: Operand,
        b: Operand,
        [m, n]: [usize; 2],
        out: DType,
        is_exact: bool,
    ) -> Option<Skinny> {
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
        let scale = |operand: Operand| {
            let Some((scale_inv, granularity)) = operand.scale_inv() else { return ((0, 0), Shared::Tensor) };
            let stride = match granularity.info().shared {
                Shared::Tensor => 0,
                Shared::Row => 1,
                Shared::Strip(_) | Shared::Square(_) => scale_inv.shape()[1],
            };
            ((scale_inv.device_ptr(), stride), granularity.info().shared)
        };
        let ((of_a, shared_a), (of_b, shared_b)) = (scale(a), scale(b));
        let has_strips = match (shared_a, shared_b) {
            (Shared::Tensor | Shared::Row, Shared::Tensor | Shared::Row) => "0",
            (Shared::Strip(128), Shared::Square(128)) => "1",
            _ => return None,
        };
        let wanted = [name(out), name(x.dtype()), has_strips];
        let defines = VARIANTS.iter().find(|have| have.iter().zip(wanted).all(|(have, want)| have.1 == want))?;
        let tile = choose(gpu, m, n)?;
        let map = |t: &Tensor, rows: usize, box_rows: usize| {
            let (size, pitch) = (t.dtype().size(), t.shape()[1] * t.dtype().size());
            let fits = t.device_ptr().is_multiple_of(16) && pitch.is_multiple_of(16);
            fits.then(|| TensorMap::matrix(t.device_ptr(), rows, k * size, pitch, box_rows))
        };
        let (a, b) = (map(x, m, tile.rows)?, map(y, n, tile.columns)?);
        let most = match shared_a {
            Shared::Strip(_) => MOST_ROWS_OF_BLOCKS,
            _ if x.dtype().is_fp8() => usize::MAX,
            _ => MOST_PLAIN_ROWS,
        };
        let is_fast = gpu.has_constant_weights() && m <= most;
        let fits = (is_exact || is_fast) && y.dtype() == x.dtype() && is_supported(gpu);
        let steps = a.row_bytes.div_ceil(STEP);
        fits.then_some(Skinny { defines, tile, rows: m, columns: n, a, b, scales: [of_a, of_b], steps })
    }

    /// Enqueues the product.
    pub fn enqueue(&self, gpu: &CudaDevice, out: &mut Tensor, addend: Addend) -> Result<()> {
        let Skinny { defines, tile, rows, columns, a, b, scales, steps } = self;
        let [(a_scale, a_stride), (b_scale, b_stride)] = *scales;
        let [slot, of_scales] = tile.slot();
        // 1 KiB aligns the ring. A product reads 64 rows of a slot, even if a slot has fewer.
        let (bytes, rest) = (SHARED_BYTES / tile.blocks, 1024 + (64usize.saturating_sub(tile.rows)) * STEP);
        let slots = ((bytes - rest) / (slot + of_scales)).min(MOST_SLOTS);
        let addend = addend_address(out, addend);
        // All kernels for products of few rows have the same parameters.
        let entry = kernel::skinny_16_32(
            *a,
            *b,
            out,
            addend,
            Address(a_scale),
            Address(b_scale),
            *rows,
            *columns,
            *steps,
            slots,
            a_stride,
            b_stride,
        );
        let kernel = SKINNY.kernel(defines, Entry { name: tile.name, ..entry });
        // Two warps copy.
        let threads = tile.groups * GROUP + 64;
        let grid = [columns.div_ceil(tile.columns) as u32, 1, 1];
        // SAFETY: the maps belong to the operands, scales have one element, one per row or one per block, and the addend has the shape and type of
        // `out`. Before it waits, the kernel reads only `b` and its scales, which are constants if the kernel starts early.
        unsafe { gpu.launch_early(&kernel, grid, threads, bytes as u32) }
    }
}

/// Returns the kernel for a product with `rows` rows and `columns` columns, or `None` if there are too many rows. The choice does not change the
/// bits of results.
///
/// A product takes as long as reading `b`, if most multiprocessors have a block, and all blocks run at once. So tiles have as few columns as all blocks
/// can run at once.
fn choose(gpu: &CudaDevice, rows: usize, columns: usize) -> Option<Tile> {
    let most = TILES.iter().map(|tile| tile.rows).find(|&most| rows <= most)?;
    let runs_at_once = |tile: &&Tile| columns.div_ceil(tile.columns) <= tile.blocks * gpu.sm_count();
    let mut of_rows = TILES.iter().filter(|tile| tile.rows == most);
    of_rows.clone().find(runs_at_once).or_else(|| of_rows.next_back()).copied()
}
