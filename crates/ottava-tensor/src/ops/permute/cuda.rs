use super::Slots;
use crate::cuda::CudaDevice;
use crate::ops::declaration::{AddressMut, kernels};
use crate::ops::destination::Fp8Output;
use crate::ops::groups::Groups;
use crate::ops::launch::{self, BLOCK};
use crate::ops::quantize::{self, CAST_EIGHTS, Producer, ROW_EIGHTS, RowKernels};
use crate::{DType, QuantizedTensor, Result, Tensor};

/// A macro of the kernels: the alignment of groups.
const ALIGNMENT: usize = Groups::ALIGNMENT;
/// The number of rows, and the number of columns, of a block of `gather`.
const GATHERED_ROWS: usize = 16;
const GATHERED_COLUMNS: usize = 512;
/// The number of choices that a block places. Each thread has eight.
const PLACED: usize = 2048;
/// The number of tokens per block of `gather_amaxes`. Each thread has eight columns.
const MEASURED_TOKENS: usize = 64;

kernels! {
    static SOURCE = {
        file: "permute", constants: [ALIGNMENT, PLACED, GATHERED_ROWS, GATHERED_COLUMNS, MEASURED_TOKENS], variants: launch::STORAGE
    };
    static FP8_SOURCE = {
        file: "permute", headers: ["destination.cuh", "rows.cuh"], macros: [STREAMED], constants: [ROW_EIGHTS],
        variants: quantize::VARIANTS
    };
    kernel count_slots(of_chunks: *mut i32, ids: *const i32, pairs: i32, first_expert: i32, experts: i32);
    kernel scan_slots(offsets: *mut i32, counts: *mut i32, of_chunks: *mut i32, chunks: i32, experts: i32);
    kernel place_slots(
        slot_of: *mut i32, pair_of: *mut i32, ids: *const i32, offsets: *const i32, counts: *const i32, of_chunks: *const i32, pairs: i32,
        first_expert: i32, experts: i32
    );
    kernel place_few_slots(
        offsets: *mut i32, counts: *mut i32, slot_of: *mut i32, pair_of: *mut i32, ids: *const i32, pairs: i32, first_expert: i32,
        experts: i32
    );
    kernel clear_unused_rows(x: *mut X, end: *const i32, rows: i32, columns: i32);
    kernel gather(
        y: *mut X, x: *const X, pair_of: *const i32, weights: *const f32, end: *const i32, rows: i32, chosen: i32, columns: i32
    );
    kernel gather_quantized(
        codes: *mut uint4, scales: *mut f32, from: *const uint4, from_scales: *const f32, pair_of: *const i32, chosen: i32, end: *const i32, words: i32,
        blocks: i32, rows: i32, tokens: i32
    );
    kernel gather_amaxes(
        amax: *mut f32, row_amax: *mut f32, column_amax: *mut f32, x: *const X, slot_of: *const i32, weights: *const f32, tokens: i32,
        chosen: i32, columns: i32
    );
    kernel gather_codes, gather_few_rows, gather_rows(
        x: *const X, pair_of: *const i32, weights: *const f32, chosen: i32; Destination
    );
    kernel combine(
        y: *mut X, z: *const X, slot_of: *const i32, weights: *const f32, addend: *const X, chosen: i32, columns: i32
    );
    kernel weight_gradient(
        dweights: *mut f32, dots: *const f32, slot_of: *const i32, weights: *const f32, pairs: i32
    );
    kernel gathered_weight_gradient(
        dweights: *mut f32, z: *const X, x: *const X, slot_of: *const i32, chosen: i32, columns: i32
    );
}

const ROW_KERNELS: RowKernels = RowKernels { few: ("gather_few_rows", CAST_EIGHTS), many: Some("gather_rows") };

