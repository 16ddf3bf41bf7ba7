//! The state space duality in chunks, on Hopper's tensor cores.

use super::{BoundaryStates, Segments, SsdGradient, SsdInput, SsdParameterGradients, SsdSpec};
use crate::cuda::CudaDevice;
use crate::ops::bias::cuda::add_partial_sums;
use crate::ops::declaration::kernels;
use crate::ops::gated_delta_rule::chunk_table::{CHUNK, ChunkTable, PANEL, PANEL_COLUMNS};
use crate::ops::launch::Defines;
use crate::{DType, Feature, Result, Tensor};

kernels! {
    static SOURCE = {
        file: "ssd_chunks", headers: ["hopper.cuh", "chunk_panels.cuh", "softplus.cuh", "ssd/time_step.cuh"], needs: [Wgmma, BulkCopies], constants: [CHUNK, STAGES],
        variants: VARIANTS
    };
    static GRADIENTS = {
        file: "ssd_chunks_backward", headers: ["hopper.cuh", "chunk_panels.cuh", "softplus.cuh", "ssd/time_step.cuh"], needs: [Wgmma, BulkCopies],
        constants: [CHUNK, STAGES], variants: VARIANTS
    };
    kernel ssd_steps(
        steps: *mut f32, dt: *const bf16, a_log: *const f32, dt_bias: *const f32, chunks: *const int2, heads: i32, least: f32, most: f32
    );
    kernel ssd_scan(
        kept: *mut u8, to: *mut f32, values: *const bf16, pitch: u64, xbc: *const bf16, width: u64, terms: i32, steps: *const f32,
        from: *const f32, chunks: *const int2, segments: *const int2, heads: i32, groups: i32, is_back: i32
    );
    kernel ssd_output(
        y: *mut bf16, xbc: *const bf16, kept: *const u8, steps: *const f32, d: *const f32, chunks: *const int2, at: *const i32, count: i32,
        all_rows: i32, heads: i32, groups: i32, each: i32
    );
    kernel ssd_gradients(
        dxbc: *mut bf16, ddt: *mut bf16, partial: *mut f32, dy: *const bf16, xbc: *const bf16, dt: *const bf16, a_log: *const f32,
        dt_bias: *const f32, d: *const f32, kept_states: *const u8, kept_gradients: *const u8, steps: *const f32, chunks: *const int2,
        at: *const i32, count: i32, all_rows: i32, heads: i32, groups: i32, least: f32, most: f32
    );
}

/// The size of a head that the kernels support.
const HEAD: usize = 64;
/// The kernels by the number of panels of a state. A block of backward has as many heads at once as fit its shared memory.
const VARIANTS: &[Defines] = &[&[("PANELS", "2"), ("HEAD_STAGES", "2")], &[("PANELS", "4"), ("HEAD_STAGES", "1")]];
/// The number of chunks that a block of `ssd_scan` has in shared memory.
const STAGES: usize = 4;
/// The maximum number of heads of a block of `ssd_output`.
const MOST_HEADS: usize = 8;
/// The panels of a state for which a block computes the gradients by B and C.
const PART: usize = 2;
/// The bytes of the cumulative sums and the time steps of a chunk and head.
const STEPS_BYTES: usize = 2 * CHUNK * 4;

/// Returns the variant for these states, if there is one.
fn variant(dtype: DType, spec: &SsdSpec) -> Option<(Defines, usize)> {
    let panels = spec.state_dim / PANEL_COLUMNS;
    let fits = dtype == DType::BF16 && spec.head_dim == HEAD && spec.state_dim.is_multiple_of(PANEL_COLUMNS);
    let defines = VARIANTS.iter().find(|variant| variant[0].1 == panels.to_string())?;
    fits.then_some((defines, panels))
}

/// Returns whether the kernels support these states on this GPU.
pub(super) fn supports(gpu: &CudaDevice, dtype: DType, spec: &SsdSpec) -> Result<bool> {
    Ok(variant(dtype, spec).is_some() && gpu.has(Feature::Wgmma)? && gpu.has(Feature::BulkCopies)?)
}

/// A run of the chunks of a batch.
struct Chunks<'a> {
    gpu: &'a CudaDevice,
    input: SsdInput<'a>,
    spec: &'a SsdSpec,
    table: ChunkTable<'a>,
    /// The cumulative sums and the time steps of each chunk and head.
    steps: Tensor,
    defines: Defines,
    /// The panels of a state.
    panels: usize,
}

/// The direction of a scan: from the first chunk of each segment, or back from the last.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Forward,
    Back,
}

