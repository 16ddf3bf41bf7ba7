//! The teacher: a model beside the one that is trained, which is never updated.

use ottava_checkpoint::{FolderWeights, RandomWeights, verify_model};
use ottava_common::error::{Error, Result};
use ottava_data::Tokenizer;
use ottava_models::{Decoder, DecoderConfig};
use ottava_recipe::Recipe;
use ottava_recipe::context::Sequences;
use ottava_recipe::mode::Mode;
use ottava_recipe::param::{Purpose, Resident, WeightSource};
use ottava_settings::RunConfig;
use ottava_tensor::{DType, Device, Tensor};
use std::cell::RefCell;

/// A frozen model.
pub struct Teacher(RefCell<Decoder>);

impl Teacher {
    /// The teacher of the run of `config`, with random weights on a device in a dry run.
    ///
    /// Errors as [`RunConfig::teacher_sizes`], and when the weights of its folder cannot be read.
    pub(super) fn of(config: &RunConfig, device: &Device) -> Result<Teacher> {
        let _scope = device.whole_scope("teacher");
        let (sizes, recipe, seq_len) = (config.teacher_sizes()?, config.teacher_recipe(device), config.data.max_length);
        if device.tracker().is_some() {
            return Teacher::new(
                &sizes,
                &recipe,
                device,
                seq_len,
                &mut RandomWeights { seed: 0, device: device.clone() },
            );
        }
        let folder = &config.distillation.teacher;
        verify_model(folder)?;
        let mut weights = FolderWeights::open(folder)?.on(device);
        let teacher = Teacher::new(&sizes, &recipe, device, seq_len, &mut weights)?;
        weights.finish(&sizes)?;
        Ok(teacher)
    }

    /// A teacher of these `sizes`, with values from `weights`, for rows of up to `seq_len` tokens.
    pub fn new(
        sizes: &DecoderConfig,
        recipe: &Recipe,
        device: &Device,
        seq_len: usize,
        weights: &mut dyn WeightSource,
    ) -> Result<Teacher> {
        let mut model = Decoder::new(sizes, recipe, device, Purpose::Infer, seq_len, weights)?;
        model.quantize_weights()?;
        Ok(Teacher(RefCell::new(model)))
    }

    /// The last activations `[T, C]` of the tokens `inputs` `[T]`.
    pub fn activations(&self, inputs: &Tensor, sequences: &Sequences) -> Result<Tensor> {
        let mut model = self.0.borrow_mut();
        let device = model.device().clone();
        let _scope = device.whole_scope("teacher");
        model.forward_only(0, inputs, sequences, Mode::EVALUATION, &mut Resident)
    }

    /// The logits `[T, V]` of these activations `[T, C]`, in F32 (F64 for F64).
    pub fn logits(&self, activations: &Tensor) -> Result<Tensor> {
        let model = self.0.borrow();
        let _scope = model.device().whole_scope("teacher");
        model.logits_of(activations)
    }

    /// Room for the activations of `tokens` tokens.
    pub(super) fn room(&self, tokens: usize) -> Result<Tensor> {
        let model = self.0.borrow();
        let (device, dtype): (&Device, DType) = (model.device(), model.recipe().compute);
        let _scope = device.whole_scope("teacher");
        Ok(Tensor::empty(device, &[tokens, model.config().stream.channels], dtype)?)
    }
}

/// Errors with [`Error::Config`] if the tokenizer in the teacher's folder has other tokens than the tokenizer of the run. A folder without a tokenizer
/// passes: its vocabulary has as many tokens.
pub(super) fn expect_tokens(config: &RunConfig) -> Result<()> {
    let (folder, own) = (&config.distillation.teacher, config.model.tokenizer_path());
    if !folder.join("tokenizer.json").exists() || Tokenizer::load(folder)?.has_tokens_of(&Tokenizer::load(own)?) {
        return Ok(());
    }
    Err(Error::Config(format!(
        "the tokenizer of `distillation.teacher` ({}) has other tokens than the tokenizer of the run ({}), so their distributions cannot be compared; \
         choose a teacher with the same tokenizer",
        folder.display(),
        own.display()
    )))
}
