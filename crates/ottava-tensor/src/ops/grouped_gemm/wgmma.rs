//! The kernels for Hopper's tensor cores, of grouped products in BF16 and FP8.

use super::{Groups, Sizes, Stack};
use crate::cuda::{Arg, CudaDevice, Kernel, TensorMap};
use crate::ops::gemm::Operand;
use crate::ops::launch::{Defines, kernel_source};
use crate::{Capability, DType, Granularity, Result, Tensor};

kernel_source!(SOURCE, "grouped_wgmma", "hopper.cuh" needs [Wgmma, BulkCopies, Multicast]; SIDE, STEP, STAGES);

/// Rows and columns of a tile.
const SIDE: usize = 128;
/// Bytes that a stage holds of each row of the operands.
const STEP: usize = TensorMap::BOX_BYTES;
/// Stages of the ring in shared memory.
const STAGES: usize = 6;
const THREADS: u32 = 3 * 128;
/// Groups at most: their offsets and counts are in shared memory.
const MOST_GROUPS: usize = 2048;

macro_rules! variant {
    ($x:literal $bits:literal, $a:literal, $b:literal, $scaled:literal, $a_scales:literal, $b_scales:literal, $a_mn:literal, $b_mn:literal, $wgrad:literal) => {
        &[
            ("X", $x),
            ("A", $a),
            ("B", $b),
            ("A_SCALES", $a_scales),
            ("B_SCALES", $b_scales),
            ("A_MN", $a_mn),
            ("B_MN", $b_mn),
            ("WGRAD", $wgrad),
            ("SCALED", $scaled),
            ("OUT_BITS", $bits),
        ]
    };
}

macro_rules! variants_of {
    ($($x:literal $bits:literal),*) => { &[$(
        variant!($x $bits, "bf16", "bf16", "0", "AT_END", "AT_END", "0", "0", "0"),
        variant!($x $bits, "bf16", "bf16", "0", "AT_END", "AT_END", "0", "1", "0"),
        variant!($x $bits, "bf16", "bf16", "0", "AT_END", "AT_END", "1", "1", "1"),
        variant!($x $bits, "e4m3", "e4m3", "1", "AT_END", "AT_END", "0", "0", "0"),
        variant!($x $bits, "e4m3", "e4m3", "1", "AT_END", "AT_END", "0", "0", "1"),
        variant!($x $bits, "e5m2", "e4m3", "1", "AT_END", "AT_END", "0", "0", "0"),
        variant!($x $bits, "e5m2", "e4m3", "1", "AT_END", "AT_END", "0", "0", "1"),
        variant!($x $bits, "e4m3", "e4m3", "1", "STRIPS", "SQUARES", "0", "0", "0"),
        variant!($x $bits, "e4m3", "e4m3", "1", "STRIPS", "STRIPS", "0", "0", "1"),
        variant!($x $bits, "e4m3", "e4m3", "1", "SQUARES", "STRIPS", "0", "0", "1"),
    )*] };
}

/// Types, scales and layouts of the operands and of the result.
pub(crate) const VARIANTS: &[Defines] = variants_of!("bf16" "16", "f32" "32");

/// One operand as the kernel reads it.
struct Side {
    map: TensorMap,
    name: &'static str,
    scales: &'static str,
    is_transposed: bool,
    /// Inverse scales, their pitch, and whether each row has one.
    inverse: (u64, usize, usize),
}

