use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{BLOCK, Defines, elements, elements_by_eight, kernel_source};
use crate::stored::ScaledTensor;
use crate::{DType, Result, Tensor};

kernel_source!(SOURCE, "scaled", "stored.cuh");

/// Each stored type with each plain one.
pub(crate) const VARIANTS: &[Defines] = &[
    &[("X", "f32"), ("Y", "f16")],
    &[("X", "f32"), ("Y", "e4m3")],
    &[("X", "bf16"), ("Y", "f16")],
    &[("X", "bf16"), ("Y", "e4m3")],
    &[("X", "f16"), ("Y", "f16")],
    &[("X", "f16"), ("Y", "e4m3")],
];

fn variant(plain: DType, stored: DType) -> Defines {
    let plain = match plain {
        DType::F32 => 0,
        DType::BF16 => 1,
        _ => 2,
    };
    VARIANTS[2 * plain + usize::from(stored == DType::E4M3)]
}

pub(super) fn scaled(gpu: &CudaDevice, x: &Tensor, amax: &Tensor, out: &mut ScaledTensor) -> Result<()> {
    let largest = out.values.dtype().max_finite().expect("F16 and E4M3 have one");
    let kernel = Kernel { source: &SOURCE, defines: variant(x.dtype(), out.values.dtype()), entry: "scaled" };
    let args = [
        Arg::Ptr(out.values.device_ptr_mut()),
        Arg::Ptr(out.scale_inv.device_ptr_mut()),
        Arg::Ptr(x.device_ptr()),
        Arg::Ptr(amax.device_ptr()),
        Arg::F32(largest),
        Arg::U64(x.len() as u64),
    ];
    // SAFETY: `x` and `values` have as many elements as the last argument says, of the types in the defines; the others one F32 each.
    unsafe { gpu.launch(&kernel, elements_by_eight(gpu, x.len()), BLOCK, 0, &args) }
}

pub(super) fn unscaled(gpu: &CudaDevice, x: &ScaledTensor, y: &mut Tensor) -> Result<()> {
    let kernel = Kernel { source: &SOURCE, defines: variant(y.dtype(), x.values.dtype()), entry: "unscaled" };
    let args = [
        Arg::Ptr(y.device_ptr_mut()),
        Arg::Ptr(x.values.device_ptr()),
        Arg::Ptr(x.scale_inv.device_ptr()),
        Arg::U64(x.values.len() as u64),
    ];
    // SAFETY: as above.
    unsafe { gpu.launch(&kernel, elements_by_eight(gpu, y.len()), BLOCK, 0, &args) }
}

pub(super) fn split(gpu: &CudaDevice, x: &Tensor, upper: &mut Tensor, rest: &mut Tensor) -> Result<()> {
    let kernel = Kernel { source: &SOURCE, defines: VARIANTS[0], entry: "split" };
    let args = [
        Arg::Ptr(upper.device_ptr_mut()),
        Arg::Ptr(rest.device_ptr_mut()),
        Arg::Ptr(x.device_ptr()),
        Arg::U64(x.len() as u64),
    ];
    // SAFETY: all three have as many elements as the last argument says, of the types of the kernel.
    unsafe { gpu.launch(&kernel, elements(gpu, x.len()), BLOCK, 0, &args) }
}
