//! A parameter: the weights, gradient and cast of the shards of one or several stacked tensors.

mod divided;
mod forward_weight;
mod sliced;

pub use forward_weight::{ForwardWeight, SuspendedWeight};
pub use sliced::{SliceWrite, Writer};

use super::builder::{Builder, Init, Purpose, WeightSource};
use super::cast::{UpdateCast, WeightCast};
use super::gradient::{GradFormat, Gradient};
use super::identity::{Identity, Stack};
use super::loan::{Loan, LoanedWeight};
use super::ownership::Ownership;
use super::shard::{FolderLayout, Shard};
use super::weights::{StoredWeights, Weights};
use crate::Cast;
use crate::lora::{PEFT_PREFIX, module_of};
use crate::scaling::{Casts, Slot, Values};
use crate::storage::{Formats, Masters, Storage};
use ottava_common::error::{Error, Result};
use ottava_tensor::ops::{self, CodeCopies, UpdatedWeight, amax, cast_into, real_type};
use ottava_tensor::{DType, ExpandedTensor, MemoryKind, QuantizedTensor, Tensor};

/// A parameter of a layer.
pub struct Param {
    /// The position in the model, and the tensors of a model folder that the parameter holds.
    pub identity: Identity,
    /// The weights.
    pub weights: Weights,
    /// The gradient of the loss.
    pub gradient: Gradient,
    /// The cast for FP8 products. `None` if no product reads codes.
    cast: Option<WeightCast>,
    /// The storage formats of master weights and moments.
    pub formats: Formats,
    /// The kind of memory that holds master weights and moments.
    pub states_memory: MemoryKind,
    /// The factor of the optimizer's learning rate.
    pub learning_rate_factor: f64,
    /// The elements that this process updates.
    ownership: Ownership,
}

impl Param {
    /// Creates a parameter of stacked `shards` that are loaded later. Its gradient is in F32 or F64. Beside adapters, it is trained if the adapters
    /// save its module.
    pub fn new(build: &mut Builder, mut shards: Vec<Shard>, init: Init) -> Result<Param> {
        let sums = GradFormat::Plain(real_type(build.recipe.compute));
        let Some(lora) = build.lora else { return Param::with_gradient(build, shards, init, sums, false) };
        let name = shards[0].tensor.name.clone();
        // PEFT has no names for tensors that a folder stores in another layout.
        let is_plain = shards.iter().all(|shard| shard.tensor.layout == FolderLayout::Same);
        let is_saved = is_plain && lora.saves(module_of(&name));
        if is_saved {
            shards.iter_mut().for_each(|shard| shard.tensor.name.insert_str(0, PEFT_PREFIX));
        }
        let param = Param::with_gradient(build, shards, init, sums, !is_saved)?;
        let trained = if is_saved { param.weights.shape().iter().product() } else { 0 };
        match is_plain {
            true => build.description.modules.add(&name, trained),
            false => build.description.modules.add_frozen(&name),
        }
        Ok(param)
    }

    /// Returns the same vector, stored in the type of sums, regardless of the compute type and the format of other master weights.
    pub fn in_sums(self, build: &Builder) -> Param {
        let (real, mut param) = (real_type(build.recipe.compute), self);
        param.formats.masters = Masters::None;
        param.weights = Weights::new(build.device, param.weights.shape(), real, param.formats.masters);
        if !param.is_trained() {
            param.weights.freeze();
        }
        param
    }

    /// Creates a matrix whose gradient is a product, in the gradient format of the purpose.
    pub fn matrix(build: &mut Builder, shards: Vec<Shard>, init: Init) -> Result<Param> {
        let compute = build.recipe.compute;
        let (format, offloaded) = match build.purpose {
            Purpose::Train(memory) => (
                GradFormat::for_matrix(memory.formats.gradients, compute),
                memory.offload_parameters.covers(build.block),
            ),
            Purpose::Infer => (GradFormat::Plain(real_type(compute)), false),
        };
        if build.lora.is_some() {
            shards.iter().for_each(|shard| build.description.modules.add_frozen(&shard.tensor.name));
        }
        let mut param = Param::with_gradient(build, shards, init, format, build.lora.is_some())?;
        let in_four_bits = matches!(build.purpose, Purpose::Train(memory) if memory.four_bit);
        if in_four_bits && build.block.is_some() && !param.is_trained() {
            param.weights.pack();
        }
        let memory = if offloaded { MemoryKind::Host } else { MemoryKind::Device };
        let ownership = if param.is_trained() { Ownership::Whole(memory) } else { Ownership::Frozen(Some(memory)) };
        Ok(Param { ownership, ..param })
    }

