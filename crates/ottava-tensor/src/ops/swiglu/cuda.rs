use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::destination::Fp8Output;
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::ops::quantize;
use crate::{DType, QuantizedTensor, Result, Tensor};

kernel_source!("swiglu");
kernel_source!(FP8_SOURCE, "swiglu", "destination.cuh");

pub(super) fn swiglu(gpu: &CudaDevice, x: &Tensor, y: &mut Tensor) -> Result<()> {
    let [tokens, hidden] = y.dims("swiglu: y")?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(x.dtype())?, entry: "swiglu" };
    let args = [Arg::Ptr(y.device_ptr_mut()), Arg::Ptr(x.device_ptr()), Arg::I32(hidden as i32)];
    // SAFETY: `x` has rows of twice the width of those of `y`, and as many: one block for each.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], BLOCK, 0, &args) }
}

pub(super) fn swiglu_amax(gpu: &CudaDevice, x: &Tensor, amax: &mut Tensor) -> Result<()> {
    let [tokens, width] = x.dims("swiglu: x")?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(x.dtype())?, entry: "swiglu_amax" };
    let args = [
        Arg::Ptr(amax.device_ptr_mut()),
        Arg::Ptr(x.device_ptr()),
        Arg::I32(tokens as i32),
        Arg::I32((width / 2) as i32),
    ];
    // SAFETY: `x` is `tokens · width`, and `amax` has one element.
    unsafe { gpu.launch(&kernel, launch::readers(tokens), BLOCK, 0, &args) }
}

pub(super) fn swiglu_codes(gpu: &CudaDevice, x: &Tensor, out: &mut QuantizedTensor, to: &mut Fp8Output) -> Result<()> {
    let defines = quantize::fp8_variant(x, to.format)?;
    let kernel = Kernel { source: &FP8_SOURCE, defines, entry: "swiglu_codes" };
    let grid = quantize::tiles(out.rows, out.columns, 1);
    let args = quantize::destination(out, to, &[Arg::Ptr(x.device_ptr())]);
    // SAFETY: `x` is `out.rows · 2 · out.columns` elements; the rest is as `destination` says.
    unsafe { gpu.launch(&kernel, grid, BLOCK, 0, &args) }
}

pub(super) fn swiglu_backward(gpu: &CudaDevice, dy: &Tensor, x: &Tensor, dx: &mut Tensor) -> Result<()> {
    let [tokens, hidden] = dy.dims("swiglu_backward: dy")?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(x.dtype())?, entry: "swiglu_backward" };
    let args =
        [Arg::Ptr(dx.device_ptr_mut()), Arg::Ptr(dy.device_ptr()), Arg::Ptr(x.device_ptr()), Arg::I32(hidden as i32)];
    // SAFETY: `x` and `dx` have rows of twice the width of those of `dy`, and as many: one block for each.
    unsafe { gpu.launch(&kernel, [tokens as u32, 1, 1], BLOCK, 0, &args) }
}

pub(super) fn swiglu_backward_amax(gpu: &CudaDevice, dy: &Tensor, x: &Tensor, amax: &mut Tensor) -> Result<()> {
    let [tokens, hidden] = dy.dims("swiglu_backward: dy")?;
    let kernel = Kernel { source: &SOURCE, defines: launch::storage(x.dtype())?, entry: "swiglu_backward_amax" };
    let args = [
        Arg::Ptr(amax.device_ptr_mut()),
        Arg::Ptr(dy.device_ptr()),
        Arg::Ptr(x.device_ptr()),
        Arg::I32(tokens as i32),
        Arg::I32(hidden as i32),
    ];
    // SAFETY: `dy` is `tokens · hidden`, `x` has rows of twice the width, and `amax` has one element.
    unsafe { gpu.launch(&kernel, launch::readers(tokens), BLOCK, 0, &args) }
}

/// Whether scales are known, both halves of a row of codes start at whole sixteens, and all reads at multiples of 16 bytes. The
/// kernel writes activations in the format of all our recipes.
pub(super) fn fuses_backward(dy: &Tensor, x: &Tensor, to: &Fp8Output, activated: Option<&Fp8Output>) -> bool {
    dy.shape()[1].is_multiple_of(QuantizedTensor::PAD)
        && launch::aligned(&[dy, x])
        && to.is_given()
        && activated.is_none_or(|to| to.is_given() && to.format == DType::E4M3)
}

pub(super) fn swiglu_backward_codes(
    gpu: &CudaDevice,
    dy: &Tensor,
    x: &Tensor,
    (out, to): (&mut QuantizedTensor, &mut Fp8Output),
    activated: Option<&mut (QuantizedTensor, Fp8Output)>,
) -> Result<()> {
    let defines = quantize::fp8_variant(x, to.format)?;
    let grid = quantize::tiles(out.rows, out.columns / 2, 1);
    let inputs = [Arg::Ptr(dy.device_ptr()), Arg::Ptr(x.device_ptr())];
    let (entry, more, shared) = match activated {
        None => ("swiglu_backward_codes", inputs.to_vec(), 0),
        // Three tiles, and more than the 48 KiB that a launch may have unasked: the kernel has static shared memory too.
        Some((out, to)) => (
            "swiglu_backward_and_activated_codes",
            quantize::destination(out, to, &inputs),
            3 * quantize::TILE_BYTES + 16,
        ),
    };
    let args = quantize::destination(out, to, &more);
    // SAFETY: `x` is `out.rows · out.columns` elements, `dy` and the activation half of it; the rest is as `destination` and
    // `fuses_backward` say.
    unsafe { gpu.launch(&Kernel { source: &FP8_SOURCE, defines, entry }, grid, BLOCK, shared, &args) }
}
