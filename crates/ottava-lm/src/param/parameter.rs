//! A trained tensor with its names, its weights, its FP8 codes and its gradient.

mod slice;

use super::builder::{Builder, Init, Part, Purpose};
use super::gradient::{Grad, GradFormat};
use super::scopes::{CODES, GRADIENTS, MASTERS, WEIGHTS};
use super::weights::Weights;
use crate::error::{Error, Result};
use crate::hash::name_hash;
use crate::level::{Formats, Level, Masters};
use crate::operand::FrozenScale;
use crate::scaling::{Casts, NextCast, Slot, Values};
use ottava_tensor::ops::{self, Accumulation, AdamWWeight, CastScale, CodeCopies, Operand, real_type};
use ottava_tensor::{DType, Granularity, HostTransfer, MemoryKind, QuantizedTensor, Tensor};
use std::ops::Range;

/// Weights that a block reads from elsewhere while it computes, by the parameter's name.
#[derive(Default)]
pub struct Fetched(Vec<(String, FetchedWeight)>);

/// A weight for the time of a pass of a block.
pub enum FetchedWeight {
    /// As [`Param::value`] gives it.
    Value(Tensor),
    /// A copy of [`Weights::read_from`].
    Stored(Tensor),
    /// The codes of its cast.
    Codes(QuantizedTensor),
}

impl Fetched {
    /// No copies: all weights are on the device.
    pub fn none() -> &'static Fetched {
        static NONE: Fetched = Fetched(Vec::new());
        &NONE
    }

    /// Adds the weight of the parameter called so.
    pub fn add(&mut self, name: &str, weight: FetchedWeight) {
        self.0.push((name.to_string(), weight));
    }

    /// Adds what `other` has.
    pub fn extend(&mut self, other: Fetched) {
        self.0.extend(other.0);
    }

    /// Starts to copy `params` in host memory, and `others`, whose copies are returned.
    ///
    /// On a CPU no weight is copied, since device memory is host memory.
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
        let named =
            held.iter().map(|param| param.name().to_string()).zip(weights.into_iter().map(FetchedWeight::Stored));
        Ok((Fetched(named.collect()), copies, transfer))
    }

    fn of(&self, param: &Param) -> Option<&FetchedWeight> {
        self.0.iter().find(|(name, _)| name == param.name()).map(|(_, weight)| weight)
    }

    fn codes_of(&self, param: &Param) -> Option<&QuantizedTensor> {
        match self.of(param)? {
            FetchedWeight::Codes(codes) => Some(codes),
            FetchedWeight::Value(_) | FetchedWeight::Stored(_) => None,
        }
    }
}

/// A trained tensor.
pub struct Param {
    /// The tensors of a model folder that are stacked in it.
    pub parts: Vec<Part>,
    /// The weights.
    pub weights: Weights,
    /// Gradient of the loss, to which backward adds; `None` before the first backward of a step, which leaves the memory to forward.
    pub grad: Option<Grad>,
    /// Storage format of the gradient.
    grad_format: GradFormat,
    /// The cast that FP8 products read; `None` if no product reads codes.
    cast: Option<WeightCast>,
    /// Storage formats of master weights and moments.
    pub formats: Formats,
    /// The memory of master weights and moments.
    pub home: MemoryKind,
    /// The memory of the weights that layers read.
    read_from: MemoryKind,
    /// The elements whose master weights and moments this process has; `None` for all.
    slice: Option<Range<usize>>,
    /// Whether an update can cast the slice in the same pass.
    casts_slice: bool,
    /// Memory for the coming gradient.
    grad_place: Option<Tensor>,
    /// Whether it stays as it is, so that it has no gradient, no master weights and no moments.
    frozen: bool,
}

/// The cast of a weight.
struct WeightCast {
    slot: Slot,
    /// The copies that products will read.
    copies: CodeCopies,
    /// The codes, if they are stored between products.
    codes: Option<QuantizedTensor>,
    keeps_codes: bool,
    /// Whether the codes replace a frozen weight.
    replaces_value: bool,
    frozen: FrozenScale,
    /// F32 `[1]`: the amax of the new weights for current scaling, during an update.
    amax: Option<Tensor>,
}

impl Param {
    /// A parameter of the stacked `parts`, filled from the builder's weights, with its gradient in F32 or F64.
    pub fn new(build: &mut Builder, parts: Vec<Part>, init: Init) -> Result<Param> {
        let sums = GradFormat::Plain(real_type(build.recipe.compute));
        Param::with_gradient(build, parts, init, sums, build.lora.is_some())
    }

