//! AdamW with decoupled weight decay, fused with the cast of the new weights to FP8. Loshchilov and Hutter 2019, arXiv:1711.05101. The order of
//! operations is PyTorch's.
//!
//! One kernel source updates weights and states in all formats, which are selected by defines.
//!
//! - States with one power of two per matrix (`Scaled`) take two passes. `adamw_amaxes` finds the amaxes; most weights are ruled out without a
//!   division. Then `adamw` writes.
//! - States with an expanded range (`Expanded`) compute the range of a group in sixteen threads.
//! - Stochastic rounding draws from a hash of the parameter's name, the step and the element, so results depend neither on the order of parameters
//!   nor on the number of ranks.

mod cpu;
pub(super) mod cuda;
#[cfg(test)]
mod ten_steps;
#[cfg(test)]
mod tests;

use super::destination::CastScale;
use super::destination::CastStatistics;
use super::parameter::{Gradient, UpdatedWeight, expect_expanded, expect_plain, expect_scaled, expect_slice};
use super::quantize::{expect_amax, expect_cast, expect_measured};
use crate::granularity::Granularity;
use crate::ops::dispatch::dispatch;
use crate::quantized::QuantizedTensor;
use crate::stored::{ExpandedTensor, ScaledTensor};
use crate::{DType, Device, Error, Result, Tensor};
use bytemuck::{Pod, Zeroable};

/// The scalars of one update.
#[derive(Clone, Copy, Debug)]
pub struct AdamW {
    /// The step size of this step.
    pub learning_rate: f64,
    /// The decay of the first moment.
    pub beta1: f64,
    /// The decay of the second moment.
    pub beta2: f64,
    /// The term added to the root of the second moment.
    pub epsilon: f64,
    /// The number of this update, counted from 1.
    pub step: u64,
    /// The maximum global norm of gradients, to which they are clipped; 0 disables clipping.
    pub max_norm: f64,
    /// The factor that gradients and their norm contain, such as a loss scale.
    pub gradient_scale: f64,
}

/// Scalars derived from [`AdamW`], each rounded once from F64, in the layout of elements.cuh.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Scalars {
    learning_rate: f64,
    step: u64,
    step_size: f32,
    take1: f32,
    beta2: f32,
    take2: f32,
    correction2: f32,
    epsilon: f32,
    max_norm: f32,
    unscale: f32,
}

impl AdamW {
    fn scalars(&self) -> Scalars {
        let correction = |beta: f64| 1.0 - beta.powi(self.step.min(i32::MAX as u64) as i32);
        Scalars {
            learning_rate: self.learning_rate,
            step: self.step,
            step_size: (self.learning_rate / correction(self.beta1)) as f32,
            take1: (1.0 - self.beta1) as f32,
            beta2: self.beta2 as f32,
            take2: (1.0 - self.beta2) as f32,
            correction2: correction(self.beta2).sqrt() as f32,
            epsilon: self.epsilon as f32,
            max_norm: self.max_norm as f32,
            unscale: (1.0 / self.gradient_scale) as f32,
        }
    }
}

impl Scalars {
    /// Returns the factor of weight decay.
    fn decay_factor(&self, weight_decay: f64) -> f32 {
        (1.0 - self.learning_rate * weight_decay) as f32
    }
}

/// The scalars of an update in device memory, so that a replayed graph reads the scalars of the current step.
#[derive(Debug)]
pub struct AdamWScalars {
    /// The bytes of [`Scalars`].
    words: Tensor,
}

impl AdamWScalars {
    /// Returns unset scalars. Call [`AdamWScalars::set`] before the first update.
    pub fn new(device: &Device) -> Result<AdamWScalars> {
        Ok(AdamWScalars { words: Tensor::zeros(device, &[size_of::<Scalars>() / 8], DType::I64)? })
    }

    /// Writes the scalars and synchronises. Not allowed during graph capture.
    pub fn set(&mut self, how: &AdamW) -> Result<()> {
        self.words.write_bytes(bytemuck::bytes_of(&how.scalars()))
    }

    fn host(&self) -> Scalars {
        bytemuck::cast_slice(self.words.host::<i64>())[0]
    }
}

/// The moments of a parameter.
#[derive(Debug)]
pub enum Moments {
    /// F32, or BF16 with stochastic rounding. Weights are updated with the moments before rounding.
    Plain {
        /// The mean of the gradient.
        m: Tensor,
        /// The mean of the squared gradient.
        v: Tensor,
    },
    /// The first moment in scaled E4M3, the second in scaled F16.
    Scaled {
        /// The mean of the gradient.
        m: ScaledTensor,
        /// The mean of the squared gradient.
        v: ScaledTensor,
    },
    /// Both moments in 8 bits with dynamic range expansion.
    Expanded {
        /// The mean of the gradient.
        m: ExpandedTensor,
        /// The mean of the squared gradient.
        v: ExpandedTensor,
    },
}

