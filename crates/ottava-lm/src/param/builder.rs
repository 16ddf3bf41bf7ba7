//! The context in which layers are built, and where they record themselves.

use super::description::Description;
use crate::error::Result;
use crate::level::{Formats, Level, Share};
use crate::lora::Lora;
use crate::recipe::Recipe;
use crate::recompute::{Recompute, SavedActivations};
use crate::scaling::Slots;
use ottava_tensor::{Device, Tensor};

/// Rows of a fused weight that are a separate tensor in a Hugging Face folder.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// The tensor's name in a model folder, as `model.layers.0.self_attn.q_proj.weight`.
    pub name: String,
    /// Its shape; parts are stacked along the first dimension.
    pub shape: Vec<usize>,
    /// How a folder has it.
    pub layout: Layout,
}

/// How a model folder has a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// As it is.
    Same,
    /// Transposed, `[inputs, outputs]`.
    Transposed,
    /// A vector as a matrix of this many rows.
    Rows(usize),
}

impl Part {
    /// A tensor that a folder has in this shape.
    pub fn new(name: String, shape: Vec<usize>) -> Part {
        Part { name, shape, layout: Layout::Same }
    }

    /// Its shape in a folder.
    pub fn stored_shape(&self) -> Vec<usize> {
        match self.layout {
            Layout::Same => self.shape.clone(),
            Layout::Transposed => self.shape.iter().rev().copied().collect(),
            Layout::Rows(rows) => vec![rows, self.shape[0] / rows],
        }
    }
}

/// Initial values of a parameter without a model folder.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// Normal with mean 0 and this standard deviation.
    Normal(f32),
    /// All zero.
    Zeros,
    /// All one.
    Ones,
    /// Uniform between this bound and its negative.
    Uniform(f32),
}

/// A source of weights: F32 tensors of one [`Part`] each, on any device.
pub trait WeightSource {
    /// The values of `part`; a source of random weights follows `init`.
    fn weight(&mut self, part: &Part, init: Init) -> Result<Tensor>;
}

/// What a model is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Training, with this memory policy.
    Train(MemoryPolicy),
    /// Inference: weights alone.
    Infer,
}

/// What training stores, in which format and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryPolicy {
    /// Formats of master weights, gradients and moments.
    pub formats: Formats,
    /// Whether FP8 codes of weights are stored for a step. Otherwise each product casts the weight that it reads.
    pub weight_codes: bool,
    /// Whether frozen weights whose products read codes are stored in the compute type too, for steps in high precision.
    pub frozen_values: bool,
    /// Which activations forward saves.
    pub recompute: Recompute,
    /// Format of saved inputs of norms and SwiGLU.
    pub saved_activations: SavedActivations,
    /// Share of the blocks whose moments and master weights are offloaded.
    pub offload_optimizer: Share,
    /// Share of the blocks whose weights are offloaded.
    pub offload_parameters: Share,
    /// Whether the inputs of blocks are offloaded; for [`Recompute::Full`].
    pub offload_residuals: bool,
}

impl MemoryPolicy {
    /// Everything stored on the device, in F32.
    pub const FULL: MemoryPolicy = MemoryPolicy {
        formats: Level::O0.formats(),
        weight_codes: true,
        frozen_values: true,
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

/// The context in which layers are built.
pub struct Builder<'a> {
    /// The device of all tensors.
    pub device: &'a Device,
    /// The precision of the run.
    pub recipe: &'a Recipe,
    /// Training or inference.
    pub purpose: Purpose,
    /// Values of the weights.
    pub weights: &'a mut dyn WeightSource,
    /// The casts of the layers built so far.
    pub slots: Slots,
    /// The description of the layers built so far.
    pub description: Description,
    /// The index of the current block, and the number of blocks.
    pub block: Option<(usize, usize)>,
    /// Adapters beside the linears; where there are some, all other parameters are frozen.
    pub lora: Option<&'a Lora>,
}

impl<'a> Builder<'a> {
    /// A builder without layers.
    pub fn new(
        device: &'a Device,
        recipe: &'a Recipe,
        purpose: Purpose,
        weights: &'a mut dyn WeightSource,
    ) -> Builder<'a> {
        let (slots, description) = (Slots::default(), Description::default());
        Builder { device, recipe, purpose, weights, slots, description, block: None, lora: None }
    }
}
