//! The live tensors of a training run for a checkpoint, including tensors of other ranks.

use crate::model::rows_of;
use crate::{TensorInfo, expert_adapters, stacks};
use ottava_common::error::Result;
use ottava_models::Decoder;
use ottava_parallel::Partition;
use ottava_recipe::param::{FolderLayout, Param, Shard};
use ottava_tensor::ops::transpose;
use ottava_tensor::{DType, Device, Tensor};
use std::collections::HashMap;
use std::ops::Range;

/// The live tensors of [`Contents`](super::training::Contents). All ranks read the weights in the order of the model. Weights that ranks divide are
/// gathered one after another. The weights of a pipeline stage are sent to the ranks of other stages.
pub struct LiveTensors<'a> {
    partition: &'a Partition,
    device: Device,
    params: Vec<LiveParam<'a>>,
    /// The number of the first parameter that was not gathered yet.
    next: usize,
    /// The location of each weight, by name: the number of the parameter, the layout in a folder, and the rows.
    rows: HashMap<String, (usize, FolderLayout, Range<usize>)>,
    /// Views of all other tensors, by name.
    others: HashMap<String, Tensor>,
    /// The last parameter that was gathered, with its number.
    whole: Option<(usize, Tensor)>,
}

/// A parameter of the model.
struct LiveParam<'a> {
    name: String,
    shape: Vec<usize>,
    dtype: DType,
    /// The pipeline rank that holds the parameter.
    owner: usize,
    /// The parameter; `None` if this rank does not hold it.
    here: Option<&'a mut Param>,
}

impl<'a> LiveTensors<'a> {
    /// Makes the live tensors of a model on `device`. `params` are the trained parameters of this rank. If ranks have different parts of the model,
    /// `whole` is the whole model without weights. Also returns the weights of the model, in its order.
    pub(super) fn new(
        partition: &'a Partition,
        device: &Device,
        whole: Option<Decoder>,
        params: Vec<&'a mut Param>,
        others: HashMap<String, Tensor>,
    ) -> Result<(Vec<TensorInfo>, LiveTensors<'a>)> {
        let (mut weights, mut rows, mut live) = (Vec::new(), HashMap::new(), Vec::new());
        let mut add = |shards: &[Shard], param: LiveParam<'a>| {
            for (shard, at) in rows_of(shards) {
                let (mut first, dtype) = (at.start, param.dtype);
                for tensor in shard.tensor.in_folder() {
                    let is_stacked = matches!(tensor.layout, FolderLayout::Stacked(_) | FolderLayout::ExpertAdapter(_));
                    let name = tensor.stored_name();
                    // A stack of experts is written as one tensor, which takes all rows of the parameter.
                    let own = if is_stacked { 0..param.shape[0] } else { first..(first + tensor.shape[0]).min(at.end) };
                    first = own.end;
                    if rows.insert(name.clone(), (live.len(), tensor.layout, own)).is_none() {
                        weights.push(TensorInfo { name, dtype, shape: tensor.stored_shape() });
                    }
                }
            }
            live.push(param);
        };
        let describe =
            |param: &Param| (param.identity.name().to_string(), param.weights.shape().to_vec(), param.weights.dtype());
        match whole {
            None => {
                for param in params {
                    let ((name, shape, dtype), shards) = (describe(param), param.identity.shards.clone());
                    add(&shards, LiveParam { name, shape, dtype, owner: 0, here: Some(param) });
                }
            }
            Some(mut whole) => {
                let names: Vec<_> = params.iter().map(|param| param.identity.name().to_string()).collect();
                let stages = partition.ranks().of_stages("parameters of stages", &names)?;
                let rank = partition.ranks().pipeline().rank();
                let mut own: HashMap<_, _> = names.into_iter().zip(params).collect();
                for param in whole.parameters() {
                    let (name, shape, dtype) = describe(param);
                    // If ranks share the weight of embedding and head, the first of these ranks owns it.
                    let owner = stages.iter().position(|names| names.contains(&name)).unwrap_or(0);
                    let here = own.remove(&name).filter(|_| owner == rank);
                    add(&param.identity.shards, LiveParam { name, shape, dtype, owner, here });
                }
            }
        }
        let (device, next, whole) = (device.clone(), 0, None);
        Ok((weights, LiveTensors { partition, device, params: live, next, rows, others, whole }))
    }

    /// Returns the tensor called `name`. Tensors must be requested in the order of [`Contents::names`](super::training::Contents::names).
    pub fn get(&mut self, name: &str) -> Result<Tensor> {
        let Some((i, layout, rows)) = self.rows.get(name).cloned() else {
            self.gather_rest()?;
            return Ok(self.others[name].clone());
        };
        while self.next <= i {
            // The preceding parameter is freed before the next is gathered.
            self.whole = None;
            self.whole = Some((self.next, self.value(self.next)?));
            self.next += 1;
        }
        let (_, whole) = self.whole.as_ref().filter(|(at, _)| *at == i).expect("weights are asked for in their order");
        let part = whole.rows(rows.start, rows.end)?;
        match layout {
            FolderLayout::Same | FolderLayout::Rows(_) | FolderLayout::Heads(_) => Ok(part),
            FolderLayout::Transposed => Ok(transpose(&part)?),
            FolderLayout::ByHead(heads) => stacks::regrouped(&part, [3, heads]),
            FolderLayout::Stacked(stack) => stacks::stored(&part, stack),
            FolderLayout::ExpertAdapter(place) => expert_adapters::stored(&part, place),
        }
    }

    /// Gathers the weights that were not requested, so that all ranks gather the same weights.
    pub fn gather_rest(&mut self) -> Result<()> {
        self.whole = None;
        let has_others = self.partition.divides() || !self.partition.ranks().have_whole_model();
        for at in (self.next..self.params.len()).filter(|_| has_others) {
            self.value(at)?;
        }
        self.next = self.params.len();
        Ok(())
    }

    /// Returns the whole weights of a parameter, on all ranks.
    fn value(&self, at: usize) -> Result<Tensor> {
        let LiveParam { name, shape, dtype, owner, here } = &self.params[at];
        let own = here.as_ref().map(|param| self.partition.whole_value(param)).transpose()?;
        match (own, self.partition.ranks().pipeline().size()) {
            (Some(own), 1) => Ok(own),
            // The broadcast writes its buffer, so the weights are copied.
            (Some(own), _) => self.partition.share_with_stages(name, *owner, own.duplicate()?),
            (None, _) => {
                let into = Tensor::empty(&self.device, shape, *dtype)?;
                self.partition.share_with_stages(name, *owner, into)
            }
        }
    }
}