    /// Creates a parameter that is trained even if adapters freeze other weights.
    pub fn trained(build: &mut Builder, shards: Vec<Shard>, init: Init) -> Result<Param> {
        let sums = GradFormat::Plain(real_type(build.recipe.compute));
        Param::with_gradient(build, shards, init, sums, false)
    }

    fn with_gradient(
        build: &mut Builder,
        shards: Vec<Shard>,
        init: Init,
        format: GradFormat,
        frozen: bool,
    ) -> Result<Param> {
        let mut shape = shards[0].shape();
        shape[0] = shards.iter().map(|shard| shard.shape()[0]).sum();
        // Convolutions are small, and are stored like vectors.
        let (compute, is_matrix) = (build.recipe.compute, shape.len() == 2);
        let formats = match build.purpose {
            Purpose::Train(memory) if !frozen && is_matrix => memory.formats,
            Purpose::Train(memory) if !frozen => memory.formats.of_vectors(),
            Purpose::Train(_) | Purpose::Infer => Formats { masters: Masters::None, ..Storage::Float32.formats() },
        };
        if build.purpose.trains()
            && !frozen
            && let Some(problem) = formats.problem(compute)
        {
            return Err(Error::Config(problem));
        }
        if let Some(shard) = shards.iter().find(|shard| shard.divides_groups(formats.states)) {
            return Err(Error::Config(format!(
                "`optimizer.state_dtype` is `coat`, whose groups of {} values do not divide the {} columns of `{}` that a rank of `parallel.tensor` has; start fewer such ranks, or choose other states",
                ExpandedTensor::GROUP,
                shard.range.len(),
                shard.tensor.name
            )));
        }
        let mut weights = Weights::new(build.device, &shape, compute, formats.masters);
        if frozen {
            weights.freeze();
        }
        let mut states_memory = MemoryKind::Device;
        if let Purpose::Train(memory) = build.purpose
            && is_matrix
            && memory.offload_optimizer.covers(build.block)
        {
            states_memory = MemoryKind::Host;
            // Without stored codes, products cast the F16 master, so it stays on the device.
            if memory.weight_codes || formats.masters != Masters::Float16 {
                weights.offload_master();
            }
        }
        let values = if frozen { &mut build.description.frozen } else { &mut build.description.parameters };
        *values += shape.iter().product::<usize>();
        let (id, in_block) = (build.next_id(), build.block.is_some());
        let identity = Identity { id, shards, init, stack: None, in_block };
        let gradient = Gradient::new(build.device, &shape, format);
        let ownership = match frozen {
            true => Ownership::Frozen(Some(MemoryKind::Device)),
            false => Ownership::Whole(MemoryKind::Device),
        };
        let learning_rate_factor = 1.0;
        Ok(Param { identity, weights, gradient, cast: None, formats, states_memory, learning_rate_factor, ownership })
    }

    /// Returns the same parameter, whose learning rate has another `factor`.
    pub fn at_rate(self, factor: f64) -> Param {
        Param { learning_rate_factor: factor, ..self }
    }

    /// Returns the same parameter as this rank's part of a stack of experts. The stack begins with the tensor `first`.
    pub fn within_stack(self, first: String) -> Param {
        let is_here = self.identity.shards[0].tensor.name == first;
        Param { identity: Identity { stack: Some(Stack { first, is_here }), ..self.identity }, ..self }
    }

    /// Loads the weights that this process stores. `largest` returns the maximum of an amax, F32 `[1]`, over the processes that have elements
    /// of the parameter.
    ///
    /// Errors when `source` has no such tensor or cannot read it.
    pub fn load(
        &mut self,
        source: &mut dyn WeightSource,
        largest: &mut dyn FnMut(&str, Tensor) -> Result<Tensor>,
    ) -> Result<()> {
        if let Some(cast) = self.cast.as_mut().filter(|cast| cast.is_frozen)
            && !cast.read_codes(&self.weights, &self.identity.shards, source)?
        {
            return Ok(());
        }
        if self.weights.are_packed() {
            return self.weights.fill_packed(&self.identity, source);
        }
        let (device, elements) = (self.weights.device().clone(), self.slice());
        let scope = device.scope(self.weights.scope_of_full());
        let (mut full, mut at) = (Tensor::empty(&device, &[elements.len()], DType::F32)?, 0);
        drop(scope);
        for (shard, range) in self.identity.pieces(elements) {
            let values = source.read(&shard.tensor, range, self.identity.init)?;
            let values = if values.device().same(&device) { values } else { values.to_device(&device)? };
            cast_into(&values, &mut full, at)?;
            at += values.len();
        }
        self.fill(into_shape(full, &self.update_shape())?, largest)
    }

