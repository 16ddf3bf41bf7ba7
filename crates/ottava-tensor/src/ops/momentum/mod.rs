//! The momentum of an update, and the direction that is computed from it, for Muon (Jordan 2024) and Lion (Chen et al. 2023,
//! arXiv:2302.06675). [`descend`](super::descend()) then moves the weights.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod tests;

use super::parameter::{Gradient, expect_expanded, expect_plain, expect_scaled, expect_slice};
use crate::ops::dispatch::dispatch;
use crate::stored::{ExpandedTensor, ScaledTensor};
use crate::{DType, Device, Error, Result, Tensor};
use bytemuck::{Pod, Zeroable};

/// The scalars of one update.
#[derive(Clone, Copy, Debug)]
pub struct MomentumStep {
    /// The step size of this step.
    pub learning_rate: f64,
    /// The share of the momentum in the direction.
    pub beta1: f64,
    /// The decay of the momentum.
    pub beta2: f64,
    /// The number of this update, counted from 1.
    pub step: u64,
    /// The maximum global norm of gradients, to which they are clipped; 0 disables clipping.
    pub max_norm: f64,
    /// The factor that gradients and their norm contain, such as a loss scale.
    pub gradient_scale: f64,
}

/// Scalars derived from [`MomentumStep`], each rounded once from F64, in the layout of momentum.cu and descend.cu.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Scalars {
    pub learning_rate: f64,
    pub step: u64,
    pub take1: f32,
    pub take2: f32,
    pub max_norm: f32,
    pub unscale: f32,
}

/// The scalars of an update in device memory, so that a replayed graph reads the scalars of the current step.
#[derive(Debug)]
pub struct MomentumScalars {
    /// The bytes of [`Scalars`].
    pub(super) words: Tensor,
}

impl MomentumScalars {
    /// Returns unset scalars. Call [`MomentumScalars::set`] before the first update.
    pub fn new(device: &Device) -> Result<MomentumScalars> {
        Ok(MomentumScalars { words: Tensor::zeros(device, &[size_of::<Scalars>() / 8], DType::I64)? })
    }

    /// Writes the scalars and synchronises. Not allowed during graph capture.
    pub fn set(&mut self, how: &MomentumStep) -> Result<()> {
        self.words.write_bytes(bytemuck::bytes_of(&Scalars {
            learning_rate: how.learning_rate,
            step: how.step,
            take1: (1.0 - how.beta1) as f32,
            take2: (1.0 - how.beta2) as f32,
            max_norm: how.max_norm as f32,
            unscale: (1.0 / how.gradient_scale) as f32,
        }))
    }

    pub(super) fn host(&self) -> Scalars {
        bytemuck::cast_slice(self.words.host::<i64>())[0]
    }
}

/// A momentum in its storage format.
#[derive(Debug)]
pub enum Momentum {
    /// F32, or BF16 with stochastic rounding.
    Plain(Tensor),
    /// Scaled E4M3.
    Scaled(ScaledTensor),
    /// 8 bits with dynamic range expansion. Only for a matrix.
    Expanded(ExpandedTensor),
}

/// How the direction is computed from the gradient `g`, the old momentum `m` and the new momentum `m'`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The direction of Nesterov: `m' + (g - m') · (1 - β1)`.
    Nesterov,
    /// The sign of `m + (g - m) · (1 - β1)`; the sign of 0 is 0.
    Sign,
}

/// The tensors of one parameter or of a slice of a parameter. All have the same shape.
#[derive(Debug)]
pub struct MomentumParameter<'a> {
    /// The momentum.
    pub momentum: &'a mut Momentum,
    /// The gradient.
    pub grad: Gradient<'a>,
    /// The direction, BF16, which the op writes.
    pub direction: &'a mut Tensor,
    /// The seed of stochastic rounding, different for each parameter. The rounding of element `i` in step `t` depends only on
    /// `(seed, t, offset + i)`.
    pub seed: u64,
    /// The index of the first element within the whole parameter, if these tensors are a slice; otherwise 0. A multiple of 128.
    pub offset: usize,
    /// The amaxes of the weights and of the momentum, F32 `[2]`, or `None` if the momentum is not [`Momentum::Scaled`]. [`momentum_amax`] raises the
    /// second, and [`momentum`] reads it. For a slice, [`momentum`] needs the amax of the whole parameter.
    pub amaxes: Option<&'a mut Tensor>,
}

/// Writes the direction, but not the momentum. If the momentum is stored with a scale, also raises the second of the amaxes to the largest absolute
/// value that [`momentum`] will store.
///
/// If `norm` is not finite, nothing is written. The result is bit-identical on every device.
pub fn momentum_amax(
    parameter: MomentumParameter,
    rule: Direction,
    norm: &Tensor,
    scalars: &MomentumScalars,
) -> Result<()> {
    check(&parameter, norm, scalars)?;
    dispatch! { norm.device(),
        cpu => cpu::momentum(parameter, rule, norm, &scalars.host(), false),
        gpu => cuda::momentum(gpu, parameter, rule, norm, &scalars.words, false)?,
    }
    Ok(())
}

/// Updates a momentum, and writes the direction of the update: with
/// `g = grad / gradient_scale · min(1, max_norm / (norm / gradient_scale + 1e-6))`, `m' = m + (g - m) · (1 - β2)`. `rule` computes the direction
/// from the momentum before rounding.
///
/// `norm` F32 `[1]` is the global gradient norm. If it is not finite, nothing is written. The result is bit-identical on every device, because each
/// operation is rounded separately.
pub fn momentum(parameter: MomentumParameter, rule: Direction, norm: &Tensor, scalars: &MomentumScalars) -> Result<()> {
    check(&parameter, norm, scalars)?;
    dispatch! { norm.device(),
        cpu => cpu::momentum(parameter, rule, norm, &scalars.host(), true),
        gpu => cuda::momentum(gpu, parameter, rule, norm, &scalars.words, true)?,
    }
    Ok(())
}

fn check(parameter: &MomentumParameter, norm: &Tensor, scalars: &MomentumScalars) -> Result<()> {
    let (shape, device) = (parameter.grad.values().shape(), norm.device());
    expect_plain("momentum: norm", norm, &[DType::F32], &[1], device)?;
    scalars.words.expect_device("momentum: scalars", device)?;
    parameter.grad.expect("momentum", device)?;
    expect_plain("momentum: direction", parameter.direction, &[DType::BF16], shape, device)?;
    expect_slice("momentum", parameter.offset)?;
    match &*parameter.momentum {
        Momentum::Plain(m) => expect_plain("momentum: m", m, &[DType::F32, DType::BF16], shape, device),
        Momentum::Expanded(m) => expect_expanded("momentum: m", m, shape, device),
        Momentum::Scaled(m) => {
            expect_scaled("momentum: m", m, DType::E4M3, shape, device)?;
            expect_amaxes("momentum", parameter.amaxes.as_deref(), device)
        }
    }
}

/// Checks the amaxes of weights and momentum, for an op that needs one of them.
pub(super) fn expect_amaxes(op: &str, amaxes: Option<&Tensor>, device: &Device) -> Result<()> {
    match amaxes {
        Some(amaxes) => expect_plain(&format!("{op}: amaxes"), amaxes, &[DType::F32], &[2], device),
        None => Err(Error::Value(format!("{op}: a tensor with one scale has no amax to compute it from"))),
    }
}
