use super::{COEFFICIENTS, EPSILON};
use crate::cuda::{Arg, CudaDevice, Kernel};
use crate::ops::launch::{self, BLOCK, kernel_source};
use crate::{Result, Tensor};

kernel_source!("newton_schulz");

pub(super) fn normalize(gpu: &CudaDevice, x: &Tensor, norm: &Tensor, y: &mut Tensor) -> Result<()> {
    let args = [
        Arg::Ptr(y.device_ptr_mut()),
        Arg::Ptr(x.device_ptr()),
        Arg::Ptr(norm.device_ptr()),
        Arg::F32(EPSILON),
        Arg::U64(x.len() as u64),
    ];
    let kernel = Kernel { source: &SOURCE, defines: &[], entry: "normalize" };
    // SAFETY: both matrices have `x.len()` elements, BF16, and the norm one, F32.
    unsafe { gpu.launch(&kernel, launch::elements_by_eight(gpu, x.len()), BLOCK, 0, &args) }
}

pub(super) fn polynomial(gpu: &CudaDevice, gram: &mut Tensor, square: &Tensor, factor: f32) -> Result<()> {
    let [a, b, c] = COEFFICIENTS;
    let mut args = vec![Arg::Ptr(gram.device_ptr_mut()), Arg::Ptr(square.device_ptr())];
    args.extend([a, b, c, factor].map(Arg::F32));
    args.extend([Arg::U64(square.shape()[0] as u64), Arg::U64(square.len() as u64)]);
    let kernel = Kernel { source: &SOURCE, defines: &[], entry: "polynomial" };
    // SAFETY: both matrices have `square.len()` elements, BF16 and F32, in rows of as many as given.
    unsafe { gpu.launch(&kernel, launch::elements_by_eight(gpu, square.len()), BLOCK, 0, &args) }
}