pub(super) fn slots(gpu: &CudaDevice, ids: &Tensor, first: usize, slots: &mut Slots) -> Result<()> {
    let Slots { groups: Groups { offsets, counts }, slot_of, pair_of } = slots;
    let (pairs, experts, defines) = (ids.len(), counts.len(), launch::storage(DType::F32)?);
    let (chunks, threads) = (pairs.div_ceil(PLACED).max(1), PLACED as u32 / 8);
    let (grid, shared) = ([chunks as u32, 1, 1], (threads as usize / 32 * experts * DType::I32.size()) as u32);
    if chunks == 1 {
        let entry = kernel::place_few_slots(offsets, counts, slot_of, pair_of, ids, pairs, first, experts);
        let kernel = SOURCE.kernel(defines, entry);
        // SAFETY: `ids` and `slot_of` have `pairs` elements, `offsets` has one more than there are experts, and `pair_of` suffices for any choices.
        return unsafe { gpu.launch_early(&kernel, grid, threads, shared) };
    }
    let mut of_chunks = Tensor::empty(ids.device(), &[chunks, experts], DType::I32)?;
    let kernel = SOURCE.kernel(defines, kernel::count_slots(&mut of_chunks, ids, pairs, first, experts));
    // SAFETY: as above; each chunk has a count for each expert.
    unsafe { gpu.launch_early(&kernel, grid, threads, shared)? };
    let entry = kernel::scan_slots(&mut *offsets, &mut *counts, &mut of_chunks, chunks, experts);
    // SAFETY: as above.
    unsafe { gpu.launch_early(&SOURCE.kernel(defines, entry), [1, 1, 1], 1024, 0)? };
    let entry = kernel::place_slots(slot_of, pair_of, ids, &*offsets, &*counts, &of_chunks, pairs, first, experts);
    // SAFETY: as above; `of_chunks` has the first slots of chunks now.
    unsafe { gpu.launch_early(&SOURCE.kernel(defines, entry), grid, threads, shared) }
}

pub(super) fn clear_unused_rows(gpu: &CudaDevice, x: &mut Tensor, groups: &Groups) -> Result<()> {
    let [rows, columns] = x.dims("clear_unused_rows: x")?;
    let defines = launch::storage(x.dtype())?;
    let kernel = SOURCE.kernel(defines, kernel::clear_unused_rows(&mut *x, groups.end(), rows, columns));
    // SAFETY: `x` has `rows · columns` elements, and the last group ends within these rows.
    unsafe { gpu.launch(&kernel, launch::elements(gpu, rows * columns), BLOCK, 0) }
}

pub(super) fn gather(
    gpu: &CudaDevice,
    x: &Tensor,
    slots: &Slots,
    weights: Option<&Tensor>,
    y: &mut Tensor,
) -> Result<()> {
    let ([rows, channels], [_, chosen, _]) = (y.dims("gather: y")?, slots.sizes()?);
    let entry = kernel::gather(y, x, &slots.pair_of, weights, slots.groups.end(), rows, chosen, channels);
    let kernel = SOURCE.kernel(launch::storage(x.dtype())?, entry);
    let grid = [rows.div_ceil(GATHERED_ROWS) as u32, channels.div_ceil(GATHERED_COLUMNS) as u32, 1];
    // SAFETY: all rows and columns have threads; `pair_of` has choices of tokens of `x`, or -1.
    unsafe { gpu.launch_early(&kernel, grid, BLOCK, 0) }
}

pub(super) fn gather_amax(
    gpu: &CudaDevice,
    x: &Tensor,
    slots: &Slots,
    weights: Option<&Tensor>,
    amax: &mut Tensor,
) -> Result<()> {
    gather_amaxes(gpu, x, slots, weights, [amax.device_ptr_mut(), 0, 0])
}

/// Raises the amaxes of the result of `gather`: the amax of all rows, of each row and of each column. Addresses may be null.
fn gather_amaxes(
    gpu: &CudaDevice,
    x: &Tensor,
    slots: &Slots,
    weights: Option<&Tensor>,
    amaxes: [u64; 3],
) -> Result<()> {
    let ([tokens, channels], [_, chosen, _]) = (x.dims("gather: x")?, slots.sizes()?);
    let [all, of_rows, of_columns] = amaxes.map(AddressMut);
    let entry = kernel::gather_amaxes(all, of_rows, of_columns, x, &slots.slot_of, weights, tokens, chosen, channels);
    let kernel = SOURCE.kernel(launch::storage(x.dtype())?, entry);
    let grid = [channels.div_ceil(8 * BLOCK as usize) as u32, tokens.div_ceil(MEASURED_TOKENS) as u32, 1];
    // SAFETY: `slot_of` has a row of the result, or -1, for each choice of a token of `x`. The caller's amaxes have an element for each.
    unsafe { gpu.launch(&kernel, grid, BLOCK, 0) }
}

