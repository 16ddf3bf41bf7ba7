//! Forward passes whose results do not depend on the batch (`precision.batch_invariant`).
//!
//! On a GPU, products of two operands in rows, and causal attention, then have the sums of inference with `--batch-invariant`. A run for which this would
//! not hold ends with an error before its first step.

use ottava_common::error::{Error, Result};
use ottava_models::Decoder;
use ottava_settings::RunConfig;
use ottava_tensor::Device;
use ottava_tensor::cuda::BatchInvariance;

/// Makes the forward passes of `run` independent of the batch until the result is dropped, if the run asks for it and `device` is a GPU. Results of a CPU
/// never depend on the batch.
///
/// Errors with [`Error::Config`] if a layer of the `model` has no kernel with a known order of sums.
pub fn begin(run: &RunConfig, model: &Decoder, device: &Device) -> Result<Option<BatchInvariance>> {
    let Device::Cuda(gpu) = device else { return Ok(None) };
    if !run.precision.batch_invariant {
        return Ok(None);
    }
    match refusal(model, device) {
        None => Ok(Some(gpu.batch_invariance())),
        Some(reason) => {
            Err(Error::Config(format!("`precision.batch_invariant` is true, and {reason}; set it to false")))
        }
    }
}

/// Returns why results of the model would depend on the batch.
fn refusal(model: &Decoder, device: &Device) -> Option<String> {
    let recipe = model.recipe();
    if !recipe.has_ordered_sums(device) {
        return Some(format!("recipe {} has no products with a known order of sums on {device}", recipe.name.as_str()));
    }
    model.description().order_refusal(device, recipe.compute)
}
