//! The gated delta rule in chunks, on Hopper's tensor cores.

use super::chunk_table::{CHUNK, ChunkTable, PANEL};
use super::{BoundaryStates, DeltaGates, DeltaGradient, DeltaSpec, EPS, Segments};
use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::launch::{Defines, UNTYPED};
use crate::{DType, Feature, Result, Tensor};

kernels! {
    static SOURCE = {
        file: "delta_chunks", headers: ["hopper.cuh", "chunk_panels.cuh", "gated_delta_rule/delta_chunks.cuh"],
        needs: [Wgmma, BulkCopies], constants: [CHUNK, PITCH, STAGES], variants: &[PLAIN, KEEPING]
    };
    static BACKWARD = {
        file: "delta_chunks_backward", headers: ["hopper.cuh", "chunk_panels.cuh", "gated_delta_rule/delta_chunks.cuh"], needs: [Wgmma, BulkCopies],
        constants: [CHUNK, STAGES], variants: UNTYPED
    };
    kernel delta_prepare(
        keys: *mut u8, heads_images: *mut u8, gates: *mut f32, rstd: *mut f32, qkv: *const bf16, g: *const f32, beta: *const f32, chunks: *const int2,
        key_heads: i32, heads: i32, eps: f32, keeps_inverse: i32
    );
    kernel delta_states(
        o: *mut bf16, kept_states: *mut u8, kept_values: *mut u8, keys: *const u8, heads_images: *const u8, gates: *const f32,
        before: *const f32, chunks: *const int2, segments: *const int2, at: *const i32, count: i32, rows: i32, key_heads: i32, heads: i32
    );
    kernel delta_state_gradients(
        kept_gradients: *mut u8, kept_dn: *mut u8, dbefore: *mut f32, d_o: *const bf16, keys: *const u8, heads_images: *const u8,
        gates: *const f32, gradient: *const f32, chunks: *const int2, segments: *const int2, key_heads: i32, heads: i32
    );
    kernel delta_gradients(
        dqkv: *mut bf16, dg: *mut f32, dbeta: *mut f32, d_o: *const bf16, qkv: *const bf16, keys: *const u8, heads_images: *const u8,
        kept_states: *const u8, kept_values: *const u8, kept_gradients: *const u8, kept_dn: *const u8, gates: *const f32, rstd: *const f32,
        chunks: *const int2, at: *const i32, count: i32, all_rows: i32, key_heads: i32, heads: i32
    );
}

/// The number of chunks that a block has in shared memory, while it runs from chunk to chunk.
const STAGES: usize = 3;
/// The floats of a column of the triangular matrix, so that the elements of a store are in different banks of shared memory.
const PITCH: usize = 68;
/// The size of keys and of values that the kernels support.
const SIZE: usize = 128;

const PLAIN: Defines = &[("KEEPS", "0")];
const KEEPING: Defines = &[("KEEPS", "1")];

/// The bytes of a panel of a state: 64 columns in BF16 (`delta_chunks.cuh`).
const SLICE: usize = SIZE * 128;
/// The bytes of shared memory of the kernels: panels, gates of stages, and in `delta_prepare` two matrices in F32 with padded rows.
const PREPARE_BYTES: usize = 6 * PANEL + CHUNK * PITCH * 4;
const STATES_BYTES: usize = STAGES * (8 * PANEL + CHUNK * 4) + SLICE + PANEL;
const GRADIENTS_BYTES: usize = 19 * PANEL + 4 * SLICE;

/// Returns whether the kernels support these heads on this GPU.
pub(super) fn supports(gpu: &CudaDevice, dtype: DType, spec: &DeltaSpec) -> Result<bool> {
    let fits = dtype == DType::BF16 && spec.key_dim == SIZE && spec.value_dim == SIZE;
    Ok(fits && gpu.has(Feature::Wgmma)? && gpu.has(Feature::BulkCopies)?)
}

/// The inputs of all kernels.
struct Inputs<'a> {
    gpu: &'a CudaDevice,
    qkv: &'a Tensor,
    spec: &'a DeltaSpec,
    table: ChunkTable<'a>,
}

/// What each chunk has of its own rows.
struct Chunks {
    /// Queries and keys of each chunk and key head.
    keys: Tensor,
    /// The panels of each chunk and head.
    heads: Tensor,
    /// The cumulative sums of `g`, and `beta`, of each chunk and head.
    gates: Tensor,
    /// The reciprocal lengths of the queries and keys of each chunk and key head.
    rstd: Tensor,
}

/// States and new values of each chunk and head, or the gradients by them.
struct Kept {
    states: Tensor,
    values: Tensor,
}

