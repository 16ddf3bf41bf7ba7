//! The decoder that all families share, in training and evaluation.

mod adapters;
mod compare;

pub use adapters::Adapters;

use crate::layers::{ChunkLoss, Head, join_vocabulary};
use crate::stage::{Span, Stage, StageSaved, fetch};
use crate::{CacheSizes, DecoderConfig, InferenceBatch, KvCache, KvGroup, RopeTables};
use ottava_common::error::{Error, Result};
use ottava_recipe::Recipe;
use ottava_recipe::context::{Context, DeferredWgrads, Sequences};
use ottava_recipe::layer_ranks::{LayerRanks, Undivided};
use ottava_recipe::mode::{Mode, StepPrecision};
use ottava_recipe::param::{
    Builder, Description, Direction, FolderTensor, FolderUse, Loan, MemoryPolicy, Param, ParamId, Purpose, Units,
    WeightCast, WeightSource,
};
use ottava_recipe::recompute::{Recompute, SavedActivations};
use ottava_recipe::scaling::{RouterLoad, ScalingState};
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::{CrossEntropy, cap_logits, embedding, real_type};
use ottava_tensor::{DType, Device, Tensor};
use std::rc::Rc;

/// A decoder, or the stages of a decoder that a process has, with the weights and the scaling state of the casts.
pub struct Decoder {
    config: DecoderConfig,
    device: Device,
    recipe: Recipe,
    recompute: Recompute,
    saved_activations: SavedActivations,
    /// The stages in the order of forward.
    stages: Vec<Stage>,
    scaling: ScalingState,
    description: Description,
    /// The description of the layers of this process. If ranks divide tensors, shapes are the shapes of this rank's parts.
    part: Description,
    /// The biases of routers that balance the loads of experts, by the name of the router.
    router_biases: Vec<(String, ParamId)>,
    /// Whether ranks divide the tensors or the experts of layers.
    is_divided: bool,
    /// The ranks that divide tensors, sequences and experts of layers.
    ranks: Rc<dyn LayerRanks>,
    folder_codes: FolderCounts,
}

/// The number of frozen weights with FP8 codes in the model folder. Weights that are fused in memory count once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FolderCounts {
    /// The number of weights that keep the codes.
    pub kept: usize,
    /// The number of weights that are cast again, since the recipe has other scales.
    pub recast: usize,
}

/// The inputs of a backward pass other than activations and gradients.
#[derive(Clone, Copy)]
pub struct BackwardPass<'a> {
    /// The sequences of the micro-batch.
    pub sequences: &'a Sequences,
    /// The precision of the forward pass.
    pub precision: StepPrecision,
    /// The factor of the losses of layers, F32 `[1]` (F64 for F64). These losses are means over the tokens of the micro-batch.
    pub layer_loss_scale: &'a Tensor,
}

impl Decoder {
    /// Builds the whole model on `device` for sequences up to `seq_len`, and loads its weights from `weights`.
    pub fn new(
        config: &DecoderConfig,
        recipe: &Recipe,
        device: &Device,
        purpose: Purpose,
        seq_len: usize,
        weights: &mut dyn WeightSource,
    ) -> Result<Decoder> {
        let mut decoder = Decoder::unloaded(config, recipe, device, purpose, seq_len)?;
        decoder.load(weights)?;
        Ok(decoder)
    }

    /// Builds and loads a model for inference on one of the `ranks` that divide its tensors, for sequences up to `seq_len`.
    pub fn for_inference(
        config: &DecoderConfig,
        recipe: &Recipe,
        device: &Device,
        seq_len: usize,
        weights: &mut dyn WeightSource,
        ranks: Rc<dyn LayerRanks>,
    ) -> Result<Decoder> {
        let whole = [Span::whole(config.layers.len())];
        let mut decoder = Decoder::staged(config, recipe, device, Purpose::Infer, seq_len, &whole, ranks)?;
        decoder.load(weights)?;
        if decoder.is_divided {
            decoder.expect_all(weights)?;
        }
        Ok(decoder)
    }

    /// Builds the whole model without loading weights, so that ranks can divide the weights before each rank loads its slices.
    pub fn unloaded(
        config: &DecoderConfig,
        recipe: &Recipe,
        device: &Device,
        purpose: Purpose,
        seq_len: usize,
    ) -> Result<Decoder> {
        let whole = [Span::whole(config.layers.len())];
        Decoder::staged(config, recipe, device, purpose, seq_len, &whole, Rc::new(Undivided))
    }

