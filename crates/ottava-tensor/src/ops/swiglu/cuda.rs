use super::{Activation, Gelu};
use crate::cuda::{Arg, CudaDevice, Kernel, Source};
use crate::ops::destination::Fp8Output;
use crate::ops::gemm::UnscaledProduct;
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::ops::quantize::{self, Producer, ROW_EIGHTS, RowKernels};
use crate::ops::{CompressedTensor, SavedActivation};
use crate::{DType, QuantizedTensor, Result, Tensor};

kernel_source!(SWIGLU, "swiglu");
kernel_source!(GEGLU_EXACT, "swiglu" + GELU_EXACT);
kernel_source!(GEGLU_TANH, "swiglu" + GELU_TANH);
kernel_source!(EXACT, "swiglu" + GELU_EXACT + UNGATED);
kernel_source!(TANH, "swiglu" + GELU_TANH + UNGATED);
kernel_source!(CLAMPED, "swiglu" + CLAMPED);
kernel_source!(SWIGLU_FP8, "swiglu", "destination.cuh", "rows.cuh"; ROW_EIGHTS);
kernel_source!(GEGLU_EXACT_FP8, "swiglu", "destination.cuh", "rows.cuh" + GELU_EXACT; ROW_EIGHTS);
kernel_source!(GEGLU_TANH_FP8, "swiglu", "destination.cuh", "rows.cuh" + GELU_TANH; ROW_EIGHTS);
kernel_source!(EXACT_FP8, "swiglu", "destination.cuh", "rows.cuh" + GELU_EXACT + UNGATED; ROW_EIGHTS);
kernel_source!(TANH_FP8, "swiglu", "destination.cuh", "rows.cuh" + GELU_TANH + UNGATED; ROW_EIGHTS);
kernel_source!(CLAMPED_FP8, "swiglu", "destination.cuh", "rows.cuh" + CLAMPED; ROW_EIGHTS);

/// Fewer eights per block than a plain cast, since an activation takes more arithmetic.
const ROW_KERNELS: RowKernels = RowKernels { few: ("swiglu_few_rows", 256), many: Some("swiglu_rows") };

/// The kernels for a product whose scales they apply.
const PRODUCT_KERNELS: RowKernels =
    RowKernels { few: ("swiglu_product_few_rows", 256), many: Some("swiglu_product_rows") };

/// The kernels of each activation, and kernels that write FP8.
pub(crate) static SOURCES: [&Source; 6] = [&SWIGLU, &GEGLU_EXACT, &GEGLU_TANH, &EXACT, &TANH, &CLAMPED];
pub(crate) static FP8_SOURCES: [&Source; 6] =
    [&SWIGLU_FP8, &GEGLU_EXACT_FP8, &GEGLU_TANH_FP8, &EXACT_FP8, &TANH_FP8, &CLAMPED_FP8];

/// The place of an activation in [`SOURCES`].
fn place(how: Activation) -> usize {
    match how {
        Activation::SwiGlu => 0,
        Activation::GeGlu(Gelu::Exact) => 1,
        Activation::GeGlu(Gelu::Tanh) => 2,
        Activation::Gelu(Gelu::Exact) => 3,
        Activation::Gelu(Gelu::Tanh) => 4,
        Activation::ClampedSwiGlu => 5,
    }
}

pub(super) fn activation(gpu: &CudaDevice, how: Activation, x: &Tensor, y: &mut Tensor) -> Result<()> {
    let [tokens, hidden] = y.dims("activation: y")?;
    let kernel = Kernel { source: SOURCES[place(how)], defines: launch::storage(x.dtype())?, entry: "swiglu" };
    let args = [Arg::Ptr(y.device_ptr_mut()), Arg::Ptr(x.device_ptr()), Arg::I32(hidden as i32)];
    // Few rows leave most of the GPU idle, so their blocks are larger.
    let threads = if tokens < gpu.sm_count() { 4 * BLOCK } else { BLOCK };
    // SAFETY: `x` has as many rows as `y`, `how.inputs()` times as wide: one block for each.
    unsafe { gpu.launch_early(&kernel, [tokens as u32, 1, 1], threads, 0, &args) }
}

