//! The gradients of tensors that several ranks of the tensor axis have: all of them, or those with the same key and value heads.

use super::Ranks;
use super::bucket::flat;
use crate::error::Result;
use crate::param::scopes::GRADIENTS;
use crate::param::{Grad, Param};
use ottava_tensor::comm::{Axis, Group, Reduce};
use ottava_tensor::{DType, Tensor};
use std::ops::Range;

impl Ranks {
    /// Sums the gradients of tensors that all ranks of the tensor axis have whole: each rank has the gradient of its tokens or heads. `params`
    /// are the trained parameters, with gradients that are reduced over other axes; a gradient may be that of a slice.
    pub(super) fn sum_whole_gradients(&self, params: &mut [&mut Param]) -> Result<()> {
        let group = self.group(&[Axis::Tensor]);
        if group.size() == 1 {
            return Ok(());
        }
        let mut taken: Vec<_> = params
            .iter_mut()
            .filter(|param| param.is_whole())
            .filter_map(|param| param.gradient.take().map(|grad| (param, plain(grad))))
            .collect();
        // Matrices may have gradients in BF16, and vectors have them in F32.
        while let Some(dtype) = taken.first().map(|(_, grad)| grad.dtype()) {
            let (of_type, others): (Vec<_>, Vec<_>) = taken.into_iter().partition(|(_, grad)| grad.dtype() == dtype);
            taken = others;
            sum_in_one_call(group, dtype, of_type)?;
        }
        Ok(())
    }

    /// Sums the gradients of rows that several ranks of the tensor axis have: each has the gradient by its queries. As
    /// [`Ranks::sum_whole_gradients`]; a gradient may be that of a slice.
    pub(super) fn sum_replicated_gradients(&self, params: &mut [&mut Param]) -> Result<()> {
        let group = self.group(&[Axis::Tensor]);
        for param in params.iter_mut().filter(|param| param.has_replicas()) {
            let pieces: Vec<_> = param.elements_of(|shard| shard.replica.is_divided());
            let Some(grad) = param.gradient.take().map(plain) else { continue };
            let (shape, replicas) = (grad.shape().to_vec(), param.replicas());
            let grad = flat(grad)?;
            let _scope = grad.device().clone().scope(GRADIENTS);
            let length: usize = pieces.iter().map(Range::len).sum();
            // The rows of all heads, to which ranks with other heads add zeros.
            let mut all = Tensor::zeros(grad.device(), &[group.size() / replicas * length], grad.dtype())?;
            let first = group.rank() / replicas * length;
            let mut at = first;
            for piece in &pieces {
                all.copy_from(at, &grad.rows(piece.start, piece.end)?)?;
                at += piece.len();
            }
            let all = group.all_reduce(param.name(), Reduce::Sum, all)?.wait()?;
            let (mut sum, mut at) = (grad.duplicate()?, first);
            for piece in &pieces {
                sum.copy_from(piece.start, &all.rows(at, at + piece.len())?)?;
                at += piece.len();
            }
            param.gradient.set(Grad::Plain(sum.reshape(&shape)?));
        }
        Ok(())
    }
}

/// Sums gradients of type `dtype` over `group`, and gives each to its parameter.
fn sum_in_one_call(group: &Group, dtype: DType, grads: Vec<(&mut &mut Param, Tensor)>) -> Result<()> {
    let device = grads[0].1.device().clone();
    let _scope = device.scope(GRADIENTS);
    let mut all = Tensor::empty(&device, &[grads.iter().map(|(_, grad)| grad.len()).sum()], dtype)?;
    let mut start = 0;
    for (_, grad) in &grads {
        all.copy_from(start, &grad.reshape(&[grad.len()])?)?;
        start += grad.len();
    }
    let all = group.all_reduce("gradients of whole tensors", Reduce::Sum, all)?.wait()?;
    let mut start = 0;
    for (param, grad) in grads {
        let end = start + grad.len();
        param.gradient.set(Grad::Plain(all.rows(start, end)?.reshape(grad.shape())?));
        start = end;
    }
    Ok(())
}

fn plain(grad: Grad) -> Tensor {
    match grad {
        Grad::Plain(grad) => grad,
        Grad::Scaled(_) => unreachable!("a partition keeps the sums of tensors that several ranks have"),
    }
}
