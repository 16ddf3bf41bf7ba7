//! AdamW over all parameters of a model: in one go what lies on the device, and then, group by group, what is fetched from the host's
//! memory and written back beside it.

use crate::error::Result;
use crate::level::States;
use crate::param::{Grad, Master, Param, Weights};
use crate::scaling::{Casts, NextCast};
use ottava_tensor::ops::{AdamW, AdamWParameter, AdamWScalars, Moments, adamw, adamw_amaxes, global_norm};
use ottava_tensor::{DType, ExpandedTensor, HostTransfer, MemoryKind, ScaledTensor, Tensor, discard_mirrors};
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
        let grads: Vec<_> = params.iter().filter_map(|p| p.gradient.get()).map(Grad::read).collect();
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

    /// The amaxes from which [`AdamWOptimizer::step`] would find the scales of master weights and moments, of the elements that this process
    /// has: F32 `[3 · n]` for `n` parameters with such formats; `None` without any. Changes nothing else.
    ///
    /// Where the elements are slices, the maximum over all of a parameter's slices is that of the whole. What lies in the host's memory is
    /// fetched for it, and again for the step.
    pub fn amaxes(&mut self, params: &mut [&mut Param], norm: &Tensor) -> Result<Option<Tensor>> {
        let Some(mut amaxes) = zero_amaxes(params)? else { return Ok(None) };
        let AdamWOptimizer { config, moments, scalars, .. } = self;
        let scaled = updated(params, moments, &mut amaxes).filter(|updated| updated.amaxes.is_some());
        in_groups(scaled, discard, |group| {
            let parameters = group.iter_mut().map(|updated| updated.parameter(config, &None));
            Ok(adamw_amaxes(&mut parameters.collect::<Result<Vec<_>>>()?, norm, scalars)?)
        })?;
        Ok(Some(Tensor::join(amaxes)?))
    }

    /// One update of `params`, of which the first is number `start` of the model, with gradients clipped by `norm` from
    /// [`AdamWOptimizer::grad_norm`]; a norm that is not finite changes no weight. The new weights are cast for the products of the next
    /// step: where the scale is known, in the same pass.
    ///
    /// `amaxes` are those of [`AdamWOptimizer::amaxes`] for whole parameters of which these are slices. Without them they are found here.
    pub fn step(
        &mut self,
        params: &mut [&mut Param],
        start: usize,
        casts: &mut Casts,
        norm: &Tensor,
        amaxes: Option<Tensor>,
    ) -> Result<()> {
        let known = amaxes.is_some();
        let mut amaxes = match amaxes {
            Some(amaxes) => by_parameter(amaxes)?,
            None => zero_amaxes(params)?.unwrap_or_default(),
        };
        let AdamWOptimizer { config, moments, scalars, .. } = self;
        in_groups(updated(params, &mut moments[start..], &mut amaxes), write_back, |group| {
            let next = group.iter_mut().map(|updated| updated.param.begin_update(casts)).collect::<Result<Vec<_>>>()?;
            let parameters = group.iter_mut().zip(&next).map(|(updated, next)| updated.parameter(config, next));
            let mut parameters = parameters.collect::<Result<Vec<_>>>()?;
            if !known {
                adamw_amaxes(&mut parameters, norm, scalars)?;
            }
            adamw(&mut parameters, casts.statistics(), norm, scalars)?;
            group.iter_mut().try_for_each(|updated| updated.param.finish_update(casts))
        })
    }
}

/// Zeros `[3]` for each parameter whose master weights or moments have one scale; `None` without any.
fn zero_amaxes(params: &[&mut Param]) -> Result<Option<Vec<Tensor>>> {
    let count = params.iter().filter(|param| param.formats.has_scales()).count();
    match count {
        0 => Ok(None),
        _ => Ok(Some(by_parameter(Tensor::zeros(params[0].weights.device(), &[3 * count], DType::F32)?)?)),
    }
}

/// A tensor of each parameter's three amaxes.
fn by_parameter(amaxes: Tensor) -> Result<Vec<Tensor>> {
    let places: Vec<_> = (0..amaxes.len()).step_by(3).map(|start| start..start + 3).collect();
    Ok(amaxes.split(&places)?)
}

/// A parameter in an update, with its moments, and its amaxes if it has scales.
struct Updated<'a, 'p> {
    param: &'a mut &'p mut Param,
    moments: &'a mut Moments,
    amaxes: Option<&'a mut Tensor>,
}

/// The parameters of which this process updates something.
fn updated<'a, 'p>(
    params: &'a mut [&'p mut Param],
    moments: &'a mut [Moments],
    amaxes: &'a mut [Tensor],
) -> impl Iterator<Item = Updated<'a, 'p>> {
    let mut amaxes = amaxes.iter_mut();
    let with_amaxes = params.iter_mut().zip(moments).map(move |(param, moments)| {
        let amaxes = if param.formats.has_scales() { amaxes.next() } else { None };
        Updated { param, moments, amaxes }
    });
    with_amaxes.filter(|updated| !updated.param.slice().is_empty())
}