    /// Stores the F32 values `full` `[update_shape]` of the elements that this process updates.
    fn fill(&mut self, full: Tensor, largest: &mut dyn FnMut(&str, Tensor) -> Result<Tensor>) -> Result<()> {
        let amax = match self.weights.masters() {
            Masters::Float16 => {
                let zeros = || Tensor::zeros(full.device(), &[1], DType::F32);
                let own = if full.is_empty() { zeros()? } else { amax(&full)? };
                Some(largest(self.identity.name(), own)?)
            }
            Masters::None | Masters::Float32 | Masters::Remainder => None,
        };
        let copies = matches!(&self.ownership, Ownership::Sliced(slice) if !slice.stores_value());
        self.weights.fill(full, amax, copies)?;
        match &self.ownership {
            Ownership::Sliced(slice) if slice.offloads => self.weights.offload_value(),
            _ if self.is_offloaded() => self.weights.offload_read(),
            _ => Ok(()),
        }
    }

    /// Replaces the weights by the F32 values `full`, in the shape [`Param::update_shape`], and returns the weights before. `largest` is the `largest` of
    /// [`Param::load`]. Codes are not cast.
    pub fn replace(
        &mut self,
        full: Tensor,
        largest: &mut dyn FnMut(&str, Tensor) -> Result<Tensor>,
    ) -> Result<StoredWeights> {
        let before = self.weights.take();
        self.fill(full, largest)?;
        Ok(before)
    }

    /// Puts the weights back that [`Param::replace`] has returned. Codes are not cast.
    pub fn put_back(&mut self, before: StoredWeights) {
        self.weights.put(before);
    }

    /// Loads a parameter that is not divided among processes.
    pub fn load_whole(&mut self, source: &mut dyn WeightSource) -> Result<()> {
        self.load(source, &mut |_, amax| Ok(amax))
    }

    /// Returns whether an optimizer updates the parameter. Frozen parameters are not updated.
    pub fn is_trained(&self) -> bool {
        !matches!(self.ownership, Ownership::Frozen(_))
    }

    /// Returns whether this process stores all elements, and the weights that layers read are in host memory between passes.
    pub fn is_offloaded(&self) -> bool {
        matches!(self.ownership, Ownership::Whole(MemoryKind::Host) | Ownership::Frozen(Some(MemoryKind::Host)))
    }

    /// Returns the weights in the compute type, stored or lent.
    pub fn read(&self, loan: &Loan) -> Result<Tensor> {
        self.values(loan)?.plain()
    }

    /// Returns the weights in the form that casts read, stored or lent.
    fn values(&self, loan: &Loan) -> Result<Values> {
        match loan.values(self.identity.id) {
            Some(LoanedWeight::Value(value)) => Ok(value.into()),
            Some(LoanedWeight::Stored(copy)) => self.weights.values_from(Some(copy)),
            Some(LoanedWeight::Codes(_)) | None => self.weights.values_from(None),
        }
    }

    /// Returns whether forward reads only stored tensors, without computing weights or codes.
    pub fn is_stored(&self) -> bool {
        match &self.cast {
            Some(cast) => cast.codes.is_some(),
            None => self.weights.is_stored(),
        }
    }

    /// Returns the gradient for an op that always computes a gradient. It is [`Gradient::sum_mut`] if the parameter is trained, otherwise zeros in
    /// `unread`.
    pub fn grad_or_unread<'a>(&'a mut self, unread: &'a mut Option<Tensor>) -> Result<&'a mut Tensor> {
        match self.is_trained() {
            true => self.gradient.sum_mut(),
            false => Ok(unread.insert(self.gradient.zeros()?)),
        }
    }

    /// Sets the `cast` of this matrix in `slot` to the `copies` that FP8 products read, in a model built for `purpose`. Offloaded weights
    /// that ranks do not divide store no codes, because an update would have to write back weights and codes.
    pub fn cast_in(&mut self, slot: Slot, cast: Cast, copies: CodeCopies, purpose: Purpose) {
        let (copies, ranks_store_codes, keeps_value) = match purpose {
            Purpose::Train(memory) => (copies, memory.weight_codes, memory.frozen_values),
            Purpose::Infer => (CodeCopies::Rows, true, true),
        };
        let is_on_device = matches!(
            self.ownership,
            Ownership::Whole(MemoryKind::Device) | Ownership::Frozen(Some(MemoryKind::Device))
        );
        let stores_codes = ranks_store_codes && is_on_device && !self.weights.are_packed();
        let is_frozen = stores_codes && !self.is_trained();
        let replaces_value = is_frozen && copies == CodeCopies::Both && !keeps_value;
        if copies == CodeCopies::Both && purpose.trains() {
            self.weights.drop_value();
        }
        self.cast = Some(WeightCast {
            stores_codes,
            ranks_store_codes,
            is_frozen,
            replaces_value,
            ..WeightCast::new(slot, cast, copies)
        });
    }