    /// A matrix whose gradient is a product, in the gradient format of the purpose.
    pub fn matrix(build: &mut Builder, parts: Vec<Part>, init: Init) -> Result<Param> {
        let compute = build.recipe.compute;
        let (format, offloaded) = match build.purpose {
            Purpose::Train(memory) => {
                (GradFormat::of(memory.formats.gradients, compute), memory.offload_parameters.covers(build.block))
            }
            Purpose::Infer => (GradFormat::Plain(real_type(compute)), false),
        };
        let param = Param::with_gradient(build, parts, init, format, build.lora.is_some())?;
        Ok(Param { read_from: if offloaded { MemoryKind::Host } else { MemoryKind::Device }, ..param })
    }

    /// A matrix of an adapter, which is trained beside frozen weights.
    pub fn adapter(build: &mut Builder, parts: Vec<Part>, init: Init) -> Result<Param> {
        let sums = GradFormat::Plain(real_type(build.recipe.compute));
        Param::with_gradient(build, parts, init, sums, false)
    }

    fn with_gradient(
        build: &mut Builder,
        parts: Vec<Part>,
        init: Init,
        grad_format: GradFormat,
        frozen: bool,
    ) -> Result<Param> {
        let mut shape = parts[0].shape.clone();
        shape[0] = parts.iter().map(|part| part.shape[0]).sum();
        let compute = build.recipe.compute;
        let formats = match build.purpose {
            Purpose::Train(memory) if !frozen && shape.len() > 1 => memory.formats,
            Purpose::Train(memory) if !frozen => memory.formats.of_vectors(),
            Purpose::Train(_) | Purpose::Infer => Formats { masters: Masters::None, ..Level::O0.formats() },
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
            && !frozen
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
            // Without stored codes, products cast the F16 master.
            if memory.weight_codes || formats.masters != Masters::Float16 {
                weights.offload_master()?;
            }
        }
        let values = if frozen { &mut build.description.frozen } else { &mut build.description.parameters };
        *values += shape.iter().product::<usize>();
        Ok(Param {
            parts,
            weights,
            grad: None,
            grad_format,
            cast: None,
            formats,
            home,
            read_from: MemoryKind::Device,
            slice: None,
            casts_slice: false,
            grad_place: None,
            frozen,
        })
    }

    /// Whether layers read the weights from the host's memory.
    pub fn is_offloaded(&self) -> bool {
        self.read_from == MemoryKind::Host
    }

    /// Whether an optimizer updates it; not so beside adapters.
    pub fn is_trained(&self) -> bool {
        !self.frozen
    }

    /// Whether it has rows and columns; norms and biases do not.
    pub fn is_matrix(&self) -> bool {
        self.weights.shape().len() > 1
    }

    /// Moves the weights to the memory from which layers read them. Call it after [`Param::cast_in`].
    pub fn place_weights(&mut self) -> Result<()> {
        match self.read_from {
            MemoryKind::Device => Ok(()),
            MemoryKind::Host => self.weights.offload_read(),
        }
    }

    /// The weights in the compute type, as layers read them.
    pub fn value(&self) -> Result<Tensor> {
        self.weights.value()
    }

    /// [`Param::value`], from the device copy if the weights are elsewhere.
    pub fn read(&self, fetched: &Fetched) -> Result<Tensor> {
        self.values(fetched)?.plain()
    }

    /// The weights as casts read them, from the device copy if they are elsewhere.
    fn values(&self, fetched: &Fetched) -> Result<Values> {
        match fetched.of(self) {
            Some(FetchedWeight::Value(value)) => Ok(value.into()),
            Some(FetchedWeight::Stored(copy)) => self.weights.values_from(Some(copy)),
            Some(FetchedWeight::Codes(_)) | None => self.weights.values_from(None),
        }
    }

    /// Whether forward reads what is stored, and makes no values or codes of its own.
    pub fn is_stored(&self) -> bool {
        match &self.cast {
            Some(cast) => cast.codes.is_some(),
            None => self.weights.is_stored(),
        }
    }

    /// The type of [`Param::value`].
    pub fn dtype(&self) -> DType {
        self.weights.dtype()
    }

    /// Drops the gradient, before the first backward of a step.
    pub fn clear_grad(&mut self) {
        self.grad = None;
    }

