//! What layers are built with, and what they record of themselves while they are built.

use super::description::Description;
use crate::error::Result;
use crate::level::{Formats, Level, Share};
use crate::recipe::Recipe;
use crate::recompute::{Recompute, SavedActivations};
use crate::scaling::Slots;
use ottava_tensor::{Device, Tensor};

/// Rows of a fused weight that Hugging Face keeps as a tensor of its own.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// The tensor's name in a model folder, as `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// Its shape there; parts are stacked along the first dimension.
    pub shape: Vec<usize>,
}

/// How a parameter starts when no model folder is given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal with mean 0 and this standard deviation.
    Normal(f32),
    /// All zero.
    Zeros,
    /// All one.
    Ones,
}

/// Where weights come from, as F32 tensors of one [`Part`] each, on whatever device they are at hand.
pub trait WeightSource {
    /// The values of `part`, which a fresh model would start by `init`.
    fn weight(&mut self, part: &Part, init: Init) -> Result<Tensor>;
}

/// What a model is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Backward will run, with this beside the weights.
    Train(MemoryPolicy),
    /// Weights alone.
    Infer,
}

/// What training keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPolicy {
    /// Of the optimizer.
    pub formats: Formats,
    /// FP8 codes of weights, made once per step. Without, each product casts the weight that it reads.
    pub weight_codes: bool,
    /// Of forward's activations.
    pub recompute: Recompute,
    /// How those are kept that are.
    pub saved_activations: SavedActivations,
    /// Of the blocks, those whose moments and masters are in the host's memory.
    pub offload_optimizer: Share,
    /// Of the blocks, those whose matrices are, as layers read them.
    pub offload_parameters: Share,
    /// Whether the inputs of blocks are, where they are all that forward keeps.
    pub offload_residuals: bool,
}

impl MemoryPolicy {
    /// Everything, in F32.
    pub const FULL: MemoryPolicy = MemoryPolicy {
        formats: Level::O0.formats(),
        weight_codes: true,
        recompute: Recompute::None,
        saved_activations: SavedActivations::Exact,
        offload_optimizer: Share::NONE,
        offload_parameters: Share::NONE,
        offload_residuals: false,
    };
}

impl Purpose {
    /// Whether backward will run.
    pub fn trains(self) -> bool {
        self != Purpose::Infer
    }
}

/// What layers are built with.
pub struct Builder<'a> {
    /// Where tensors are put.
    pub device: &'a Device,
    /// The precision of the run.
    pub recipe: &'a Recipe,
    /// Training or inference.
    pub purpose: Purpose,
    /// Values of the weights.
    pub weights: &'a mut dyn WeightSource,
    /// The casts that the layers will do.
    pub slots: Slots,
    /// What the layers built so far are.
    pub description: Description,
    /// The number of the block that is built, and how many there are.
    pub block: Option<(usize, usize)>,
}

impl<'a> Builder<'a> {
    /// A builder that has built nothing yet.
    pub fn new(
        device: &'a Device,
        recipe: &'a Recipe,
        purpose: Purpose,
        weights: &'a mut dyn WeightSource,
    ) -> Builder<'a> {
        let (slots, description) = (Slots::default(), Description::default());
        Builder { device, recipe, purpose, weights, slots, description, block: None }
    }
}
