use super::{AdamWState, Scalars};
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{self, BLOCK, Defines, kernel_source};
use crate::{DType, Result, Tensor};

kernel_source!("adamw");

pub(crate) const VARIANTS: &[Defines] = &[&[("COPY", "bf16")], &[("COPY", "f16")]];

pub(super) fn adamw(gpu: &CudaDevice, state: AdamWState, grad: &Tensor, norm: &Tensor, how: &Scalars) -> Result<()> {
    let variant = matches!(&state.copy, Some(copy) if copy.dtype() == DType::F16) as usize;
    let kernel = Kernel { source: &SOURCE, defines: VARIANTS[variant], entry: "adamw" };
    let args = [
        Arg::Ptr(state.master.device_ptr_mut()),
        Arg::Ptr(state.m.device_ptr_mut()),
        Arg::Ptr(state.v.device_ptr_mut()),
        Arg::Ptr(state.copy.map_or(0, Tensor::device_ptr_mut)),
        Arg::Ptr(grad.device_ptr()),
        Arg::Ptr(norm.device_ptr()),
        Arg::U64(grad.len() as u64),
        Arg::F32(how.keep),
        Arg::F32(how.step_size),
        Arg::F32(how.take1),
        Arg::F32(how.beta2),
        Arg::F32(how.take2),
        Arg::F32(how.correction2),
        Arg::F32(how.epsilon),
        Arg::F32(how.max_norm),
    ];
    // SAFETY: all tensors have `grad.len()` elements, checked by the op, and `norm` one.
    unsafe { gpu.launch(&kernel, launch::elements(grad.len()), BLOCK, 0, &args) }
}
