//! What ranks exchange in a pass: slices of weights before a unit runs, and gradients while backward makes them.

use super::partition::Partition;
use super::reduction::ReduceFormat;
use super::unit::{Stored, Unit};
use super::zero::Zero;
use crate::error::{Error, Result};
use crate::param::scopes::GRADIENTS;
use crate::param::{Direction, Fetched, FetchedWeight, Grad, Param, Units};
use crate::scaling::ScalingState;
use ottava_tensor::comm::{Comm, Pending, Reduce};
use ottava_tensor::ops::{
    CodingError, add, decode_gradients, encode_gradients, gradient_code_bytes, sum_gradient_codes,
};
use ottava_tensor::{DType, Tensor};
use std::collections::{HashMap, VecDeque};
use std::mem;

/// The weights of a pass on their way to this rank, and the gradients of a step on their way from it.
///
/// The matrices of a unit have their gradients in one buffer. When a backward that reduces has added to it, it is summed over ranks: whole
/// where every rank updates everything, else by slices, each for the rank that updates it. FP8 codes are exchanged by slices, added, and
/// where every rank updates everything cast once more and gathered.
pub struct Exchange<'a> {
    partition: &'a Partition,
    /// Gathers in progress, by unit.
    gathers: HashMap<usize, Pending>,
    /// Whether gradients are reduced, and not left where they are made.
    reduces: bool,
    /// Whether the reductions start in the backward that runs.
    reduces_now: bool,
    open: VecDeque<Reduction>,
    /// Sums by unit: a buffer, or this rank's slice of it.
    sums: Vec<Option<Tensor>>,
    /// Of gradients that are exchanged as FP8 codes.
    error: Option<CodingError>,
}

/// The gradients of a unit on their way.
struct Reduction {
    unit: usize,
    pending: Pending,
    stage: Stage,
    /// Type of the sum.
    dtype: DType,
}

/// What a collective brings.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The sum.
    Sum,
    /// Codes of this rank's slice from all ranks.
    Codes,
    /// Codes of the sum.
    CodesOfSum,
}

