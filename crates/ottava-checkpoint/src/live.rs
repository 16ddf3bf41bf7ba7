//! The tensors of a checkpoint as training has them, also the tensors of other ranks.

use crate::model::rows_of;
use crate::{TensorInfo, stacks};
use ottava_common::error::Result;
use ottava_models::Decoder;
use ottava_parallel::Partition;
use ottava_recipe::param::{FolderLayout, Param, Shard};
use ottava_tensor::ops::transpose;
use ottava_tensor::{DType, Device, Tensor};
use std::collections::HashMap;
use std::ops::Range;

/// The tensors of [`Contents`](super::training::Contents) as training has them. Weights that ranks divide are gathered one after another,
/// and the weights of a stage are sent to the ranks with other stages, by all ranks in the order of the model.
pub struct LiveTensors<'a> {
    partition: &'a Partition,
    device: Device,
    params: Vec<LiveParam<'a>>,
    /// The first parameter that was not gathered yet.
    next: usize,
    /// Where weights are: parameter, how a folder has them, and rows, by name.
    rows: HashMap<String, (usize, FolderLayout, Range<usize>)>,
    /// Views of all other tensors, by name.
    others: HashMap<String, Tensor>,
    /// The last parameter that was gathered.
    whole: Option<(usize, Tensor)>,
}

/// A parameter of the model.
struct LiveParam<'a> {
    name: String,
    shape: Vec<usize>,
    dtype: DType,
    /// The rank of the pipeline that has it.
    owner: usize,
    /// `None` if this rank does not have it.
    here: Option<&'a mut Param>,
}

impl<'a> LiveTensors<'a> {
    /// The tensors of a model on `device`, of whose trained parameters this rank has `params`. `whole` is the model without weights, if
    /// ranks have different parts of it. Returns also the weights of the model, in its order.
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
                let (tensor, dtype) = (&shard.tensor, param.dtype);
                let (name, is_stacked) = (tensor.stored_name(), matches!(tensor.layout, FolderLayout::Stacked(_)));
                // Experts are written with the first of their stack, which is all of the parameter.
                let at = if is_stacked { 0..param.shape[0] } else { at };
                if rows.insert(name.clone(), (live.len(), tensor.layout, at)).is_none() {
                    weights.push(TensorInfo { name, dtype, shape: tensor.stored_shape() });
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
                    // The first of the ranks that share the weight of embedding and head.
                    let owner = stages.iter().position(|names| names.contains(&name)).unwrap_or(0);
                    let here = own.remove(&name).filter(|_| owner == rank);
                    add(&param.identity.shards, LiveParam { name, shape, dtype, owner, here });
                }
            }
        }
        let (device, next, whole) = (device.clone(), 0, None);
        Ok((weights, LiveTensors { partition, device, params: live, next, rows, others, whole }))
    }

    /// A tensor by its name, in the order of [`Contents::names`](super::training::Contents::names).
    pub fn get(&mut self, name: &str) -> Result<Tensor> {
        let Some((i, layout, rows)) = self.rows.get(name).cloned() else {
            self.gather_rest()?;
            return Ok(self.others[name].clone());
        };
        while self.next <= i {
            // The one before is freed first.
            self.whole = None;
            self.whole = Some((self.next, self.value(self.next)?));
            self.next += 1;
        }
        let (_, whole) = self.whole.as_ref().filter(|(at, _)| *at == i).expect("weights are asked for in their order");
        let part = whole.rows(rows.start, rows.end)?;
        match layout {
            FolderLayout::Same | FolderLayout::Rows(_) => Ok(part),
            FolderLayout::Transposed => Ok(transpose(&part)?),
            FolderLayout::Stacked(stack) => stacks::stored(&part, stack),
        }
    }

    /// Gathers the weights that nobody has asked for, so that all ranks gather the same ones.
    pub fn gather_rest(&mut self) -> Result<()> {
        self.whole = None;
        let has_others = self.partition.divides() || !self.partition.ranks().have_whole_model();
        for at in (self.next..self.params.len()).filter(|_| has_others) {
            self.value(at)?;
        }
        self.next = self.params.len();
        Ok(())
    }

    /// The whole weights of a parameter, on all ranks.
    fn value(&self, at: usize) -> Result<Tensor> {
        let LiveParam { name, shape, dtype, owner, here } = &self.params[at];
        let own = here.as_ref().map(|param| self.partition.whole_value(param)).transpose()?;
        match (own, self.partition.ranks().pipeline().size()) {
            (Some(own), 1) => Ok(own),
            // A broadcast writes its buffer.
            (Some(own), _) => self.partition.share_with_stages(name, *owner, own.duplicate()?),
            (None, _) => {
                let into = Tensor::empty(&self.device, shape, *dtype)?;
                self.partition.share_with_stages(name, *owner, into)
            }
        }
    }
}
