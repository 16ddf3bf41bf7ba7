//! The memory of a model for inference, from a dry run.

use super::memory::{available, unlimited};
use ottava_checkpoint::{FolderWeights, RandomWeights};
use ottava_common::error::{Error, Result};
use ottava_models::{Adapters, ConfigFile, Decoder, DecoderConfig, decoder_config};
use ottava_parallel::{LayerAxes, Ranks};
use ottava_recipe::Recipe;
use ottava_recipe::context::Sequences;
use ottava_recipe::lora::Lora;
use ottava_recipe::mode::Mode;
use ottava_recipe::param::Resident;
use ottava_tensor::comm::{Group, MeshShape};
use ottava_tensor::{DType, Device, Tensor};
use std::path::Path;
use std::rc::Rc;

/// Checks that each of `ranks` ranks can load its part of the model in `folder`, with `adapters`, for sequences of `seq_len` tokens. Nothing is
/// allocated.
///
/// Errors with [`Error::Memory`] if a model of these `sizes` takes more memory than `device` has available. Errors with [`Error::Model`] if the
/// folder's weights do not fit its config.json.
pub fn expect_model_fits(
    folder: &Path,
    sizes: &DecoderConfig,
    recipe: &Recipe,
    device: &Device,
    seq_len: usize,
    ranks: usize,
    adapters: &[Lora],
) -> Result<()> {
    let Some(bytes) = shortage(inference_bytes(sizes, recipe, device, seq_len, ranks, adapters)?, device) else {
        // The folder can hold the base model of an adapter, or the model from which a reward model starts. So the folder's own config.json is
        // checked.
        return FolderWeights::check(folder, &decoder_config(&ConfigFile::read(folder)?)?, recipe);
    };
    let (what, remedy) = match adapters {
        [] => ("the model does not fit: by its config.json it takes", ""),
        _ => ("the model and the adapters beside it do not fit: by their settings they take", " serve fewer adapters,"),
    };
    Err(Error::Memory(format!(
        "{what} {bytes};{remedy} check `hidden_size`, `intermediate_size`, `head_dim` and `vocab_size`, or take a device with more memory"
    )))
}

/// Checks as [`expect_model_fits`] does, for a known model with random weights and without adapters.
pub fn expect_random_model_fits(
    sizes: &DecoderConfig,
    recipe: &Recipe,
    device: &Device,
    seq_len: usize,
    ranks: usize,
) -> Result<()> {
    let Some(bytes) = shortage(inference_bytes(sizes, recipe, device, seq_len, ranks, &[])?, device) else {
        return Ok(());
    };
    let who = if ranks == 1 { "it".to_string() } else { format!("each of {ranks} ranks") };
    Err(Error::Memory(format!(
        "the model does not fit: {who} takes {bytes}; divide it among more GPUs (--gpus), set fewer blocks (--layers), or take a device with more \
         memory"
    )))
}

/// Returns the memory `needed` and the memory available in words, if `needed` is larger.
fn shortage(needed: usize, device: &Device) -> Option<String> {
    let available = available(device);
    let gib = |bytes: usize| bytes as f64 / f64::from(1 << 30);
    (needed > available).then(|| format!("{:.2} GiB, {:.2} GiB available", gib(needed), gib(available)))
}

/// Returns the peak of memory of each of `ranks` ranks in bytes, while a model of these `sizes` and `adapters` are loaded for inference and one token
/// is computed with each adapter.
///
/// Errors in the same cases as [`Decoder::load_adapters`].
pub fn inference_bytes(
    sizes: &DecoderConfig,
    recipe: &Recipe,
    device: &Device,
    seq_len: usize,
    ranks: usize,
    adapters: &[Lora],
) -> Result<usize> {
    let dry = unlimited(device);
    let weights = &mut RandomWeights { seed: 0, device: dry.clone() };
    let shape = MeshShape { tensor: ranks, ..MeshShape::of_data(1) };
    let axes = LayerAxes::new(Rc::new(Ranks::new(Group::dry(0, ranks), shape, &dry)?));
    let mut model = Decoder::for_inference(sizes, recipe, &dry, seq_len, weights, Rc::new(axes))?;
    model.quantize_weights()?;
    let mut loaded: Vec<Adapters> =
        adapters.iter().map(|lora| model.load_adapters(lora, weights)).collect::<Result<_>>()?;
    if sizes.lora.is_some() {
        pass(&mut model, ranks)?;
    }
    for adapters in &mut loaded {
        model.exchange_adapters(adapters);
        pass(&mut model, ranks)?;
        model.exchange_adapters(adapters);
    }
    Ok(dry.tracker().expect("a device in a dry run").take_peak().bytes)
}

/// Runs forward of one token per rank, for the memory that does not depend on the number of tokens, such as the norms of magnitudes.
fn pass(model: &mut Decoder, ranks: usize) -> Result<()> {
    let device = model.device().clone();
    let (ids, sequences) = (Tensor::zeros(&device, &[ranks], DType::I32)?, Sequences::new(&device, ranks, 1)?);
    model.forward_only(0, &ids, &sequences, Mode::EVALUATION, &mut Resident)?;
    Ok(())
}
