//! A trained tensor with its names, its weights, its FP8 codes and its gradient.

mod kept;

pub use kept::{Grad, GradFormat, Master, Weights};

use crate::error::{Error, Result};
use crate::level::{Formats, Level, Masters, Share};
use crate::recipe::Recipe;
use crate::recompute::{Recompute, SavedActivations};
use crate::scaling::{Frozen, NextCast, ScalingState, Slot};
use ottava_tensor::ops::{self, Accumulation, AdamWWeight, CastScale, Copies, Operand, real_type};
use ottava_tensor::{DType, Device, Granularity, Home, QuantizedTensor, Tensor};

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

/// What a dry run calls the memory of parameters.
const WEIGHTS: &str = "weights";
const MASTERS: &str = "master weights";
const GRADIENTS: &str = "gradients";

/// What a model is built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Backward will run, with this beside the weights.
    Train(Kept),
    /// Weights alone.
    Infer,
}

/// What training keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kept {
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

impl Kept {
    /// Everything, in F32.
    pub const FULL: Kept = Kept {
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
    pub slots: crate::scaling::Slots,
    /// The number of the block that is built, and how many there are.
    pub block: Option<(usize, usize)>,
}

/// A trained tensor.
pub struct Param {
    /// The tensors of a model folder that it is made of, stacked.
    pub parts: Vec<Part>,
    /// The weights.
    pub weights: Weights,
    /// Gradient of the loss, added to by backward; `None` before the first backward of a step, so that the memory serves forward.
    pub grad: Option<Grad>,
    /// Of the gradient.
    grad_format: GradFormat,
    /// How FP8 products read it.
    cast: Option<WeightCast>,
    /// How the optimizer keeps it.
    pub formats: Formats,
    /// Where the optimizer keeps what it alone reads.
    pub home: Home,
    /// Where layers read it.
    read_from: Home,
    /// Whether weight decay applies: to matrices, not to norms and biases, as Hugging Face's trainer has it.
    pub decay: bool,
}

/// The cast of a weight.
struct WeightCast {
    slot: Slot,
    /// The copies that products will read.
    copies: Copies,
    /// The codes, where they are kept from product to product.
    codes: Option<QuantizedTensor>,
    keeps_codes: bool,
    frozen: Frozen,
    /// F32 `[1]`: of the new weights, for a scale of their own, while an update makes them.
    amax: Option<Tensor>,
}

impl Param {
    /// A parameter of the stacked `parts`, filled from the builder's weights, with its gradient in the type of sums.
    pub fn new(build: &mut Builder, parts: Vec<Part>, init: Init) -> Result<Param> {
        let sums = GradFormat::Plain(real_type(build.recipe.compute));
        Param::with_gradient(build, parts, init, sums)
    }

    /// A matrix whose gradient is a product, in the format that the purpose names.
    pub fn matrix(build: &mut Builder, parts: Vec<Part>, init: Init) -> Result<Param> {
        let compute = build.recipe.compute;
        let (format, away) = match build.purpose {
            Purpose::Train(kept) => {
                (GradFormat::of(kept.formats.gradients, compute), kept.offload_parameters.covers(build.block))
            }
            Purpose::Infer => (GradFormat::Plain(real_type(compute)), false),
        };
        let param = Param::with_gradient(build, parts, init, format)?;
        Ok(Param { read_from: if away { Home::Host } else { Home::Device }, ..param })
    }

    fn with_gradient(build: &mut Builder, parts: Vec<Part>, init: Init, grad_format: GradFormat) -> Result<Param> {
        let mut shape = parts[0].shape.clone();
        shape[0] = parts.iter().map(|part| part.shape[0]).sum();
        let compute = build.recipe.compute;
        let formats = match build.purpose {
            Purpose::Train(kept) if shape.len() > 1 => kept.formats,
            Purpose::Train(kept) => kept.formats.of_vectors(),
            Purpose::Infer => Formats { masters: Masters::None, ..Level::O0.formats() },
        };
        let is_master = formats.masters == Masters::Float32 && compute != DType::F32;
        let scope = build.device.scope(if is_master { MASTERS } else { WEIGHTS });
        let mut full = Tensor::empty(build.device, &shape, DType::F32)?;
        drop(scope);
        let mut row = 0;
        for part in &parts {
            let tensor = build.weights.weight(part, init)?;
            if tensor.shape() != part.shape {
                return Err(Error::Model(format!(
                    "tensor `{}` has shape {:?}, config.json makes it {:?}",
                    part.name,
                    tensor.shape(),
                    part.shape
                )));
            }
            full.copy_from(
                row,
                &if tensor.device().same(build.device) { tensor } else { tensor.to_device(build.device)? },
            )?;
            row += part.shape[0];
        }
        if build.purpose.trains()
            && let Some(problem) = formats.problem(compute)
        {
            return Err(Error::Config(problem));
        }
        let mut weights = Weights::new(full, compute, formats.masters)?;
        let mut home = Home::Device;
        if let Purpose::Train(kept) = build.purpose
            && shape.len() > 1
            && kept.offload_optimizer.covers(build.block)
        {
            home = Home::Host;
            // Without codes, a master in F16 is what products cast.
            if kept.weight_codes || formats.masters != Masters::Float16 {
                weights.offload_master()?;
            }
        }
        let (decay, read_from) = (shape.len() > 1, Home::Device);
        Ok(Param { decay, parts, weights, grad: None, grad_format, cast: None, formats, home, read_from })
    }