pub(super) fn activation_amax(gpu: &CudaDevice, how: Activation, x: &Tensor, amax: &mut Tensor) -> Result<()> {
    let [tokens, width] = x.dims("activation: x")?;
    let kernel = Kernel { source: SOURCES[place(how)], defines: launch::storage(x.dtype())?, entry: "swiglu_amax" };
    let args = [
        Arg::Ptr(amax.device_ptr_mut()),
        Arg::Ptr(x.device_ptr()),
        Arg::I32(tokens as i32),
        Arg::I32((width / how.inputs()) as i32),
    ];
    // SAFETY: `x` is `tokens · width`, and `amax` has one element.
    unsafe { gpu.launch(&kernel, launch::readers(gpu, tokens), BLOCK, 0, &args) }
}

/// Whether [`activation_codes`] can compress what it reads.
pub(super) fn fuses_compression(how: Activation, x: &Tensor) -> bool {
    (x.shape()[1] / how.inputs()).is_multiple_of(16) && launch::aligned(&[x])
}

/// With `compressed`, which requires [`fuses_compression`], it also writes `x` as [`compress`](crate::ops::compress()) does.
pub(super) fn activation_codes(
    gpu: &CudaDevice,
    how: Activation,
    x: &Tensor,
    compressed: Option<&mut CompressedTensor>,
    out: &mut QuantizedTensor,
    to: &mut Fp8Output,
) -> Result<()> {
    let mut inputs = vec![Arg::Ptr(x.device_ptr())];
    if compressed.is_none() && ROW_KERNELS.fit(gpu, out, x)? {
        // SAFETY: `x` is `out.rows · how.inputs() · out.columns` elements.
        return unsafe {
            quantize::produce_rows(gpu, FP8_SOURCES[place(how)], ROW_KERNELS, x.dtype(), &inputs, out, to)
        };
    }
    let entry = if compressed.is_some() { "swiglu_codes_compressing" } else { "swiglu_codes" };
    inputs.extend(compressed.into_iter().flat_map(CompressedTensor::device_ptrs_mut));
    let how = Producer {
        source: FP8_SOURCES[place(how)],
        entry,
        dtype: x.dtype(),
        grid: quantize::tiles(out.rows, out.columns, 1),
        block: BLOCK,
        shared: quantize::tile_bytes(1, out.granularity, x.dtype()),
        inputs: &inputs,
        raise: None,
    };
    // SAFETY: `x` is `out.rows · how.inputs() · out.columns` elements, and so are the codes of `compressed`, with one of its scales for 16.
    unsafe { quantize::produce(gpu, how, &mut [(out, to)]) }
}

/// Whether [`product_codes`] can write `out` from a product with these scales of columns.
pub(super) fn fits_product(gpu: &CudaDevice, out: &QuantizedTensor, column_scale_inv: &Tensor) -> Result<bool> {
    PRODUCT_KERNELS.fit(gpu, out, column_scale_inv)
}

/// The codes of the activation of a product, whose scales it applies. Requires [`fits_product`].
pub(super) fn product_codes(
    gpu: &CudaDevice,
    how: Activation,
    x: &UnscaledProduct,
    out: &mut QuantizedTensor,
    to: &mut Fp8Output,
) -> Result<()> {
    let inputs = [&x.sums, x.row_scale_inv, x.column_scale_inv].map(|t| Arg::Ptr(t.device_ptr()));
    // SAFETY: the sums have `how.inputs() · out.columns` columns and at least `out.rows` rows, and a scale for each row and column.
    unsafe { quantize::produce_rows(gpu, FP8_SOURCES[place(how)], PRODUCT_KERNELS, x.sums.dtype(), &inputs, out, to) }
}

pub(super) fn activation_backward(
    gpu: &CudaDevice,
    how: Activation,
    dy: &Tensor,
    x: &SavedActivation,
    dx: &mut Tensor,
) -> Result<()> {
    let [tokens, hidden] = dy.dims("activation_backward: dy")?;
    let entry = x.entry("swiglu_backward", "swiglu_backward_compressed");
    let kernel = Kernel { source: SOURCES[place(how)], defines: launch::storage(x.dtype())?, entry };
    let mut args = vec![Arg::Ptr(dx.device_ptr_mut()), Arg::Ptr(dy.device_ptr())];
    args.extend(x.device_ptrs());
    args.push(Arg::I32(hidden as i32));
    // SAFETY: `x` and `dx` have as many rows as `dy`, `how.inputs()` times as wide: one block for each.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], BLOCK, 0, &args) }
}

