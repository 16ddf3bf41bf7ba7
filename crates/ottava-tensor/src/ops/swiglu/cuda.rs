use super::{Activation, Gelu};
use crate::cuda::CudaDevice;
use crate::ops::declaration::kernels;
use crate::ops::destination::Fp8Output;
use crate::ops::gemm::UnscaledProduct;
use crate::ops::groups::{GroupedRows, end_of};
use crate::ops::launch::{self, BLOCK};
use crate::ops::quantize::{self, Producer, ROW_EIGHTS, RowKernels};
use crate::ops::{CompressedTensor, SavedActivation};
use crate::{DType, QuantizedTensor, Result, Tensor};

kernels! {
    table plain(Activation) = {
        file: "swiglu", headers: ["sigmoid.cuh"], constants: [], variants: launch::STORAGE,
        (Activation::SwiGlu) => [],
        (Activation::GeGlu(Gelu::Exact)) => [GELU_EXACT],
        (Activation::GeGlu(Gelu::Tanh)) => [GELU_TANH],
        (Activation::Gelu(Gelu::Exact)) => [GELU_EXACT, UNGATED],
        (Activation::Gelu(Gelu::Tanh)) => [GELU_TANH, UNGATED],
        (Activation::Relu2) => [RELU2, UNGATED],
        (Activation::Tanh) => [TANH, UNGATED],
        (Activation::ClampedSwiGlu) => [CLAMPED],
    };
    table fp8(Activation) = {
        file: "swiglu", headers: ["destination.cuh", "rows.cuh", "sigmoid.cuh"], constants: [ROW_EIGHTS], variants: quantize::VARIANTS,
        (Activation::SwiGlu) => [],
        (Activation::GeGlu(Gelu::Exact)) => [GELU_EXACT],
        (Activation::GeGlu(Gelu::Tanh)) => [GELU_TANH],
        (Activation::Gelu(Gelu::Exact)) => [GELU_EXACT, UNGATED],
        (Activation::Gelu(Gelu::Tanh)) => [GELU_TANH, UNGATED],
        (Activation::Relu2) => [RELU2, UNGATED],
        (Activation::Tanh) => [TANH, UNGATED],
        (Activation::ClampedSwiGlu) => [CLAMPED],
    };
    kernel swiglu(y: *mut X, x: *const X, end: *const i32, hidden: i32);
    kernel swiglu_backward(dx: *mut X, dy: *const X, x: *const X, end: *const i32, hidden: i32);
    kernel swiglu_backward_compressed(
        dx: *mut X, dy: *const X, codes: *const e4m3, scale_inv: *const u8, end: *const i32, hidden: i32
    );
    kernel swiglu_dots(dots: *mut f32, dy: *const X, x: *const X, end: *const i32, hidden: i32);
    kernel swiglu_dots_compressed(
        dots: *mut f32, dy: *const X, codes: *const e4m3, scale_inv: *const u8, end: *const i32, hidden: i32
    );
    kernel swiglu_amax(amax: *mut f32, x: *const X, end: *const i32, rows: i32, hidden: i32);
    kernel swiglu_backward_amax(amax: *mut f32, dy: *const X, x: *const X, end: *const i32, rows: i32, hidden: i32);
    kernel swiglu_backward_amax_compressed(
        amax: *mut f32, dy: *const X, codes: *const e4m3, scale_inv: *const u8, end: *const i32, rows: i32, hidden: i32
    );
    kernel swiglu_few_rows, swiglu_rows(x: *const X; Destination);
    kernel swiglu_product_few_rows, swiglu_product_rows(x: *const X, of_rows: *const f32, of_columns: *const f32; Destination);
    kernel swiglu_codes(x: *const X; Destination);
    kernel swiglu_codes_compressing(x: *const X, codes: *mut e4m3, scale_inv: *mut u8; Destination);
    kernel swiglu_backward_codes(dy: *const X, x: *const X; Destination);
    kernel swiglu_backward_codes_compressed(dy: *const X, codes: *const e4m3, scale_inv: *const u8; Destination);
    kernel swiglu_backward_and_activated_codes(dy: *const X, x: *const X; WithActivation);
    kernel swiglu_backward_and_activated_codes_compressed(dy: *const X, codes: *const e4m3, scale_inv: *const u8; WithActivation);
}

/// The maximum number of eights per block is smaller than for a plain cast, because an activation takes more arithmetic.
const ROW_KERNELS: RowKernels = RowKernels { few: ("swiglu_few_rows", 256), many: Some("swiglu_rows") };