impl<'a> Exchange<'a> {
    /// The exchange of a step, from the first micro-batch to the update.
    pub fn of_step(partition: &'a Partition) -> Exchange<'a> {
        let mut exchange = Exchange::of_weights(partition);
        exchange.reduces = partition.ranks().size() > 1;
        exchange
    }

    /// The exchange of passes whose gradients, if they have any, stay on their rank.
    pub fn of_weights(partition: &'a Partition) -> Exchange<'a> {
        let (gathers, open, sums) = (HashMap::new(), VecDeque::new(), Vec::new());
        Exchange { partition, gathers, reduces: false, reduces_now: false, open, sums, error: None }
    }

    /// Whether the coming backward starts to reduce the gradients of each unit to which it has added.
    pub fn reduce_after_backward(&mut self, reduces: bool) {
        self.reduces_now = reduces;
    }

    /// Starts to sum the gradients of unit number `i` over ranks.
    fn reduce(&mut self, i: usize, unit: &mut Unit, gradients: Tensor) -> Result<()> {
        let (ranks, device, dtype) = (self.partition.ranks(), gradients.device().clone(), gradients.dtype());
        let _scope = device.scope(GRADIENTS);
        let (pending, stage) = match (self.partition.reduction(), self.partition.zero()) {
            (ReduceFormat::Float8 { .. }, _) => {
                let error = match &mut self.error {
                    Some(error) => error,
                    none => none.insert(CodingError::new(&device)?),
                };
                let codes = encode_gradients(&gradients, ranks.size(), unit.feedback.as_mut(), error)?;
                let received = Tensor::empty(&device, codes.shape(), codes.dtype())?;
                (ranks.comm().all_to_all(unit.name(), &codes, received)?, Stage::Codes)
            }
            (ReduceFormat::Stored, Zero::Nothing) => {
                (ranks.comm().all_reduce(unit.name(), Reduce::Sum, gradients)?, Stage::Sum)
            }
            (ReduceFormat::Stored, _) => {
                let slice = Tensor::empty(&device, &[unit.slices.slice_len()], dtype)?;
                (ranks.comm().reduce_scatter(unit.name(), &gradients, slice)?, Stage::Sum)
            }
        };
        self.open.push_back(Reduction { unit: i, pending, stage, dtype });
        Ok(())
    }

    /// Collectives that each unit's gradients take.
    fn stages(&self) -> usize {
        match (self.partition.reduction(), self.partition.zero()) {
            (ReduceFormat::Float8 { .. }, Zero::Nothing) => 2,
            _ => 1,
        }
    }

    /// Waits for the oldest collective of gradients.
    fn settle(&mut self, units: &[Unit]) -> Result<()> {
        let Some(Reduction { unit: i, pending, stage, dtype }) = self.open.pop_front() else { return Ok(()) };
        let (unit, ranks, arrived) = (&units[i], self.partition.ranks(), pending.wait()?);
        let _scope = arrived.device().clone().scope(GRADIENTS);
        let slice = unit.slices.slice_len();
        let sum = match stage {
            Stage::Sum => arrived,
            Stage::Codes => {
                let sum = sum_gradient_codes(&arrived, slice, dtype)?;
                drop(arrived);
                if self.partition.zero() == Zero::Nothing {
                    let error = self.error.as_mut().expect("made for the first codes");
                    let codes = encode_gradients(&sum, 1, None, error)?;
                    let shape = [ranks.size(), gradient_code_bytes(slice)];
                    let mut all = Tensor::empty(codes.device(), &shape, codes.dtype())?;
                    all.copy_from(ranks.rank(), &codes)?;
                    let pending = ranks.comm().all_gather(unit.name(), all)?;
                    self.open.push_back(Reduction { unit: i, pending, stage: Stage::CodesOfSum, dtype });
                    return Ok(());
                }
                sum
            }
            Stage::CodesOfSum => decode_gradients(&arrived, slice, dtype)?,
        };
        if self.sums.len() <= i {
            self.sums.resize(i + 1, None);
        }
        self.sums[i] = Some(match self.sums[i].take() {
            Some(before) => add(&before, &sum)?,
            None => sum,
        });
        Ok(())
    }

    /// Ends the reductions: each of `params` has its gradient, or that of its slice, and the amaxes of the step are those of all ranks.
    /// Returns the relative error of what this rank sent as FP8 codes, F32 `[1]`.
    pub fn finish(&mut self, mut params: Vec<&mut Param>, scaling: &mut ScalingState) -> Result<Option<Tensor>> {
        if !self.reduces {
            return Ok(None);
        }
        let comm = self.partition.ranks().comm();
        let amaxes = scaling.amaxes_mut();
        let empty = Tensor::empty(amaxes.device(), &[0], DType::F32)?;
        let merged = comm.all_reduce("amaxes of casts", Reduce::Max, mem::replace(amaxes, empty))?;
        let vectors = Vectors::reduce(&mut params, comm)?;
        let units = self.partition.units();
        while !self.open.is_empty() {
            self.settle(&units)?;
        }
        for (sum, unit) in mem::take(&mut self.sums).into_iter().zip(units.iter()) {
            let sum = sum.expect("backward makes the gradients of all units");
            let matrices = unit.among(&mut params).expect("the model has all units");
            if self.partition.zero() == Zero::Nothing {
                for (param, part) in matrices.into_iter().zip(sum.split(unit.slices.matrices())?) {
                    param.grad = Some(Grad::Plain(part.reshape(param.weights.shape())?));
                }
                continue;
            }
            let first = self.partition.ranks().rank() * unit.slices.slice_len();
            for (param, matrix) in matrices.into_iter().zip(unit.slices.matrices()) {
                let owned = param.slice();
                if !owned.is_empty() {
                    let start = matrix.start + owned.start - first;
                    let slice = sum.rows(start, start + owned.len())?;
                    param.grad = Some(Grad::Plain(slice.reshape(&param.update_shape())?));
                }
            }
        }
        drop(units);
        vectors.finish(&mut params)?;
        *amaxes = merged.wait()?;
        self.error.take().map(|error| Ok(error.relative()?)).transpose()
    }
}

impl Drop for Exchange<'_> {
    /// Puts back what a pass that failed did not fetch.
    fn drop(&mut self) {
        let mut units = self.partition.units();
        for (unit, gather) in self.gathers.drain() {
            // A failure of the group is reported by what failed before.
            if let (Ok(buffer), false) = (gather.wait(), self.partition.zero() == Zero::Weights) {
                units[unit].weights = Stored::Buffer(buffer);
            }
        }
    }
}

impl Units for Exchange<'_> {
    fn start(&mut self, params: &[&Param]) -> Result<()> {
        if !self.partition.divides() {
            return Ok(());
        }
        let ranks = self.partition.ranks();
        for (i, unit) in self.partition.units().iter_mut().enumerate() {
            if !unit.has_any(params) {
                continue;
            }
            let buffer = match mem::take(&mut unit.weights) {
                Stored::Buffer(buffer) => buffer,
                Stored::Slice(slice) => {
                    let mut buffer = Tensor::empty(slice.device(), &[unit.slices.padded_len()], slice.dtype())?;
                    buffer.copy_from(ranks.rank() * unit.slices.slice_len(), &slice)?;
                    unit.weights = Stored::Slice(slice);
                    buffer
                }
                other => {
                    unit.weights = other;
                    continue;
                }
            };
            self.gathers.insert(i, ranks.comm().all_gather(unit.name(), buffer)?);
        }
        Ok(())
    }

