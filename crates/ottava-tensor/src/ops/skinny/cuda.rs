use crate::cuda::{Arg, CudaDevice, Kernel, TensorMap};
use crate::granularity::Granularity;
use crate::ops::gemm::{Addend, Operand};
use crate::ops::launch::{Defines, kernel_source};
use crate::{DType, Result, Tensor};

kernel_source!("skinny");

/// Types of the operands and of the result, and bits of an operand's element.
pub(crate) const VARIANTS: &[Defines] = &[
    &[("IN", "e4m3"), ("IN_BITS", "8"), ("OUT", "bf16")],
    &[("IN", "bf16"), ("IN_BITS", "16"), ("OUT", "bf16")],
    &[("IN", "bf16"), ("IN_BITS", "16"), ("OUT", "f32")],
];

/// The kernels by the rows that they have room for.
const KERNELS: [(usize, &str); 4] = [(8, "skinny_8"), (16, "skinny_16"), (32, "skinny_32"), (64, "skinny_64")];
/// Rows of plain operands at most; the library is faster with more.
const MOST_PLAIN_ROWS: usize = 32;

/// Columns of the result in a tile, and bytes that a step reads of each row, as in `skinny.cu`; so are threads, and bytes of shared memory.
const LINES: usize = 128;
const STEP: usize = TensorMap::BOX_BYTES;
const THREADS: u32 = 288;
const SHARED_BYTES: u32 = 200 << 10;

/// A product that [`Skinny::enqueue`] can compute.
pub(in crate::ops) struct Skinny {
    defines: Defines,
    rows: usize,
    columns: usize,
    a: TensorMap,
    b: TensorMap,
    scales: [Option<(u64, i32)>; 2],
}

impl Skinny {
    /// `a · bᵀ` `[m, n]` in `out`, if this is a product of few rows in inference, of types and addresses that the kernel takes.
    pub(in crate::ops) fn of(
        gpu: &CudaDevice,
        a: Operand,
        b: Operand,
        [m, n]: [usize; 2],
        out: DType,
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
        let defines = VARIANTS.iter().find(|v| v[0].1 == name(x.dtype()) && v[2].1 == name(out))?;
        let scale = |operand: Operand| match operand.scale_inv() {
            None => Some(None),
            Some((scale_inv, Granularity::PerTensor)) => Some(Some((scale_inv.device_ptr(), 0))),
            Some((scale_inv, Granularity::PerRow)) => Some(Some((scale_inv.device_ptr(), 1))),
            Some(_) => None,
        };
        let scales = [scale(a)?, scale(b)?];
        let rows = KERNELS.iter().map(|&(rows, _)| rows).find(|&rows| m <= rows)?;
        let map = |t: &Tensor, rows: usize, box_rows: usize| {
            let (size, pitch) = (t.dtype().size(), t.shape()[1] * t.dtype().size());
            let fits = t.device_ptr().is_multiple_of(16) && pitch.is_multiple_of(16);
            fits.then_some(TensorMap { address: t.device_ptr(), rows, row_bytes: k * size, pitch, box_rows })
        };
        let (a, b) = (map(x, m, rows)?, map(y, n, LINES)?);
        let fits =
            gpu.has_constant_weights() && y.dtype() == x.dtype() && (x.dtype().is_fp8() || m <= MOST_PLAIN_ROWS);
        fits.then_some(Skinny { defines, rows: m, columns: n, a, b, scales })
    }

    /// Enqueues the product.
    pub(in crate::ops) fn enqueue(&self, gpu: &CudaDevice, out: &mut Tensor, addend: Addend) -> Result<()> {
        let Skinny { defines, rows, columns, a, b, scales } = self;
        let (steps, tiles) = (a.row_bytes.div_ceil(STEP), columns.div_ceil(LINES));
        // Half of the multiprocessors suffice to read at the speed of the memory, so none has more tiles than another, and fewer may work.
        let parts = (gpu.sm_count() / tiles).clamp(1, steps);
        let most = tiles.div_ceil(gpu.sm_count());
        let blocks = tiles.div_ceil(most) * parts;
        let partial = if parts > 1 { tiles * parts } else { 0 };
        let partial = Tensor::empty(out.device(), &[partial, LINES * a.box_rows], DType::F32)?;
        let addend = match addend {
            Addend::None => 0,
            Addend::Out => out.device_ptr(),
            Addend::Tensor(c) => c.device_ptr(),
        };
        let [(a_scale, a_stride), (b_scale, b_stride)] = scales.map(|scale| scale.unwrap_or((0, 0)));
        let args = [
            Arg::Map(*a),
            Arg::Map(*b),
            Arg::Ptr(out.device_ptr_mut()),
            Arg::Ptr(addend),
            Arg::Ptr(a_scale),
            Arg::Ptr(b_scale),
            Arg::Ptr(partial.device_ptr()),
            Arg::I32(*rows as i32),
            Arg::I32(*columns as i32),
            Arg::I32(steps as i32),
            Arg::I32(most as i32),
            Arg::I32(parts as i32),
            Arg::I32(a_stride),
            Arg::I32(b_stride),
        ];
        let (_, entry) = KERNELS.into_iter().find(|&(rows, _)| rows == a.box_rows).expect("a box has a kernel's rows");
        let kernel = Kernel { source: &SOURCE, defines, entry };
        // SAFETY: the maps are those of the operands, scales have one element or one per row, what is added has the shape and type of `out`,
        // and there is room for the partial sums. The kernel reads only `b` before it waits, which is a constant where it starts early.
        unsafe { gpu.launch_early(&kernel, [blocks as u32, 1, 1], THREADS, SHARED_BYTES, &args) }
    }
}
