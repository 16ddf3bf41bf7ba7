//! AdamW over all parameters of a model: in one go what lies on the device, and then, group by group, what is fetched from the host's
//! memory and written back beside it.

use crate::error::Result;
use crate::level::States;
use crate::param::{Grad, Master, Param, Weights};
use crate::scaling::Casts;
use ottava_tensor::ops::{AdamW, AdamWParameter, AdamWScalars, Moments, adamw, global_norm};
use ottava_tensor::{DType, ExpandedTensor, HostTransfer, MemoryKind, ScaledTensor, Tensor};
use std::collections::VecDeque;

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

    /// Counts a step and sets its scalars, before any of its work is enqueued. Gradients will contain the factor `gradient_scale`.
    pub fn begin_step(&mut self, learning_rate: f64, gradient_scale: f64) -> Result<()> {
        self.steps += 1;
        Ok(self.scalars.set(&AdamW {
            learning_rate,
            beta1: self.config.beta1,
            beta2: self.config.beta2,
            epsilon: self.config.epsilon,
            step: self.steps,
            max_norm: self.config.max_grad_norm,
            gradient_scale,
        })?)
    }

    /// Takes a step back whose gradients were not finite, so that it changed nothing.
    pub fn skip_step(&mut self) {
        self.steps -= 1;
    }

    /// One update of all `params`, with gradients clipped by `norm` from [`AdamWOptimizer::grad_norm`]; a norm that is not finite
    /// changes no weight. The new weights are cast for the products of the next step: where the scale is known, in the same pass.
    pub fn step(&mut self, params: &mut [&mut Param], casts: &mut Casts, norm: &Tensor) -> Result<()> {
        let (mut on_device, mut offloaded) = (Vec::new(), Groups::default());
        for (param, moments) in params.iter_mut().zip(&mut self.moments) {
            if param.slice().is_empty() {
                continue;
            }
            let mut updated = Updated { param, moments };
            match updated
                .tensors()
                .iter()
                .filter(|tensor| tensor.memory_kind() == MemoryKind::Host)
                .map(|t| t.bytes())
                .sum()
            {
                0 => on_device.push(updated),
                bytes => offloaded.push(updated, bytes),
            }
        }
        // Parameters on the device are updated in slices that overlap with the transfers.
        let slice = on_device.len().div_ceil(offloaded.groups.len() + 1).max(1);
        let mut slices = on_device.chunks_mut(slice);
        let mut groups = offloaded.groups.into_iter();
        let mut next = groups.next().map(Arriving::fetch).transpose()?;
        let mut leaving = VecDeque::new();
        while let Some(Arriving { mut group, transfer }) = next {
            next = groups.next().map(Arriving::fetch).transpose()?;
            update(&self.config, slices.next().unwrap_or_default(), casts, norm, &self.scalars)?;
            transfer.wait()?;
            update(&self.config, &mut group, casts, norm, &self.scalars)?;
            leaving.push_back(HostTransfer::write_back(group.iter_mut().flat_map(Updated::tensors))?);
            if leaving.len() > Groups::LEAVING {
                leaving.pop_front().map_or(Ok(()), HostTransfer::wait)?;
            }
        }
        slices.try_for_each(|rest| update(&self.config, rest, casts, norm, &self.scalars))?;
        Ok(leaving.into_iter().try_for_each(HostTransfer::wait)?)
    }
}

/// A parameter in an update, with its moments.
struct Updated<'a, 'p> {
    param: &'a mut &'p mut Param,
    moments: &'a mut Moments,
}

impl Updated<'_, '_> {
    /// All that is kept of it, wherever it lies.
    fn tensors(&mut self) -> Vec<&mut Tensor> {
        let (read, kept) = read_and_optimizer_tensors(&mut self.param.weights, self.moments);
        read.into_iter().chain(kept.into_iter().map(|(_, tensor)| tensor)).collect()
    }
}

