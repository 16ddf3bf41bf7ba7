//! The gradients of elements that several ranks of the tensor axis have: of whole parameters, or of the same rows of a divided parameter.

use crate::Ranks;
use ottava_common::error::Result;
use ottava_recipe::param::scopes::GRADIENTS;
use ottava_recipe::param::{Grad, Param};
use ottava_tensor::Tensor;
use ottava_tensor::comm::{Axis, Group, Reduce};
use std::ops::Range;

impl Ranks {
    /// Sums the gradients of tensors that all ranks of the tensor axis have whole. Each rank has the gradient of its tokens or heads. `params`
    /// are the trained parameters, whose gradients are already reduced over other axes. A gradient may cover only a slice.
    pub(super) fn sum_whole_gradients(&self, params: &mut [&mut Param]) -> Result<()> {
        let group = self.group(&[Axis::Tensor]);
        if group.size() == 1 {
            return Ok(());
        }
        let mut buffers: Vec<Vec<(&mut Param, Tensor)>> = Vec::new();
        for param in params.iter_mut().filter(|param| param.identity.is_whole()) {
            let Some(grad) = param.gradient.take().map(plain) else { continue };
            let fits = |buffer: &&mut Vec<(&mut Param, Tensor)>| {
                let (_, first) = &buffer[0];
                first.dtype() == grad.dtype() && first.len().max(grad.len()) < LARGE
            };
            match buffers.iter_mut().find(fits) {
                Some(buffer) => buffer.push((&mut **param, grad)),
                None => buffers.push(vec![(&mut **param, grad)]),
            }
        }
        buffers.into_iter().try_for_each(|buffer| sum_whole(buffer, group))
    }
}

/// The number of elements from which a gradient is copied to a separate buffer.
const LARGE: usize = 1 << 20;

/// Sums gradients of one type over the ranks of `group`, in one buffer.
fn sum_whole(grads: Vec<(&mut Param, Tensor)>, group: &Group) -> Result<()> {
    let (device, dtype) = (grads[0].1.device().clone(), grads[0].1.dtype());
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

impl Ranks {
    /// Sums the gradients of rows that several ranks of the tensor axis have. Each rank has the gradient from its queries. `params` are as in
    /// [`Ranks::sum_whole_gradients`]. A gradient may cover only a slice.
    pub(super) fn sum_replicated_gradients(&self, params: &mut [&mut Param]) -> Result<()> {
        let group = self.group(&[Axis::Tensor]);
        for param in params.iter_mut().filter(|param| param.identity.replicas() > 1) {
            let pieces: Vec<_> = param.identity.elements_of(param.slice(), |shard| shard.replica.is_divided());
            let Some(grad) = param.gradient.take().map(plain) else { continue };
            let (shape, replicas) = (grad.shape().to_vec(), param.identity.replicas());
            let grad = flat(grad)?;
            let _scope = grad.device().clone().scope(GRADIENTS);
            let length: usize = pieces.iter().map(Range::len).sum();
            // The rows of all heads. Ranks with other heads add zeros.
            let mut all = Tensor::zeros(grad.device(), &[group.size() / replicas * length], grad.dtype())?;
            let first = group.rank() / replicas * length;
            let mut at = first;
            for piece in &pieces {
                all.copy_from(at, &grad.rows(piece.start, piece.end)?)?;
                at += piece.len();
            }
            let all = group.all_reduce(param.identity.name(), Reduce::Sum, all)?.wait()?;
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

fn plain(grad: Grad) -> Tensor {
    match grad {
        Grad::Plain(grad) => grad,
        Grad::Scaled(_) => unreachable!("ranks keep sums of gradients that they add"),
    }
}

/// Returns a tensor that is not shared as a vector.
pub(super) fn flat(tensor: Tensor) -> Result<Tensor> {
    // The argument is dropped, so the result is not shared either.
    Ok(tensor.reshape(&[tensor.len()])?)
}
