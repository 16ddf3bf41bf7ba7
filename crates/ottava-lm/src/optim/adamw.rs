//! AdamW over all parameters of a model, in one launch.

use crate::error::Result;
use crate::param::Param;
use ottava_tensor::ops::{AdamW, AdamWParameter, AdamWScalars, AdamWWeight, CastStatistics, adamw, global_norm};
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
        Ok(AdamWOptimizer { config, moments, steps: 0 })
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

    /// One update of all `params`, with gradients clipped by `norm` from [`AdamWOptimizer::grad_norm`]; a norm that is not finite
    /// changes no weight.
    pub fn step(&mut self, params: &mut [&mut Param], norm: &Tensor, learning_rate: f64) -> Result<()> {
        self.steps += 1;
        let how = AdamW {
            learning_rate,
            beta1: self.config.beta1,
            beta2: self.config.beta2,
            epsilon: self.config.epsilon,
            step: self.steps,
            max_norm: self.config.max_grad_norm,
        };
        let mut parameters = Vec::with_capacity(params.len());
        for (seed, (param, moments)) in (0..).zip(params.iter_mut().zip(&mut self.moments)) {
            let weight_decay = if param.decay { self.config.weight_decay } else { 0.0 };
            let Param { value, master, grad, .. } = &mut **param;
            let weight = match master {
                Some(master) => AdamWWeight::Master { master, copy: Some(value) },
                None if value.dtype() == DType::BF16 => AdamWWeight::Stochastic { weight: value, seed },
                None => AdamWWeight::Master { master: value, copy: None },
            };
            let grad = grad.as_ref().expect("a model built for training");
            let (m, v) = (&mut moments.m, &mut moments.v);
            parameters.push(AdamWParameter { weight, m, v, grad, weight_decay, cast: None });
        }
        let mut scalars = AdamWScalars::new(norm.device())?;
        scalars.set(&how)?;
        adamw(&mut parameters, &mut CastStatistics::new(norm.device(), 1)?, norm, &scalars)?;
        Ok(())
    }
}