    /// Loads all weights.
    pub fn load(&mut self, weights: &mut dyn WeightSource) -> Result<()> {
        self.load_each(|param| param.load_whole(weights), |_| Ok(()))
    }

    /// Errors if `weights` lack a tensor of the whole model, including tensors that only other processes read.
    pub fn expect_all(&self, weights: &mut dyn WeightSource) -> Result<()> {
        Decoder::folder_tensors(&self.config, &self.recipe)?.iter().try_for_each(|tensor| weights.expect(tensor))
    }

    /// Loads each parameter with `load`, casts it if it is frozen, and runs `finish` on the parameters of each unit.
    pub fn load_each(
        &mut self,
        mut load: impl FnMut(&mut Param) -> Result<()>,
        mut finish: impl FnMut(&mut [&mut Param]) -> Result<()>,
    ) -> Result<()> {
        let (mut units, scaling) = (self.stages.iter_mut().flat_map(Stage::units_mut), &mut self.scaling);
        let mut casts = scaling.casts(Mode::TRAINING);
        let folder = &mut self.folder_codes;
        units.try_for_each(|mut params| {
            for param in &mut params {
                load(param)?;
                match param.cast().and_then(WeightCast::folder_use) {
                    Some(FolderUse::Kept) => folder.kept += 1,
                    Some(FolderUse::Recast) => folder.recast += 1,
                    None => {}
                }
                param.quantize_frozen(&mut casts)?;
            }
            finish(&mut params)
        })
    }

    /// Returns how many frozen weights with FP8 codes in the folder kept the codes, and how many were cast again.
    pub fn folder_codes(&self) -> FolderCounts {
        self.folder_codes
    }

    /// Builds one stage for each of `spans`, without loading weights. If `ranks` divide tensors, the layers have this rank's parts.
    pub fn staged(
        config: &DecoderConfig,
        recipe: &Recipe,
        device: &Device,
        purpose: Purpose,
        seq_len: usize,
        spans: &[Span],
        ranks: Rc<dyn LayerRanks>,
    ) -> Result<Decoder> {
        if config.embedding.learned_positions && seq_len > config.max_positions {
            return Err(Error::Model(format!(
                "the model has learned {} positions; keep sequences of {seq_len} within them",
                config.max_positions
            )));
        }
        recipe.expect_on(device)?;
        let tables = RopeTables::new(config, device, seq_len, real_type(recipe.compute))?;
        let mut build = Builder::new(device, recipe, purpose).divided(ranks.clone());
        build.lora = config.lora.as_ref();
        let is_divided = [Axis::Tensor, Axis::Expert].into_iter().any(|axis| build.place_on(axis).is_divided());
        let stages = spans.iter().map(|span| Stage::new(&mut build, config, span, &tables)).collect::<Result<_>>()?;
        build.description.casts = build.slots.amax_groups();
        let part = build.description.clone();
        let (scaling, router_biases) = (ScalingState::new(device, build.slots, ranks.clone())?, build.router_biases);
        let kept = match purpose {
            Purpose::Train(kept) => kept,
            Purpose::Infer => MemoryPolicy::FULL,
        };
        let recompute = kept.recompute;
        // Backward consumes the activations of a recomputed block immediately.
        let saved_activations = if recompute.blocks() { SavedActivations::Exact } else { kept.saved_activations };
        // Plans and reports describe the whole model.
        let description = match (*spans == [Span::whole(config.layers.len())], is_divided) {
            (true, false) => {
                build.description.check(recipe, config.lora.as_ref())?;
                build.description
            }
            (true, true) => Description { casts: build.description.casts, ..Decoder::describe(config, recipe)? },
            (false, _) => Decoder::describe(config, recipe)?,
        };
        let (config, device, recipe) = (config.clone(), device.clone(), recipe.clone());
        Ok(Decoder {
            config,
            device,
            recipe,
            recompute,
            saved_activations,
            stages,
            scaling,
            description,
            part,
            router_biases,
            is_divided,
            ranks,
            folder_codes: FolderCounts::default(),
        })
    }

