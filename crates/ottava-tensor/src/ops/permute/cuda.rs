use super::Slots;
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::destination::Fp8Output;
use crate::ops::grouped_gemm::Groups;
use crate::ops::launch::{self, BLOCK, Defines, kernel_source};
use crate::ops::quantize::{self, CAST_EIGHTS, Producer, ROW_EIGHTS, RowKernels};
use crate::{DType, QuantizedTensor, Result, Tensor};

/// Macros of the kernels.
const ALIGNMENT: usize = Groups::ALIGNMENT;
/// Rows and columns of a block of `gather`.
const GATHERED_ROWS: usize = 16;
const GATHERED_COLUMNS: usize = 512;
/// Tokens per block of `gather_amaxes`, whose threads have eight columns each.
const MEASURED_TOKENS: usize = 64;

kernel_source!("permute"; ALIGNMENT, GATHERED_ROWS, GATHERED_COLUMNS, MEASURED_TOKENS);
kernel_source!(FP8_SOURCE, "permute", "destination.cuh", "rows.cuh" + STREAMED; ROW_EIGHTS);

const ROW_KERNELS: RowKernels = RowKernels { few: ("gather_few_rows", CAST_EIGHTS), many: Some("gather_rows") };

fn kernel(defines: Defines, entry: &'static str) -> Kernel {
    Kernel { source: &SOURCE, defines, entry }
}

fn address(t: Option<&Tensor>) -> Arg {
    Arg::Ptr(t.map_or(0, Tensor::device_ptr))
}

pub(super) fn slots(gpu: &CudaDevice, ids: &Tensor, first: usize, slots: &mut Slots) -> Result<()> {
    let Slots { groups: Groups { offsets, counts }, slot_of, pair_of } = slots;
    let (pairs, experts) = (ids.len() as i32, counts.len() as u32);
    let defines = launch::storage(DType::F32)?;
    let args = [Arg::Ptr(counts.device_ptr_mut()), Arg::Ptr(ids.device_ptr()), Arg::I32(pairs), Arg::I32(first as i32)];
    // SAFETY: a block for each of the counts, and `pairs` ids.
    unsafe { gpu.launch_early(&kernel(defines, "count_slots"), [experts, 1, 1], 1024, 0, &args)? };
    let args = [
        Arg::Ptr(offsets.device_ptr_mut()),
        Arg::Ptr(slot_of.device_ptr_mut()),
        Arg::Ptr(pair_of.device_ptr_mut()),
        Arg::Ptr(ids.device_ptr()),
        Arg::Ptr(counts.device_ptr()),
        Arg::I32(pairs),
        Arg::I32(experts as i32),
        Arg::I32(pair_of.len() as i32),
        Arg::I32(first as i32),
    ];
    // SAFETY: `slot_of` has `pairs` elements, `offsets` one more than there are experts, and `pair_of` suffices for any choices.
    unsafe { gpu.launch_early(&kernel(defines, "place_slots"), [experts, 1, 1], 1024, 0, &args) }
}

