//! The exchange of activations among the ranks that divide the tensors, sequences and experts of layers.

use crate::Ranks;
use ottava_common::error::Result;
use ottava_recipe::layer_ranks::{AmaxRanks, Arriving, LayerRanks, ShardPlace};
use ottava_tensor::Tensor;
use ottava_tensor::comm::{Axis, Group, Reduce};
use ottava_tensor::ops::sum_parts;
use std::ops::Range;
use std::rc::Rc;

/// The ranks of the axes tensor, context and expert x tensor, as the interface of layers to ranks.
pub struct LayerAxes(Rc<Ranks>);

impl LayerAxes {
    /// Wraps the axes of `ranks`.
    pub fn new(ranks: Rc<Ranks>) -> LayerAxes {
        LayerAxes(ranks)
    }

    /// Returns the ranks of `axis`. Layers exchange nothing over the data axis; losses that compare the rows of all ranks do.
    fn group(&self, axis: Axis) -> &Group {
        if axis == Axis::Data { self.0.group(&[Axis::Data]) } else { self.0.layer_group(axis) }
    }
}

impl LayerRanks for LayerAxes {
    fn place(&self, axis: Axis) -> ShardPlace {
        let group = self.group(axis);
        ShardPlace { rank: group.rank(), ranks: group.size() }
    }

    fn exchange(&self, axis: Axis, name: &str, parts: &Tensor) -> Result<Tensor> {
        let group = self.group(axis);
        let received = group.symmetric(parts.device(), parts.shape(), parts.dtype())?;
        self.0.of_layers(|| Ok(group.all_to_all(name, parts, received)?.wait()?))
    }

    fn start_gather(&self, axis: Axis, name: &str, rows: &Tensor) -> Result<Arriving> {
        let group = self.group(axis);
        let symmetric = |shape: &[usize]| Ok(group.symmetric(rows.device(), shape, rows.dtype())?);
        self.0.of_layers(|| gather_into(group, name, rows, symmetric))
    }

    fn sum_computed_rows(
        &self,
        axis: Axis,
        name: &str,
        rows: usize,
        partial: &mut dyn FnMut(Range<usize>) -> Result<Tensor>,
        addend: Option<&Tensor>,
    ) -> Result<Tensor> {
        let group = self.group(axis);
        let (rank, ranks) = (group.rank(), group.size());
        let share = rows / ranks;
        let rows_of = |rank: usize| rank * share..(rank + 1) * share;
        let first = partial(rows_of((rank + 1) % ranks))?;
        let format = self.0.sent();
        let mut sent = format.encode(name, &first)?;
        let mut inbox = group.inbox(first.device(), sent.len(), sent.dtype())?;
        let mut part = first;
        for step in 1..ranks {
            let (to, from) = ((rank + step) % ranks, (rank + ranks - step) % ranks);
            let exchange = || -> Result<()> { Ok(inbox.exchange(name, to, &sent, from)?) };
            self.0.of_layers(exchange)?;
            part = inbox.beside(|| partial(rows_of((to + 1) % ranks)))?;
            if step + 1 < ranks {
                sent = format.encode(name, &part)?;
            }
        }
        let others = format.decode(inbox.wait()?, part.len(), part.dtype())?;
        // `sum_parts` sums in F32 in the order of the ranks, and rounds once together with the addend. NCCL's sum would round twice.
        Ok(sum_parts(&part, rank, &others, addend)?)
    }

    fn sum(&self, axis: Axis, name: &str, x: &Tensor, addend: Option<&Tensor>) -> Result<Tensor> {
        self.0.of_layers(|| Ok(self.group(axis).sum(name, x, addend)?))
    }
}

impl AmaxRanks for LayerAxes {
    fn largest(&self, axis: Axis, name: &str, amax: Tensor) -> Result<Tensor> {
        self.0.of_layers(|| Ok(self.0.layer_group(axis).all_reduce(name, Reduce::Max, amax)?.wait()?))
    }
}

impl Ranks {
    /// Starts to gather the rows of all ranks of `axis`, in the order of the ranks.
    pub(super) fn start_gather(&self, axis: Axis, name: &str, rows: &Tensor) -> Result<Arriving> {
        let group = self.layer_group(axis);
        gather_into(group, name, rows, |shape| Ok(Tensor::empty(rows.device(), shape, rows.dtype())?))
    }
}

/// Starts to gather the rows of all ranks of `group`, in the order of the ranks, into the tensor that `empty` creates.
fn gather_into(
    group: &Group,
    name: &str,
    rows: &Tensor,
    empty: impl FnOnce(&[usize]) -> Result<Tensor>,
) -> Result<Arriving> {
    if group.size() == 1 {
        return Ok(Arriving::Here(rows.clone()));
    }
    let (mut shape, own) = (rows.shape().to_vec(), rows.shape()[0]);
    shape[0] *= group.size();
    let mut all = empty(&shape)?;
    all.copy_from(group.rank() * own, rows)?;
    Ok(Arriving::Coming(group.all_gather(name, all)?))
}