    /// Returns the description of a model of these sizes under `recipe`, from a dry run that allocates nothing.
    ///
    /// Errors if the recipe's exceptions match nothing in the model.
    pub fn describe(config: &DecoderConfig, recipe: &Recipe) -> Result<Description> {
        Ok(Decoder::dry(config, recipe)?.description)
    }

    /// Returns the tensors that a folder of the model has.
    ///
    /// Errors like [`Decoder::describe`].
    pub fn folder_tensors(config: &DecoderConfig, recipe: &Recipe) -> Result<Vec<FolderTensor>> {
        let mut decoder = Decoder::dry(config, recipe)?;
        let shards = decoder.all_parameters().into_iter().flat_map(|param| param.identity.shards.iter());
        Ok(shards.map(|shard| shard.tensor.clone()).collect())
    }

    /// Returns a model of the same sizes without weights, on a device that holds no data. It takes the model's place while the model is moved out.
    pub fn without_data(&self) -> Result<Decoder> {
        Decoder::dry(&self.config, &self.recipe)
    }

    /// Builds a model without weights, on a device that holds no data.
    fn dry(config: &DecoderConfig, recipe: &Recipe) -> Result<Decoder> {
        Decoder::unloaded(config, recipe, &Device::Cpu.dry(), Purpose::Infer, 1)
    }

    /// Returns the sizes of the model.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Returns the recipe, which decides the precision.
    pub fn recipe(&self) -> &Recipe {
        &self.recipe
    }

    /// Returns the device of the model.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the ranks that divide tensors, sequences and experts of layers.
    pub fn ranks(&self) -> &dyn LayerRanks {
        &*self.ranks
    }

    /// Returns the description of the whole model, even if this process has only some stages.
    pub fn description(&self) -> &Description {
        &self.description
    }

    /// Returns the description of the layers of this process. If ranks divide tensors, shapes are the shapes of this rank's parts.
    pub fn part(&self) -> &Description {
        &self.part
    }

    /// Returns the scaling state of the model's casts.
    pub fn scaling(&mut self) -> &mut ScalingState {
        &mut self.scaling
    }

    /// Returns all trained parameters, always in the same order.
    pub fn parameters(&mut self) -> Vec<&mut Param> {
        trained(self.all_parameters())
    }

    /// Returns all parameters, including frozen ones.
    pub fn all_parameters(&mut self) -> Vec<&mut Param> {
        self.stages.iter_mut().flat_map(Stage::parameters_mut).collect()
    }

    /// Returns the trained parameters of each stage.
    pub fn parameters_by_stage(&mut self) -> Vec<Vec<&mut Param>> {
        self.stages.iter_mut().map(|stage| trained(stage.parameters_mut())).collect()
    }

    /// Returns the trained weight that embedding and head share, if embedding or head is in a stage of another process.
    pub fn tied_weight(&mut self) -> Option<&mut Param> {
        self.stages.iter_mut().find_map(Stage::tied_weight_mut).filter(|param| param.is_trained())
    }

    /// Returns whether [`Decoder::tied_weight`] returns a weight.
    pub fn is_tied(&self) -> bool {
        self.stages.iter().any(Stage::is_tied) && self.config.lora.is_none()
    }

    /// Returns the id of the head's copy of the embedding's table, if the embedding is in a stage of another process.
    pub fn copy(&self) -> Option<ParamId> {
        self.stages.iter().find_map(Stage::copy).map(|copy| copy.identity.id)
    }

    /// Returns the number of stages.
    pub fn stages(&self) -> usize {
        self.stages.len()
    }

    /// Returns the parameters, grouped by unit in the order of [`Stage::units_mut`], and the scaling state of all casts.
    pub fn units_and_scaling(&mut self) -> (Vec<Vec<&mut Param>>, &mut ScalingState) {
        (self.stages.iter_mut().flat_map(Stage::units_mut).collect(), &mut self.scaling)
    }

    /// Returns all trained parameters, and the scaling state of all casts.
    pub fn parameters_and_scaling(&mut self) -> (Vec<&mut Param>, &mut ScalingState) {
        (trained(self.stages.iter_mut().flat_map(Stage::parameters_mut).collect()), &mut self.scaling)
    }

    /// Changes the biases of routers to balance experts, after a step with these `loads` summed over all ranks.
    pub fn balance_routers(&mut self, loads: &[RouterLoad], rate: f64) -> Result<()> {
        for param in trained(self.stages.iter_mut().flat_map(Stage::parameters_mut).collect()) {
            if let Some((name, _)) = self.router_biases.iter().find(|(_, bias)| *bias == param.identity.id) {
                let load = loads.iter().find(|load| load.name == *name).expect("each router has a load");
                param.weights.add(&load.bias_change(rate))?;
            }
        }
        Ok(())
    }

