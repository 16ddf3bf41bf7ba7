//! ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054): which rank keeps and updates which part of a model's matrices.
//!
//! Each rank trains the whole model on rows of its own. Vectors (norms, biases) are so small that every rank updates all of them.

use super::DataParallel;
use super::slices::Slices;
use crate::error::{Error, Result};
use crate::mode::Mode;
use crate::models::Decoder;
use crate::optim::AdamWOptimizer;
use crate::param::{Grad, Param};
use crate::scaling::Casts;
use ottava_tensor::ops::{root_of_sum, sum_of_squares};
use ottava_tensor::{DType, Tensor};
use serde::{Deserialize, Serialize};
use std::rc::Rc;

/// What ranks divide among each other instead of keeping all of it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Deserialize, Serialize)]
#[serde(try_from = "u8", into = "u8")]
pub enum Zero {
    /// Nothing.
    #[default]
    Nothing,
    /// Master weights and moments, and gradients once all micro-batches of a step have been added.
    OptimizerStates,
    /// Gradients of each micro-batch, too.
    Gradients,
}

impl TryFrom<u8> for Zero {
    type Error = String;

    fn try_from(stage: u8) -> Result<Zero, String> {
        [Zero::Nothing, Zero::OptimizerStates, Zero::Gradients]
            .get(usize::from(stage))
            .copied()
            .ok_or(format!("ZeRO stage {stage} is not one of 0, 1, 2"))
    }
}

impl From<Zero> for u8 {
    fn from(zero: Zero) -> u8 {
        zero as u8
    }
}

/// The matrices of a block, of the embedding or of the head in one flat buffer, which one collective serves.
pub(super) struct Unit {
    /// Names of the matrices, in the order of the buffer.
    names: Vec<String>,
    pub(super) slices: Slices,
}

impl Unit {
    /// For messages and the order of collectives.
    pub(super) fn name(&self) -> &str {
        &self.names[0]
    }
}

/// How the ranks of a run divide a model.
pub struct Partition {
    ranks: Rc<DataParallel>,
    zero: Zero,
    /// Of several ranks.
    units: Vec<Unit>,
}

impl Partition {
    /// One rank, which has all.
    pub fn solo() -> Partition {
        Partition { ranks: Rc::new(DataParallel::solo()), zero: Zero::Nothing, units: Vec::new() }
    }

    /// Divides `model` among `ranks`, before its optimizer is made.
    ///
    /// Errors with [`Error::Config`] for formats and placements of weights that cannot be divided.
    pub fn new(model: &mut Decoder, ranks: Rc<DataParallel>, zero: Zero) -> Result<Partition> {
        let mut partition = Partition { zero, units: Vec::new(), ranks };
        if partition.ranks.size() == 1 {
            return Ok(partition);
        }
        for mut params in model.units() {
            let matrices: Vec<_> = matrices(&mut params).collect();
            if matrices.is_empty() {
                continue;
            }
            if matrices.iter().any(|param| param.grad_dtype().is_none()) {
                return Err(Error::Config(
                    "`optimizer.gradient_dtype` is float8, which several ranks do not reduce yet; set it to \"bfloat16\" or \"float32\"".into(),
                ));
            }
            let lengths = matrices.iter().map(|param| param.weights.shape().iter().product());
            let slices = Slices::new(lengths, partition.ranks.size());
            let names = matrices.iter().map(|param| param.name().to_string()).collect();
            let unit = Unit { names, slices };
            if zero >= Zero::OptimizerStates {
                partition.divide(&unit, matrices)?;
            }
            partition.units.push(unit);
        }
        Ok(partition)
    }

    /// Moves the weights of a unit into one buffer, and drops the master weights of other ranks' slices.
    fn divide(&self, unit: &Unit, matrices: Vec<&mut Param>) -> Result<()> {
        if matrices.iter().any(|param| param.is_offloaded()) {
            return Err(Error::Config(
                "`memory.offload_parameters` keeps weights in the host's memory, from where ranks do not gather them; set it to 0, or `parallel.zero` to 0".into(),
            ));
        }
        let (device, dtype) = (matrices[0].weights.device().clone(), matrices[0].dtype());
        let scope = device.scope("weights");
        let flat = Tensor::empty(&device, &[unit.slices.padded_len()], dtype)?;
        drop(scope);
        let parts = flat.split(unit.slices.matrices())?;
        for ((param, mut part), owned) in matrices.into_iter().zip(parts).zip(unit.slices.owned(self.ranks.rank())) {
            param.keep_slice(owned)?;
            let value = param.weights.take_value().expect("formats that store no value are refused");
            part.copy_from(0, &value.reshape(&[value.len()])?)?;
            param.weights.set_value(part.reshape(value.shape())?);
        }
        Ok(())
    }

    /// The ranks.
    pub fn ranks(&self) -> &DataParallel {
        &self.ranks
    }

    /// What they divide.
    pub fn zero(&self) -> Zero {
        self.zero
    }

