//! A model beside the trained model, which is never updated: the teacher of distillation, or the reference model and the reward models of reinforcement
//! learning.

use crate::step::MicroBatch;
use crate::step::host::values;
use ottava_checkpoint::{FolderWeights, RandomWeights, verify_model};
use ottava_common::error::{Error, Result};
use ottava_data::{Batch, Tokenizer};
use ottava_models::{Decoder, DecoderConfig};
use ottava_recipe::Recipe;
use ottava_recipe::context::Sequences;
use ottava_recipe::layer_ranks::ShardPlace;
use ottava_recipe::mode::Mode;
use ottava_recipe::param::{Purpose, Resident, WeightSource};
use ottava_settings::RunConfig;
use ottava_tensor::{DType, Device, Tensor};
use std::cell::RefCell;
use std::path::Path;

/// A frozen model, whole on each rank.
pub struct FrozenModel {
    model: RefCell<Decoder>,
    /// The scope of the memory of its passes.
    scope: &'static str,
}

impl FrozenModel {
    /// Reads the model in `folder`, for rows of up to `seq_len` tokens. In a dry run, the weights are random.
    ///
    /// Errors when the weights cannot be read.
    pub(super) fn of_folder(
        scope: &'static str,
        folder: &Path,
        sizes: &DecoderConfig,
        recipe: &Recipe,
        device: &Device,
        seq_len: usize,
    ) -> Result<FrozenModel> {
        if device.tracker().is_some() {
            let mut weights = RandomWeights { seed: 0, device: device.clone() };
            return FrozenModel::new(scope, sizes, recipe, device, seq_len, &mut weights);
        }
        verify_model(folder)?;
        let mut weights = FolderWeights::open_for(folder, sizes)?.on(device);
        let model = FrozenModel::new(scope, sizes, recipe, device, seq_len, &mut weights)?;
        weights.finish(sizes)?;
        Ok(model)
    }

    /// Makes a model of these `sizes`, with values from `weights`, for rows of up to `seq_len` tokens. `scope` names its memory.
    pub fn new(
        scope: &'static str,
        sizes: &DecoderConfig,
        recipe: &Recipe,
        device: &Device,
        seq_len: usize,
        weights: &mut dyn WeightSource,
    ) -> Result<FrozenModel> {
        let _scope = device.whole_scope(scope);
        let mut model = Decoder::new(sizes, recipe, device, Purpose::Infer, seq_len, weights)?;
        model.quantize_weights()?;
        Ok(FrozenModel { model: RefCell::new(model), scope })
    }

    /// Returns the last activations `[T, C]` of the tokens `inputs` `[T]`.
    pub fn activations(&self, inputs: &Tensor, sequences: &Sequences) -> Result<Tensor> {
        let mut model = self.model.borrow_mut();
        let device = model.device().clone();
        let _scope = device.whole_scope(self.scope);
        model.forward_only(0, inputs, sequences, Mode::EVALUATION, &mut Resident)
    }

    /// Returns the logits `[T, V]` of these activations `[T, C]`, in F32 (F64 for F64).
    pub fn logits(&self, activations: &Tensor) -> Result<Tensor> {
        let model = self.model.borrow();
        let _scope = model.device().whole_scope(self.scope);
        model.logits_of(activations)
    }

    /// Returns the losses `[T]` of the `targets` `[T]` of the tokens `inputs` `[T]`.
    pub(super) fn losses(&self, inputs: &Tensor, targets: &Tensor, sequences: &Sequences) -> Result<Tensor> {
        let activations = self.activations(inputs, sequences)?;
        let model = self.model.borrow();
        let _scope = model.device().whole_scope(self.scope);
        model.losses(&activations, targets, &mut Resident)
    }

    /// Returns the losses of the targets of `batch`, by token.
    pub(super) fn losses_of(&self, batch: &Batch) -> Result<Vec<f64>> {
        let device = self.model.borrow().device().clone();
        let MicroBatch { inputs, targets, sequences, .. } = MicroBatch::new(batch, &device, ShardPlace::ALONE)?;
        values(&self.losses(&inputs, &targets, &sequences)?)
    }

    /// Allocates room for the activations of `tokens` tokens.
    pub(super) fn room(&self, tokens: usize) -> Result<Tensor> {
        let model = self.model.borrow();
        let (device, dtype): (&Device, DType) = (model.device(), model.recipe().compute);
        let _scope = device.whole_scope(self.scope);
        Ok(Tensor::empty(device, &[tokens, model.config().stream.channels], dtype)?)
    }
}

/// Errors with [`Error::Config`] if the tokenizer in `folder` has other tokens than the tokenizer of the run. A folder without a tokenizer passes.
/// `what` names the model of the folder, and `consequence` says why other tokens cannot be used.
pub(super) fn expect_tokens(what: &str, folder: &Path, run: &RunConfig, consequence: &str) -> Result<()> {
    let own = run.tokenizer_path();
    if !folder.join("tokenizer.json").exists() || Tokenizer::load(folder)?.has_tokens_of(&Tokenizer::load(own)?) {
        return Ok(());
    }
    Err(Error::Config(format!(
        "the tokenizer of {what} ({}) has other tokens than the tokenizer of the run ({}), so {consequence}; choose a model with the same tokenizer",
        folder.display(),
        own.display()
    )))
}
