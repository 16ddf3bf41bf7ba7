//! A trained tensor with its names, its weights, its FP8 codes and its gradient.

use super::builder::{Builder, Init, Part, Purpose};
use super::gradient::{Grad, GradFormat};
use super::weights::{MASTERS, WEIGHTS, Weights};
use crate::error::{Error, Result};
use crate::hash::name_hash;
use crate::level::{Formats, Level, Masters};
use crate::operand::FrozenScale;
use crate::scaling::{Casts, NextCast, Slot};
use ottava_tensor::ops::{self, Accumulation, AdamWWeight, CastScale, CodeCopies, Operand, real_type};
use ottava_tensor::{DType, Granularity, HostTransfer, MemoryKind, QuantizedTensor, Tensor};

/// The name of gradients' memory in a dry run.
const GRADIENTS: &str = "gradients";

/// Copies on the device of weights that lie in the host's memory, by the first part's name, for as long as a block computes.
#[derive(Default)]
pub struct Fetched(Vec<(String, Tensor)>);

impl Fetched {
    /// Nothing, where all weights lie on the device.
    pub fn none() -> &'static Fetched {
        static NONE: Fetched = Fetched(Vec::new());
        &NONE
    }

    /// Starts to copy those of `params` that lie in the host's memory, and `others`, whose copies are returned.
    ///
    /// On a CPU no weight is copied, since the device's memory is the host's.
    pub fn start(params: &[&Param], others: &[&Tensor]) -> Result<(Fetched, Vec<Tensor>, HostTransfer)> {
        let held: Vec<_> = params
            .iter()
            .filter(|param| {
                param.read_from == MemoryKind::Host && param.weights.read_from().memory_kind() == MemoryKind::Host
            })
            .collect();
        let weights = held.iter().map(|param| param.weights.read_from());
        let tensors: Vec<&Tensor> = others.iter().copied().chain(weights).collect();
        let (mut copies, transfer) = HostTransfer::upload(&tensors)?;
        let weights = copies.split_off(others.len());
        let named = held.iter().map(|param| param.name().to_string()).zip(weights).collect();
        Ok((Fetched(named), copies, transfer))
    }

    fn of(&self, param: &Param) -> Option<&Tensor> {
        self.0.iter().find(|(name, _)| name == param.name()).map(|(_, copy)| copy)
    }
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
    pub home: MemoryKind,
    /// Where layers read it.
    read_from: MemoryKind,
    /// Whether weight decay applies: to matrices, not to norms and biases, as Hugging Face's trainer has it.
    pub decay: bool,
}

