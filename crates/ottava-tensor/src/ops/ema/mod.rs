//! The exponential moving average of weights. Polyak and Juditsky 1992 average all weights; `torch.optim.swa_utils` has this form.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::parameter::{UpdatedWeight, expect_plain};
use crate::ops::dispatch::dispatch;
use crate::{DType, Result, Tensor};

/// Moves the `average` of a parameter, or of a slice of a parameter, towards its weights `w`: `average += share · (w - average)`. With a share of 1, the
/// average is `w`, and with a share of 0 it stays.
///
/// `average` is F32 in the shape of the weights. `share` and `norm` are F32 `[1]` on the device, so that steps can be captured. If `norm`, the norm of
/// the gradients, is not finite, the step has changed no weight, and the average stays. The result is bit-identical on every device, because each
/// operation is rounded separately.
pub fn ema(average: &mut Tensor, mut weight: UpdatedWeight, share: &Tensor, norm: &Tensor) -> Result<()> {
    let (shape, device) = (average.shape().to_vec(), norm.device());
    for (what, tensor, shape) in
        [("ema: average", &*average, &shape[..]), ("ema: share", share, &[1]), ("ema: norm", norm, &[1])]
    {
        expect_plain(what, tensor, &[DType::F32], shape, device)?;
    }
    weight.expect("ema", &shape, device)?;
    dispatch! { device,
        cpu => cpu::ema(average, &mut weight, share, norm),
        gpu => cuda::ema(gpu, average, &mut weight, share, norm)?,
    }
    Ok(())
}
