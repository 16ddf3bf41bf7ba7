//! Tensor parallelism: the exchange of activations, and the gradients of tensors that all ranks have whole.

use super::Ranks;
use crate::error::Result;
use crate::param::scopes::GRADIENTS;
use crate::param::{Grad, Param};
use crate::tensor_ranks::{ShardPlace, TensorRanks};
use ottava_tensor::Tensor;
use ottava_tensor::comm::{Axis, Group, Reduce};
use ottava_tensor::ops::sum_parts;
use std::rc::Rc;

/// The ranks of the tensor axis.
pub struct TensorAxis(Rc<Ranks>);

impl TensorAxis {
    /// The tensor axis of `ranks`.
    pub fn new(ranks: Rc<Ranks>) -> TensorAxis {
        TensorAxis(ranks)
    }

    fn group(&self) -> &Group {
        self.0.group(&[Axis::Tensor])
    }
}

impl TensorRanks for TensorAxis {
    fn place(&self) -> ShardPlace {
        self.0.tensor_place()
    }

    fn gather(&self, name: &str, rows: &Tensor) -> Result<Tensor> {
        self.0.gather_tensor_rows(name, rows)
    }

    fn sum_own_rows(&self, name: &str, partial: Tensor, addend: Option<&Tensor>) -> Result<Tensor> {
        let [rows, columns] = partial.dims(name)?;
        let group = self.group();
        // A sum of our own is F32, in the order of the ranks, and rounded once together with the addend. NCCL's would round twice.
        let received = Tensor::empty(partial.device(), partial.shape(), partial.dtype())?;
        let parts = group.all_to_all(name, &partial, received)?.wait()?;
        drop(partial);
        Ok(sum_parts(&parts.reshape(&[group.size(), rows / group.size(), columns])?, addend)?)
    }

    fn sum(&self, name: &str, x: Tensor) -> Result<Tensor> {
        Ok(self.group().all_reduce(name, Reduce::Sum, x)?.wait()?)
    }

    fn largest(&self, name: &str, x: Tensor) -> Result<Tensor> {
        Ok(self.group().all_reduce(name, Reduce::Max, x)?.wait()?)
    }
}

impl Ranks {
    /// The rows of all ranks of the tensor axis, in their order.
    pub(super) fn gather_tensor_rows(&self, name: &str, rows: &Tensor) -> Result<Tensor> {
        let (group, own) = (self.group(&[Axis::Tensor]), rows.shape()[0]);
        if group.size() == 1 {
            return Ok(rows.clone());
        }
        let mut shape = rows.shape().to_vec();
        shape[0] *= group.size();
        let mut all = Tensor::empty(rows.device(), &shape, rows.dtype())?;
        all.copy_from(group.rank() * own, rows)?;
        Ok(group.all_gather(name, all)?.wait()?)
    }

    /// Sums the gradients of tensors that all ranks of the tensor axis have whole: each rank has the gradient of its tokens or heads. `params`
    /// are the trained parameters, with gradients that are reduced over other axes.
    pub(super) fn sum_whole_gradients(&self, params: &mut [&mut Param]) -> Result<()> {
        let group = self.group(&[Axis::Tensor]);
        if group.size() == 1 {
            return Ok(());
        }
        let mut whole: Vec<_> = params.iter_mut().filter(|param| param.is_whole()).collect();
        let taken: Vec<_> = whole.iter_mut().map(|param| param.gradient.take().map(plain)).collect();
        let grads: Vec<_> = taken.iter().flatten().collect();
        let Some(first) = grads.first() else { return Ok(()) };
        let _scope = first.device().clone().scope(GRADIENTS);
        let mut all = Tensor::empty(first.device(), &[grads.iter().map(|grad| grad.len()).sum()], first.dtype())?;
        let mut start = 0;
        for grad in &grads {
            all.copy_from(start, &grad.reshape(&[grad.len()])?)?;
            start += grad.len();
        }
        let all = group.all_reduce("gradients of whole tensors", Reduce::Sum, all)?.wait()?;
        let mut start = 0;
        for (param, grad) in whole.into_iter().zip(taken) {
            let Some(grad) = grad else { continue };
            let end = start + grad.len();
            param.gradient.set(Grad::Plain(all.rows(start, end)?.reshape(grad.shape())?));
            start = end;
        }
        Ok(())
    }
}

fn plain(grad: Grad) -> Tensor {
    match grad {
        Grad::Plain(grad) => grad,
        Grad::Scaled(_) => unreachable!("only gradients of products have a scale, and their tensors are divided"),
    }
}