    /// Casts all weights with the current scales. It must be called after building and loading. Later updates cast the weights that they write.
    pub fn quantize_weights(&mut self) -> Result<()> {
        let (mut params, scaling) = (self.stages.iter_mut().flat_map(Stage::parameters_mut), &mut self.scaling);
        let mut casts = scaling.casts(Mode::TRAINING);
        params.try_for_each(|param| param.quantize(&mut casts))?;
        // Values lost in these casts are not counted for a step, since another process may have run the preceding step.
        scaling.forget_losses()
    }

    /// Runs [`Stage::forward_only`] on stage number `stage`. `mode` must be a mode without backward. The scaling state does not change.
    pub fn forward_only(
        &mut self,
        stage: usize,
        x: &Tensor,
        sequences: &Sequences,
        mode: Mode,
        units: &mut dyn Units,
    ) -> Result<Tensor> {
        let mut context = Context::new(self.scaling.casts(mode), &*self.ranks, sequences);
        self.stages[stage].forward_only(x, &mut context, units)
    }

    /// Returns the losses `[T]` of I32 `targets` `[T]`, from the result of [`Decoder::forward_only`].
    ///
    /// Errors for a stage without the head.
    pub fn losses(&self, normed: &Tensor, targets: &Tensor, units: &mut dyn Units) -> Result<Tensor> {
        let (weight, output) = (self.head_weight()?, self.head().output().ok_or_else(no_head)?);
        let loan = fetch(weight, Direction::Forward, units)?;
        Head::losses(normed, weight, &loan, targets, output, &*self.ranks)
    }

    /// Returns [`Head::scores`] `[T, L]` of the result of [`Decoder::forward_only`]. Errors for a stage without the head.
    pub fn scores(&self, normed: &Tensor, units: &mut dyn Units) -> Result<Tensor> {
        let weight = self.head_weight()?;
        let mut scores = Head::scores(normed, weight, &fetch(weight, Direction::Forward, units)?, &*self.ranks)?;
        self.add_bias(&mut scores)?;
        Ok(scores)
    }

    /// Returns the last stage of this process. It has the head if the process has the head.
    fn head(&self) -> &Stage {
        self.stages.last().expect("a process has a stage")
    }

    fn head_weight(&self) -> Result<&Param> {
        self.head().head_weight().ok_or_else(no_head)
    }

    /// Runs [`Stage::forward`] of a micro-batch on stage number `stage`.
    pub fn forward(
        &mut self,
        stage: usize,
        x: &Tensor,
        sequences: &Sequences,
        precision: StepPrecision,
        units: &mut dyn Units,
    ) -> Result<(Tensor, StageSaved)> {
        let _scope = self.device.scope("forward");
        let (stage, mut context) = self.training(stage, sequences, precision, None);
        stage.forward(x, &mut context, units)
    }

    /// Runs [`Stage::losses_and_gradient`] on the result of [`Decoder::forward`].
    ///
    /// Errors for a stage without the head.
    pub fn losses_and_gradient(
        &mut self,
        normed: &Tensor,
        targets: &Tensor,
        scale: &Tensor,
        units: &mut dyn Units,
    ) -> Result<(Tensor, Tensor)> {
        let _scope = self.device.scope("head");
        let stage = self.stages.last_mut().expect("a process has a stage");
        stage.losses_and_gradient(normed, targets, scale, &*self.ranks, units)?.ok_or_else(no_head)
    }

    /// [`Decoder::losses_and_gradient`] of any loss of the logits of `tokens` tokens, as [`Head::chunked_gradient`].
    ///
    /// Errors for a stage without the head.
    pub fn chunked_gradient(
        &mut self,
        normed: &Tensor,
        tokens: usize,
        units: &mut dyn Units,
        loss_of_chunk: &mut ChunkLoss,
    ) -> Result<(Tensor, Tensor)> {
        let _scope = self.device.scope("head");
        let stage = self.stages.last_mut().expect("a process has a stage");
        stage.chunked_gradient(normed, tokens, &*self.ranks, units, loss_of_chunk)?.ok_or_else(no_head)
    }