    /// The unit of these parameters, and those of them that it divides; `None` for one rank and where there are only vectors.
    pub(super) fn unit<'a, 'p>(&self, params: &'a mut [&'p mut Param]) -> Option<(usize, Vec<&'a mut &'p mut Param>)> {
        let matrices: Vec<_> = params.iter_mut().filter(|param| is_matrix(param)).collect();
        let first = matrices.first()?.name().to_string();
        let unit = self.units.iter().position(|unit| *unit.name() == first)?;
        Some((unit, matrices))
    }

    /// The unit with this number.
    pub(super) fn at(&self, unit: usize) -> &Unit {
        &self.units[unit]
    }

    /// The global norm of the reduced gradients of `params`, F32 `[1]`, on all ranks. The sum of squares is F64, of another order than
    /// that of one rank.
    pub fn grad_norm(&self, params: &[&mut Param]) -> Result<Tensor> {
        let (rank, size) = (self.ranks.rank(), self.ranks.size());
        if self.zero == Zero::Nothing || size == 1 {
            return AdamWOptimizer::grad_norm(params);
        }
        // Vectors are the same on all ranks, and counted once.
        let counted = params.iter().filter(|param| param.is_sliced() || rank == 0);
        let grads: Vec<_> = counted.filter_map(|param| param.grad.as_ref()).map(Grad::read).collect();
        let mut sums = Tensor::zeros(params[0].weights.device(), &[size], DType::F64)?;
        if !grads.is_empty() {
            sums.copy_from(rank, &sum_of_squares(&grads)?)?;
        }
        Ok(root_of_sum(&self.ranks.comm().all_gather("gradient norm", sums)?.wait()?)?)
    }

    /// Updates the weights with reduced gradients, each rank its slices, and casts them for the coming step.
    pub fn update(&self, model: &mut Decoder, optimizer: &mut AdamWOptimizer, norm: &Tensor) -> Result<()> {
        let (mut params, scaling) = model.parameters_and_scaling();
        // Scales move on first, so that new weights are cast by them.
        scaling.update()?;
        if self.zero == Zero::Nothing || self.ranks.size() == 1 {
            return optimizer.step(&mut params, &mut scaling.casts(Mode::TRAINING), norm);
        }
        let whole = self.narrow(&mut params)?;
        optimizer.step(&mut params, &mut scaling.casts(Mode::TRAINING), norm)?;
        self.widen(&mut params, whole, &mut scaling.casts(Mode::TRAINING))
    }

    /// The matrices of each unit, of all parameters.
    pub(super) fn by_unit<'a, 'p>(&self, params: &'a mut [&'p mut Param]) -> Vec<Vec<&'a mut &'p mut Param>> {
        let mut matrices = params.iter_mut().filter(|param| is_matrix(param));
        self.units.iter().map(|unit| matrices.by_ref().take(unit.names.len()).collect()).collect()
    }

    /// Leaves each matrix the slice of its weights that this rank updates. Returns the buffers of units of which it updates nothing.
    fn narrow(&self, params: &mut [&mut Param]) -> Result<Vec<Option<Tensor>>> {
        let mut untouched = Vec::with_capacity(self.units.len());
        for (unit, mut matrices) in self.units.iter().zip(self.by_unit(params)) {
            let values = matrices.iter_mut().map(|param| param.weights.take_value().expect("each has weights"));
            let flat = Tensor::join(values.collect())?;
            let owned = unit.slices.owned(self.ranks.rank());
            let mut place = |(matrix, owned): (&std::ops::Range<usize>, &std::ops::Range<usize>)| {
                (!owned.is_empty()).then(|| matrix.start + owned.start..matrix.start + owned.end)
            };
            let places: Vec<_> = unit.slices.matrices().iter().zip(&owned).filter_map(&mut place).collect();
            if places.is_empty() {
                untouched.push(Some(flat));
                continue;
            }
            let parts = flat.split(&places)?;
            let updated = matrices.into_iter().filter(|param| !param.slice().is_empty());
            for (param, part) in updated.zip(parts) {
                param.weights.set_value(part.reshape(&param.update_shape())?);
            }
            untouched.push(None);
        }
        Ok(untouched)
    }

    /// Gathers the slices of all ranks, and casts the weights anew.
    fn widen(&self, params: &mut [&mut Param], untouched: Vec<Option<Tensor>>, casts: &mut Casts) -> Result<()> {
        let mut gathers = Vec::with_capacity(self.units.len());
        for ((unit, mut matrices), untouched) in self.units.iter().zip(self.by_unit(params)).zip(untouched) {
            let flat = match untouched {
                Some(flat) => flat,
                None => Tensor::join(matrices.iter_mut().filter_map(|param| param.weights.take_value()).collect())?,
            };
            gathers.push(self.ranks.comm().all_gather(unit.name(), flat)?);
        }
        for ((unit, matrices), gather) in self.units.iter().zip(self.by_unit(params)).zip(gathers) {
            let parts = gather.wait()?.split(unit.slices.matrices())?;
            for (param, part) in matrices.into_iter().zip(parts) {
                let value = part.reshape(param.weights.shape())?;
                param.weights.set_value(value);
                drop(part);
                param.quantize(casts)?;
            }
        }
        Ok(())
    }
}

pub(super) fn is_matrix(param: &Param) -> bool {
    param.weights.shape().len() > 1
}

fn matrices<'a>(params: &'a mut [&mut Param]) -> impl Iterator<Item = &'a mut Param> {
    params.iter_mut().map(|param| &mut **param).filter(|param| is_matrix(param))
}
