//! The recurrence on a GPU, and the choice between it and chunks.

use super::{
    BoundaryStates, SegmentStates, Segments, SsdGradient, SsdInput, SsdParameterGradients, SsdSpec, ssd_chunks,
};
use crate::cuda::{CudaDevice, Entry, Kernel};
use crate::ops::bias::bias_gradient;
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK, Defines};
use crate::{DType, Error, Result, Tensor};

kernels! {
    static SOURCE = { file: "ssd", headers: ["segments.cuh", "recurrence.cuh", "softplus.cuh", "ssd/time_step.cuh"], variants: VARIANTS };
    kernel ssd(
        y: *mut X, xbc: *const X, dt: *const X, a_log: *const f32, dt_bias: *const f32, d: *const f32, at: *const i32, count: i32, rows: i32,
        states: *mut f32, slots: *const i32, past: *const i32, heads: i32, groups: i32, dim: i32, state: i32, least: f32, most: f32
    );
    kernel ssd_backward(
        dxbc: *mut X, dbefore: *mut f32, db: *mut f32, dc: *mut f32, terms: *mut f32, tiles: *mut f32, tokens: *mut f32, dy: *const X,
        xbc: *const X, dt: *const X, a_log: *const f32, dt_bias: *const f32, d: *const f32, before: *const f32, gradient: *const f32,
        at: *const i32, count: i32, rows: i32, heads: i32, groups: i32, dim: i32, state: i32, least: f32, most: f32
    );
    kernel ssd_combine(
        dxbc: *mut X, ddt: *mut X, terms: *mut f32, db: *const f32, dc: *const f32, dt: *const X, a_log: *const f32, dt_bias: *const f32,
        at: *const i32, count: i32, heads: i32, groups: i32, dim: i32, state: i32, least: f32, most: f32
    );
}

/// The kernels by storage type, and by the number of columns of a state that a thread has in registers.
const VARIANTS: &[Defines] = &[
    &[("X", "f32"), ("OWN", "16")],
    &[("X", "f16"), ("OWN", "16")],
    &[("X", "bf16"), ("OWN", "16")],
    &[("X", "f32"), ("OWN", "32")],
    &[("X", "f16"), ("OWN", "32")],
    &[("X", "bf16"), ("OWN", "32")],
];

/// The number of warps of a block, and of tokens of a tile.
const WARPS: usize = 8;
/// The number of rows of a state that a block has in registers.
const ROWS: usize = 32;
/// The largest number of columns of a state.
const LARGEST_STATE: usize = 32 * WARPS;
/// The maximum number of segments of a head that backward runs at once.
const MOST_BLOCKS: usize = 16;

/// Returns the number of columns of a state that a block has in registers.
///
/// Errors if there is no kernel for the states.
fn columns(spec: &SsdSpec) -> Result<usize> {
    match spec.state_dim {
        ..=128 => Ok(128),
        129..=LARGEST_STATE => Ok(LARGEST_STATE),
        size => {
            Err(Error::Value(format!("ssd: states of {size} columns; a GPU has kernels for up to {LARGEST_STATE}")))
        }
    }
}

fn variant(xbc: &Tensor, spec: &SsdSpec, entry: Entry) -> Result<Kernel> {
    let own = (columns(spec)? / WARPS).to_string();
    Ok(SOURCE.kernel(launch::variant(VARIANTS, xbc.dtype(), &own)?, entry))
}

