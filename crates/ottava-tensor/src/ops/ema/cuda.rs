use crate::cuda::CudaDevice;
use crate::ops::declaration::{Address, kernels};
use crate::ops::launch::{self, BLOCK, Defines};
use crate::ops::parameter::UpdatedWeight;
use crate::{Result, Tensor};

kernels! {
    static SOURCE = { file: "ema", headers: ["stored.cuh", "parameter.cuh"], variants: VARIANTS };
    kernel ema(average: *mut f32, weight: *const W, rest: *const void, share: *const f32, norm: *const f32, n: u64);
}

/// The storage formats of the weights.
const VARIANTS: &[Defines] =
    &[&[("WEIGHTS", "Master")], &[("WEIGHTS", "ScaledMaster")], &[("WEIGHTS", "Split")], &[("WEIGHTS", "Chance")]];

pub(super) fn ema(
    gpu: &CudaDevice,
    average: &mut Tensor,
    weight: &mut UpdatedWeight,
    share: &Tensor,
    norm: &Tensor,
) -> Result<()> {
    let n = average.len();
    if n == 0 {
        return Ok(());
    }
    let (variant, [weight, rest]) = match weight {
        UpdatedWeight::Master { master, .. } => (0, [master.device_ptr(), 0]),
        UpdatedWeight::Scaled { master, .. } => (1, [master.values.device_ptr(), master.scale_inv.device_ptr()]),
        UpdatedWeight::Split { weight, rest } => (2, [weight.device_ptr(), rest.device_ptr()]),
        UpdatedWeight::Stochastic { weight } => (3, [weight.device_ptr(), 0]),
    };
    let kernel = SOURCE.kernel(VARIANTS[variant], kernel::ema(average, Address(weight), Address(rest), share, norm, n));
    // SAFETY: the op has checked that the average and the weights have `n` elements of the types in the defines. Scaled weights have one scale; split
    // weights have a remainder per element. `share` and `norm` have one element.
    unsafe { gpu.launch(&kernel, launch::elements_by_eight(gpu, n), BLOCK, 0) }
}
