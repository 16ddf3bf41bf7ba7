//! The exchange of activations among the ranks that divide the tensors, sequences and experts of layers.

use super::Ranks;
use crate::error::Result;
use crate::layer_ranks::{LayerRanks, ShardPlace};
use ottava_tensor::Tensor;
use ottava_tensor::comm::{Axis, Group, Reduce};
use ottava_tensor::ops::sum_parts;
use std::rc::Rc;

/// The ranks of the axes tensor, context and expert.
pub struct LayerAxes(Rc<Ranks>);

impl LayerAxes {
    /// The axes of `ranks`.
    pub fn new(ranks: Rc<Ranks>) -> LayerAxes {
        LayerAxes(ranks)
    }
}

impl LayerRanks for LayerAxes {
    fn place(&self, axis: Axis) -> ShardPlace {
        self.0.place(axis)
    }

    fn exchange(&self, axis: Axis, name: &str, parts: &Tensor) -> Result<Tensor> {
        self.0.of_layers(|| all_to_all(self.0.group(&[axis]), name, parts))
    }

    fn gather(&self, axis: Axis, name: &str, rows: &Tensor) -> Result<Tensor> {
        self.0.of_layers(|| self.0.gather_rows(axis, name, rows))
    }

    fn sum_own_rows(&self, axis: Axis, name: &str, partial: Tensor, addend: Option<&Tensor>) -> Result<Tensor> {
        let [rows, columns] = partial.dims(name)?;
        let group = self.0.group(&[axis]);
        // A sum of our own is F32, in the order of the ranks, and rounded once together with the addend. NCCL's would round twice.
        let parts = self.0.of_layers(|| all_to_all(group, name, &partial))?;
        drop(partial);
        Ok(sum_parts(&parts.reshape(&[group.size(), rows / group.size(), columns])?, addend)?)
    }

    fn sum(&self, axis: Axis, name: &str, x: Tensor) -> Result<Tensor> {
        self.0.of_layers(|| Ok(self.0.group(&[axis]).all_reduce(name, Reduce::Sum, x)?.wait()?))
    }

    fn largest(&self, axis: Axis, name: &str, x: Tensor) -> Result<Tensor> {
        self.0.of_layers(|| Ok(self.0.group(&[axis]).all_reduce(name, Reduce::Max, x)?.wait()?))
    }
}

/// Sends part `i` of `parts` to rank `i` of `group`. Returns the parts received, in the order of the ranks.
fn all_to_all(group: &Group, name: &str, parts: &Tensor) -> Result<Tensor> {
    let received = Tensor::empty(parts.device(), parts.shape(), parts.dtype())?;
    Ok(group.all_to_all(name, parts, received)?.wait()?)
}

impl Ranks {
    /// The rows of all ranks of `axis`, in their order.
    pub(super) fn gather_rows(&self, axis: Axis, name: &str, rows: &Tensor) -> Result<Tensor> {
        let (group, own) = (self.group(&[axis]), rows.shape()[0]);
        if group.size() == 1 {
            return Ok(rows.clone());
        }
        let mut shape = rows.shape().to_vec();
        shape[0] *= group.size();
        let mut all = Tensor::empty(rows.device(), &shape, rows.dtype())?;
        all.copy_from(group.rank() * own, rows)?;
        Ok(group.all_gather(name, all)?.wait()?)
    }
}
