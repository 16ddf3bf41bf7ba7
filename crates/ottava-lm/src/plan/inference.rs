//! The memory of a model for inference, from a dry run.

use super::memory::{available, unlimited};
use crate::checkpoint::{FolderWeights, RandomWeights};
use crate::error::{Error, Result};
use crate::models::{ConfigFile, Decoder, DecoderConfig, decoder_config};
use crate::parallel::{LayerAxes, Ranks};
use crate::recipe::Recipe;
use ottava_tensor::Device;
use ottava_tensor::comm::{Group, MeshShape};
use std::path::Path;
use std::rc::Rc;

/// Checks, before anything is allocated, that the model in `folder` can be loaded for sequences of `seq_len` tokens, by each of `ranks` that
/// divide its tensors.
///
/// Errors with [`Error::Memory`] when a model of these `sizes` takes more memory than `device` has available, and with [`Error::Model`] when
/// the folder's weights are not those of its config.json.
pub fn expect_model_fits(
    folder: &Path,
    sizes: &DecoderConfig,
    recipe: &Recipe,
    device: &Device,
    seq_len: usize,
    ranks: usize,
) -> Result<()> {
    let dry = unlimited(device);
    let weights = &mut RandomWeights { seed: 0, device: dry.clone() };
    let shape = MeshShape { tensor: ranks, ..MeshShape::of_data(1) };
    let axes = LayerAxes::new(Rc::new(Ranks::new(Group::dry(0, ranks), shape, &dry)?));
    Decoder::for_inference(sizes, recipe, &dry, seq_len, weights, Rc::new(axes))?.quantize_weights()?;
    let needed = dry.tracker().expect("a device in a dry run").take_peak().bytes;
    let available = available(device);
    if needed <= available {
        // The folder may be the base model of an adapter, or one that a reward model starts from.
        return FolderWeights::check(folder, &decoder_config(&ConfigFile::read(folder)?)?, recipe);
    }
    let gib = |bytes: usize| bytes as f64 / f64::from(1 << 30);
    Err(Error::Memory(format!(
        "the model does not fit: by its config.json it takes {:.2} GiB, {:.2} GiB available; check `hidden_size`, `intermediate_size`, \
         `head_dim` and `vocab_size`, or take a device with more memory",
        gib(needed),
        gib(available)
    )))
}