impl<'a> Inputs<'a> {
    fn new(gpu: &'a CudaDevice, qkv: &'a Tensor, spec: &'a DeltaSpec, segments: &Segments<'a>) -> Result<Inputs<'a>> {
        Ok(Inputs { gpu, qkv, spec, table: ChunkTable::new(gpu, qkv, segments)? })
    }

    fn empty(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        Tensor::empty(self.qkv.device(), shape, dtype)
    }

    fn prepare(&self, gates: [&Tensor; 2], keeps_inverse: bool) -> Result<Chunks> {
        let [g, beta] = gates;
        let DeltaSpec { key_heads, value_heads, .. } = *self.spec;
        let max = self.table.max;
        let mut keys = self.empty(&[max, key_heads, 4 * PANEL], DType::U8)?;
        let mut heads = self.empty(&[max, value_heads, 6 * PANEL], DType::U8)?;
        let mut of_gates = self.empty(&[max, value_heads, 2 * CHUNK], DType::F32)?;
        let mut rstd = self.empty(&[max, key_heads, 2 * CHUNK], DType::F32)?;
        let entry = kernel::delta_prepare(
            &mut keys,
            &mut heads,
            &mut of_gates,
            &mut rstd,
            self.qkv,
            g,
            beta,
            &self.table.of,
            key_heads,
            value_heads,
            EPS,
            keeps_inverse,
        );
        let grid = [max as u32, value_heads as u32, 1];
        // SAFETY: the op has checked that the gates fit `qkv`; the images have a place for each chunk and head.
        unsafe { self.gpu.launch(&SOURCE.kernel(PLAIN, entry), grid, 128, PREPARE_BYTES as u32)? };
        Ok(Chunks { keys, heads, gates: of_gates, rstd })
    }

    /// Returns memory for a state and new values of each chunk and head.
    fn kept(&self) -> Result<Kept> {
        let of = |bytes| self.empty(&[self.table.max, self.spec.value_heads, 2 * bytes], DType::U8);
        Ok(Kept { states: of(SLICE)?, values: of(PANEL)? })
    }

    /// Returns the grid of the kernels that run from chunk to chunk, with `more` segments.
    fn by_segment(&self, more: bool) -> [u32; 3] {
        [(self.table.count + usize::from(more)) as u32, self.spec.value_heads as u32, 2]
    }

    /// Runs the chunks forward, and writes the output, or keeps what backward needs.
    fn run(
        &self,
        chunks: &Chunks,
        before: Option<&Tensor>,
        o: Option<&mut Tensor>,
        kept: Option<&mut Kept>,
    ) -> Result<()> {
        let (defines, writes) = if kept.is_some() { (KEEPING, false) } else { (PLAIN, true) };
        let (states, values) = kept.map(|kept| (&mut kept.states, &mut kept.values)).unzip();
        let DeltaSpec { key_heads, value_heads, .. } = *self.spec;
        let ChunkTable { of, of_segments, at, count, rows, .. } = &self.table;
        let Chunks { keys, heads, gates, .. } = chunks;
        let entry = kernel::delta_states(
            o,
            states,
            values,
            keys,
            heads,
            gates,
            before,
            of,
            of_segments,
            *at,
            *count,
            *rows,
            key_heads,
            value_heads,
        );
        let grid = self.by_segment(writes && at.is_some());
        // SAFETY: `prepare` has written the images of these chunks; the op has checked the states and the output.
        unsafe { self.gpu.launch(&SOURCE.kernel(defines, entry), grid, 160, STATES_BYTES as u32) }
    }
}

pub(super) fn forward(
    gpu: &CudaDevice,
    qkv: &Tensor,
    gates: &DeltaGates,
    spec: &DeltaSpec,
    segments: Segments,
    o: &mut Tensor,
) -> Result<()> {
    let inputs = Inputs::new(gpu, qkv, spec, &segments)?;
    let chunks = inputs.prepare([&gates.g, &gates.beta], false)?;
    inputs.run(&chunks, None, Some(o), None)
}

pub(super) fn backward(
    gpu: &CudaDevice,
    d_o: &Tensor,
    [qkv, g, beta]: [&Tensor; 3],
    spec: &DeltaSpec,
    segments: Segments,
    states: BoundaryStates,
    gradient: &mut DeltaGradient,
) -> Result<()> {
    let inputs = Inputs::new(gpu, qkv, spec, &segments)?;
    let chunks = inputs.prepare([g, beta], true)?;
    let (mut kept, mut of_kept) = (inputs.kept()?, inputs.kept()?);
    inputs.run(&chunks, states.before, None, Some(&mut kept))?;
    let DeltaSpec { key_heads, value_heads, .. } = *spec;
    let DeltaGradient { qkv: dqkv, gates, before } = gradient;
    let ChunkTable { of, of_segments, max, at, count, rows } = &inputs.table;
    let Chunks { keys, heads, gates: of_gates, rstd } = &chunks;
    let entry = kernel::delta_state_gradients(
        &mut of_kept.states,
        &mut of_kept.values,
        before.as_mut(),
        d_o,
        keys,
        heads,
        of_gates,
        states.gradient,
        of,
        of_segments,
        key_heads,
        value_heads,
    );
    // SAFETY: as in `run`; the op has checked `d_o` and the gradients by states.
    unsafe { gpu.launch(&BACKWARD.kernel(&[], entry), inputs.by_segment(false), 160, STATES_BYTES as u32)? };
    let entry = kernel::delta_gradients(
        dqkv,
        &mut gates.g,
        &mut gates.beta,
        d_o,
        qkv,
        keys,
        heads,
        &kept.states,
        &kept.values,
        &of_kept.states,
        &of_kept.values,
        of_gates,
        rstd,
        of,
        *at,
        *count,
        *rows,
        key_heads,
        value_heads,
    );
    // SAFETY: as above; the gradients have the shapes of their inputs.
    unsafe {
        gpu.launch(&BACKWARD.kernel(&[], entry), [*max as u32 + 1, key_heads as u32, 1], 256, GRADIENTS_BYTES as u32)
    }
}
