//! The recurrence on a GPU, and the choice between it and chunks.

use super::{BoundaryStates, DeltaGates, DeltaGradient, DeltaSpec, EPS, SegmentStates, Segments, delta_chunks};
use crate::cuda::{CudaDevice, Entry, Kernel};
use crate::ops::declaration::kernels;
use crate::ops::launch::{self, BLOCK};
use crate::{DType, Error, Result, Tensor};

kernels! {
    static SOURCE = { file: "gated_delta_rule", headers: ["segments.cuh", "recurrence.cuh"], constants: [TOKENS, COLUMNS, ROWS], variants: launch::STORAGE };
    kernel gated_delta_rule(
        o: *mut X, qkv: *const X, g: *const f32, beta: *const f32, at: *const i32, count: i32, rows: i32, states: *mut f32,
        slots: *const i32, past: *const i32, key_heads: i32, heads: i32, keys: i32, values: i32, eps: f32
    );
    kernel gated_delta_rule_backward(
        dqkv: *mut X, dg: *mut f32, dbeta: *mut f32, dbefore: *mut f32, dq: *mut f32, dk: *mut f32, tiles: *mut f32, tokens: *mut f32,
        d_o: *const X, qkv: *const X, g: *const f32, beta: *const f32, before: *const f32, gradient: *const f32, at: *const i32, count: i32,
        rows: i32, key_heads: i32, heads: i32, keys: i32, values: i32, eps: f32
    );
    kernel gated_delta_rule_units(
        dqkv: *mut X, dg: *mut f32, dbeta: *mut f32, dq: *const f32, dk: *const f32, qkv: *const X, at: *const i32, count: i32,
        key_heads: i32, heads: i32, keys: i32, values: i32, eps: f32
    );
}

/// The number of tokens of a tile, and the number of columns of a state that a block has in registers.
const TOKENS: usize = 16;
const COLUMNS: usize = 32;
/// The largest size of a key: a block has eight warps, with `ROWS` rows of a state each.
const LARGEST_KEY: usize = 8 * ROWS;
const ROWS: usize = 16;
/// The maximum number of segments of a head that backward runs at once.
const MOST_BLOCKS: usize = 16;

fn variant(qkv: &Tensor, spec: &DeltaSpec, entry: Entry) -> Result<Kernel> {
    if spec.key_dim > LARGEST_KEY {
        let size = spec.key_dim;
        let message = format!("gated_delta_rule: keys of {size} elements; a GPU has kernels for up to {LARGEST_KEY}");
        return Err(Error::Value(message));
    }
    Ok(SOURCE.kernel(launch::storage(qkv.dtype())?, entry))
}

pub(super) fn gated_delta_rule(
    gpu: &CudaDevice,
    qkv: &Tensor,
    gates: &DeltaGates,
    spec: &DeltaSpec,
    segments: Segments,
    states: Option<SegmentStates>,
    o: &mut Tensor,
) -> Result<()> {
    if states.is_none() && delta_chunks::supports(gpu, qkv.dtype(), spec)? {
        return delta_chunks::forward(gpu, qkv, gates, spec, segments, o);
    }
    let (rows, count) = (qkv.shape()[0], segments.count());
    let at = segments.offsets();
    let DeltaSpec { key_heads, value_heads, key_dim, value_dim } = *spec;
    let (values, slots, past) = match states {
        Some(SegmentStates { values, slots, past }) => (Some(values), Some(slots), Some(past)),
        None => (None, None, None),
    };
    let entry = kernel::gated_delta_rule(
        o,
        qkv,
        &gates.g,
        &gates.beta,
        at,
        count,
        rows,
        values,
        slots,
        past,
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        EPS,
    );
    let blocks = count + usize::from(at.is_some());
    let grid = [blocks as u32, value_heads as u32, value_dim.div_ceil(COLUMNS) as u32];
    // SAFETY: the op has checked that gates, segments and states fit `qkv`. Offsets do not exceed the rows, and slots
    // are in the pool: the caller's promise, because offsets and slots are on the GPU.
    unsafe { gpu.launch_early(&variant(qkv, spec, entry)?, grid, BLOCK, 0) }
}

pub(super) fn gated_delta_rule_backward(
    gpu: &CudaDevice,
    d_o: &Tensor,
    [qkv, g, beta]: [&Tensor; 3],
    spec: &DeltaSpec,
    segments: Segments,
    states: BoundaryStates,
    gradient: &mut DeltaGradient,
) -> Result<()> {
    if delta_chunks::supports(gpu, qkv.dtype(), spec)? {
        return delta_chunks::backward(gpu, d_o, [qkv, g, beta], spec, segments, states, gradient);
    }
    let (rows, count) = (qkv.shape()[0], segments.count());
    let at = segments.offsets();
    let DeltaSpec { key_heads, value_heads, key_dim, value_dim } = *spec;
    let empty = |shape: &[usize]| Tensor::empty(qkv.device(), shape, DType::F32);
    let by_heads = [rows, value_heads, key_dim];
    let (mut dq, mut dk) = (empty(&by_heads)?, empty(&by_heads)?);
    let mut tiles = empty(&[rows / TOKENS + count, value_heads, LARGEST_KEY, COLUMNS])?;
    // Reserved segments may be many more than segments with rows.
    let blocks = count.min(MOST_BLOCKS);
    let mut tokens = empty(&[blocks, value_heads, TOKENS, LARGEST_KEY, COLUMNS])?;
    let DeltaGradient { qkv: dqkv, gates: d, before } = gradient;
    let entry = kernel::gated_delta_rule_backward(
        &mut *dqkv,
        &mut d.g,
        &mut d.beta,
        before.as_mut(),
        &mut dq,
        &mut dk,
        &mut tiles,
        &mut tokens,
        d_o,
        qkv,
        g,
        beta,
        states.before,
        states.gradient,
        at,
        count,
        rows,
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        EPS,
    );
    // SAFETY: as in forward; the gradients have the shapes of their inputs, and the scratch has a tile more per segment than its rows fill.
    unsafe { gpu.launch(&variant(qkv, spec, entry)?, [blocks as u32, value_heads as u32, 1], BLOCK, 0)? };
    let entry = kernel::gated_delta_rule_units(
        dqkv,
        &mut d.g,
        &mut d.beta,
        &dq,
        &dk,
        qkv,
        at,
        count,
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        EPS,
    );
    // SAFETY: as above, with a block for each row.
    unsafe { gpu.launch(&variant(qkv, spec, entry)?, [rows as u32, 1, 1], BLOCK, 0) }
}
