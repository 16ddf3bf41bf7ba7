//! A parameter: weights, gradient and cast of the shards of one or several stacked tensors.

mod divided;
mod sliced;

use super::builder::{Builder, Init, Purpose, WeightSource};
use super::cast::WeightCast;
use super::folder_codes::FolderUse;
use super::gradient::{GradFormat, Gradient, WgradProduct};
use super::id::ParamId;
use super::loan::{Loan, LoanedWeight};
use super::scopes::GRADIENTS;
use super::shard::{Shard, Split};
use super::weights::Weights;
use crate::Cast;
use crate::scaling::{Casts, NextCast, Slot, Values};
use crate::storage::{Formats, Masters, Storage};
use ottava_common::error::{Error, Result};
use ottava_common::hash::name_hash;
use ottava_tensor::element::Element;
use ottava_tensor::ops::{self, Accumulation, CodeCopies, Operand, UpdatedWeight, amax, cast_into, real_type};
use ottava_tensor::{DType, ExpandedTensor, HostTransfer, MemoryKind, QuantizedTensor, Tensor};
use std::ops::{Add, Range};

/// A parameter of a layer.
pub struct Param {
    id: ParamId,
    /// The parts of tensors of a model folder that it holds, stacked along the first dimension.
    pub shards: Vec<Shard>,
    /// Its place in a stack of experts that ranks divide; `None` for all other parameters.
    stack: Option<Stack>,
    /// The weights.
    pub weights: Weights,
    /// Gradient of the loss.
    pub gradient: Gradient,
    /// The cast that FP8 products read; `None` if no product reads codes.
    cast: Option<WeightCast>,
    /// Storage formats of master weights and moments.
    pub formats: Formats,
    /// The memory of master weights and moments.
    pub states_memory: MemoryKind,
    placement: Placement,
    /// The elements that this process updates; `None` for all.
    slice: Option<Slice>,
    /// Whether it belongs to a block.
    in_block: bool,
    /// Whether it is frozen: it has no gradient, no master weights and no moments.
    frozen: bool,
    init: Init,
}

/// Where the weights that layers read are between passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// In memory of the device.
    Device,
    /// In host memory; each pass copies them to the device.
    Host,
    /// Divided among ranks; each pass gathers them.
    Gathered,
    /// Divided among ranks, and each rank has its slice in host memory; each pass copies and gathers the slices.
    GatheredFromHost,
}

/// The place of a parameter in the stack of the experts of all ranks.
struct Stack {
    /// The first tensor of the stack.
    first: String,
    /// Whether this rank has it.
    is_here: bool,
}

/// The elements whose master weights and moments this process has.
#[derive(Clone, Debug)]
struct Slice {
    elements: Range<usize>,
    /// Whether ranks gather the codes of their cast.
    codes: bool,
    /// Whether an update can cast them in the same pass.
    is_cast_by_update: bool,
    /// Whether their weights are stored although they can be computed from a master, since ranks gather them from where they are stored.
    stores_value: bool,
}

impl Param {
    /// A parameter of stacked `shards` that are loaded later, with its gradient in F32 or F64.
    pub fn new(build: &mut Builder, shards: Vec<Shard>, init: Init) -> Result<Param> {
        let sums = GradFormat::Plain(real_type(build.recipe.compute));
        Param::with_gradient(build, shards, init, sums, build.lora.is_some())
    }

    /// A vector that is stored in the type of sums, whatever the compute type and the format of other master weights.
    pub fn in_sums(build: &mut Builder, shards: Vec<Shard>, init: Init) -> Result<Param> {
        Ok(Param::new(build, shards, init)?.stored_in_sums(build))
    }

    /// [`Param::in_sums`] of a vector that is trained also with adapters.
    pub fn trained_in_sums(build: &mut Builder, shards: Vec<Shard>, init: Init) -> Result<Param> {
        Ok(Param::trained(build, shards, init)?.stored_in_sums(build))
    }

    fn stored_in_sums(self, build: &Builder) -> Param {
        let (real, mut param) = (real_type(build.recipe.compute), self);
        param.formats.masters = Masters::None;
        param.weights = Weights::new(build.device, param.weights.shape(), real, param.formats.masters);
        if param.frozen {
            param.weights.freeze();
        }
        param
    }

