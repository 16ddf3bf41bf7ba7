//! The momenta of parameters, and updates along directions that are computed from momenta. Muon and Lion share this code.
//!
//! The op `momentum` updates a momentum and writes the direction. The op `descend` updates the weights. Lion runs `momentum` and then `descend`.
//! Muon runs `newton_schulz` between the two ops, and delegates all parameters that are not hidden matrices to an `AdamWOptimizer`.

use super::optimizer::{Per, StateTensor, Updated};
use super::rates::Rates;
use ottava_common::error::Result;
use ottava_recipe::param::Param;
use ottava_recipe::storage::States;
use ottava_tensor::ops::{
    DescendParameter, Direction, Momentum, MomentumParameter, MomentumScalars, MomentumStep, descend, descend_amax,
    momentum, momentum_amax,
};
use ottava_tensor::{DType, ExpandedTensor, ScaledTensor, Tensor};

/// The constants of an optimizer with a momentum.
#[derive(Clone, Copy, Debug)]
pub struct MomentumConfig {
    /// The share of the momentum in the direction of an update.
    pub beta1: f64,
    /// The decay of the momentum.
    pub beta2: f64,
    /// The share of matrices that is removed per unit of learning rate.
    pub weight_decay: f64,
    /// The global norm to which gradients are clipped. 0 turns clipping off.
    pub max_grad_norm: f64,
}

/// The momenta of some parameters of a model.
pub(super) struct Momenta {
    config: MomentumConfig,
    rule: Direction,
    /// The momentum of each parameter, if it has one.
    momenta: Vec<Option<Momentum>>,
    scalars: Rates<MomentumScalars>,
}

impl Momenta {
    /// Creates zero momenta for the `chosen` parameters of `params`.
    pub fn new(
        config: MomentumConfig,
        rule: Direction,
        params: &[&mut Param],
        chosen: impl Fn(&Param) -> bool,
    ) -> Result<Momenta> {
        let of = |param: &&mut Param| chosen(param).then(|| zeros(param)).transpose();
        let momenta = params.iter().map(of).collect::<Result<_>>()?;
        let device = params.first().expect("a model has parameters").weights.device();
        let scalars = Rates::new(params, || Ok(MomentumScalars::new(device)?))?;
        Ok(Momenta { config, rule, momenta, scalars })
    }

    /// Sets the scalars of an update.
    pub fn begin_step(&mut self, step: u64, learning_rate: f64, gradient_scale: f64) -> Result<()> {
        let MomentumConfig { beta1, beta2, max_grad_norm: max_norm, .. } = self.config;
        self.scalars.set(|factor, scalars| {
            let learning_rate = factor * learning_rate;
            Ok(scalars.set(&MomentumStep { learning_rate, beta1, beta2, step, max_norm, gradient_scale })?)
        })
    }

    /// Returns the tensors of each parameter's momentum. A parameter without a momentum has none.
    pub fn states(&mut self) -> impl Iterator<Item = Vec<StateTensor<'_>>> {
        self.momenta.iter_mut().map(|momentum| momentum.as_mut().map(kept).unwrap_or_default())
    }

    /// Returns 2 (for master weights and momentum) if one of them has a scale for the whole parameter, else 0.
    pub fn amaxes_of(param: &Param) -> usize {
        if param.formats.has_scales() { 2 } else { 0 }
    }

    /// Returns the direction of the update of a parameter, BF16 in its update shape. Stores the new momentum, or only raises its amax if `stores` is
    /// false.
    pub fn direction(&mut self, updated: &mut Updated, norm: &Tensor, stores: bool) -> Result<Tensor> {
        let Updated { param, index, amaxes, .. } = updated;
        let (seed, offset) = (param.identity.seed(), param.slice().start);
        let mut direction = Tensor::empty(param.weights.device(), &param.update_shape(), DType::BF16)?;
        let grad = param.gradient.read();
        let scalars = self.scalars.of(param);
        let momentum_of = self.momenta[*index].as_mut().expect("a parameter with a momentum");
        let amaxes = amaxes.as_deref_mut();
        let parameter =
            MomentumParameter { momentum: momentum_of, grad, direction: &mut direction, seed, offset, amaxes };
        match stores {
            true => momentum(parameter, self.rule, norm, scalars)?,
            false => momentum_amax(parameter, self.rule, norm, scalars)?,
        }
        Ok(direction)
    }

    /// Moves the weights along `direction`, or only raises their amax if `stores` is false.
    pub fn descend(&self, updated: &mut Updated, direction: &Tensor, norm: &Tensor, stores: bool) -> Result<()> {
        let Updated { param, amaxes, .. } = updated;
        let weight_decay = if param.identity.is_matrix() { self.config.weight_decay } else { 0.0 };
        let (seed, offset) = (param.identity.seed(), param.slice().start);
        let direction = &direction.reshape(&param.update_shape())?;
        let scalars = self.scalars.of(param);
        let weight = param.weights.for_update();
        let parameter =
            DescendParameter { weight, direction, weight_decay, seed, offset, amaxes: amaxes.as_deref_mut() };
        match stores {
            true => descend(parameter, norm, scalars)?,
            false => descend_amax(parameter, norm, scalars)?,
        }
        Ok(())
    }
}

fn zeros(param: &Param) -> Result<Momentum> {
    let (device, shape, memory) = (param.weights.device(), &param.update_shape(), param.states_memory);
    Ok(match param.formats.states {
        States::Float32 => Momentum::Plain(Tensor::zeros_in(device, shape, DType::F32, memory)?),
        States::Bfloat16 => Momentum::Plain(Tensor::zeros_in(device, shape, DType::BF16, memory)?),
        States::Float8 => Momentum::Scaled(ScaledTensor::zeros(device, shape, DType::E4M3, memory)?),
        States::Coat => Momentum::Expanded(ExpandedTensor::zeros(device, shape, memory)?),
    })
}

fn kept(momentum: &mut Momentum) -> Vec<StateTensor<'_>> {
    use Per::{Element, Group, Parameter};
    let kept = match momentum {
        Momentum::Plain(m) => vec![("momentum", Element, m)],
        Momentum::Scaled(m) => {
            vec![("momentum", Element, &mut m.values), ("momentum_scale_inv", Parameter, &mut m.scale_inv)]
        }
        Momentum::Expanded(m) => vec![("momentum", Element, &mut m.codes), ("momentum_groups", Group, &mut m.groups)],
    };
    kept.into_iter().map(|(kind, per, tensor)| StateTensor { kind, per, tensor }).collect()
}