/// One update of these parameters, in one launch for each way to keep them.
fn update(
    config: &AdamWConfig,
    params: &mut [Updated],
    casts: &mut Casts,
    norm: &Tensor,
    scalars: &AdamWScalars,
) -> Result<()> {
    let next = params.iter_mut().map(|updated| updated.param.begin_update(casts)).collect::<Result<Vec<_>>>()?;
    let mut parameters = Vec::with_capacity(params.len());
    for (Updated { param, moments }, next) in params.iter_mut().zip(&next) {
        // As in Hugging Face's trainer, norms and biases do not decay.
        let weight_decay = if param.is_matrix() { config.weight_decay } else { 0.0 };
        let (seed, offset) = (param.seed(), param.slice().start);
        let (weight, cast, grad) = param.for_update(next)?;
        parameters.push(AdamWParameter { weight, moments, grad, weight_decay, seed, offset, cast });
    }
    adamw(&mut parameters, casts.statistics(), norm, scalars)?;
    params.iter_mut().try_for_each(|updated| updated.param.finish_update(casts))
}

/// Parameters of which something lies in the host's memory, in groups that are fetched at once.
#[derive(Default)]
struct Groups<'a, 'p> {
    groups: Vec<Vec<Updated<'a, 'p>>>,
    /// In the last group.
    bytes: usize,
}

impl<'a, 'p> Groups<'a, 'p> {
    /// Bytes that cross the bus at once, where a single parameter has no more: enough that starting copies costs nothing, and few enough
    /// that two groups on the device are little.
    const BYTES: usize = 256 << 20;
    /// Groups that may be on their way back while another one is updated. Groups are not of one size: with a single one the bus would wait
    /// for large ones.
    const LEAVING: usize = 2;

    fn push(&mut self, updated: Updated<'a, 'p>, bytes: usize) {
        if self.groups.is_empty() || self.bytes + bytes > Groups::BYTES {
            self.groups.push(Vec::new());
            self.bytes = 0;
        }
        self.bytes += bytes;
        self.groups.last_mut().expect("there is one now").push(updated);
    }
}

/// A group on its way to the device.
struct Arriving<'a, 'p> {
    group: Vec<Updated<'a, 'p>>,
    transfer: HostTransfer,
}

impl<'a, 'p> Arriving<'a, 'p> {
    fn fetch(mut group: Vec<Updated<'a, 'p>>) -> Result<Arriving<'a, 'p>> {
        let transfer = HostTransfer::fetch(group.iter_mut().flat_map(Updated::tensors))?;
        Ok(Arriving { group, transfer })
    }
}

fn zeros(param: &Param) -> Result<Moments> {
    let (device, shape, home) = (param.weights.device(), &param.update_shape(), param.home);
    let zeros = |dtype| Tensor::zeros_in(device, shape, dtype, home);
    let scaled = |dtype| ScaledTensor::zeros(device, shape, dtype, home);
    let expanded = || ExpandedTensor::zeros(device, shape, home);
    Ok(match param.formats.states {
        States::Float32 => Moments::Plain { m: zeros(DType::F32)?, v: zeros(DType::F32)? },
        States::Bfloat16 => Moments::Plain { m: zeros(DType::BF16)?, v: zeros(DType::BF16)? },
        States::Float8 => Moments::Scaled { m: scaled(DType::E4M3)?, v: scaled(DType::F16)? },
        States::Coat => Moments::Expanded { m: expanded()?, v: expanded()? },
    })
}

/// What an optimizer keeps of a parameter beside the weights that layers read, by kind.
pub fn optimizer_tensors<'a>(
    weights: &'a mut Weights,
    moments: &'a mut Moments,
) -> Vec<(&'static str, &'a mut Tensor)> {
    read_and_optimizer_tensors(weights, moments).1
}

/// The weights as layers read them, where they are kept as such, and [`optimizer_tensors`].
fn read_and_optimizer_tensors<'a>(
    weights: &'a mut Weights,
    moments: &'a mut Moments,
) -> (Option<&'a mut Tensor>, Vec<(&'static str, &'a mut Tensor)>) {
    let (read, master) = weights.tensors_mut();
    let mut kept = match master {
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
    (read, kept)
}
