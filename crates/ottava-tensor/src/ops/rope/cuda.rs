use super::{Angles, RopeLayout, RopePairs, Rotation, is_partial};
use crate::cuda::{Arg, CudaDevice, Kernel, Source};
use crate::ops::destination::Fp8Output;
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::ops::quantize::{self, Producer};
use crate::{QuantizedTensor, Result, Tensor};

kernel_source!(HALVES, "rope", "rope/pairs.cuh");
kernel_source!(NEIGHBOURS, "rope", "rope/pairs.cuh" + INTERLEAVED);
kernel_source!(PARTIAL_HALVES, "rope", "rope/pairs.cuh" + PARTIAL);
kernel_source!(PARTIAL_NEIGHBOURS, "rope", "rope/pairs.cuh" + PARTIAL + INTERLEAVED);
kernel_source!(HALVES_FP8, "rope", "destination.cuh", "rope/pairs.cuh");
kernel_source!(NEIGHBOURS_FP8, "rope", "destination.cuh", "rope/pairs.cuh" + INTERLEAVED);

/// The kernels by [`RopePairs`], kernels that rotate a part of each head, and kernels that write FP8.
pub(crate) static SOURCES: [&Source; 2] = [&HALVES, &NEIGHBOURS];
pub(crate) static PARTIAL_SOURCES: [&Source; 2] = [&PARTIAL_HALVES, &PARTIAL_NEIGHBOURS];
pub(crate) static FP8_SOURCES: [&Source; 2] = [&HALVES_FP8, &NEIGHBOURS_FP8];

/// The place of `pairs` in [`SOURCES`].
fn place(pairs: RopePairs) -> usize {
    match pairs {
        RopePairs::Halves => 0,
        RopePairs::Neighbours => 1,
    }
}

/// The last arguments of every kernel: which columns turn, how far, and which way.
fn turning(positions: &Tensor, layout: RopeLayout, rotation: Rotation) -> [Arg; 4] {
    [
        Arg::I32(layout.heads as i32),
        Arg::I32(layout.head_dim as i32),
        Arg::Ptr(positions.device_ptr()),
        Arg::F32(if rotation == Rotation::Forward { 1.0 } else { -1.0 }),
    ]
}

pub(super) fn rope(
    gpu: &CudaDevice,
    x: &mut Tensor,
    angles: Angles,
    layout: RopeLayout,
    rotation: Rotation,
) -> Result<()> {
    let [tokens, width] = x.dims("rope: x")?;
    let partial = is_partial(angles, layout);
    let sources = if partial { PARTIAL_SOURCES } else { SOURCES };
    let kernel = Kernel { source: sources[place(layout.pairs)], defines: launch::storage(x.dtype())?, entry: "rope" };
    let args = [Arg::Ptr(x.device_ptr_mut()), Arg::Ptr(angles.table.device_ptr()), Arg::I32(width as i32)];
    let mut args = [args.as_slice(), &turning(angles.positions, layout, rotation)].concat();
    args.extend(partial.then(|| Arg::I32(angles.table.shape()[1] as i32)));
    // SAFETY: `x` is `tokens · width` with the rotated heads inside a row, there is a position for each row, both checked
    // by the op, and the table has a row for every position by contract.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], BLOCK, 0, &args) }
}

pub(super) fn rope_amax(
    gpu: &CudaDevice,
    x: &Tensor,
    angles: Angles,
    layout: RopeLayout,
    rotation: Rotation,
    amax: &mut Tensor,
) -> Result<()> {
    let [tokens, width] = x.dims("rope: x")?;
    let kernel =
        Kernel { source: SOURCES[place(layout.pairs)], defines: launch::storage(x.dtype())?, entry: "rope_amax" };
    let args = [
        Arg::Ptr(amax.device_ptr_mut()),
        Arg::Ptr(x.device_ptr()),
        Arg::Ptr(angles.table.device_ptr()),
        Arg::I32(tokens as i32),
        Arg::I32(width as i32),
    ];
    let args = [args.as_slice(), &turning(angles.positions, layout, rotation)].concat();
    // SAFETY: as in `rope`; `amax` has one element.
    unsafe { gpu.launch(&kernel, launch::readers(gpu, tokens), BLOCK, 0, &args) }
}

/// Whether whole heads are rotated, tiles hold whole heads, and all reads are aligned to 16 bytes.
pub(super) fn fuses(x: &Tensor, table: &Tensor, layout: RopeLayout) -> bool {
    [16, 32, 64, 128].contains(&layout.head_dim)
        && table.shape()[1] == layout.head_dim
        && x.shape()[1].is_multiple_of(layout.head_dim)
        && launch::aligned(&[x, table])
}

pub(super) fn rope_codes(
    gpu: &CudaDevice,
    x: &Tensor,
    angles: Angles,
    layout: RopeLayout,
    rotation: Rotation,
    out: &mut QuantizedTensor,
    to: &mut Fp8Output,
) -> Result<()> {
    let inputs = [Arg::Ptr(x.device_ptr()), Arg::Ptr(angles.table.device_ptr())];
    let how = Producer {
        source: FP8_SOURCES[place(layout.pairs)],
        entry: "rope_codes",
        dtype: x.dtype(),
        grid: quantize::tiles(out.rows, out.columns, 2),
        block: BLOCK,
        shared: quantize::tile_bytes(2, out.granularity, x.dtype()),
        inputs: &[inputs.as_slice(), &turning(angles.positions, layout, rotation)].concat(),
        raise: None,
    };
    // SAFETY: `x` is `out.rows · out.columns` elements and the table has a row for every position; `fuses` holds.
    unsafe { quantize::produce(gpu, how, &mut [(out, to)]) }
}