impl Side {
    /// `None` if the kernel cannot read `operand`.
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
                match granularity {
                    Granularity::PerTensor => ("AT_END", (address, 1, 0)),
                    Granularity::PerRow => ("AT_END", (address, shape[0], 1)),
                    Granularity::Blocks1x128 | Granularity::MixedBlocks => ("STRIPS", (address, shape[1], 0)),
                    Granularity::Blocks128x128 => ("SQUARES", (address, shape[1], 0)),
                    Granularity::Mx => return None,
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
    a: Side,
    b: Side,
}

impl Product {
    /// `None` if no variant has these operands, or the GPU lacks what the kernel needs. `is_wgrad` contracts the rows of groups.
    pub(super) fn plan(
        gpu: &CudaDevice,
        a: Operand,
        b: Operand,
        groups: &Groups,
        out: DType,
        is_wgrad: bool,
    ) -> Option<Product> {
        let (a, b) = (Side::new(a, SIDE / 2)?, Side::new(b, SIDE)?);
        let x = match out {
            DType::BF16 => "bf16",
            DType::F32 => "f32",
            _ => return None,
        };
        let flag = |value| if value { "1" } else { "0" };
        let wanted =
            [x, a.name, b.name, a.scales, b.scales, flag(a.is_transposed), flag(b.is_transposed), flag(is_wgrad)];
        let defines = *VARIANTS.iter().find(|variant| variant.iter().zip(wanted).all(|(have, want)| have.1 == want))?;
        let known = Capability::find(gpu.capability()).is_ok_and(|known| known.lacks(SOURCE.needs).is_empty());
        (known && groups.len() <= MOST_GROUPS).then_some(Product { defines, a, b })
    }

    /// Enqueues `y[r] = a[r] · b[g]ᵀ`.
    pub(super) fn enqueue(
        &self,
        gpu: &CudaDevice,
        groups: &Groups,
        Sizes { stack, p, n, k }: Sizes,
        y: &mut Tensor,
    ) -> Result<()> {
        let [b_rows, b_terms] = match stack {
            Stack::Rows => [n, 0],
            Stack::Contracted => [0, k],
        };
        self.launch(gpu, groups, y, [p, n, k, b_rows, b_terms, 0], 1)
    }

    /// Enqueues `into[g] = a[:, rows of g] · b[:, rows of g]ᵀ`, added to `into` if `add`.
    pub(super) fn enqueue_wgrad(&self, gpu: &CudaDevice, groups: &Groups, into: &mut Tensor, add: bool) -> Result<()> {
        let (m, n) = (into.shape()[0] / groups.len(), into.shape()[1]);
        self.launch(gpu, groups, into, [m, n, 0, 0, 0, usize::from(add)], groups.len())
    }

    fn launch(
        &self,
        gpu: &CudaDevice,
        groups: &Groups,
        out: &mut Tensor,
        [rows, columns, terms, b_rows, b_terms, adds]: [usize; 6],
        matrices: usize,
    ) -> Result<()> {
        let two = |low: usize, high: usize| Arg::U64(low as u64 | (high as u64) << 32);
        let mut args = vec![Arg::Map(self.a.map), Arg::Map(self.b.map)];
        // `Arguments` of the kernel, its last parameter, in words of 64 bits.
        for (address, pitch, by_row) in [self.a.inverse, self.b.inverse] {
            args.extend([Arg::Ptr(address), two(pitch, by_row)]);
        }
        args.push(Arg::Ptr(out.device_ptr_mut()));
        args.extend([Arg::Ptr(groups.offsets.device_ptr()), Arg::Ptr(groups.counts.device_ptr())]);
        args.extend([two(groups.len(), rows), two(columns, terms), two(b_rows, b_terms), two(adds, 0)]);
        let stage = 4 * (SIDE / 2) * STEP + 2 * SIDE * size_of::<f32>();
        // 1 KiB aligns the ring.
        let shared = 1024 + STAGES * stage + (2 * groups.len() + 1) * size_of::<i32>();
        let tiles = matrices * rows.div_ceil(SIDE) * columns.div_ceil(2 * SIDE);
        let blocks = 2 * tiles.min(gpu.sm_count() / 2);
        let kernel = Kernel { source: &SOURCE, defines: self.defines, entry: "grouped_wgmma" };
        // SAFETY: the maps and scales are those of the operands, whose sizes `check` and `wgrad` have compared with `out`; offsets and counts lie
        // within the rows of the operands, as the contract demands.
        unsafe { gpu.launch_early(&kernel, [blocks as u32, 1, 1], THREADS, shared as u32, &args) }
    }
}
