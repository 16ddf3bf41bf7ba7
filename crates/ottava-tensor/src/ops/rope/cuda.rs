use super::{Angles, RopeLayout, RopePairs, Rotation, is_partial};
use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::destination::Fp8Output;
use crate::ops::launch::{self, BLOCK};
use crate::ops::quantize::{self, Producer};
use crate::{QuantizedTensor, Result, Tensor};

kernels! {
    table whole(RopePairs) = {
        file: "rope", headers: ["rope/pairs.cuh"], constants: [], variants: launch::STORAGE,
        (RopePairs::Halves) => [],
        (RopePairs::Neighbours) => [INTERLEAVED],
    };
    table partial(RopePairs) = {
        file: "rope", headers: ["rope/pairs.cuh"], constants: [], variants: launch::STORAGE,
        (RopePairs::Halves) => [PARTIAL],
        (RopePairs::Neighbours) => [PARTIAL, INTERLEAVED],
    };
    table fp8(RopePairs) = {
        file: "rope", headers: ["destination.cuh", "rope/pairs.cuh"], constants: [], variants: quantize::VARIANTS,
        (RopePairs::Halves) => [],
        (RopePairs::Neighbours) => [INTERLEAVED],
    };
    kernel rope(
        x: *mut X, table: *const f32, width: i32, heads: i32, dim: i32, positions: *const i32, turn: f32, #[PARTIAL] rotated: i32
    );
    kernel rope_amax(
        amax: *mut f32, x: *const X, table: *const f32, rows: i32, width: i32, heads: i32, dim: i32, positions: *const i32, turn: f32
    );
    kernel rope_codes(
        x: *const X, table: *const f32, heads: i32, dim: i32, positions: *const i32, turn: f32; Destination
    );
}

/// Returns the direction in which the kernels rotate: 1 or -1.
fn turn(rotation: Rotation) -> f32 {
    if rotation == Rotation::Forward { 1.0 } else { -1.0 }
}

pub(super) fn rope(
    gpu: &CudaDevice,
    x: &mut Tensor,
    angles: Angles,
    layout: RopeLayout,
    rotation: Rotation,
) -> Result<()> {
    let [tokens, width] = x.dims("rope: x")?;
    let RopeLayout { heads, head_dim, pairs, .. } = layout;
    let (is_partial, defines) = (is_partial(angles, layout), launch::storage(x.dtype())?);
    let rotated = is_partial.then(|| angles.table.shape()[1]);
    let entry = kernel::rope(x, angles.table, width, heads, head_dim, angles.positions, turn(rotation), rotated);
    let source = if is_partial { partial(pairs) } else { whole(pairs) };
    let kernel = source.kernel(defines, entry);
    // SAFETY: the op has checked that `x` has `tokens · width` elements, that a row contains the rotated heads, and that each row has a position. By
    // contract, the table has a row for every position.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], BLOCK, 0) }
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
    let RopeLayout { heads, head_dim, pairs, .. } = layout;
    let entry =
        kernel::rope_amax(amax, x, angles.table, tokens, width, heads, head_dim, angles.positions, turn(rotation));
    let kernel = whole(pairs).kernel(launch::storage(x.dtype())?, entry);
    // SAFETY: as in `rope`; `amax` has one element.
    unsafe { gpu.launch(&kernel, launch::readers(gpu, tokens), BLOCK, 0) }
}

/// Returns whether whole heads are rotated, tiles hold whole heads, and all reads are aligned to 16 bytes.
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
    let RopeLayout { heads, head_dim, pairs, .. } = layout;
    let how = Producer {
        source: fp8(pairs),
        entry: kernel::rope_codes(x, angles.table, heads, head_dim, angles.positions, turn(rotation)),
        dtype: x.dtype(),
        grid: quantize::tiles(out.rows, out.columns, 2),
        block: BLOCK,
        shared: quantize::tile_bytes(2, out.granularity, x.dtype()),
        groups: None,
        raise: None,
    };
    // SAFETY: `x` has `out.rows · out.columns` elements, and the table has a row for every position. `fuses` holds.
    unsafe { quantize::produce(gpu, how, &mut [(out, to)]) }
}