    /// The gradient, for a layer's backward to add to.
    ///
    /// Panics if it is stored with a scale.
    pub fn grad_mut(&mut self) -> Result<&mut Tensor> {
        if self.grad.is_none() {
            self.grad = Some(Grad::Plain(self.zero_grad()?));
        }
        match &mut self.grad {
            Some(Grad::Plain(grad)) => Ok(grad),
            _ => unreachable!("only gradients that are products have scales"),
        }
    }

    /// [`Param::grad_mut`], or `unread` zeros where it is frozen, for an op that computes the gradient in any case.
    pub fn grad_or_unread<'a>(&'a mut self, unread: &'a mut Option<Tensor>) -> Result<&'a mut Tensor> {
        match self.frozen {
            true => Ok(unread.insert(self.zero_grad()?)),
            false => self.grad_mut(),
        }
    }

    /// Makes the next gradient in `memory`, of its shape and type, where there is none yet.
    pub fn place_grad(&mut self, memory: Tensor) {
        self.grad_place = Some(memory);
    }

    /// Whether there is a gradient, or memory for one.
    pub fn has_grad(&self) -> bool {
        self.grad.is_some() || self.grad_place.is_some()
    }

    /// The type of the gradient where it has no scale.
    pub fn grad_dtype(&self) -> Option<DType> {
        match self.grad_format {
            GradFormat::Plain(dtype) => Some(dtype),
            GradFormat::Scaled(_) => None,
        }
    }

    /// Stores the gradient in the type in which products add to it, because it is added to those of other ranks before its cast.
    pub fn keep_sums(&mut self) {
        self.grad_format = GradFormat::Plain(self.grad_format.sums());
    }

    /// A gradient to start from.
    fn zero_grad(&mut self) -> Result<Tensor> {
        let _scope = self.weights.device().scope(GRADIENTS);
        match self.grad_place.take() {
            Some(mut place) => {
                place.fill_zero()?;
                Ok(place)
            }
            None => Ok(Tensor::zeros(self.weights.device(), self.weights.shape(), self.grad_format.sums())?),
        }
    }

    /// Adds `a · bᵀ` to the gradient of a matrix; the first product of a step overwrites it.
    pub fn add_product_to_grad(&mut self, a: Operand, b: Operand, accumulation: Accumulation) -> Result<()> {
        let _scope = self.weights.device().scope(GRADIENTS);
        let (grad, place) = (self.grad.take(), self.grad_place.take());
        self.grad = Some(Grad::plus_product(grad, place, self.grad_format, a, b, accumulation)?);
        Ok(())
    }

    /// Runs `add` on the gradient of a matrix, unscaled.
    pub fn add_to_grad(&mut self, add: impl FnOnce(&mut Tensor) -> Result<()>) -> Result<()> {
        let _scope = self.weights.device().scope(GRADIENTS);
        let (grad, format) = (self.grad.take(), self.grad_format);
        self.grad = Some(Grad::plus(grad, format, |sum| {
            let mut sum = match sum {
                Some(sum) => sum,
                None => self.zero_grad()?,
            };
            add(&mut sum)?;
            Ok(sum)
        })?);
        Ok(())
    }

    /// Makes FP8 products read `copies` of this matrix, cast in `slot`, in a model built for `purpose`. Offloaded weights store no codes:
    /// an
    /// update would have to write back both.
    pub fn cast_in(&mut self, slot: Slot, copies: CodeCopies, purpose: Purpose) {
        let (copies, keeps_codes, keeps_value) = match purpose {
            Purpose::Train(memory) => {
                (copies, memory.weight_codes && self.read_from == MemoryKind::Device, memory.frozen_values)
            }
            Purpose::Infer => (CodeCopies::Rows, true, true),
        };
        let replaces_value = self.frozen && keeps_codes && copies == CodeCopies::Both && !keeps_value;
        if copies == CodeCopies::Both && purpose.trains() {
            self.weights.drop_value();
        }
        self.cast = Some(WeightCast {
            slot,
            copies,
            codes: None,
            keeps_codes,
            replaces_value,
            frozen: FrozenScale::default(),
            amax: None,
        });
    }

    /// The number of the slot in which it is cast.
    pub fn cast_slot(&self) -> Option<usize> {
        self.cast.as_ref().map(|cast| cast.slot.index())
    }

