//! AdamW over all parameters of a model, in one launch.

use crate::error::Result;
use crate::level::States;
use crate::param::{Grad, Master, Param, Weights};
use crate::scaling::ScalingState;
use ottava_tensor::ops::{AdamW, AdamWParameter, AdamWScalars, Moments, adamw, global_norm};
use ottava_tensor::{DType, Expanded, Scaled, Tensor};

/// Constants of AdamW.
#[derive(Clone, Copy, Debug)]
pub struct AdamWConfig {
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub epsilon: f64,
    /// Share of matrices removed per unit of learning rate.
    pub weight_decay: f64,
    /// Gradients are scaled down to this global norm; 0 leaves them alone.
    pub max_grad_norm: f64,
}

/// The moments of all parameters.
pub struct AdamWOptimizer {
    config: AdamWConfig,
    moments: Vec<Moments>,
    steps: u64,
    scalars: AdamWScalars,
}

impl AdamWOptimizer {
    /// Zero moments for `params`.
    pub fn new(config: AdamWConfig, params: &[&mut Param]) -> Result<AdamWOptimizer> {
        let moments = params.iter().map(|param| zeros(param)).collect::<Result<_>>()?;
        let device = params.first().expect("a model has parameters").weights.device();
        Ok(AdamWOptimizer { config, moments, steps: 0, scalars: AdamWScalars::new(device)? })
    }

    /// Updates done so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The moments, in the order of the parameters.
    pub fn moments_mut(&mut self) -> &mut [Moments] {
        &mut self.moments
    }

    /// Takes over the count of a checkpoint.
    pub fn set_steps(&mut self, steps: u64) {
        self.steps = steps;
    }

    /// The norm of all gradients as one vector, F32 `[1]`.
    pub fn grad_norm(params: &[&mut Param]) -> Result<Tensor> {
        let grads: Vec<_> = params.iter().filter_map(|p| p.grad.as_ref()).map(Grad::read).collect();
        Ok(global_norm(&grads)?)
    }

    /// Counts a step and sets its scalars, before any of its work is enqueued. Gradients will come multiplied by `loss_scale`.
    pub fn begin_step(&mut self, learning_rate: f64, loss_scale: f64) -> Result<()> {
        self.steps += 1;
        Ok(self.scalars.set(&AdamW {
            learning_rate,
            beta1: self.config.beta1,
            beta2: self.config.beta2,
            epsilon: self.config.epsilon,
            step: self.steps,
            max_norm: self.config.max_grad_norm,
            loss_scale,
        })?)
    }

    /// Takes a step back whose gradients were not finite, so that it changed nothing.
    pub fn skip_step(&mut self) {
        self.steps -= 1;
    }

    /// One update of all `params`, with gradients clipped by `norm` from [`AdamWOptimizer::grad_norm`]; a norm that is not finite
    /// changes no weight. Weights with a cast by a known scale are cast in the same pass.
    pub fn step(&mut self, params: &mut [&mut Param], scaling: &mut ScalingState, norm: &Tensor) -> Result<()> {
        let next = params.iter_mut().map(|param| param.begin_update(scaling)).collect::<Result<Vec<_>>>()?;
        let mut parameters = Vec::with_capacity(params.len());
        for (seed, ((param, moments), next)) in (0..).zip(params.iter_mut().zip(&mut self.moments).zip(&next)) {
            let weight_decay = if param.decay { self.config.weight_decay } else { 0.0 };
            let (weight, cast, grad) = param.for_update(next)?;
            parameters.push(AdamWParameter { weight, moments, grad, weight_decay, seed, cast });
        }
        Ok(adamw(&mut parameters, scaling.statistics_mut(), norm, &self.scalars)?)
    }
}

fn zeros(param: &Param) -> Result<Moments> {
    let (device, shape, home) = (param.weights.device(), param.weights.shape(), param.home);
    let zeros = |dtype| Tensor::zeros_in(device, shape, dtype, home);
    let scaled = |dtype| Scaled::zeros(device, shape, dtype, home);
    let expanded = || Expanded::zeros(device, shape, home);
    Ok(match param.formats.states {
        States::Float32 => Moments::Plain { m: zeros(DType::F32)?, v: zeros(DType::F32)? },
        States::Bfloat16 => Moments::Plain { m: zeros(DType::BF16)?, v: zeros(DType::BF16)? },
        States::Float8 => Moments::Scaled { m: scaled(DType::E4M3)?, v: scaled(DType::F16)? },
        States::Coat => Moments::Expanded { m: expanded()?, v: expanded()? },
    })
}

/// What an optimizer keeps of a parameter beside the weights that layers read, by kind.
pub fn kept<'a>(weights: &'a mut Weights, moments: &'a mut Moments) -> Vec<(&'static str, &'a mut Tensor)> {
    let mut kept = match weights.master_mut() {
        None => vec![],
        Some(Master::Full(master)) => vec![("master", master)],
        Some(Master::Scaled(master)) => {
            vec![("master", &mut master.values), ("master_scale_inv", &mut master.scale_inv)]
        }
        Some(Master::Rest(rest)) => vec![("master_rest", rest)],
    };
    match moments {
        Moments::Plain { m, v } => kept.extend([("m", m), ("v", v)]),
        Moments::Scaled { m, v } => {
            kept.extend([("m", &mut m.values), ("m_scale_inv", &mut m.scale_inv)]);
            kept.extend([("v", &mut v.values), ("v_scale_inv", &mut v.scale_inv)]);
        }
        Moments::Expanded { m, v } => {
            kept.extend([("m", &mut m.codes), ("m_groups", &mut m.groups)]);
            kept.extend([("v", &mut v.codes), ("v_groups", &mut v.groups)]);
        }
    }
    kept
}
