//! AdamW, fused with the cast of the new weights.

use super::optimizer::{Optimizer, Per, StateTensor, Updated};
use super::rates::Rates;
use super::update::IN_ORDER;
use ottava_common::error::Result;
use ottava_recipe::param::Param;
use ottava_recipe::scaling::Casts;
use ottava_recipe::storage::States;
use ottava_tensor::ops::{AdamW, AdamWParameter, AdamWScalars, Moments, adamw, adamw_amaxes};
use ottava_tensor::{DType, ExpandedTensor, ScaledTensor, Tensor};

/// The constants of AdamW.
#[derive(Clone, Copy, Debug)]
pub struct AdamWConfig {
    /// The decay of the first moment.
    pub beta1: f64,
    /// The decay of the second moment.
    pub beta2: f64,
    /// The constant that is added to the root of the second moment.
    pub epsilon: f64,
    /// The share of matrices that is removed per unit of learning rate.
    pub weight_decay: f64,
    /// The global norm to which gradients are clipped. 0 turns clipping off.
    pub max_grad_norm: f64,
}

/// The moments of all parameters or of some parameters.
pub struct AdamWOptimizer {
    config: AdamWConfig,
    /// The moments by parameter. `None` for parameters that another optimizer updates.
    moments: Vec<Option<Moments>>,
    steps: u64,
    scalars: Rates<AdamWScalars>,
}

impl AdamWOptimizer {
    /// Creates zero moments for `params`.
    pub fn new(config: AdamWConfig, params: &[&mut Param]) -> Result<AdamWOptimizer> {
        AdamWOptimizer::for_some(config, params, |_| true)
    }

    /// Creates zero moments for the `chosen` parameters of `params`. The other parameters are never in an update.
    pub(super) fn for_some(
        config: AdamWConfig,
        params: &[&mut Param],
        chosen: impl Fn(&Param) -> bool,
    ) -> Result<AdamWOptimizer> {
        let of = |param: &&mut Param| chosen(param).then(|| zeros(param)).transpose();
        let moments = params.iter().map(of).collect::<Result<_>>()?;
        let device = params.first().expect("a model has parameters").weights.device();
        let scalars = Rates::new(params, || Ok(AdamWScalars::new(device)?))?;
        Ok(AdamWOptimizer { config, moments, steps: 0, scalars })
    }
}

impl Optimizer for AdamWOptimizer {
    fn steps(&self) -> u64 {
        self.steps
    }

    fn set_steps(&mut self, steps: u64) {
        self.steps = steps;
    }

    fn begin_step(&mut self, learning_rate: f64, gradient_scale: f64) -> Result<()> {
        self.steps += 1;
        let AdamWConfig { beta1, beta2, epsilon, max_grad_norm: max_norm, .. } = self.config;
        let step = self.steps;
        self.scalars.set(|factor, scalars| {
            let learning_rate = factor * learning_rate;
            Ok(scalars.set(&AdamW { learning_rate, beta1, beta2, epsilon, step, max_norm, gradient_scale })?)
        })
    }

    fn states(&mut self) -> Vec<Vec<StateTensor<'_>>> {
        self.moments.iter_mut().map(|moments| moments.as_mut().map(kept).unwrap_or_default()).collect()
    }

    fn fuses_casts(&self) -> bool {
        true
    }

    /// Returns 3 (for master weight, first and second moment) if one of these tensors has a scale for the whole parameter, else 0.
    fn amaxes_of(&self, param: &Param) -> usize {
        if param.formats.has_scales() { 3 } else { 0 }
    }

    fn find_amaxes(&mut self, group: &mut [Updated], norm: &Tensor) -> Result<()> {
        let AdamWOptimizer { config, moments, scalars, .. } = self;
        scalars.iter().try_for_each(|(factor, scalars)| {
            let mut parameters = parameters(config, moments, group, *factor)?;
            if !parameters.is_empty() {
                adamw_amaxes(&mut parameters, norm, scalars)?;
            }
            Ok(())
        })
    }

    fn update(&mut self, group: &mut [Updated], casts: &mut Casts, norm: &Tensor) -> Result<()> {
        let AdamWOptimizer { config, moments, scalars, .. } = self;
        scalars.iter().try_for_each(|(factor, scalars)| {
            let mut parameters = parameters(config, moments, group, *factor)?;
            if !parameters.is_empty() {
                adamw(&mut parameters, casts.statistics(), norm, scalars)?;
            }
            Ok(())
        })
    }
}

/// Returns the parameters of `group` whose learning rate has this `factor`, with their moments. `moments` has the moments of all parameters.
fn parameters<'g>(
    config: &AdamWConfig,
    moments: &'g mut [Option<Moments>],
    group: &'g mut [Updated],
    factor: f64,
) -> Result<Vec<AdamWParameter<'g>>> {
    let mut moments = moments.iter_mut().enumerate();
    let of = |Updated { param, index, amaxes, cast, .. }: &'g mut Updated| {
        let (_, moments) = moments.find(|(number, _)| number == index).expect(IN_ORDER);
        let moments = moments.as_mut().expect("a parameter with moments");
        // Norms and biases do not decay, as in Hugging Face's trainer.
        let weight_decay = if param.identity.is_matrix() { config.weight_decay } else { 0.0 };
        let (seed, offset) = (param.identity.seed(), param.slice().start);
        let (weight, cast, grad) = param.for_update(cast);
        Ok(AdamWParameter { weight, moments, grad, weight_decay, seed, offset, amaxes: amaxes.as_deref_mut(), cast })
    };
    group.iter_mut().filter(|updated| updated.param.learning_rate_factor == factor).map(of).collect()
}

fn zeros(param: &Param) -> Result<Moments> {
    let (device, shape, memory) = (param.weights.device(), &param.update_shape(), param.states_memory);
    let zeros = |dtype| Tensor::zeros_in(device, shape, dtype, memory);
    let scaled = |dtype| ScaledTensor::zeros(device, shape, dtype, memory);
    let expanded = || ExpandedTensor::zeros(device, shape, memory);
    Ok(match param.formats.states {
        States::Float32 => Moments::Plain { m: zeros(DType::F32)?, v: zeros(DType::F32)? },
        States::Bfloat16 => Moments::Plain { m: zeros(DType::BF16)?, v: zeros(DType::BF16)? },
        States::Float8 => Moments::Scaled { m: scaled(DType::E4M3)?, v: scaled(DType::F16)? },
        States::Coat => Moments::Expanded { m: expanded()?, v: expanded()? },
    })
}

fn kept(moments: &mut Moments) -> Vec<StateTensor<'_>> {
    use Per::{Element, Group, Parameter};
    let kept = match moments {
        Moments::Plain { m, v } => vec![("m", Element, m), ("v", Element, v)],
        Moments::Scaled { m, v } => vec![
            ("m", Element, &mut m.values),
            ("m_scale_inv", Parameter, &mut m.scale_inv),
            ("v", Element, &mut v.values),
            ("v_scale_inv", Parameter, &mut v.scale_inv),
        ],
        Moments::Expanded { m, v } => vec![
            ("m", Element, &mut m.codes),
            ("m_groups", Group, &mut m.groups),
            ("v", Element, &mut v.codes),
            ("v_groups", Group, &mut v.groups),
        ],
    };
    kept.into_iter().map(|(kind, per, tensor)| StateTensor { kind, per, tensor }).collect()
}