    /// Adds `change`, of the elements of the whole parameter, to a parameter of [`Param::in_sums`]; waits for the device.
    pub fn add_to_value(&mut self, change: &[f64]) -> Result<()> {
        let own = self.slice();
        let (value, _) = self.weights.tensors_mut();
        let value = value.expect("a parameter without a master stores its value");
        let change = if value.len() == change.len() { change } else { &change[own] };
        match value.dtype() {
            DType::F64 => add_to(value, change.iter().copied()),
            _ => add_to(value, change.iter().map(|dx| *dx as f32)),
        }
    }

    /// A matrix whose gradient is a product, in the gradient format of the purpose.
    pub fn matrix(build: &mut Builder, shards: Vec<Shard>, init: Init) -> Result<Param> {
        let compute = build.recipe.compute;
        let (format, offloaded) = match build.purpose {
            Purpose::Train(memory) => (
                GradFormat::for_matrix(memory.formats.gradients, compute),
                memory.offload_parameters.covers(build.block),
            ),
            Purpose::Infer => (GradFormat::Plain(real_type(compute)), false),
        };
        let param = Param::with_gradient(build, shards, init, format, build.lora.is_some())?;
        Ok(Param { placement: if offloaded { Placement::Host } else { Placement::Device }, ..param })
    }