/// The cast of the new weights that an update performs.
#[derive(Debug)]
pub enum WeightCast<'a> {
    /// Only the amax: F32 `[1]`, which is raised to the largest absolute value.
    Amax(&'a mut Tensor),
    /// FP8 codes and statistics, as in [`quantize`](super::quantize()) or [`quantize_blocks`](super::quantize_blocks()).
    Codes {
        /// The scales. If the cast computes the scales, they must be scales of 128x128 blocks and the codes E4M3, because an update works on tiles,
        /// not on whole rows.
        scale: CastScale<'a>,
        /// The entry of the statistics that the cast updates.
        slot: usize,
        /// An operand of the same shape. Its copies of the codes and their inverse scales are overwritten.
        into: &'a mut QuantizedTensor,
    },
}

/// The tensors of one parameter or of a slice of a parameter. All have the same shape.
#[derive(Debug)]
pub struct AdamWParameter<'a> {
    /// The weights.
    pub weight: UpdatedWeight<'a>,
    /// The first and second moment. Only a matrix can have [`Moments::Expanded`].
    pub moments: &'a mut Moments,
    /// The gradient.
    pub grad: Gradient<'a>,
    /// Weight decay per unit of learning rate.
    pub weight_decay: f64,
    /// The seed of stochastic rounding, different for each parameter. The rounding of element `i` in step `t` depends only on
    /// `(seed, t, offset + i)`.
    pub seed: u64,
    /// The index of the first element within the whole parameter, if these tensors are a slice; otherwise 0. It must be a multiple of 128, and 0 if
    /// weights or moments are rounded stochastically and the weights are cast to codes.
    pub offset: usize,
    /// The amaxes of the new weights, first moment and second moment, F32 `[3]`, or `None` without a [`ScaledTensor`]. They must be zeros before
    /// [`adamw_amaxes`], which finds the amaxes of values in a [`ScaledTensor`]. If the tensors are a slice, [`adamw`] needs the amaxes of the whole
    /// parameter.
    pub amaxes: Option<&'a mut Tensor>,
    /// The cast of the new weights. Codes require a matrix `[R, C]`.
    pub cast: Option<WeightCast<'a>>,
}

impl AdamWParameter<'_> {
    fn rounds_stochastically(&self) -> bool {
        let narrow = matches!(&self.moments, Moments::Plain { m, .. } if m.dtype() == DType::BF16);
        narrow || matches!(self.weight, UpdatedWeight::Stochastic { .. })
    }

    /// Returns whether the weights, and whether the moments, are stored with one scale that depends on the new values.
    fn is_scaled(&self) -> (bool, bool) {
        (matches!(self.weight, UpdatedWeight::Scaled { .. }), matches!(self.moments, Moments::Scaled { .. }))
    }

    fn has_powers(&self) -> bool {
        self.is_scaled() != (false, false)
    }
}

/// Raises the `amaxes` of `parameters` to the largest absolute values that [`adamw`] will store, and writes nothing else. Parameters without `amaxes`
/// are skipped. This is the first of two passes, as in FP8-LM; both passes take the same arguments.
///
/// If `norm` is not finite, nothing is written. The result is bit-identical on every device. The maximum over slices is the amax of the whole
/// parameter.
pub fn adamw_amaxes(parameters: &mut [AdamWParameter], norm: &Tensor, scalars: &AdamWScalars) -> Result<()> {
    check_all(parameters, norm, scalars)?;
    dispatch! { norm.device(),
        cpu => cpu::adamw_amaxes(parameters, norm, &scalars.host()),
        gpu => cuda::adamw_amaxes(gpu, parameters, norm, &scalars.words)?,
    }
    Ok(())
}

/// Updates all `parameters`: with `g = grad / gradient_scale · min(1, max_norm / (norm / gradient_scale + 1e-6))`,
/// `w = master · (1 - lr·wd)`, `m += (g - m)·(1 - β1)`, `v = v·β2 + g²·(1 - β2)`,
/// `master = w - lr/(1-β1^t) · m / (√v/√(1-β2^t) + ε)`.
///
/// `norm` F32 `[1]` is the global gradient norm. If it is not finite, nothing is written, neither codes nor statistics. Moments are
/// rounded after their exact values updated the weights. A [`ScaledTensor`] gets the scale of its amax from [`adamw_amaxes`]. Casts
/// update `statistics`. The result is bit-identical on every device, because each operation is rounded separately.
pub fn adamw(
    parameters: &mut [AdamWParameter],
    statistics: &mut CastStatistics,
    norm: &Tensor,
    scalars: &AdamWScalars,
) -> Result<()> {
    check_all(parameters, norm, scalars)?;
    for parameter in &*parameters {
        check_cast(parameter, statistics, norm.device())?;
    }
    dispatch! { norm.device(),
        scratch => cpu::scratch(parameters),
        cpu => cpu::adamw(parameters, statistics, norm, &scalars.host()),
        gpu => cuda::adamw(gpu, parameters, statistics, norm, &scalars.words)?,
    }
    Ok(())
}