    /// Returns the cast for FP8 products, or `None` if no product reads codes.
    pub fn cast(&self) -> Option<&WeightCast> {
        self.cast.as_ref()
    }

    /// Casts a frozen weight right after loading it, so that at most one weight of a model is in memory before its cast. The scale does not
    /// depend on the state of a run.
    pub fn quantize_frozen(&mut self, casts: &mut Casts) -> Result<()> {
        match &self.cast {
            Some(cast) if cast.is_frozen => self.quantize(casts),
            _ => Ok(()),
        }
    }

    /// Casts the weight for the next step. Call it whenever weights or scales have changed. A frozen weight is cast once.
    pub fn quantize(&mut self, casts: &mut Casts) -> Result<()> {
        self.cast.as_mut().map_or(Ok(()), |cast| cast.quantize(&mut self.weights, casts))
    }

    /// Replaces the scale of the codes by equal scales per row, for products whose other operand has scales per row. The codes do not change.
    pub fn repeat_scale(&mut self) -> Result<()> {
        self.cast.as_mut().map_or(Ok(()), WeightCast::repeat_scale)
    }

    /// Prepares an update, which casts the new weights in the same pass if it can. [`Param::finish_update`] consumes the result.
    pub fn begin_update(&mut self, casts: &mut Casts) -> Result<UpdateCast> {
        match &mut self.cast {
            Some(cast) => cast.begin_update(casts),
            None => Ok(UpdateCast::default()),
        }
    }

    /// Returns the data that an optimizer reads and writes: the weights, their fused cast, and the gradient.
    ///
    /// Panics before backward has run.
    pub fn for_update<'a>(
        &'a mut self,
        update: &'a mut UpdateCast,
    ) -> (UpdatedWeight<'a>, Option<ops::WeightCast<'a>>, ops::Gradient<'a>) {
        let Param { weights, gradient, cast, .. } = self;
        (weights.for_update(), cast.as_mut().and_then(|cast| cast.in_update(update)), gradient.read())
    }

    /// Casts updated weights if their scales depend on their amax. [`Param::finish_write`] casts slices.
    pub fn finish_update(&mut self, update: UpdateCast, casts: &mut Casts) -> Result<()> {
        match (&mut self.cast, &self.ownership) {
            (Some(cast), Ownership::Sliced(_)) => {
                cast.finish_slice_update(update);
                Ok(())
            }
            (Some(cast), _) => cast.finish_update(update, &self.weights, casts),
            (None, _) => Ok(()),
        }
    }

    /// Returns the codes that fprop reads: stored, lent, or cast and measured now.
    ///
    /// Panics if FP8 products do not read this parameter.
    pub fn codes_for_forward(&self, loan: &Loan, casts: &mut Casts) -> Result<QuantizedTensor> {
        let cast = self.cast.as_ref().expect("the weight of an FP8 product has a cast");
        match cast.codes.as_ref().or(loan.codes(self.identity.id)) {
            Some(codes) => Ok(codes.clone()),
            None => cast.cast_for_forward(self.values(loan)?, casts),
        }
    }

    /// Measures the weight for an fprop that reads its value, if a cast for fprop would have measured it.
    pub fn measure_for_forward(&self, loan: &Loan, casts: &mut Casts) -> Result<()> {
        match &self.cast {
            Some(cast) if !cast.stores_codes => casts.measure(cast.slot, &self.read(loan)?),
            _ => Ok(()),
        }
    }

    /// Returns the codes that dgrad reads: stored, lent, or cast now.
    ///
    /// Panics if FP8 products do not read this parameter.
    pub fn codes_for_backward(&self, loan: &Loan, casts: &mut Casts) -> Result<QuantizedTensor> {
        let cast = self.cast.as_ref().expect("the weight of an FP8 product has a cast");
        match cast.codes.as_ref().or(loan.codes(self.identity.id)) {
            Some(codes) => WeightCast::for_backward(codes),
            None => cast.cast_for_backward(self.values(loan)?, casts),
        }
    }
}

/// Reshapes a tensor that is not shared.
pub(super) fn into_shape(tensor: Tensor, shape: &[usize]) -> Result<Tensor> {
    // The argument is dropped, so the result is not shared either.
    Ok(tensor.reshape(shape)?)
}