impl Updated<'_, '_> {
    /// All that is kept of it, wherever it lies.
    fn tensors(&mut self) -> Vec<&mut Tensor> {
        let (read, kept) = read_and_optimizer_tensors(&mut self.param.weights, self.moments);
        read.into_iter().chain(kept.into_iter().map(|kept| kept.tensor)).collect()
    }

    fn parameter<'a>(&'a mut self, config: &AdamWConfig, next: &'a Option<NextCast>) -> Result<AdamWParameter<'a>> {
        let Updated { param, moments, amaxes } = self;
        // As in Hugging Face's trainer, norms and biases do not decay.
        let weight_decay = if param.is_matrix() { config.weight_decay } else { 0.0 };
        let (seed, offset) = (param.seed(), param.slice().start);
        let (weight, cast, grad) = param.for_update(next)?;
        Ok(AdamWParameter { weight, moments, grad, weight_decay, seed, offset, amaxes: amaxes.as_deref_mut(), cast })
    }
}

/// Runs `work` on all parameters, in groups: those of which something lies in the host's memory are fetched before, and then they `leave`.
fn in_groups<'a, 'p>(
    all: impl Iterator<Item = Updated<'a, 'p>>,
    leave: fn(Vec<Updated>) -> Result<HostTransfer>,
    mut work: impl FnMut(&mut [Updated<'a, 'p>]) -> Result<()>,
) -> Result<()>
where
    'p: 'a,
{
    let (mut on_device, mut offloaded) = (Vec::new(), Groups::default());
    for mut updated in all {
        let tensors = updated.tensors();
        match tensors.iter().filter(|tensor| tensor.memory_kind() == MemoryKind::Host).map(|t| t.bytes()).sum() {
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
        work(slices.next().unwrap_or_default())?;
        transfer.wait()?;
        work(&mut group)?;
        leaving.push_back(leave(group)?);
        if leaving.len() > Groups::LEAVING {
            leaving.pop_front().map_or(Ok(()), HostTransfer::wait)?;
        }
    }
    slices.try_for_each(work)?;
    Ok(leaving.into_iter().try_for_each(HostTransfer::wait)?)
}

fn write_back(mut group: Vec<Updated>) -> Result<HostTransfer> {
    Ok(HostTransfer::write_back(group.iter_mut().flat_map(Updated::tensors))?)
}

fn discard(mut group: Vec<Updated>) -> Result<HostTransfer> {
    discard_mirrors(group.iter_mut().flat_map(Updated::tensors));
    Ok(HostTransfer::default())
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

/// A tensor that an optimizer keeps of a parameter.
pub struct Kept<'a> {
    /// Its name without that of the parameter.
    pub kind: &'static str,
    /// What its values belong to.
    pub per: Per,
    /// The values of the parameter, or of a slice of it.
    pub tensor: &'a mut Tensor,
}

/// What a value of an optimizer's tensor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Per {
    /// An element of the parameter.
    Element,
    /// A group of [`ExpandedTensor::GROUP`] elements of a row, which has three.
    Group,
    /// The whole parameter, so that all its slices have the same.
    Parameter,
}

/// What an optimizer keeps of a parameter beside the weights that layers read.
pub fn optimizer_tensors<'a>(weights: &'a mut Weights, moments: &'a mut Moments) -> Vec<Kept<'a>> {
    read_and_optimizer_tensors(weights, moments).1
}

/// The weights as layers read them, where they are kept as such, and [`optimizer_tensors`].
fn read_and_optimizer_tensors<'a>(
    weights: &'a mut Weights,
    moments: &'a mut Moments,
) -> (Option<&'a mut Tensor>, Vec<Kept<'a>>) {
    use Per::{Element, Group, Parameter};
    let (read, master) = weights.tensors_mut();
    let mut kept = match master {
        None => vec![],
        Some(Master::Full(master)) => vec![("master", Element, master)],
        Some(Master::Scaled(master)) => {
            vec![("master", Element, &mut master.values), ("master_scale_inv", Parameter, &mut master.scale_inv)]
        }
        Some(Master::Rest(rest)) => vec![("master_rest", Element, rest)],
    };
    match moments {
        Moments::Plain { m, v } => kept.extend([("m", Element, m), ("v", Element, v)]),
        Moments::Scaled { m, v } => {
            kept.extend([("m", Element, &mut m.values), ("m_scale_inv", Parameter, &mut m.scale_inv)]);
            kept.extend([("v", Element, &mut v.values), ("v_scale_inv", Parameter, &mut v.scale_inv)]);
        }
        Moments::Expanded { m, v } => {
            kept.extend([("m", Element, &mut m.codes), ("m_groups", Group, &mut m.groups)]);
            kept.extend([("v", Element, &mut v.codes), ("v_groups", Group, &mut v.groups)]);
        }
    }
    (read, kept.into_iter().map(|(kind, per, tensor)| Kept { kind, per, tensor }).collect())
}
