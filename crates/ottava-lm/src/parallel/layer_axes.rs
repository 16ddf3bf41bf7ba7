//! The exchange of activations among the ranks that divide the tensors and the sequences of layers.

use super::Ranks;
use crate::error::Result;
use crate::layer_ranks::{LayerRanks, ShardPlace};
use ottava_tensor::Tensor;
use ottava_tensor::comm::{Axis, Group, Reduce};
use ottava_tensor::ops::sum_parts;
use std::rc::Rc;

/// The ranks of the axes tensor and context.
pub struct LayerAxes(Rc<Ranks>);

impl LayerAxes {
    /// The axes of `ranks`.
    pub fn new(ranks: Rc<Ranks>) -> LayerAxes {
        LayerAxes(ranks)
    }

    fn group(&self) -> &Group {
        self.0.group(&[Axis::Tensor])
    }
}

impl LayerRanks for LayerAxes {
    fn place(&self) -> ShardPlace {
        self.0.tensor_place()
    }

    fn sequence_place(&self) -> ShardPlace {
        self.0.sequence_place()
    }

    fn exchange(&self, name: &str, parts: &Tensor) -> Result<Tensor> {
        all_to_all(self.0.group(&[Axis::Context]), name, parts)
    }

    fn gather(&self, name: &str, rows: &Tensor) -> Result<Tensor> {
        self.0.gather_tensor_rows(name, rows)
    }

    fn sum_own_rows(&self, name: &str, partial: Tensor, addend: Option<&Tensor>) -> Result<Tensor> {
        let [rows, columns] = partial.dims(name)?;
        let group = self.group();
        // A sum of our own is F32, in the order of the ranks, and rounded once together with the addend. NCCL's would round twice.
        let parts = all_to_all(group, name, &partial)?;
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

/// Sends part `i` of `parts` to rank `i` of `group`. Returns the parts received, in the order of the ranks.
fn all_to_all(group: &Group, name: &str, parts: &Tensor) -> Result<Tensor> {
    let received = Tensor::empty(parts.device(), parts.shape(), parts.dtype())?;
    Ok(group.all_to_all(name, parts, received)?.wait()?)
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
}