    /// Returns the values `[T]` that the value head estimates from the result `[T, C]` of [`Decoder::forward_only`] or [`Decoder::forward`], in the type
    /// of sums (F32; F64 for F64).
    ///
    /// Errors for a model without a value head.
    pub fn values(&self, normed: &Tensor) -> Result<Tensor> {
        Head::values(normed, self.head().value_weight().ok_or_else(no_value_head)?, &*self.ranks)
    }

    /// Returns the gradient by `normed` of a loss whose gradient by [`Decoder::values`] is `dvalues` `[T]`. Adds to the gradient of the value head.
    ///
    /// Errors for a model without a value head.
    pub fn value_gradient(&mut self, normed: &Tensor, dvalues: &Tensor) -> Result<Tensor> {
        let _scope = self.device.scope("head");
        let stage = self.stages.last_mut().expect("a process has a stage");
        stage.value_gradient(normed, dvalues, &*self.ranks)?.ok_or_else(no_value_head)
    }

    /// The logits `[T, V]` of the result `[T, C]` of [`Decoder::forward_only`] of a whole model, capped if the model caps logits, in the type of
    /// sums (F32; F64 for F64).
    ///
    /// Errors for a stage without the head.
    pub fn logits_of(&self, normed: &Tensor) -> Result<Tensor> {
        let mut logits = Head::logits(normed, self.head_weight()?, Loan::none(), real_type(normed.dtype()))?;
        self.cap(&mut logits)?;
        Ok(logits)
    }

    /// Adds the bias of scores, if they have one.
    fn add_bias(&self, scores: &mut Tensor) -> Result<()> {
        self.head().score_bias().map_or(Ok(()), |bias| Head::add_bias(scores, bias))
    }

    fn cap(&self, logits: &mut Tensor) -> Result<()> {
        let loss = self.head().output().and_then(|output| output.of_logits(logits.dtype()));
        match loss {
            Some((CrossEntropy { soft_cap: Some(cap), .. }, _)) => Ok(cap_logits(logits, cap)?),
            _ => Ok(()),
        }
    }

    /// Runs [`Stage::backward`] of a micro-batch on stage number `stage`.
    pub fn backward(
        &mut self,
        stage: usize,
        dy: Tensor,
        saved: StageSaved,
        pass: BackwardPass,
        units: &mut dyn Units,
    ) -> Result<Option<Tensor>> {
        self.backward_with(stage, (dy, saved), pass, units, None)
    }

    /// Runs backward like [`Decoder::backward`], but defers the wgrad products. [`Decoder::wgrads`] computes them later.
    pub fn dgrads(
        &mut self,
        stage: usize,
        dy: Tensor,
        saved: StageSaved,
        pass: BackwardPass,
        units: &mut dyn Units,
    ) -> Result<(Option<Tensor>, DeferredWgrads)> {
        let mut deferred = DeferredWgrads::default();
        let dx = self.backward_with(stage, (dy, saved), pass, units, Some(&mut deferred))?;
        Ok((dx, deferred))
    }

    fn backward_with(
        &mut self,
        stage: usize,
        (dy, saved): (Tensor, StageSaved),
        BackwardPass { sequences, precision, layer_loss_scale }: BackwardPass,
        units: &mut dyn Units,
        deferred: Option<&mut DeferredWgrads>,
    ) -> Result<Option<Tensor>> {
        let _scope = self.device.scope("backward");
        let (stage, context) = self.training(stage, sequences, precision, deferred);
        let mut context = Context { layer_loss_scale: Some(layer_loss_scale), ..context };
        stage.backward(dy, saved, &mut context, units)
    }

    /// Computes the products that [`Decoder::dgrads`] deferred for stage number `stage`, and adds them to the gradients of the weights.
    pub fn wgrads(&mut self, stage: usize, deferred: DeferredWgrads, units: &mut dyn Units) -> Result<()> {
        let _scope = self.device.scope("backward");
        self.stages[stage].wgrads(deferred, units)
    }