/// The kernels for a product without scales. They apply the scales of the product.
const PRODUCT_KERNELS: RowKernels =
    RowKernels { few: ("swiglu_product_few_rows", 256), many: Some("swiglu_product_rows") };

pub(super) fn activation(gpu: &CudaDevice, how: Activation, x: GroupedRows, y: &mut Tensor) -> Result<()> {
    let [tokens, hidden] = y.dims("activation: y")?;
    let entry = kernel::swiglu(y, x.matrix, end_of(x.groups), hidden);
    let kernel = plain(how).kernel(launch::storage(x.matrix.dtype())?, entry);
    // Few rows leave most of the GPU idle, so their blocks have more threads.
    let threads = if tokens < gpu.sm_count() { 4 * BLOCK } else { BLOCK };
    // SAFETY: `x` has as many rows as `y`, `how.inputs()` times as wide. Each row has a block.
    unsafe { gpu.launch_early(&kernel, [tokens as u32, 1, 1], threads, 0) }
}

pub(super) fn activation_amax(gpu: &CudaDevice, how: Activation, x: GroupedRows, amax: &mut Tensor) -> Result<()> {
    let [tokens, width] = x.matrix.dims("activation: x")?;
    let entry = kernel::swiglu_amax(amax, x.matrix, end_of(x.groups), tokens, width / how.inputs());
    let kernel = plain(how).kernel(launch::storage(x.matrix.dtype())?, entry);
    // SAFETY: `x` has `tokens · width` elements, and `amax` has one.
    unsafe { gpu.launch(&kernel, launch::readers(gpu, tokens), BLOCK, 0) }
}

/// Returns whether [`activation_codes`] can compress its input.
pub(super) fn fuses_compression(how: Activation, x: &Tensor) -> bool {
    (x.shape()[1] / how.inputs()).is_multiple_of(16) && launch::aligned(&[x])
}

/// Writes the codes of the activation. With `compressed`, also writes `x` as [`compress`](crate::ops::compress()) does; this requires
/// [`fuses_compression`].
pub(super) fn activation_codes(
    gpu: &CudaDevice,
    how: Activation,
    GroupedRows { matrix: x, groups }: GroupedRows,
    compressed: Option<&mut CompressedTensor>,
    out: &mut QuantizedTensor,
    to: &mut Fp8Output,
) -> Result<()> {
    if compressed.is_none() && ROW_KERNELS.fit(gpu, out, x)? {
        let entry = kernel::swiglu_rows(x);
        // SAFETY: `x` has `out.rows · how.inputs() · out.columns` elements.
        return unsafe { quantize::produce_rows(gpu, fp8(how), ROW_KERNELS, x.dtype(), entry, (out, to), groups) };
    }
    let entry = match compressed {
        Some(to) => kernel::swiglu_codes_compressing(x, &mut to.codes, &mut to.scale_inv),
        None => kernel::swiglu_codes(x),
    };
    let how = Producer {
        source: fp8(how),
        entry,
        dtype: x.dtype(),
        grid: quantize::tiles(out.rows, out.columns, 1),
        block: BLOCK,
        shared: quantize::tile_bytes(1, out.granularity, x.dtype()),
        groups,
        raise: None,
    };
    // SAFETY: `x` and the codes of `compressed` have `out.rows · how.inputs() · out.columns` elements. `compressed` has a scale for each 16 codes.
    unsafe { quantize::produce(gpu, how, &mut [(out, to)]) }
}

/// Returns whether [`product_codes`] can write `out` from a product with these scales of columns.
pub(super) fn fits_product(gpu: &CudaDevice, out: &QuantizedTensor, column_scale_inv: &Tensor) -> Result<bool> {
    PRODUCT_KERNELS.fit(gpu, out, column_scale_inv)
}

/// Applies the scales of a product, and writes the codes of the activation of the product. Requires [`fits_product`].
pub(super) fn product_codes(
    gpu: &CudaDevice,
    how: Activation,
    x: &UnscaledProduct,
    out: &mut QuantizedTensor,
    to: &mut Fp8Output,
) -> Result<()> {
    let entry = kernel::swiglu_product_rows(&x.sums, x.row_scale_inv, x.column_scale_inv);
    // SAFETY: the sums have `how.inputs() · out.columns` columns and at least `out.rows` rows. Each row and each column has a scale.
    unsafe { quantize::produce_rows(gpu, fp8(how), PRODUCT_KERNELS, x.sums.dtype(), entry, (out, to), None) }
}

