//! Forward passes whose results do not depend on the batch (`precision.batch_invariant`).
//!
//! On a GPU, products of two operands in rows, and causal attention, then have the sums of inference with `--batch-invariant`. A run for which this would
//! not hold ends with an error before its first step.

use ottava_common::error::{Error, Result};
use ottava_models::{Decoder, DecoderConfig, SublayerSpec};
use ottava_settings::RunConfig;
use ottava_tensor::Device;
use ottava_tensor::cuda::BatchInvariance;
use ottava_tensor::ops::{AttentionBackend, AttentionCase};

/// Makes the forward passes of `run` independent of the batch until the result is dropped, if the run asks for it and `device` is a GPU. Results of a CPU
/// never depend on the batch.
///
/// Errors with [`Error::Config`] if a layer of the `model` of these `sizes` has no kernel with a known order of sums.
pub fn begin(
    run: &RunConfig,
    sizes: &DecoderConfig,
    model: &Decoder,
    device: &Device,
) -> Result<Option<BatchInvariance>> {
    let Device::Cuda(gpu) = device else { return Ok(None) };
    if !run.precision.batch_invariant {
        return Ok(None);
    }
    match refusal(sizes, model, device)? {
        None => Ok(Some(gpu.batch_invariance())),
        Some(reason) => {
            Err(Error::Config(format!("`precision.batch_invariant` is true, and {reason}; set it to false")))
        }
    }
}

/// Returns why results of the model would depend on the batch.
fn refusal(sizes: &DecoderConfig, model: &Decoder, device: &Device) -> Result<Option<String>> {
    let (recipe, description) = (model.recipe(), model.description());
    if !recipe.has_ordered_sums(device) {
        return Ok(Some(format!(
            "recipe {} has no products with a known order of sums on {device}",
            recipe.name.as_str()
        )));
    }
    if !description.recurrent.is_empty() {
        return Ok(Some("training computes recurrent layers in chunks, and decoding token by token".into()));
    }
    let has_sinks = |sublayer: &SublayerSpec| matches!(sublayer, SublayerSpec::Heads(heads, _) if heads.sinks);
    if sizes.sublayers().any(has_sinks) {
        return Ok(Some("attention with sinks rounds differently in training and in decoding".into()));
    }
    for spec in &description.attention {
        let case = AttentionCase::fused(spec, recipe.compute, false);
        if let Some(reason) = AttentionBackend::order_refusal(&case) {
            return Ok(Some(reason));
        }
    }
    Ok(None)
}