    /// Casts the weight for the coming step. Call it whenever weights or scales have changed; once for a frozen weight, which the codes may
    /// replace.
    pub fn quantize(&mut self, casts: &mut Casts) -> Result<()> {
        let Some(cast) = &mut self.cast else { return Ok(()) };
        let _scope = self.weights.device().scope(CODES);
        let value = self.weights.value()?;
        cast.frozen.replace(casts.freeze(cast.slot, &value)?)?;
        match &mut cast.codes {
            _ if !cast.keeps_codes => {}
            Some(codes) => casts.quantize_into(cast.slot, &cast.frozen, &value, codes)?,
            none => *none = Some(casts.quantize(cast.slot, &cast.frozen, &value, cast.copies)?),
        }
        if cast.replaces_value {
            self.weights.drop_frozen();
        }
        Ok(())
    }

    /// Repeats the one scale of the codes for each row, for products with an operand that has a scale per row. No code changes.
    pub fn repeat_scale(&mut self) -> Result<()> {
        let Some(cast) = &mut self.cast else { return Ok(()) };
        // Casts in each product have scales per row of their own.
        cast.frozen = FrozenScale::default();
        if let Some(codes) = cast.codes.as_mut().filter(|codes| codes.granularity == Granularity::PerTensor) {
            let scale_inv = codes.scale_inv.to_vec::<f32>()?[0];
            let shape = Granularity::PerRow.scales_shape(codes.rows, codes.columns);
            let repeated = vec![scale_inv; shape[0]];
            let scale_inv = Tensor::from_slice(codes.scale_inv.device(), &shape, &repeated)?;
            *codes = QuantizedTensor { scale_inv, granularity: Granularity::PerRow, ..codes.only_rows() };
        }
        Ok(())
    }

    /// Prepares an update, and returns how to cast the new weights. `None` if they are not cast, or by each product, or of a slice after the
    /// update.
    pub fn begin_update(&mut self, casts: &mut Casts) -> Result<Option<NextCast>> {
        let Some(cast) = &mut self.cast else { return Ok(None) };
        let next = casts.scales.next_cast(cast.slot)?;
        match next {
            NextCast::Measured => cast.amax = casts.amax_for(cast.slot)?,
            // The weight is no longer cast by its own scale.
            NextCast::Known(_) | NextCast::Blocks(_) | NextCast::Later => cast.frozen = FrozenScale::default(),
        }
        Ok(Some(next).filter(|next| match self.slice {
            None => cast.keeps_codes || matches!(next, NextCast::Measured),
            Some(_) => cast.codes.is_some(),
        }))
    }

    /// What an optimizer reads and writes: the weights, their cast in the same pass, and the gradient.
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

    /// Casts updated weights whose scales depend on them.
    pub fn finish_update(&mut self, casts: &mut Casts) -> Result<()> {
        let (Some(cast), None) = (&mut self.cast, &self.slice) else { return Ok(()) };
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

    /// The codes that fprop reads: the stored ones, or new ones, which are measured.
    ///
    /// Panics if FP8 products do not read this parameter.
    pub fn codes_for_forward(&self, fetched: &Fetched, casts: &mut Casts) -> Result<QuantizedTensor> {
        let cast = self.cast.as_ref().expect("the weight of an FP8 product has a cast");
        match cast.codes.as_ref().or(fetched.codes_of(self)) {
            Some(codes) => Ok(codes.clone()),
            None => {
                let values = self.values(fetched)?;
                casts.quantize(cast.slot, &cast.frozen, values, CodeCopies::Rows)
            }
        }
    }

    /// Measures the weight for a fprop that reads its value, if a cast for fprop would have measured it.
    pub fn measure_for_forward(&self, fetched: &Fetched, casts: &mut Casts) -> Result<()> {
        match &self.cast {
            Some(cast) if !cast.keeps_codes => casts.measure(cast.slot, &self.read(fetched)?),
            _ => Ok(()),
        }
    }

    /// The codes that dgrad reads: the stored ones, or new ones.
    ///
    /// Panics if FP8 products do not read this parameter.
    pub fn codes_for_backward(&self, fetched: &Fetched, casts: &mut Casts) -> Result<QuantizedTensor> {
        let cast = self.cast.as_ref().expect("the weight of an FP8 product has a cast");
        match cast.codes.as_ref().or(fetched.codes_of(self)) {
            Some(codes) => Ok(codes.clone()),
            None => {
                let values = self.values(fetched)?;
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
