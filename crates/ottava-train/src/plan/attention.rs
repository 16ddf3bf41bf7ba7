//! The plan of attention: the backend of each kind of layer, and the reason for it.

use ottava_common::error::Result;
use ottava_recipe::Recipe;
use ottava_recipe::param::Description;
use ottava_tensor::Device;
use ottava_tensor::ops::{AttentionBackend, AttentionCase, AttentionSpec};
use serde::Serialize;

/// A kind of attention layer: the layers with equal specs.
#[derive(Clone, Debug, Serialize)]
pub struct AttentionPlan {
    /// The number of layers.
    pub count: usize,
    /// The spec of these layers, in words.
    pub what: String,
    /// The backend of these layers.
    pub backend: String,
    /// For each faster backend of the device, a sentence with the condition that the layers do not meet.
    pub because: Vec<String>,
}

/// Plans the attention of a model, with or without `documents` in its sequences. Returns an entry for each kind of layer.
///
/// Errors if no backend of `device` supports a layer.
pub(super) fn attention(
    model: &Description,
    recipe: &Recipe,
    documents: bool,
    device: &Device,
) -> Result<Vec<AttentionPlan>> {
    let mut kinds: Vec<(&AttentionSpec, usize)> = Vec::new();
    for spec in &model.attention {
        match kinds.iter_mut().find(|(kind, _)| *kind == spec) {
            Some((_, count)) => *count += 1,
            None => kinds.push((spec, 1)),
        }
    }
    let plan = |(spec, count): (&AttentionSpec, usize)| {
        let chosen = AttentionBackend::choose(device, &AttentionCase::fused(spec, recipe.compute, documents))?;
        Ok(AttentionPlan { count, what: spec.to_string(), backend: chosen.name.into(), because: chosen.because })
    };
    kinds.into_iter().map(plan).collect()
}