impl<'a> Chunks<'a> {
    fn new(gpu: &'a CudaDevice, input: SsdInput<'a>, spec: &'a SsdSpec, segments: &Segments<'a>) -> Result<Chunks<'a>> {
        let SsdInput { xbc, dt, a_log, dt_bias, .. } = input;
        let (defines, panels) = variant(xbc.dtype(), spec).expect("the caller has asked `supports`");
        let table = ChunkTable::new(gpu, xbc, segments)?;
        let mut steps = Tensor::empty(xbc.device(), &[table.max, spec.heads, 2 * CHUNK], DType::F32)?;
        let [least, most] = spec.dt_limits;
        let entry = kernel::ssd_steps(&mut steps, dt, a_log, dt_bias, &table.of, spec.heads, least, most);
        let grid = [table.max as u32, spec.heads.div_ceil(8) as u32, 1];
        // SAFETY: the op has checked that `dt` and the parameters have the heads; `steps` has a part for each chunk and head.
        unsafe { gpu.launch(&SOURCE.kernel(defines, entry), grid, 256, 0)? };
        Ok(Chunks { gpu, input, spec, table, steps, defines, panels })
    }

    /// Returns the state before each chunk, `[chunks, H]` images of panels, for the inputs `values`; or back, for the gradients `values` by the output, the
    /// gradient by the state after each chunk. States begin with `from`, and `to` becomes what they end with.
    fn scan(
        &self,
        direction: Direction,
        values: &Tensor,
        from: Option<&Tensor>,
        to: Option<&mut Tensor>,
    ) -> Result<Tensor> {
        let (SsdSpec { heads, groups, .. }, ChunkTable { max, of, of_segments, count, .. }) = (*self.spec, &self.table);
        let mut kept = Tensor::empty(values.device(), &[*max, heads, self.panels * PANEL], DType::U8)?;
        let (xbc, is_back) = (self.input.xbc, direction == Direction::Back);
        let terms = self.spec.width() + if is_back { self.spec.group_width() } else { 0 };
        let [pitch, width] = [values, xbc].map(|rows| rows.shape()[1] as u64);
        let entry = kernel::ssd_scan(
            &mut kept,
            to,
            values,
            pitch,
            xbc,
            width,
            terms,
            &self.steps,
            from,
            of,
            of_segments,
            heads,
            groups,
            is_back,
        );
        let grid = [*count as u32, heads as u32, self.panels as u32];
        let bytes = STAGES * (2 * PANEL + STEPS_BYTES) + 2 * PANEL;
        // SAFETY: the op has checked the inputs and the states; `kept` has an image for each chunk and head.
        unsafe { self.gpu.launch(&SOURCE.kernel(self.defines, entry), grid, 256, bytes as u32)? };
        Ok(kept)
    }
}

pub(super) fn forward(
    gpu: &CudaDevice,
    input: SsdInput,
    spec: &SsdSpec,
    segments: Segments,
    y: &mut Tensor,
) -> Result<()> {
    let chunks = Chunks::new(gpu, input, spec, &segments)?;
    let kept = chunks.scan(Direction::Forward, input.xbc, None, None)?;
    let SsdSpec { heads, groups, .. } = *spec;
    let each = (1..=MOST_HEADS).rev().find(|&each| spec.group().is_multiple_of(each)).unwrap_or(1);
    let Chunks { table: ChunkTable { of, max, at, count, rows, .. }, steps, defines, panels, .. } = &chunks;
    let entry = kernel::ssd_output(y, input.xbc, &kept, steps, input.d, of, *at, *count, *rows, heads, groups, each);
    let bytes = 2 * panels * PANEL + 2 * ((1 + panels) * PANEL + STEPS_BYTES);
    // SAFETY: as in `scan`, also for `y`; a block more writes the rows of padding.
    unsafe {
        gpu.launch(&SOURCE.kernel(defines, entry), [*max as u32 + 1, (heads / each) as u32, 1], 128, bytes as u32)
    }
}

pub(super) fn backward(
    gpu: &CudaDevice,
    dy: &Tensor,
    input: SsdInput,
    spec: &SsdSpec,
    segments: Segments,
    states: BoundaryStates,
    (gradient, parameters): (&mut SsdGradient, SsdParameterGradients),
) -> Result<()> {
    let chunks = Chunks::new(gpu, input, spec, &segments)?;
    let SsdGradient { xbc: dxbc, dt: ddt, before } = gradient;
    let kept = chunks.scan(Direction::Forward, input.xbc, states.before, None)?;
    let of_kept = chunks.scan(Direction::Back, dy, states.gradient, before.as_mut())?;
    let SsdSpec { heads, groups, dt_limits: [least, most], .. } = *spec;
    let SsdInput { xbc, dt, a_log, dt_bias, d } = input;
    let Chunks { table: ChunkTable { of, max, at, count, rows, .. }, steps, defines, panels, .. } = &chunks;
    let mut partial = Tensor::empty(xbc.device(), &[3 * max, heads], DType::F32)?;
    let entry = kernel::ssd_gradients(
        dxbc,
        ddt,
        &mut partial,
        dy,
        xbc,
        dt,
        a_log,
        dt_bias,
        d,
        &kept,
        &of_kept,
        steps,
        of,
        *at,
        *count,
        *rows,
        heads,
        groups,
        least,
        most,
    );
    let stages: usize = defines[1].1.parse().expect("a number");
    let bytes = (2 * panels + 1) * PANEL + stages * ((2 + 2 * panels) * PANEL + STEPS_BYTES);
    let grid = [*max as u32 + 1, groups as u32, (panels / PART) as u32];
    // SAFETY: as above; the partial sums have a row for each chunk and parameter.
    unsafe { gpu.launch(&GRADIENTS.kernel(defines, entry), grid, 256, bytes as u32)? };
    let SsdParameterGradients { a_log, dt_bias, d } = parameters;
    for (i, sum) in [a_log, dt_bias, d].into_iter().enumerate() {
        add_partial_sums(gpu, &partial.rows(i * max, (i + 1) * max)?, sum)?;
    }
    Ok(())
}