    /// Moves the weights to where layers are to read them, once it is known how they do.
    pub fn move_home(&mut self) -> Result<()> {
        match self.read_from {
            Home::Device => Ok(()),
            Home::Host => self.weights.offload_read(),
        }
    }

    /// What is to be fetched from the host's memory before layers read it, if anything is.
    pub fn away_mut(&mut self) -> Option<&mut Tensor> {
        (self.read_from == Home::Host).then(|| self.weights.read_mut())
    }

    /// The weights as layers read them.
    pub fn value(&self) -> Result<Tensor> {
        self.weights.value()
    }

    /// The type of [`Param::value`].
    pub fn dtype(&self) -> DType {
        self.weights.dtype()
    }

    /// Makes the gradient zero, before the first backward of a step.
    pub fn clear_grad(&mut self) {
        self.grad = None;
    }

    /// The gradient, for a layer's backward to add to, where it has no scale.
    pub fn grad_mut(&mut self) -> Result<&mut Tensor> {
        if self.grad.is_none() {
            let _scope = self.weights.device().scope(GRADIENTS);
            let zeros = Tensor::zeros(self.weights.device(), self.weights.shape(), self.grad_format.sums())?;
            self.grad = Some(Grad::Plain(zeros));
        }
        match &mut self.grad {
            Some(Grad::Plain(grad)) => Ok(grad),
            _ => unreachable!("only gradients that are products have scales"),
        }
    }

    /// Adds `a · bᵀ` to the gradient of a matrix; the first product of a step is the gradient.
    pub fn add_product_to_grad(&mut self, a: Operand, b: Operand, accumulation: Accumulation) -> Result<()> {
        let _scope = self.weights.device().scope(GRADIENTS);
        let grad = self.grad.take();
        self.grad = Some(Grad::plus_product(grad, self.grad_format, a, b, accumulation)?);
        Ok(())
    }

    /// Adds what `add` adds to a tensor of its shape to the gradient of a matrix.
    pub fn add_to_grad(&mut self, add: impl FnOnce(&mut Tensor) -> Result<()>) -> Result<()> {
        let _scope = self.weights.device().scope(GRADIENTS);
        let grad = self.grad.take();
        self.grad = Some(Grad::plus(grad, self.grad_format, |sum| {
            let mut sum = match sum {
                Some(sum) => sum,
                None => Tensor::zeros(self.weights.device(), self.weights.shape(), self.grad_format.sums())?,
            };
            add(&mut sum)?;
            Ok(sum)
        })?);
        Ok(())
    }

    /// Has FP8 products read `copies` of this matrix through the cast in `slot`, in a model built for `purpose`. What is fetched for
    /// each use has no codes: with them, more would cross the bus.
    pub fn cast_in(&mut self, slot: Slot, copies: Copies, purpose: Purpose) {
        let (copies, keeps_codes) = match purpose {
            Purpose::Train(kept) => (copies, kept.weight_codes && self.read_from == Home::Device),
            Purpose::Infer => (Copies::Rows, true),
        };
        if copies == Copies::Both && purpose.trains() {
            self.weights.made_when_asked();
        }
        self.cast = Some(WeightCast { slot, copies, codes: None, keeps_codes, frozen: Frozen::default(), amax: None });
    }

