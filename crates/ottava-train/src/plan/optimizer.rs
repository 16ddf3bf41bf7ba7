//! The optimizer of each tensor.

use super::memory::{distinct_micro_batches, dry_run, unlimited};
use crate::run::Run;
use ottava_common::error::Result;
use ottava_models::DecoderConfig;
use ottava_settings::{Adamw, Algorithm, ResolvedConfig};
use ottava_tensor::Device;
use serde::Serialize;

/// The trained tensors of one name in all blocks, and the optimizer that updates them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TensorPlan {
    /// The name of the optimizer.
    pub optimizer: &'static str,
    /// The name of the tensors in a Hugging Face folder, with `*` in place of the number of the block.
    pub name: String,
    /// The number of tensors.
    pub count: usize,
    /// The shape of each tensor.
    pub shape: Vec<usize>,
}

/// Returns the trained tensors of a run of `config` in the order of the model, from a dry run. Allocates nothing on `device`.
pub(super) fn tensors(config: &ResolvedConfig, sizes: &DecoderConfig, device: &Device) -> Result<Vec<TensorPlan>> {
    let mut plans: Vec<TensorPlan> = Vec::new();
    for stage in 0..config.run.parallel.pipeline {
        let run = dry_run(config, sizes, &unlimited(device), distinct_micro_batches(config), stage)?;
        add(&mut plans, run, config.run.optimizer.algorithm);
    }
    Ok(plans)
}

/// Adds the tensors of `run`, which `algorithm` updates.
fn add(plans: &mut Vec<TensorPlan>, mut run: Run, algorithm: Algorithm) {
    let copy = run.model.copy();
    for param in run.model.parameters().into_iter().filter(|param| Some(param.identity.id) != copy) {
        let optimizer = match algorithm {
            Algorithm::Muon(_) if !run.optimizer.transforms(param) => Algorithm::Adamw(Adamw::default()),
            algorithm => algorithm,
        };
        for shard in &param.identity.shards {
            let (name, shape) = (without_block(&shard.tensor.name), shard.tensor.shape.clone());
            match plans.iter_mut().find(|plan| plan.name == name && plan.shape == shape) {
                Some(plan) => plan.count += 1,
                None => plans.push(TensorPlan { optimizer: optimizer.as_str(), name, count: 1, shape }),
            }
        }
    }
}

/// Returns `name` with `*` in place of the number of its block.
fn without_block(name: &str) -> String {
    let is_number = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
    let parts: Vec<_> = name.split('.').map(|part| if is_number(part) { "*" } else { part }).collect();
    parts.join(".")
}