pub(super) fn ssd(
    gpu: &CudaDevice,
    input: SsdInput,
    spec: &SsdSpec,
    segments: Segments,
    states: Option<SegmentStates>,
    y: &mut Tensor,
) -> Result<()> {
    let SsdInput { xbc, dt, a_log, dt_bias, d } = input;
    if states.is_none() && ssd_chunks::supports(gpu, xbc.dtype(), spec)? {
        return ssd_chunks::forward(gpu, input, spec, segments, y);
    }
    let (rows, count, at) = (xbc.shape()[0], segments.count(), segments.offsets());
    let SsdSpec { heads, groups, head_dim, state_dim, dt_limits: [least, most] } = *spec;
    let (values, slots, past) = match states {
        Some(SegmentStates { values, slots, past }) => (Some(values), Some(slots), Some(past)),
        None => (None, None, None),
    };
    let entry = kernel::ssd(
        y, xbc, dt, a_log, dt_bias, d, at, count, rows, values, slots, past, heads, groups, head_dim, state_dim, least,
        most,
    );
    let blocks = count + usize::from(at.is_some());
    let grid = [blocks as u32, heads as u32, head_dim.div_ceil(ROWS) as u32];
    // SAFETY: the op has checked that inputs, segments and states fit. Offsets do not exceed the rows, and slots are in the
    // pool: the caller's promise, because offsets and slots are on the GPU.
    unsafe { gpu.launch_early(&variant(xbc, spec, entry)?, grid, BLOCK, 0) }
}

pub(super) fn ssd_backward(
    gpu: &CudaDevice,
    dy: &Tensor,
    input: SsdInput,
    spec: &SsdSpec,
    segments: Segments,
    states: BoundaryStates,
    (gradient, parameters): (&mut SsdGradient, SsdParameterGradients),
) -> Result<()> {
    let SsdInput { xbc, dt, a_log, dt_bias, d } = input;
    if ssd_chunks::supports(gpu, xbc.dtype(), spec)? {
        return ssd_chunks::backward(gpu, dy, input, spec, segments, states, (gradient, parameters));
    }
    let (rows, count, at) = (xbc.shape()[0], segments.count(), segments.offsets());
    let SsdSpec { heads, groups, head_dim, state_dim, dt_limits: [least, most] } = *spec;
    let empty = |shape: &[usize]| Tensor::empty(xbc.device(), shape, DType::F32);
    let (mut db, mut dc) = (empty(&[rows, heads, state_dim])?, empty(&[rows, heads, state_dim])?);
    let mut terms = empty(&[3, rows, heads])?;
    let mut tiles = empty(&[rows / WARPS + count, heads, columns(spec)?, ROWS])?;
    // Reserved segments may be many more than segments with rows.
    let blocks = count.min(MOST_BLOCKS);
    let mut tokens = empty(&[blocks, heads, WARPS, columns(spec)?, ROWS])?;
    let SsdGradient { xbc: dxbc, dt: ddt, before } = gradient;
    let entry = kernel::ssd_backward(
        &mut *dxbc,
        before.as_mut(),
        &mut db,
        &mut dc,
        &mut terms,
        &mut tiles,
        &mut tokens,
        dy,
        xbc,
        dt,
        a_log,
        dt_bias,
        d,
        states.before,
        states.gradient,
        at,
        count,
        rows,
        heads,
        groups,
        head_dim,
        state_dim,
        least,
        most,
    );
    // SAFETY: as in forward; the gradients have the shapes of their inputs, and the scratch has a tile more per segment than its rows fill.
    unsafe { gpu.launch(&variant(xbc, spec, entry)?, [blocks as u32, heads as u32, 1], BLOCK, 0)? };
    let entry = kernel::ssd_combine(
        dxbc, ddt, &mut terms, &db, &dc, dt, a_log, dt_bias, at, count, heads, groups, head_dim, state_dim, least, most,
    );
    // SAFETY: as above, with a block for each row.
    unsafe { gpu.launch(&variant(xbc, spec, entry)?, [rows as u32, 1, 1], BLOCK, 0)? };
    let terms = terms.reshape(&[3 * rows, heads])?;
    let SsdParameterGradients { a_log, dt_bias, d } = parameters;
    for (i, sum) in [a_log, dt_bias, d].into_iter().enumerate() {
        bias_gradient(&terms.rows(i * rows, (i + 1) * rows)?, sum)?;
    }
    Ok(())
}