pub(super) fn gather(
    gpu: &CudaDevice,
    x: &Tensor,
    slots: &Slots,
    weights: Option<&Tensor>,
    y: &mut Tensor,
) -> Result<()> {
    let ([rows, channels], [_, chosen, _]) = (y.dims("gather: y")?, slots.sizes()?);
    let args = [
        Arg::Ptr(y.device_ptr_mut()),
        Arg::Ptr(x.device_ptr()),
        Arg::Ptr(slots.pair_of.device_ptr()),
        address(weights),
        Arg::I32(rows as i32),
        Arg::I32(chosen as i32),
        Arg::I32(channels as i32),
    ];
    let grid = [rows.div_ceil(GATHERED_ROWS) as u32, channels.div_ceil(GATHERED_COLUMNS) as u32, 1];
    // SAFETY: threads for all rows and columns; `pair_of` has -1 or choices of tokens of `x`.
    unsafe { gpu.launch_early(&kernel(launch::storage(x.dtype())?, "gather"), grid, BLOCK, 0, &args) }
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

/// Raises the amaxes of the result of `gather`: the amax of all rows, of each row and of each column, at addresses that may be null.
fn gather_amaxes(
    gpu: &CudaDevice,
    x: &Tensor,
    slots: &Slots,
    weights: Option<&Tensor>,
    amaxes: [u64; 3],
) -> Result<()> {
    let ([tokens, channels], [_, chosen, _]) = (x.dims("gather: x")?, slots.sizes()?);
    let mut args = amaxes.map(Arg::Ptr).to_vec();
    args.extend([Arg::Ptr(x.device_ptr()), Arg::Ptr(slots.slot_of.device_ptr()), address(weights)]);
    args.extend([tokens, chosen, channels].map(|n| Arg::I32(n as i32)));
    let grid = [channels.div_ceil(8 * BLOCK as usize) as u32, tokens.div_ceil(MEASURED_TOKENS) as u32, 1];
    // SAFETY: `slot_of` has -1 or rows of the result for each choice of a token of `x`; the caller's amaxes have an element for each.
    unsafe { gpu.launch(&kernel(launch::storage(x.dtype())?, "gather_amaxes"), grid, BLOCK, 0, &args) }
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
    let inputs =
        [Arg::Ptr(x.device_ptr()), Arg::Ptr(slots.pair_of.device_ptr()), address(weights), Arg::I32(chosen as i32)];
    if ROW_KERNELS.fit(gpu, out, x)? {
        // SAFETY: as in `gather`.
        return unsafe { quantize::produce_rows(gpu, &FP8_SOURCE, ROW_KERNELS, x.dtype(), &inputs, out, to) };
    }
    let [columns, rows, _] = quantize::tiles(out.rows, out.columns, 1);
    let raise = |[of_rows, of_columns]: [u64; 2]| gather_amaxes(gpu, x, slots, weights, [0, of_rows, of_columns]);
    let how = Producer {
        source: &FP8_SOURCE,
        entry: "gather_codes",
        dtype: x.dtype(),
        grid: [rows, columns, 1],
        block: BLOCK,
        shared: quantize::tile_bytes(1, out.granularity, x.dtype()),
        inputs: &inputs,
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
    // One scale for all stays.
    let blocks = if scale_inv.len() == 1 { 0 } else { scale_inv.len() / rows };
    let args = [
        Arg::Ptr(codes.device_ptr_mut()),
        Arg::Ptr(if blocks == 0 { 0 } else { scale_inv.device_ptr_mut() }),
        Arg::Ptr(from.device_ptr()),
        Arg::Ptr(from_scales.device_ptr()),
        Arg::Ptr(slots.pair_of.device_ptr()),
        Arg::I32(chosen as i32),
        Arg::I32((width / WORD) as i32),
        Arg::I32(blocks as i32),
        Arg::I32(rows as i32),
        Arg::I32(tokens as i32),
    ];
    let kernel = kernel(launch::storage(DType::F32)?, "gather_quantized");
    // SAFETY: a block for each row; rows of codes are multiples of 16 bytes, and `pair_of` has -1 or choices of tokens of `from`; both tensors of
    // scales have `blocks` for each row.
    unsafe { gpu.launch(&kernel, [rows as u32, 1, 1], BLOCK, 0, &args) }
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
    let args = [
        Arg::Ptr(y.device_ptr_mut()),
        Arg::Ptr(z.device_ptr()),
        Arg::Ptr(slots.slot_of.device_ptr()),
        address(weights),
        address(addend),
        Arg::I32(chosen as i32),
        Arg::I32(channels as i32),
    ];
    // SAFETY: a block for each token; `slot_of` has rows of `z`.
    unsafe { gpu.launch_early(&kernel(launch::storage(z.dtype())?, "combine"), [tokens as u32, 1, 1], BLOCK, 0, &args) }
}

pub(super) fn weight_gradient(
    gpu: &CudaDevice,
    dots: &Tensor,
    slots: &Slots,
    weights: &Tensor,
    dweights: &mut Tensor,
) -> Result<()> {
    let pairs = weights.len();
    let args = [
        Arg::Ptr(dweights.device_ptr_mut()),
        Arg::Ptr(dots.device_ptr()),
        Arg::Ptr(slots.slot_of.device_ptr()),
        Arg::Ptr(weights.device_ptr()),
        Arg::I32(pairs as i32),
    ];
    let kernel = kernel(launch::storage(DType::F32)?, "weight_gradient");
    // SAFETY: all but `dots` have `pairs` elements, and `slot_of` has rows of `dots`.
    unsafe { gpu.launch(&kernel, launch::elements(gpu, pairs), BLOCK, 0, &args) }
}
