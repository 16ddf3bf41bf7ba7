//! The builder of layers, with which layers also record themselves.

use super::description::Description;
use super::id::{ParamId, UnitId};
use super::shard::{FolderLayout, FolderTensor, Shard, Split};
use crate::Recipe;
use crate::layer_ranks::{LayerRanks, ShardPlace, Undivided};
use crate::lora::Lora;
use crate::recompute::{Recompute, SavedActivations};
use crate::scaling::Slots;
use crate::storage::{Formats, Share, Storage};
use ottava_common::error::{Error, Result};
use ottava_tensor::comm::Axis;
use ottava_tensor::{Device, Granularity, Nf4Tensor, Tensor};
use std::ops::Range;
use std::rc::Rc;

/// The initial values of a parameter without a model folder.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal with mean 0 and this standard deviation.
    Normal(f32),
    /// All zero.
    Zeros,
    /// All one.
    Ones,
    /// All this value.
    Constant(f32),
    /// Uniform between this bound and its negative.
    Uniform(f32),
    /// The logarithm of a value that is uniform between 0 and this bound, and at least 0.01.
    LogUniform(f32),
    /// The norms of the rows of the adapter's linear weight, for the magnitudes of an adapter.
    RowNorms {
        /// The number of columns of the weight.
        columns: usize,
        /// The layout of the weight in a folder.
        layout: FolderLayout,
        /// The standard deviation of the weight's initial values.
        std: f32,
    },
}

/// The FP8 codes that a source has of a weight, for a requested granularity of scales.
pub enum FolderCodes {
    /// The weight is not in FP8.
    None,
    /// The scales have another granularity, or the weight is stored in another layout.
    Other,
    /// The codes of the whole tensor, and their inverse scales, row by row.
    Codes {
        /// E4M3 `[R, C]`, finite, on any device.
        codes: Tensor,
        /// One inverse scale for the tensor, for each row, or for each 128x128 block.
        scale_inv: Vec<f32>,
    },
}

/// A source of weights. Each process reads the elements that it stores.
pub trait WeightSource {
    /// Returns the values of `elements` of the flat `tensor`, `[n]` in F32, F16 or BF16, on any device. A source of random weights follows `init`.
    fn read(&mut self, tensor: &FolderTensor, elements: Range<usize>, init: Init) -> Result<Tensor>;

    /// Returns the FP8 codes of the whole `tensor`, if the source has them with scales of this `granularity`.
    fn codes(&mut self, _tensor: &FolderTensor, _granularity: Granularity) -> Result<FolderCodes> {
        Ok(FolderCodes::None)
    }

    /// Returns the whole `tensor` in four bits on `device`, if the source stores it so.
    fn packed(&mut self, _tensor: &FolderTensor, _device: &Device) -> Result<Option<Nf4Tensor>> {
        Ok(None)
    }

    /// Errors if a source of fixed tensors lacks `tensor`. Another process reads the tensor.
    fn expect(&mut self, _tensor: &FolderTensor) -> Result<()> {
        Ok(())
    }
}

/// The purpose of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Training, with this memory policy.
    Train(MemoryPolicy),
    /// Inference: only weights are stored.
    Infer,
}

/// The memory policy of training: what is stored, in which format and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPolicy {
    /// The formats of master weights, gradients and moments.
    pub formats: Formats,
    /// Whether FP8 codes of weights are stored between updates. Otherwise each product casts the weight that it reads.
    pub weight_codes: bool,
    /// Whether frozen weights are stored in the compute type in addition to codes, for steps in high precision.
    pub frozen_values: bool,
    /// Whether frozen matrices of blocks are stored in four bits (NF4). Products read their values in the compute type, or codes of these values.
    pub four_bit: bool,
    /// The activations that backward recomputes.
    pub recompute: Recompute,
    /// The format of saved inputs of norms and SwiGLU.
    pub saved_activations: SavedActivations,
    /// The share of the blocks whose moments and master weights are offloaded.
    pub offload_optimizer: Share,
    /// The share of the blocks whose weights are offloaded.
    pub offload_parameters: Share,
    /// Whether the inputs of blocks are offloaded, with [`Recompute::Full`].
    pub offload_residuals: bool,
}

impl MemoryPolicy {
    /// The policy that stores everything on the device, in F32.
    pub const FULL: MemoryPolicy = MemoryPolicy {
        formats: Storage::Float32.formats(),
        weight_codes: true,
        frozen_values: true,
        four_bit: false,
        recompute: Recompute::None,
        saved_activations: SavedActivations::Exact,
        offload_optimizer: Share::NONE,
        offload_parameters: Share::NONE,
        offload_residuals: false,
    };
}

