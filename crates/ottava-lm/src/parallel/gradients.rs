//! The reduction of gradients over ranks, which begins while backward makes them.

use super::partition::{Partition, Zero, is_matrix};
use crate::error::Result;
use crate::param::{Grad, GradientSink, Param};
use crate::scaling::ScalingState;
use ottava_tensor::comm::{Comm, Pending, Reduce};
use ottava_tensor::ops::add;
use ottava_tensor::{DType, Tensor};
use std::collections::VecDeque;
use std::mem;

/// Reductions in progress: a further one would only hold memory.
const OPEN: usize = 2;

/// The gradients of a step, from the first micro-batch to the update.
///
/// The matrices of a unit have their gradients in one buffer. When the last micro-batch has added to it, it is summed over ranks: whole
/// where every rank updates everything, else by slices, each for the rank that updates it.
pub struct Reduction<'a> {
    partition: &'a Partition,
    /// Whether the micro-batch in progress is the step's last one.
    last: bool,
    open: VecDeque<(usize, Pending)>,
    /// Sums by unit: a buffer, or this rank's slice of it.
    sums: Vec<Option<Tensor>>,
}

impl<'a> Reduction<'a> {
    /// The reduction of the gradients of a step that begins.
    pub fn new(partition: &'a Partition) -> Reduction<'a> {
        Reduction { partition, last: false, open: VecDeque::new(), sums: Vec::new() }
    }

    /// The micro-batch that begins is the last one of the step.
    pub fn expect_last(&mut self) {
        self.last = true;
    }

    fn one_rank(&self) -> bool {
        self.partition.ranks().size() == 1
    }

    /// Waits for the oldest reduction.
    fn settle(&mut self) -> Result<()> {
        let Some((unit, pending)) = self.open.pop_front() else { return Ok(()) };
        let sum = pending.wait()?;
        if self.sums.len() <= unit {
            self.sums.resize(unit + 1, None);
        }
        self.sums[unit] = Some(match self.sums[unit].take() {
            Some(before) => add(&before, &sum)?,
            None => sum,
        });
        Ok(())
    }

    /// Ends the reductions: each of `params` has its gradient, or that of its slice, and the amaxes of the step are those of all ranks.
    pub fn finish(mut self, mut params: Vec<&mut Param>, scaling: &mut ScalingState) -> Result<()> {
        if self.one_rank() {
            return Ok(());
        }
        let comm = self.partition.ranks().comm();
        let amaxes = scaling.amaxes_mut();
        let empty = Tensor::empty(amaxes.device(), &[0], DType::F32)?;
        let merged = comm.all_reduce("amaxes of casts", Reduce::Max, mem::replace(amaxes, empty))?;
        let vectors = Vectors::reduce(&mut params, comm)?;
        while !self.open.is_empty() {
            self.settle()?;
        }
        for (unit, (sum, matrices)) in self.sums.into_iter().zip(self.partition.by_unit(&mut params)).enumerate() {
            let sum = sum.expect("backward makes the gradients of all units");
            let slices = &self.partition.at(unit).slices;
            match self.partition.zero() {
                Zero::Nothing => {
                    for (param, part) in matrices.into_iter().zip(sum.split(slices.matrices())?) {
                        param.grad = Some(Grad::Plain(part.reshape(param.weights.shape())?));
                    }
                }
                Zero::OptimizerStates | Zero::Gradients => {
                    let first = self.partition.ranks().rank() * slices.slice_len();
                    for (param, matrix) in matrices.into_iter().zip(slices.matrices()) {
                        let owned = param.slice();
                        if !owned.is_empty() {
                            let start = matrix.start + owned.start - first;
                            let slice = sum.rows(start, start + owned.len())?;
                            param.grad = Some(Grad::Plain(slice.reshape(&param.update_shape())?));
                        }
                    }
                }
            }
        }
        vectors.finish(&mut params)?;
        *amaxes = merged.wait()?;
        Ok(())
    }
}

impl GradientSink for Reduction<'_> {
    fn begin(&mut self, params: &mut [&mut Param]) -> Result<()> {
        let Some((unit, matrices)) = self.partition.unit(params) else { return Ok(()) };
        if matrices[0].has_grad() {
            return Ok(());
        }
        let slices = &self.partition.at(unit).slices;
        let dtype = matrices[0].grad_dtype().expect("gradients with scales are refused");
        let device = matrices[0].weights.device().clone();
        let _scope = device.scope("gradients");
        let parts = Tensor::empty(&device, &[slices.padded_len()], dtype)?.split(slices.matrices())?;
        for (param, part) in matrices.into_iter().zip(parts) {
            let place = part.reshape(param.weights.shape())?;
            param.place_grad(place);
        }
        Ok(())
    }

    fn end(&mut self, params: &mut [&mut Param]) -> Result<()> {
        let zero = self.partition.zero();
        if !self.last && zero < Zero::Gradients {
            return Ok(());
        }
        let Some((unit, matrices)) = self.partition.unit(params) else { return Ok(()) };
        let buffer = Tensor::join(matrices.into_iter().map(|param| plain(param.grad.take())).collect())?;
        let (ranks, of) = (self.partition.ranks(), self.partition.at(unit));
        let pending = match zero {
            Zero::Nothing => ranks.comm().all_reduce(of.name(), Reduce::Sum, buffer)?,
            Zero::OptimizerStates | Zero::Gradients => {
                let slice = {
                    let _scope = buffer.device().scope("gradients");
                    Tensor::empty(buffer.device(), &[of.slices.slice_len()], buffer.dtype())?
                };
                ranks.comm().reduce_scatter(of.name(), &buffer, slice)?
            }
        };
        self.open.push_back((unit, pending));
        if self.open.len() == OPEN { self.settle() } else { Ok(()) }
    }
}

fn plain(grad: Option<Grad>) -> Tensor {
    match grad {
        Some(Grad::Plain(grad)) => grad,
        Some(Grad::Scaled(_)) | None => unreachable!("backward has made it, and gradients with scales are refused"),
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
        params.iter_mut().map(|param| &mut **param).filter(|param| !is_matrix(param))
    }
}