    /// A parameter that is trained also with adapters, which freeze other weights.
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
        let (compute, is_matrix) = (build.recipe.compute, shape.len() > 1);
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
            // Without stored codes, products cast the F16 master.
            if memory.weight_codes || formats.masters != Masters::Float16 {
                weights.offload_master();
            }
        }
        let values = if frozen { &mut build.description.frozen } else { &mut build.description.parameters };
        *values += shape.iter().product::<usize>();
        let (id, gradient) = (build.next_id(), Gradient::new(format));
        let (cast, placement, slice, in_block) = (None, Placement::Device, None, build.block.is_some());
        Ok(Param {
            id,
            shards,
            stack: None,
            weights,
            gradient,
            cast,
            formats,
            states_memory,
            placement,
            slice,
            in_block,
            frozen,
            init,
        })
    }

    /// The same parameter, as this rank's part of a stack of experts that begins with the tensor `first`.
    pub fn within_stack(self, first: String) -> Param {
        let is_here = self.shards[0].tensor.name == first;
        Param { stack: Some(Stack { first, is_here }), ..self }
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
            && !cast.read_codes(&self.weights, &self.shards, source)?
        {
            return Ok(());
        }
        let (device, elements) = (self.weights.device().clone(), self.slice());
        let scope = device.scope(self.weights.scope_of_full());
        let (mut full, mut at) = (Tensor::empty(&device, &[elements.len()], DType::F32)?, 0);
        drop(scope);
        for (shard, range) in self.pieces(elements) {
            let values = source.read(&self.shards[shard].tensor, range, self.init)?;
            let values = if values.device().same(&device) { values } else { values.to_device(&device)? };
            cast_into(&values, &mut full, at)?;
            at += values.len();
        }
        let full = into_shape(full, &self.update_shape())?;
        let amax = match self.weights.masters() {
            Masters::Float16 => {
                let own = if full.is_empty() { Tensor::zeros(&device, &[1], DType::F32)? } else { amax(&full)? };
                Some(largest(self.name(), own)?)
            }
            Masters::None | Masters::Float32 | Masters::Remainder => None,
        };
        self.weights.fill(full, amax, self.slice.as_ref().is_some_and(|slice| !slice.stores_value))?;
        match self.placement {
            Placement::Host => self.weights.offload_read(),
            Placement::GatheredFromHost => self.weights.offload_value(),
            Placement::Device | Placement::Gathered => Ok(()),
        }
    }

    /// [`Param::load`] for a parameter that is not divided among processes.
    pub fn load_whole(&mut self, source: &mut dyn WeightSource) -> Result<()> {
        self.load(source, &mut |_, amax| Ok(amax))
    }

    /// The shards that contain `elements` of the flat parameter, with the ranges of their flat tensors.
    fn pieces(&self, elements: Range<usize>) -> Vec<(usize, Range<usize>)> {
        let (mut pieces, mut start) = (Vec::new(), 0);
        for (i, shard) in self.shards.iter().enumerate() {
            let end = start + shard.elements();
            let (from, to) = (elements.start.max(start), elements.end.min(end));
            if from < to {
                pieces.extend(shard.folder_ranges(from - start..to - start).into_iter().map(|range| (i, range)));
            }
            start = end;
        }
        pieces
    }

    /// Its initial values without a model folder.
    pub fn init(&self) -> Init {
        self.init
    }

    /// Its id.
    pub fn id(&self) -> ParamId {
        self.id
    }

    /// Where the weights that layers read are between passes.
    pub fn placement(&self) -> Placement {
        self.placement
    }

    /// Whether a pass copies the weights from host memory first.
    fn is_in_host_memory(&self) -> bool {
        self.placement == Placement::Host && self.weights.read_from().memory_kind() == MemoryKind::Host
    }

    /// Whether all ranks of the tensor axis have the same elements of it: norms, biases that are added to sums over ranks, learned
    /// positions, projections to latents, routers and what is beside the experts that ranks divide, and the halves of adapters that are not
    /// divided.
    pub fn is_whole(&self) -> bool {
        self.shards.iter().all(|shard| shard.split == Split::None)
    }

    /// Whether other ranks of the tensor axis have some of its elements too, and others other elements.
    pub fn has_replicas(&self) -> bool {
        self.replicas() > 1
    }

    /// The ranks that have the same key and value heads, or the same latents; 1 if it has none.
    pub fn replicas(&self) -> usize {
        self.shards.iter().map(|shard| shard.replica.ranks).max().unwrap_or(1)
    }

    /// The elements of the shards that `are_meant`, among the elements that this process updates: ascending and not adjacent.
    pub fn elements_of(&self, are_meant: impl Fn(&Shard) -> bool) -> Vec<Range<usize>> {
        let (slice, mut end, mut found) = (self.slice(), 0, Vec::<Range<usize>>::new());
        for shard in &self.shards {
            let start = end;
            end += shard.elements();
            let (from, to) = (start.max(slice.start), end.min(slice.end));
            if from >= to || !are_meant(shard) {
                continue;
            }
            let piece = from - slice.start..to - slice.start;
            match found.last_mut().filter(|last| last.end == piece.start) {
                Some(last) => last.end = piece.end,
                None => found.push(piece),
            }
        }
        found
    }

    /// Whether it is of experts that ranks divide.
    pub fn is_of_experts(&self) -> bool {
        self.stack.is_some()
    }

    /// Whether this rank has the first element of what the ranks with other experts have together.
    pub fn begins_stack(&self) -> bool {
        self.stack.as_ref().is_none_or(|stack| stack.is_here)
    }

    /// Whether an optimizer updates it; false if it is frozen.
    pub fn is_trained(&self) -> bool {
        !self.frozen
    }

    /// Whether it is a matrix; norms and biases are vectors.
    pub fn is_matrix(&self) -> bool {
        self.weights.shape().len() > 1
    }

    /// Whether it is a matrix of a block, rather than an embedding, the head, a norm or a bias.
    pub fn is_hidden_matrix(&self) -> bool {
        self.in_block && self.is_matrix()
    }

    /// Starts to copy the `params` that are in host memory, and `others`. Returns the copies of `others`.
    ///
    /// On a CPU no weight is copied, since device memory is host memory.
    pub fn prefetch(params: &[&Param], others: &[&Tensor]) -> Result<(Loan, Vec<Tensor>, HostTransfer)> {
        let offloaded: Vec<_> = params.iter().filter(|param| param.is_in_host_memory()).collect();
        let weights = offloaded.iter().map(|param| param.weights.read_from());
        let tensors: Vec<&Tensor> = others.iter().copied().chain(weights).collect();
        let (mut copies, transfer) = HostTransfer::upload(&tensors)?;
        let weights = copies.split_off(others.len()).into_iter().map(LoanedWeight::Stored);
        let mut loan = Loan::default();
        offloaded.iter().zip(weights).for_each(|(param, weight)| loan.add(param.id, weight));
        Ok((loan, copies, transfer))
    }

    /// The weights in the compute type, as layers read them.
    pub fn value(&self) -> Result<Tensor> {
        self.weights.value()
    }

    /// [`Param::value`], or the lent weights.
    pub fn read(&self, loan: &Loan) -> Result<Tensor> {
        self.values(loan)?.plain()
    }

    /// The weights in the form that casts read, stored or lent.
    fn values(&self, loan: &Loan) -> Result<Values> {
        match loan.values(self.id) {
            Some(LoanedWeight::Value(value)) => Ok(value.into()),
            Some(LoanedWeight::Stored(copy)) => self.weights.values_from(Some(copy)),
            Some(LoanedWeight::Codes(_)) | None => self.weights.values_from(None),
        }
    }

    /// Whether forward reads only stored tensors, and computes no weights or codes itself.
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

    /// The gradient, for a layer's backward to add to.
    ///
    /// Panics if it is stored with a scale.
    pub fn grad_mut(&mut self) -> Result<&mut Tensor> {
        self.gradient.plain_mut(self.weights.device(), self.weights.shape())
    }

    /// [`Param::grad_mut`], or zeros in `unread` if it is frozen, for an op that always computes the gradient.
    pub fn grad_or_unread<'a>(&'a mut self, unread: &'a mut Option<Tensor>) -> Result<&'a mut Tensor> {
        match self.frozen {
            true => Ok(unread.insert(self.gradient.zeros(self.weights.device(), self.weights.shape())?)),
            false => self.grad_mut(),
        }
    }

    /// Adds `a · bᵀ` to the gradient of a matrix; the first product of a step overwrites it.
    pub fn add_product_to_grad(&mut self, a: Operand, b: Operand, accumulation: Accumulation) -> Result<()> {
        self.add_wgrad(WgradProduct { a, b, accumulation, groups: None })
    }

    /// Adds a product to the gradient of a matrix; the first product of a step overwrites it.
    pub fn add_wgrad(&mut self, product: WgradProduct) -> Result<()> {
        let _scope = self.weights.device().scope(GRADIENTS);
        self.gradient.add_product(product, self.weights.device(), self.weights.shape())
    }

    /// Runs `add` on the gradient of a matrix, unscaled.
    pub fn add_to_grad(&mut self, add: impl FnOnce(&mut Tensor) -> Result<()>) -> Result<()> {
        let _scope = self.weights.device().scope(GRADIENTS);
        self.gradient.add(self.weights.device(), self.weights.shape(), add)
    }

    /// Sets the `cast` of this matrix in `slot` to the `copies` that FP8 products read, in a model built for `purpose`. Offloaded weights
    /// that ranks do not divide store no codes, since an update would have to write back both.
    pub fn cast_in(&mut self, slot: Slot, cast: Cast, copies: CodeCopies, purpose: Purpose) {
        let (copies, ranks_store_codes, keeps_value) = match purpose {
            Purpose::Train(memory) => (copies, memory.weight_codes, memory.frozen_values),
            Purpose::Infer => (CodeCopies::Rows, true, true),
        };
        let stores_codes = ranks_store_codes && self.placement == Placement::Device;
        let is_frozen = self.frozen && stores_codes;
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

    /// Whether the codes of a frozen weight are the codes of the folder that it was loaded from; `None` if that folder has no codes.
    pub fn folder_use(&self) -> Option<FolderUse> {
        self.cast.as_ref().and_then(|cast| cast.folder)
    }

    /// The number of the slot in which it is cast.
    pub fn cast_slot(&self) -> Option<usize> {
        self.cast.as_ref().map(|cast| cast.slot.index())
    }

    /// Casts a frozen weight, which the codes may replace, so that no two of a model are in memory before their casts. Its scale does not
    /// depend on the state of a run.
    pub fn quantize_frozen(&mut self, casts: &mut Casts) -> Result<()> {
        match &self.cast {
            Some(cast) if cast.is_frozen => self.quantize(casts),
            _ => Ok(()),
        }
    }

    /// Casts the weight for the next step. Must be called whenever weights or scales have changed; a frozen weight is cast once.
    pub fn quantize(&mut self, casts: &mut Casts) -> Result<()> {
        self.cast.as_mut().map_or(Ok(()), |cast| cast.quantize(&mut self.weights, casts))
    }

    /// Replaces the scale of the codes by one equal scale per row, for products whose other operand has a scale per row. No code changes.
    pub fn repeat_scale(&mut self) -> Result<()> {
        self.cast.as_mut().map_or(Ok(()), WeightCast::repeat_scale)
    }

    /// Prepares an update, and returns how the update casts the new weights. `None` if they are not cast, or cast by each product, or if a
    /// slice is cast after the update.
    pub fn begin_update(&mut self, casts: &mut Casts) -> Result<Option<NextCast>> {
        let Some(cast) = &mut self.cast else { return Ok(None) };
        let next = cast.begin_update(casts)?;
        Ok(Some(next).filter(|next| match self.slice {
            None => cast.stores_codes || matches!(next, NextCast::Measured),
            Some(_) => cast.codes.is_some(),
        }))
    }

    /// What an optimizer reads and writes: the weights, their fused cast, and the gradient.
    pub fn for_update<'a>(
        &'a mut self,
        next: &'a Option<NextCast>,
    ) -> Result<(UpdatedWeight<'a>, Option<ops::WeightCast<'a>>, ops::Gradient<'a>)> {
        let Param { weights, gradient, cast, .. } = self;
        let cast = cast.as_mut().and_then(|cast| cast.in_update(next));
        Ok((weights.for_update(), cast, gradient.get().expect("backward has run").read()))
    }

    /// Casts updated weights whose scales depend on their amax.
    pub fn finish_update(&mut self, casts: &mut Casts) -> Result<()> {
        match (&mut self.cast, &self.slice) {
            (Some(cast), None) => cast.finish_update(&self.weights, casts),
            _ => Ok(()),
        }
    }

    /// The codes that fprop reads: stored, lent, or cast and measured now.
    ///
    /// Panics if FP8 products do not read this parameter.
    pub fn codes_for_forward(&self, loan: &Loan, casts: &mut Casts) -> Result<QuantizedTensor> {
        let cast = self.cast.as_ref().expect("the weight of an FP8 product has a cast");
        match cast.codes.as_ref().or(loan.codes(self.id)) {
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

    /// The codes that dgrad reads: stored, lent, or cast now.
    ///
    /// Panics if FP8 products do not read this parameter.
    pub fn codes_for_backward(&self, loan: &Loan, casts: &mut Casts) -> Result<QuantizedTensor> {
        let cast = self.cast.as_ref().expect("the weight of an FP8 product has a cast");
        match cast.codes.as_ref().or(loan.codes(self.id)) {
            Some(codes) => WeightCast::for_backward(codes),
            None => cast.cast_for_backward(self.values(loan)?, casts),
        }
    }

    /// The seed of stochastic rounding: a hash of the name of the first tensor of this rank, so that it does not depend on the other
    /// parameters of a process.
    pub fn seed(&self) -> u64 {
        name_hash(0, &self.shards[0].tensor.name)
    }

    /// The name of the first tensor, also if another rank has it.
    pub fn name(&self) -> &str {
        self.stack.as_ref().map_or(&self.shards[0].tensor.name, |stack| &stack.first)
    }
}

/// Adds `change` to the elements of `value`, whose type is `T`.
fn add_to<T: Element + Add<Output = T>>(value: &mut Tensor, change: impl Iterator<Item = T>) -> Result<()> {
    let sums: Vec<T> = value.to_vec::<T>()?.into_iter().zip(change).map(|(x, dx)| x + dx).collect();
    Ok(value.write_bytes(bytemuck::cast_slice(&sums))?)
}

/// An unshared tensor in another shape.
fn into_shape(tensor: Tensor, shape: &[usize]) -> Result<Tensor> {
    // The argument is dropped, so the result is unshared too.
    Ok(tensor.reshape(shape)?)
}