pub(super) fn gather_codes(
    gpu: &CudaDevice,
    x: &Tensor,
    slots: &Slots,
    weights: Option<&Tensor>,
    out: &mut QuantizedTensor,
    to: &mut Fp8Output,
) -> Result<()> {
    let [_, chosen, _] = slots.sizes()?;
    if ROW_KERNELS.fit(gpu, out, x)? {
        let entry = kernel::gather_rows(x, &slots.pair_of, weights, chosen);
        // SAFETY: as in `gather`.
        return unsafe {
            quantize::produce_rows(gpu, &FP8_SOURCE, ROW_KERNELS, x.dtype(), entry, (out, to), Some(&slots.groups))
        };
    }
    let [columns, rows, _] = quantize::tiles(out.rows, out.columns, 1);
    let raise = |[of_rows, of_columns]: [u64; 2]| gather_amaxes(gpu, x, slots, weights, [0, of_rows, of_columns]);
    let how = Producer {
        source: &FP8_SOURCE,
        entry: kernel::gather_codes(x, &slots.pair_of, weights, chosen),
        dtype: x.dtype(),
        grid: [rows, columns, 1],
        block: BLOCK,
        shared: quantize::tile_bytes(1, out.granularity, x.dtype()),
        groups: Some(&slots.groups),
        raise: Some(&raise),
    };
    // SAFETY: as in `gather`.
    unsafe { quantize::produce(gpu, how, &mut [(out, to)]) }
}

pub(super) fn gather_quantized(
    gpu: &CudaDevice,
    from: &Tensor,
    from_scales: &Tensor,
    slots: &Slots,
    codes: &mut Tensor,
    scale_inv: &mut Tensor,
) -> Result<()> {
    const WORD: usize = 16;
    let ([tokens, width], [_, chosen, rows]) = (from.dims("gather: codes")?, slots.sizes()?);
    // One scale for all rows does not change.
    let blocks = if scale_inv.len() == 1 { 0 } else { scale_inv.len() / rows };
    let scales = (blocks > 0).then_some(scale_inv);
    let entry = kernel::gather_quantized(
        codes,
        scales,
        from,
        from_scales,
        &slots.pair_of,
        chosen,
        slots.groups.end(),
        width / WORD,
        blocks,
        rows,
        tokens,
    );
    let kernel = SOURCE.kernel(launch::storage(DType::F32)?, entry);
    // SAFETY: each row has a block. Rows of codes are multiples of 16 bytes, `pair_of` has choices of tokens of `from`, or -1, and both tensors of
    // scales have `blocks` scales for each row.
    unsafe { gpu.launch(&kernel, [rows as u32, 1, 1], BLOCK, 0) }
}

pub(super) fn combine(
    gpu: &CudaDevice,
    z: &Tensor,
    slots: &Slots,
    weights: Option<&Tensor>,
    addend: Option<&Tensor>,
    y: &mut Tensor,
) -> Result<()> {
    let ([tokens, channels], [_, chosen, _]) = (y.dims("combine: y")?, slots.sizes()?);
    let entry = kernel::combine(y, z, &slots.slot_of, weights, addend, chosen, channels);
    let kernel = SOURCE.kernel(launch::storage(z.dtype())?, entry);
    // SAFETY: each token has a block; `slot_of` has rows of `z`, or -1.
    unsafe { gpu.launch_early(&kernel, [tokens as u32, 1, 1], BLOCK, 0) }
}

pub(super) fn weight_gradient(
    gpu: &CudaDevice,
    dots: &Tensor,
    slots: &Slots,
    weights: &Tensor,
    dweights: &mut Tensor,
) -> Result<()> {
    let pairs = weights.len();
    let entry = kernel::weight_gradient(dweights, dots, &slots.slot_of, weights, pairs);
    let kernel = SOURCE.kernel(launch::storage(DType::F32)?, entry);
    // SAFETY: all tensors except `dots` have `pairs` elements; `slot_of` has rows of `dots`, or -1.
    unsafe { gpu.launch(&kernel, launch::elements(gpu, pairs), BLOCK, 0) }
}

pub(super) fn gathered_weight_gradient(
    gpu: &CudaDevice,
    z: &Tensor,
    x: &Tensor,
    slots: &Slots,
    dweights: &mut Tensor,
) -> Result<()> {
    let ([_, chosen, _], [_, channels], pairs) = (slots.sizes()?, x.dims("gather: x")?, dweights.len());
    let entry = kernel::gathered_weight_gradient(dweights, z, x, &slots.slot_of, chosen, channels);
    let kernel = SOURCE.kernel(launch::storage(x.dtype())?, entry);
    // SAFETY: each choice has a block; `slot_of` has rows of `z`, or -1, and `x` has a row for each token.
    unsafe { gpu.launch(&kernel, [pairs as u32, 1, 1], BLOCK, 0) }
}