pub(super) fn activation_dots(
    gpu: &CudaDevice,
    how: Activation,
    dy: &Tensor,
    x: &SavedActivation,
    dots: &mut Tensor,
) -> Result<()> {
    let [tokens, hidden] = dy.dims("activation_dots: dy")?;
    let entry = x.entry("swiglu_dots", "swiglu_dots_compressed");
    let kernel = Kernel { source: SOURCES[place(how)], defines: launch::storage(x.dtype())?, entry };
    let mut args = vec![Arg::Ptr(dots.device_ptr_mut()), Arg::Ptr(dy.device_ptr())];
    args.extend(x.device_ptrs());
    args.push(Arg::I32(hidden as i32));
    // SAFETY: `x` and `dy` have as many rows as `dots`, and rows of `x` are `how.inputs()` times as wide as rows of `dy`: one block for each.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], BLOCK, 0, &args) }
}

pub(super) fn activation_backward_amax(
    gpu: &CudaDevice,
    how: Activation,
    dy: &Tensor,
    x: &SavedActivation,
    amax: &mut Tensor,
) -> Result<()> {
    let [tokens, hidden] = dy.dims("activation_backward: dy")?;
    let entry = x.entry("swiglu_backward_amax", "swiglu_backward_amax_compressed");
    let kernel = Kernel { source: SOURCES[place(how)], defines: launch::storage(x.dtype())?, entry };
    let mut args = vec![Arg::Ptr(amax.device_ptr_mut()), Arg::Ptr(dy.device_ptr())];
    args.extend(x.device_ptrs());
    args.extend([Arg::I32(tokens as i32), Arg::I32(hidden as i32)]);
    // SAFETY: `dy` is `tokens · hidden`, `x` has rows of `how.inputs()` times the width, and `amax` has one element.
    unsafe { gpu.launch(&kernel, launch::readers(gpu, tokens), BLOCK, 0, &args) }
}

/// Whether both halves of a row of codes start at a multiple of 16 or of the block, reads are aligned to 16 bytes, and the outputs have the
/// same granularity. The kernel writes activations in E4M3, as all recipes do.
pub(super) fn fuses_backward(dy: &Tensor, x: &SavedActivation, to: &Fp8Output, activated: Option<&Fp8Output>) -> bool {
    let granularity = to.granularity();
    let whole = granularity.block().unwrap_or(QuantizedTensor::PAD);
    dy.shape()[1].is_multiple_of(whole)
        && launch::aligned(&[dy, x.values_or_codes()])
        && activated.is_none_or(|to| to.granularity() == granularity.of_rows() && to.format == DType::E4M3)
}

pub(super) fn activation_backward_codes<'a>(
    gpu: &CudaDevice,
    how: Activation,
    dy: &Tensor,
    x: &SavedActivation,
    (out, to): (&mut QuantizedTensor, &mut Fp8Output<'a>),
    activated: Option<&mut (QuantizedTensor, Fp8Output<'a>)>,
) -> Result<()> {
    let (grid, granularity) = (quantize::tiles(out.rows, out.columns / how.inputs(), 1), out.granularity);
    let mut outputs = vec![(out, to)];
    outputs.extend(activated.map(|(out, to)| (out, to)));
    let entry = match outputs.len() {
        1 => x.entry("swiglu_backward_codes", "swiglu_backward_codes_compressed"),
        _ => x.entry("swiglu_backward_and_activated_codes", "swiglu_backward_and_activated_codes_compressed"),
    };
    let mut inputs = vec![Arg::Ptr(dy.device_ptr())];
    inputs.extend(x.device_ptrs());
    let how = Producer {
        source: FP8_SOURCES[place(how)],
        entry,
        dtype: dy.dtype(),
        grid,
        block: BLOCK,
        shared: quantize::tile_bytes(how.inputs() - 1 + outputs.len(), granularity, x.dtype()),
        inputs: &inputs,
        raise: None,
    };
    // SAFETY: `x` is as many elements as the gradient, `dy` and the activation one for `how.inputs()`, and `fuses_backward` holds.
    unsafe { quantize::produce(gpu, how, &mut outputs) }
}