    fn training<'a>(
        &'a mut self,
        stage: usize,
        sequences: &'a Sequences,
        precision: StepPrecision,
        deferred: Option<&'a mut DeferredWgrads>,
    ) -> (&'a mut Stage, Context<'a>) {
        let (recompute, saved_activations) = (self.recompute, self.saved_activations);
        let casts = self.scaling.casts(Mode::training(precision));
        let context =
            Context { recompute, saved_activations, deferred, ..Context::new(casts, &*self.ranks, sequences) };
        (&mut self.stages[stage], context)
    }

    /// Returns the groups of attention layers that share block tables, for sequences up to `max_len` tokens. Groups that see most keys come first.
    pub fn kv_groups(&self, max_len: usize) -> Vec<KvGroup> {
        KvGroup::of(&self.part.attention, &self.part.caches, max_len)
    }

    /// Returns whether the device computes the first tokens of several sequences in one pass of the attention of training. Encoders always do.
    pub fn packs_prompts(&self) -> Result<bool> {
        Ok(self.config.is_encoder() || self.part.packs_documents(&self.device, self.recipe.compute)?)
    }

    /// Returns an empty cache for [`Decoder::hidden`].
    pub fn kv_cache(&self, sizes: CacheSizes) -> Result<KvCache> {
        KvCache::new(&self.device, &self.part, self.recipe.compute, self.scaling.scales().len(), sizes)
    }

    /// Returns the number of bytes of the recurrent states of a sequence, over all layers. It is 0 for a model of attention layers alone.
    pub fn state_bytes(&self) -> usize {
        self.part.recurrent.iter().map(|spec| spec.state_bytes(self.recipe.compute)).sum()
    }

    /// Returns the number of bytes of one block of `group` in a cache with blocks of `block_size` tokens.
    pub fn kv_block_bytes(&self, group: &KvGroup, block_size: usize, dtype: DType) -> usize {
        group.block_bytes(&self.part.attention, block_size, dtype)
    }

    /// Makes the result of a token in [`Decoder::hidden`] independent of the other tokens of a batch. Operands that are scaled by the amax of their
    /// tensor get one scale per row. Codes of weights do not change. Returns whether the model had such operands. The model cannot be trained
    /// afterwards.
    pub fn scale_by_token(&mut self) -> Result<bool> {
        let changes = self.scaling.scale_rows();
        if changes {
            self.all_parameters().into_iter().try_for_each(Param::repeat_scale)?;
        }
        Ok(changes)
    }

    /// Returns normalised activations `[T, C]` of the new tokens of a batch of sequences, and appends their keys and values to `cache`.
    pub fn hidden(&self, batch: &InferenceBatch, cache: &mut KvCache) -> Result<Tensor> {
        let stage = self.head();
        let pass = || cache.forward(stage, self.scaling.scales(), &*self.ranks, batch);
        with_constant_weights(self.device(), stage.blocks_are_stored(), pass)
    }

    /// Returns logits `[S, V]` for the rows `rows` (I32 `[S]`) of the result of [`Decoder::hidden`]. The logits are F32 (F64 for F64): in BF16,
    /// likely tokens would often have equal logits.
    pub fn logits(&self, hidden: &Tensor, rows: &Tensor) -> Result<Tensor> {
        let (x, head) = (embedding(hidden, rows)?, self.head_weight()?);
        let pass = || {
            let own = Head::logits(&x, head, Loan::none(), real_type(x.dtype()))?;
            // In a classifier, all ranks have the scores of all labels.
            let is_part = self.ranks.place(Axis::Tensor).is_divided() && self.config.head.labels.is_none();
            let mut logits = if is_part { join_vocabulary(&own, &*self.ranks)? } else { own };
            self.cap(&mut logits)?;
            self.add_bias(&mut logits)?;
            Ok(logits)
        };
        with_constant_weights(self.device(), head.is_stored(), pass)
    }
}

/// Runs a pass of inference. If all weights `are_stored`, the device treats them as constant. Weights that forward casts are not constant. Forward
/// casts weights after training without stored codes.
fn with_constant_weights<R>(device: &Device, are_stored: bool, pass: impl FnOnce() -> R) -> R {
    match device {
        Device::Cuda(gpu) if are_stored => gpu.with_constant_weights(pass),
        _ => pass(),
    }
}

fn trained(params: Vec<&mut Param>) -> Vec<&mut Param> {
    params.into_iter().filter(|param| param.is_trained()).collect()
}

fn no_head() -> Error {
    Error::Model("this stage of the model has no head; the stage with the head computes losses and logits".into())
}

fn no_value_head() -> Error {
    Error::Model("the model has no value head, so it estimates no values of tokens".into())
}