    /// Casts the weight for the coming step; to be called whenever weights or scales have changed.
    pub fn quantize(&mut self, scaling: &mut ScalingState) -> Result<()> {
        let Some(cast) = &mut self.cast else { return Ok(()) };
        let _scope = self.weights.device().scope("FP8 codes of weights");
        let value = self.weights.value()?;
        cast.frozen.replace(scaling.freeze(cast.slot, &value)?)?;
        match &mut cast.codes {
            _ if !cast.keeps_codes => {}
            Some(codes) => scaling.quantize_into(cast.slot, &cast.frozen, &value, codes)?,
            none => *none = Some(scaling.quantize_by(cast.slot, &cast.frozen, &value, cast.copies)?),
        }
        Ok(())
    }

    /// Gets ready for an update: how the weights that it makes will be cast, by the scales of now. `None`: not at all, or by each
    /// product.
    pub fn begin_update(&mut self, scaling: &mut ScalingState) -> Result<Option<NextCast>> {
        let Some(cast) = &mut self.cast else { return Ok(None) };
        let next = scaling.next_cast(cast.slot)?;
        match next {
            NextCast::Measured => cast.amax = scaling.amax_for(Some(cast.slot))?,
            // A scale of its own is no longer what the weight is cast by.
            NextCast::Known(_) | NextCast::Blocks(_) | NextCast::Later => cast.frozen = Frozen::default(),
        }
        Ok(Some(next).filter(|next| cast.keeps_codes || matches!(next, NextCast::Measured)))
    }

    /// What an optimizer reads and writes: the weights, what becomes of their cast meanwhile, and the gradient.
    pub fn for_update<'a>(
        &'a mut self,
        next: &'a Option<NextCast>,
    ) -> Result<(AdamWWeight<'a>, Option<ops::WeightCast<'a>>, ops::Gradient<'a>)> {
        let Param { weights, grad, cast, .. } = self;
        let weight = weights.for_update();
        let scale = match next {
            Some(NextCast::Known(scale)) => Some(CastScale::Given(scale)),
            Some(NextCast::Blocks(how)) => Some(CastScale::Own(Granularity::Blocks128x128, *how)),
            Some(NextCast::Measured | NextCast::Later) | None => None,
        };
        let cast = match (cast, scale) {
            (Some(cast), Some(scale)) => {
                let into = cast.codes.as_mut().expect("weights are quantized before the first step");
                Some(ops::WeightCast::Codes { scale, slot: cast.slot.index(), into })
            }
            (Some(WeightCast { amax: Some(amax), .. }), None) => Some(ops::WeightCast::Amax(amax)),
            _ => None,
        };
        Ok((weight, cast, grad.as_ref().expect("backward has run").read()))
    }

    /// Casts updated weights whose scales had to wait for them.
    pub fn finish_update(&mut self, scaling: &mut ScalingState) -> Result<()> {
        let Some(cast) = &mut self.cast else { return Ok(()) };
        if let Some(amax) = cast.amax.take() {
            cast.frozen.replace(scaling.own_scale(cast.slot, amax)?)?;
        } else if !matches!(scaling.next_cast(cast.slot)?, NextCast::Later) {
            return Ok(());
        }
        match &mut cast.codes {
            Some(codes) => scaling.quantize_into(cast.slot, &cast.frozen, &self.weights.value()?, codes),
            None => Ok(()),
        }
    }

    /// The codes that fprop reads: those that are kept, or new ones, which are measured.
    pub fn codes_for_forward(&self, scaling: &mut ScalingState) -> Result<QuantizedTensor> {
        let cast = self.cast.as_ref().expect("the weight of an FP8 product has a cast");
        match &cast.codes {
            Some(codes) => Ok(codes.clone()),
            None => scaling.quantize_by(cast.slot, &cast.frozen, self.weights.for_cast(), Copies::Rows),
        }
    }

    /// Measures what a product of forward reads as it is, where that would otherwise be measured by its cast.
    pub fn measure_for_forward(&self, scaling: &mut ScalingState) -> Result<()> {
        match &self.cast {
            Some(cast) if !cast.keeps_codes => scaling.measure(cast.slot, &self.value()?),
            _ => Ok(()),
        }
    }

    /// The codes that dgrad reads: those that are kept, or new ones.
    pub fn codes_for_backward(&self, scaling: &mut ScalingState) -> Result<QuantizedTensor> {
        let cast = self.cast.as_ref().expect("the weight of an FP8 product has a cast");
        match &cast.codes {
            Some(codes) => Ok(codes.clone()),
            None => scaling.quantize_again(cast.slot, &cast.frozen, self.weights.for_cast(), Copies::Columns),
        }
    }

    /// The first part's name, for messages.
    pub fn name(&self) -> &str {
        &self.parts[0].name
    }
}