fn check_all(parameters: &[AdamWParameter], norm: &Tensor, scalars: &AdamWScalars) -> Result<()> {
    norm.expect("adamw: norm", &[1])?;
    norm.expect_dtype("adamw: norm", &[DType::F32])?;
    scalars.words.expect_device("adamw: scalars", norm.device())?;
    parameters.iter().try_for_each(|parameter| check(parameter, norm.device()))
}

fn check(parameter: &AdamWParameter, device: &Device) -> Result<()> {
    let shape = parameter.grad.values().shape();
    parameter.grad.expect("adamw", device)?;
    parameter.weight.expect("adamw", shape, device)?;
    expect_slice("adamw", parameter.offset)?;
    match &*parameter.moments {
        Moments::Plain { m, v } => {
            expect_plain("adamw: m", m, &[DType::F32, DType::BF16], shape, device)?;
            expect_plain("adamw: v", v, &[m.dtype()], shape, device)?;
        }
        Moments::Scaled { m, v } => {
            expect_scaled("adamw: m", m, DType::E4M3, shape, device)?;
            expect_scaled("adamw: v", v, DType::F16, shape, device)?;
        }
        Moments::Expanded { m, v } => {
            expect_expanded("adamw: m", m, shape, device)?;
            expect_expanded("adamw: v", v, shape, device)?;
        }
    }
    match &parameter.amaxes {
        _ if !parameter.has_powers() => Ok(()),
        None => Err(Error::Value("adamw: weights or moments with one scale have no amaxes to find it from".into())),
        Some(amaxes) => {
            amaxes.expect("adamw: amaxes", &[3])?;
            amaxes.expect_dtype("adamw: amaxes", &[DType::F32])?;
            amaxes.expect_device("adamw: amaxes", device)
        }
    }
}

fn check_cast(parameter: &AdamWParameter, statistics: &CastStatistics, device: &Device) -> Result<()> {
    match &parameter.cast {
        None => Ok(()),
        Some(WeightCast::Amax(amax)) => expect_amax(amax, device),
        Some(WeightCast::Codes { .. }) if parameter.offset > 0 && parameter.rounds_stochastically() => {
            Err(Error::Value("adamw: no slice is both rounded stochastically and cast to codes".into()))
        }
        Some(WeightCast::Codes { scale, slot, into }) => {
            let granularity = match *scale {
                CastScale::Given(scale) => {
                    expect_cast(into.format, scale, statistics, *slot, device)?;
                    Granularity::PerTensor
                }
                CastScale::Own(Granularity::Blocks128x128, _) if into.format == DType::E4M3 => {
                    expect_measured(into.format, statistics, *slot, device)?;
                    Granularity::Blocks128x128
                }
                CastScale::Own(granularity, _) => {
                    let format = into.format;
                    return Err(Error::Value(format!(
                        "adamw: {format} codes with {granularity} scales cannot be cast in the update; cast them after it"
                    )));
                }
            };
            parameter.grad.values().expect("adamw: grad", &[into.rows, into.columns])?;
            let expect = |what: &str, tensor: &Tensor, shape: &[usize], dtype| {
                tensor.expect(what, shape)?;
                tensor.expect_dtype(what, &[dtype])?;
                tensor.expect_device(what, device)
            };
            let (sizes, turned) = ([into.rows, into.columns], [into.columns, into.rows]);
            let copy = |what: &str, codes: &Option<Tensor>, [rows, length]: [usize; 2]| {
                let shape = granularity.codes_shape(rows, length);
                codes.as_ref().map_or(Ok(()), |codes| expect(what, codes, &shape, into.format))
            };
            copy("adamw: codes", &into.codes, sizes)?;
            copy("adamw: transposed codes", &into.transposed, turned)?;
            let scales = |what: &str, scales: &Tensor, [rows, length]: [usize; 2]| {
                expect(what, scales, &granularity.scales_shape(rows, length), DType::F32)
            };
            scales("adamw: scale_inv", &into.scale_inv, if into.codes.is_some() { sizes } else { turned })?;
            let transposed = into.transposed_scale_inv.as_deref();
            transposed.map_or(Ok(()), |transposed| scales("adamw: transposed scale_inv", transposed, turned))
        }
    }
}
