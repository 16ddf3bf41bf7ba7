//! AdamW over all parameters of a model, in one launch.

use crate::error::Result;
use crate::param::Param;
use crate::scaling::ScalingState;
use ottava_tensor::ops::{AdamW, AdamWParameter, AdamWScalars, adamw, global_norm};
use ottava_tensor::{DType, Tensor};

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
    /// Type of the moments: F32 or BF16.
    pub state_dtype: DType,
}

/// The moments of all parameters.
pub struct AdamWOptimizer {
    config: AdamWConfig,
    moments: Vec<Moments>,
    steps: u64,
    scalars: AdamWScalars,
}

/// The two moments of one parameter, of its shape.
pub struct Moments {
    /// Mean of the gradient.
    pub m: Tensor,
    /// Mean of its square.
    pub v: Tensor,
}

impl AdamWOptimizer {
    /// Zero moments for `params`.
    pub fn new(config: AdamWConfig, params: &[&mut Param]) -> Result<AdamWOptimizer> {
        let zeros = |p: &Param| Tensor::zeros(p.value.device(), p.value.shape(), config.state_dtype);
        let moments = params.iter().map(|p| Ok(Moments { m: zeros(p)?, v: zeros(p)? })).collect::<Result<_>>()?;
        let device = params.first().expect("a model has parameters").value.device();
        Ok(AdamWOptimizer { config, moments, steps: 0, scalars: AdamWScalars::new(device)? })
    }

    /// Updates done so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Type of the moments.
    pub fn state_dtype(&self) -> DType {
        self.config.state_dtype
    }

    /// The moments, in the order of the parameters.
    pub fn moments(&self) -> &[Moments] {
        &self.moments
    }

    /// Takes over moments and count from a checkpoint.
    pub fn restore(&mut self, moments: Vec<Moments>, steps: u64) {
        self.moments = moments;
        self.steps = steps;
    }

    /// The norm of all gradients as one vector, F32 `[1]`.
    pub fn grad_norm(params: &[&mut Param]) -> Result<Tensor> {
        let grads: Vec<&Tensor> = params.iter().filter_map(|p| p.grad.as_ref()).collect();
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
            let (weight, cast, grad) = param.for_update(seed, next)?;
            let (m, v) = (&mut moments.m, &mut moments.v);
            parameters.push(AdamWParameter { weight, m, v, grad, weight_decay, cast });
        }
        Ok(adamw(&mut parameters, scaling.statistics_mut(), norm, &self.scalars)?)
    }
}