/// The cast of a weight.
struct WeightCast {
    slot: Slot,
    /// The copies that products will read.
    copies: CodeCopies,
    /// The codes, where they are kept from product to product.
    codes: Option<QuantizedTensor>,
    keeps_codes: bool,
    frozen: FrozenScale,
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
        let (format, offloaded) = match build.purpose {
            Purpose::Train(memory) => {
                (GradFormat::of(memory.formats.gradients, compute), memory.offload_parameters.covers(build.block))
            }
            Purpose::Infer => (GradFormat::Plain(real_type(compute)), false),
        };
        let param = Param::with_gradient(build, parts, init, format)?;
        Ok(Param { read_from: if offloaded { MemoryKind::Host } else { MemoryKind::Device }, ..param })
    }

    fn with_gradient(build: &mut Builder, parts: Vec<Part>, init: Init, grad_format: GradFormat) -> Result<Param> {
        let mut shape = parts[0].shape.clone();
        shape[0] = parts.iter().map(|part| part.shape[0]).sum();
        let compute = build.recipe.compute;
        let formats = match build.purpose {
            Purpose::Train(memory) if shape.len() > 1 => memory.formats,
            Purpose::Train(memory) => memory.formats.of_vectors(),
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
        let mut home = MemoryKind::Device;
        if let Purpose::Train(memory) = build.purpose
            && shape.len() > 1
            && memory.offload_optimizer.covers(build.block)
        {
            home = MemoryKind::Host;
            // Without codes, a master in F16 is what products cast.
            if memory.weight_codes || formats.masters != Masters::Float16 {
                weights.offload_master()?;
            }
        }
        build.description.parameters += shape.iter().product::<usize>();
        let (decay, read_from) = (shape.len() > 1, MemoryKind::Device);
        Ok(Param { decay, parts, weights, grad: None, grad_format, cast: None, formats, home, read_from })
    }

    /// Moves the weights to where layers are to read them, once it is known how they do.
    pub fn place_weights(&mut self) -> Result<()> {
        match self.read_from {
            MemoryKind::Device => Ok(()),
            MemoryKind::Host => self.weights.offload_read(),
        }
    }

    /// The weights as layers read them.
    pub fn value(&self) -> Result<Tensor> {
        self.weights.value()
    }

    /// The weights as layers read them, from their copy on the device if they lie in the host's memory.
    pub fn read(&self, fetched: &Fetched) -> Result<Tensor> {
        self.weights.value_from(fetched.of(self))
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
    pub fn cast_in(&mut self, slot: Slot, copies: CodeCopies, purpose: Purpose) {
        let (copies, keeps_codes) = match purpose {
            Purpose::Train(memory) => (copies, memory.weight_codes && self.read_from == MemoryKind::Device),
            Purpose::Infer => (CodeCopies::Rows, true),
        };
        if copies == CodeCopies::Both && purpose.trains() {
            self.weights.drop_value();
        }
        self.cast =
            Some(WeightCast { slot, copies, codes: None, keeps_codes, frozen: FrozenScale::default(), amax: None });
    }

    /// Casts the weight for the coming step; to be called whenever weights or scales have changed.
    pub fn quantize(&mut self, casts: &mut Casts) -> Result<()> {
        let Some(cast) = &mut self.cast else { return Ok(()) };
        let _scope = self.weights.device().scope("FP8 codes of weights");
        let value = self.weights.value()?;
        cast.frozen.replace(casts.freeze(cast.slot, &value)?)?;
        match &mut cast.codes {
            _ if !cast.keeps_codes => {}
            Some(codes) => casts.quantize_into(cast.slot, &cast.frozen, &value, codes)?,
            none => *none = Some(casts.quantize(cast.slot, &cast.frozen, &value, cast.copies)?),
        }
        Ok(())
    }

    /// Gets ready for an update: how the weights that it makes will be cast, by the scales of now. `None`: not at all, or by each
    /// product.
    pub fn begin_update(&mut self, casts: &mut Casts) -> Result<Option<NextCast>> {
        let Some(cast) = &mut self.cast else { return Ok(None) };
        let next = casts.scales.next_cast(cast.slot)?;
        match next {
            NextCast::Measured => cast.amax = casts.amax_for(cast.slot)?,
            // A scale of its own is no longer what the weight is cast by.
            NextCast::Known(_) | NextCast::Blocks(_) | NextCast::Later => cast.frozen = FrozenScale::default(),
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
    pub fn finish_update(&mut self, casts: &mut Casts) -> Result<()> {
        let Some(cast) = &mut self.cast else { return Ok(()) };
        if let Some(amax) = cast.amax.take() {
            cast.frozen.replace(casts.own_scale(cast.slot, amax)?)?;
        } else if !matches!(casts.scales.next_cast(cast.slot)?, NextCast::Later) {
            return Ok(());
        }
        match &mut cast.codes {
            Some(codes) => casts.quantize_into(cast.slot, &cast.frozen, &self.weights.value()?, codes),
            None => Ok(()),
        }
    }

    /// The codes that fprop reads: those that are kept, or new ones, which are measured.
    ///
    /// Panics where FP8 products do not read this parameter.
    pub fn codes_for_forward(&self, fetched: &Fetched, casts: &mut Casts) -> Result<QuantizedTensor> {
        let cast = self.cast.as_ref().expect("the weight of an FP8 product has a cast");
        match &cast.codes {
            Some(codes) => Ok(codes.clone()),
            None => {
                casts.quantize(cast.slot, &cast.frozen, self.weights.values_from(fetched.of(self)), CodeCopies::Rows)
            }
        }
    }

    /// Measures the weight for a fprop that reads its value, where a cast for fprop would have measured it.
    pub fn measure_for_forward(&self, fetched: &Fetched, casts: &mut Casts) -> Result<()> {
        match &self.cast {
            Some(cast) if !cast.keeps_codes => casts.measure(cast.slot, &self.read(fetched)?),
            _ => Ok(()),
        }
    }

    /// The codes that dgrad reads: those that are kept, or new ones.
    ///
    /// Panics where FP8 products do not read this parameter.
    pub fn codes_for_backward(&self, fetched: &Fetched, casts: &mut Casts) -> Result<QuantizedTensor> {
        let cast = self.cast.as_ref().expect("the weight of an FP8 product has a cast");
        match &cast.codes {
            Some(codes) => Ok(codes.clone()),
            None => {
                let values = self.weights.values_from(fetched.of(self));
                casts.requantize(cast.slot, &cast.frozen, values, CodeCopies::Columns)
            }
        }
    }

    /// The seed of stochastic rounding: from the name, so that it does not depend on what else a process holds.
    pub fn seed(&self) -> u64 {
        name_hash(0, self.name())
    }

    /// The first part's name, for messages.
    pub fn name(&self) -> &str {
        &self.parts[0].name
    }
}
