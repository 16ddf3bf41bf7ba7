//! The update of the weights along a direction, with decoupled weight decay. Loshchilov and Hutter 2019, arXiv:1711.05101.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::momentum::{MomentumScalars, expect_amaxes};
use super::parameter::{UpdatedWeight, expect_plain, expect_slice};
use crate::ops::dispatch::dispatch;
use crate::{DType, Result, Tensor};

/// The tensors of one parameter or of a slice of a parameter. All have the same shape.
#[derive(Debug)]
pub struct DescendParameter<'a> {
    /// The weights.
    pub weight: UpdatedWeight<'a>,
    /// The direction, BF16.
    pub direction: &'a Tensor,
    /// Weight decay per unit of learning rate.
    pub weight_decay: f64,
    /// The seed of weights that are rounded stochastically, as in [`MomentumParameter`](super::MomentumParameter).
    pub seed: u64,
    /// The index of the first element within the whole parameter, if these tensors are a slice; otherwise 0. A multiple of 128.
    pub offset: usize,
    /// The amaxes of the weights and of the momentum, F32 `[2]`, or `None` if the weights are not [`UpdatedWeight::Scaled`]. [`descend_amax`] raises
    /// the first, and [`descend`] reads it. For a slice, [`descend`] needs the amax of the whole parameter.
    pub amaxes: Option<&'a mut Tensor>,
}

/// Raises the first of the amaxes to the largest absolute value that [`descend`] will store, and writes nothing else. Does nothing if the weights are
/// stored without a scale.
///
/// If `norm` is not finite, nothing is written. The result is bit-identical on every device.
pub fn descend_amax(parameter: DescendParameter, norm: &Tensor, scalars: &MomentumScalars) -> Result<()> {
    check(&parameter, norm, scalars)?;
    if is_scaled(&parameter) {
        dispatch! { norm.device(),
            cpu => cpu::descend(parameter, norm, &scalars.host(), false),
            gpu => cuda::descend(gpu, parameter, norm, &scalars.words, false)?,
        }
    }
    Ok(())
}

/// Moves the weights: `w = w · (1 - lr·wd) - lr · direction`, with the learning rate of `scalars`.
///
/// `norm` F32 `[1]` is the global gradient norm. If it is not finite, nothing is written. The result is bit-identical on every device, because each
/// operation is rounded separately.
pub fn descend(parameter: DescendParameter, norm: &Tensor, scalars: &MomentumScalars) -> Result<()> {
    check(&parameter, norm, scalars)?;
    dispatch! { norm.device(),
        scratch => cpu::scratch(&parameter),
        cpu => cpu::descend(parameter, norm, &scalars.host(), true),
        gpu => cuda::descend(gpu, parameter, norm, &scalars.words, true)?,
    }
    Ok(())
}

fn is_scaled(parameter: &DescendParameter) -> bool {
    matches!(parameter.weight, UpdatedWeight::Scaled { .. })
}

fn check(parameter: &DescendParameter, norm: &Tensor, scalars: &MomentumScalars) -> Result<()> {
    let (shape, device) = (parameter.direction.shape(), norm.device());
    expect_plain("descend: norm", norm, &[DType::F32], &[1], device)?;
    scalars.words.expect_device("descend: scalars", device)?;
    expect_plain("descend: direction", parameter.direction, &[DType::BF16], shape, device)?;
    expect_slice("descend", parameter.offset)?;
    parameter.weight.expect("descend", shape, device)?;
    match is_scaled(parameter) {
        true => expect_amaxes("descend", parameter.amaxes.as_deref(), device),
        false => Ok(()),
    }
}
