//! The plan of attention: which backend serves each kind of layer, and why.

use crate::error::Result;
use crate::param::Description;
use crate::recipe::Recipe;
use ottava_tensor::Device;
use ottava_tensor::ops::{AttentionBackend, AttentionCase, AttentionSpec};
use serde::Serialize;

/// The attention layers that compute the same.
#[derive(Clone, Debug, Serialize)]
pub struct AttentionPlan {
    /// The number of layers.
    pub count: usize,
    /// What they compute.
    pub what: String,
    /// What runs it.
    pub backend: String,
    /// A sentence for each faster backend of the device, with what it does not take.
    pub because: Vec<String>,
}

/// The attention of a model, whose sequences hold `documents` or are one each: an entry for each kind of layer.
///
/// Errors where no backend of `device` serves a layer.
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