impl Purpose {
    /// Returns whether backward will run.
    pub fn trains(self) -> bool {
        self != Purpose::Infer
    }
}

/// The builder with which layers are built.
pub struct Builder<'a> {
    /// The device of all tensors.
    pub device: &'a Device,
    /// The precision of the run.
    pub recipe: &'a Recipe,
    /// The purpose of the model: training or inference.
    pub purpose: Purpose,
    /// The ranks that divide the tensors, sequences and experts of layers.
    ranks: Rc<dyn LayerRanks>,
    /// The casts of the layers that have been built.
    pub slots: Slots,
    /// The description of the layers that have been built.
    pub description: Description,
    /// The biases of routers that balance the loads of experts, by the name of the router.
    pub router_biases: Vec<(String, ParamId)>,
    /// The index of the current block, and the number of blocks.
    pub block: Option<(usize, usize)>,
    /// The adapters of the linears. If set, all other parameters are frozen.
    pub lora: Option<&'a Lora>,
    /// The id of the next parameter.
    next: ParamId,
}

impl<'a> Builder<'a> {
    /// Creates a builder without layers.
    pub fn new(device: &'a Device, recipe: &'a Recipe, purpose: Purpose) -> Builder<'a> {
        let (slots, description, next) = (Slots::default(), Description::default(), ParamId::default());
        let (ranks, router_biases) = (Rc::new(Undivided), Vec::new());
        Builder { device, recipe, purpose, ranks, slots, description, router_biases, block: None, lora: None, next }
    }

    /// Sets the `ranks` that divide the tensors of layers.
    pub fn divided(self, ranks: Rc<dyn LayerRanks>) -> Builder<'a> {
        Builder { ranks, ..self }
    }

    /// Returns this rank's place among the ranks that divide the tensors of layers.
    pub fn place(&self) -> ShardPlace {
        self.place_on(Axis::Tensor)
    }

    /// Returns this rank's place among the ranks of an axis that divides tensors, sequences or experts.
    pub fn place_on(&self, axis: Axis) -> ShardPlace {
        self.ranks.place(axis)
    }

    /// Returns the part of `tensor` that this rank holds if ranks divide it by `split`.
    pub fn shard(&self, tensor: FolderTensor, split: Split) -> Result<Shard> {
        let uneven = || self.uneven(&tensor);
        Shard::new(tensor.clone(), split, self.place()).ok_or_else(uneven)
    }

    /// Returns the parts of `tensor` that this rank holds if ranks divide each of the `parts` of its rows by `split`. A family may fuse several parts
    /// in one tensor, for example queries, keys and values. Returns one shard if nothing is divided or `parts` is empty. `replicas` holds, for each
    /// part, how many neighbouring ranks hold the same rows; a missing number means 1.
    pub fn shards(
        &self,
        tensor: FolderTensor,
        parts: &[usize],
        replicas: &[usize],
        split: Split,
    ) -> Result<Vec<Shard>> {
        if split != Split::Output || !self.place().is_divided() {
            return Ok(vec![self.shard(tensor, split)?]);
        }
        let whole = [tensor.shape[0]];
        let (parts, mut end) = (if parts.len() < 2 { &whole } else { parts }, 0);
        let part = |(at, rows): (usize, &usize)| {
            end += rows;
            let replicas = replicas.get(at).copied().unwrap_or(1);
            let shard = Shard::within(tensor.clone(), end - rows..end, split, self.place(), replicas);
            shard.ok_or_else(|| self.uneven(&tensor))
        };
        parts.iter().enumerate().map(part).collect()
    }

    fn uneven(&self, tensor: &FolderTensor) -> Error {
        let (name, shape, ranks) = (&tensor.name, &tensor.shape, self.place().ranks);
        Error::Config(format!(
            "`{name}` of shape {shape:?} cannot be divided evenly among {ranks} tensor-parallel ranks; use fewer ranks (`parallel.tensor`, in inference --gpus or --ranks)"
        ))
    }

    /// Ends the current unit, if parameters have been built for it.
    pub fn end_unit(&mut self) {
        if self.next.index > 0 {
            self.next = ParamId { unit: UnitId(self.next.unit.0 + 1), index: 0 };
        }
    }

    pub(super) fn next_id(&mut self) -> ParamId {
        let id = self.next;
        self.next.index += 1;
        id
    }
}