    fn fetch(&mut self, params: &[&Param], direction: Direction) -> Result<Fetched> {
        let mut fetched = Fetched::default();
        if !self.partition.divides() {
            return Ok(fetched);
        }
        for (i, unit) in self.partition.units().iter_mut().enumerate() {
            if !unit.has_any(params) {
                continue;
            }
            let arrived = match self.gathers.remove(&i) {
                Some(gather) => Some(gather.wait()?.split(unit.slices.matrices())?),
                None => None,
            };
            let parts = match (&unit.weights, &arrived) {
                (Stored::Gathered(parts), _) | (_, Some(parts)) => parts,
                _ => {
                    let words = format!("the gather of {} was lost", unit.name());
                    return Err(Error::Rank { rank: self.partition.ranks().rank(), words });
                }
            };
            for param in params {
                let Some(at) = unit.matrix(param.name()) else { continue };
                let part = parts[at].clone();
                let weight = match &unit.casts[at] {
                    Some(cast) => {
                        FetchedWeight::Codes(param.gathered_codes(part, cast, direction == Direction::Backward)?)
                    }
                    None => FetchedWeight::Value(part.reshape(param.weights.shape())?),
                };
                fetched.add(param.name(), weight);
            }
            if let (Some(parts), false) = (arrived, self.partition.zero() == Zero::Weights) {
                unit.weights = Stored::Gathered(parts);
            }
        }
        Ok(fetched)
    }

    fn begin_gradients(&mut self, params: &mut [&mut Param]) -> Result<()> {
        if !self.reduces {
            return Ok(());
        }
        for unit in self.partition.units().iter() {
            let Some(matrices) = unit.among(params).filter(|matrices| !matrices[0].has_grad()) else { continue };
            let dtype = matrices[0].grad_dtype().expect("ranks keep sums");
            let device = matrices[0].weights.device().clone();
            let _scope = device.scope(GRADIENTS);
            let mut buffer = Tensor::empty(&device, &[unit.slices.padded_len()], dtype)?;
            if self.partition.sends_codes() {
                // Groups of values with one scale may end in padding.
                for gap in unit.slices.padding() {
                    buffer.copy_from(gap.start, &Tensor::zeros(&device, &[gap.len()], dtype)?)?;
                }
            }
            for (param, part) in matrices.into_iter().zip(buffer.split(unit.slices.matrices())?) {
                let place = part.reshape(param.weights.shape())?;
                param.place_grad(place);
            }
        }
        Ok(())
    }

    fn end_gradients(&mut self, params: &mut [&mut Param]) -> Result<()> {
        if !self.reduces || !self.reduces_now {
            return Ok(());
        }
        let mut units = self.partition.units();
        let (stages, mut due) = (self.stages(), 0);
        for (i, unit) in units.iter_mut().enumerate() {
            let Some(matrices) = unit.among(params) else { continue };
            let gradients = Tensor::join(matrices.into_iter().map(|param| plain(param.grad.take())).collect())?;
            self.reduce(i, unit, gradients)?;
            due += stages;
        }
        // One unit at a time is in each stage: more would only hold memory.
        for _ in 0..due {
            if self.open.len() > stages {
                self.settle(&units)?;
            }
        }
        Ok(())
    }
}

fn plain(grad: Option<Grad>) -> Tensor {
    match grad {
        Some(Grad::Plain(grad)) => grad,
        Some(Grad::Scaled(_)) | None => unreachable!("backward has made it, and ranks keep sums"),
    }
}

/// The gradients of all vectors on their way, in one buffer.
struct Vectors(Option<Pending>);

impl Vectors {
    /// Sums the gradients of the vectors among `params` over ranks.
    fn reduce(params: &mut [&mut Param], comm: &Comm) -> Result<Vectors> {
        let grads: Vec<_> = Vectors::of(params).map(|param| plain(param.grad.take())).collect();
        let Some(first) = grads.first() else { return Ok(Vectors(None)) };
        let mut all = Tensor::empty(first.device(), &[grads.iter().map(Tensor::len).sum()], first.dtype())?;
        let mut start = 0;
        for grad in &grads {
            all.copy_from(start, grad)?;
            start += grad.len();
        }
        Ok(Vectors(Some(comm.all_reduce("gradients of vectors", Reduce::Sum, all)?)))
    }

    /// Gives each its sum.
    fn finish(self, params: &mut [&mut Param]) -> Result<()> {
        let Some(pending) = self.0 else { return Ok(()) };
        let (all, mut start) = (pending.wait()?, 0);
        for param in Vectors::of(params) {
            let end = start + param.weights.shape()[0];
            param.grad = Some(Grad::Plain(all.rows(start, end)?));
            start = end;
        }
        Ok(())
    }

    fn of<'a>(params: &'a mut [&mut Param]) -> impl Iterator<Item = &'a mut Param> {
        params.iter_mut().map(|param| &mut **param).filter(|param| !param.is_matrix())
    }
}