pub(super) fn activation_backward(
    gpu: &CudaDevice,
    how: Activation,
    GroupedRows { matrix: dy, groups }: GroupedRows,
    x: &SavedActivation,
    dx: &mut Tensor,
) -> Result<()> {
    let ([tokens, hidden], end) = (dy.dims("activation_backward: dy")?, end_of(groups));
    let entry = match x {
        SavedActivation::Exact(x) => kernel::swiglu_backward(dx, dy, x, end, hidden),
        SavedActivation::Compressed(x) => {
            kernel::swiglu_backward_compressed(dx, dy, &x.codes, &x.scale_inv, end, hidden)
        }
    };
    let kernel = plain(how).kernel(launch::storage(x.dtype())?, entry);
    // SAFETY: `x` and `dx` have as many rows as `dy`, `how.inputs()` times as wide. Each row has a block.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], BLOCK, 0) }
}

pub(super) fn activation_dots(
    gpu: &CudaDevice,
    how: Activation,
    GroupedRows { matrix: dy, groups }: GroupedRows,
    x: &SavedActivation,
    dots: &mut Tensor,
) -> Result<()> {
    let ([tokens, hidden], end) = (dy.dims("activation_dots: dy")?, end_of(groups));
    let entry = match x {
        SavedActivation::Exact(x) => kernel::swiglu_dots(dots, dy, x, end, hidden),
        SavedActivation::Compressed(x) => kernel::swiglu_dots_compressed(dots, dy, &x.codes, &x.scale_inv, end, hidden),
    };
    let kernel = plain(how).kernel(launch::storage(x.dtype())?, entry);
    // SAFETY: `x` and `dy` have as many rows as `dots`. Rows of `x` are `how.inputs()` times as wide as rows of `dy`. Each row has a block.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], BLOCK, 0) }
}

pub(super) fn activation_backward_amax(
    gpu: &CudaDevice,
    how: Activation,
    GroupedRows { matrix: dy, groups }: GroupedRows,
    x: &SavedActivation,
    amax: &mut Tensor,
) -> Result<()> {
    let ([tokens, hidden], end) = (dy.dims("activation_backward: dy")?, end_of(groups));
    let entry = match x {
        SavedActivation::Exact(x) => kernel::swiglu_backward_amax(amax, dy, x, end, tokens, hidden),
        SavedActivation::Compressed(x) => {
            kernel::swiglu_backward_amax_compressed(amax, dy, &x.codes, &x.scale_inv, end, tokens, hidden)
        }
    };
    let kernel = plain(how).kernel(launch::storage(x.dtype())?, entry);
    // SAFETY: `dy` has `tokens · hidden` elements, rows of `x` are `how.inputs()` times as wide, and `amax` has one element.
    unsafe { gpu.launch(&kernel, launch::readers(gpu, tokens), BLOCK, 0) }
}

/// Returns whether the fused backward supports this call: both halves of a row of codes start at a multiple of 16 or of the block, reads are aligned
/// to 16 bytes, and the outputs have the same granularity. The kernel writes activations in E4M3, like all recipes.
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
    GroupedRows { matrix: dy, groups }: GroupedRows,
    x: &SavedActivation,
    (out, to): (&mut QuantizedTensor, &mut Fp8Output<'a>),
    activated: Option<&mut (QuantizedTensor, Fp8Output<'a>)>,
) -> Result<()> {
    let (grid, granularity) = (quantize::tiles(out.rows, out.columns / how.inputs(), 1), out.granularity);
    let mut outputs = vec![(out, to)];
    outputs.extend(activated.map(|(out, to)| (out, to)));
    let entry = match (x, outputs.len()) {
        (SavedActivation::Exact(x), 1) => kernel::swiglu_backward_codes(dy, x),
        (SavedActivation::Exact(x), _) => kernel::swiglu_backward_and_activated_codes(dy, x),
        (SavedActivation::Compressed(x), 1) => kernel::swiglu_backward_codes_compressed(dy, &x.codes, &x.scale_inv),
        (SavedActivation::Compressed(x), _) => {
            kernel::swiglu_backward_and_activated_codes_compressed(dy, &x.codes, &x.scale_inv)
        }
    };
    let how = Producer {
        source: fp8(how),
        entry,
        dtype: dy.dtype(),
        grid,
        block: BLOCK,
        shared: quantize::tile_bytes(how.inputs() - 1 + outputs.len(), granularity, x.dtype()),
        groups,
        raise: None,
    };
    // SAFETY: `x` has as many elements as the gradient, `dy` and the activation have one for each `how.inputs()` elements, and `fuses_backward`
    // holds.
    unsafe { quantize::produce(gpu, how, &mut outputs) }
}
