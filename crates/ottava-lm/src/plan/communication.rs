//! The communication of a step, from a dry run of one rank.

use super::memory::{dry_run, unlimited};
use crate::config::RunConfig;
use crate::error::Result;
use crate::mode::StepPrecision;
use crate::models::DecoderConfig;
use crate::parallel::Zero;
use ottava_tensor::Device;
use ottava_tensor::comm::Traffic;
use serde::Serialize;

/// What each rank sends in a step, once steps are alike.
#[derive(Clone, Debug, Serialize)]
pub struct CommunicationPlan {
    /// Ranks that share the rows of a step.
    pub ranks: usize,
    /// The stage of ZeRO.
    pub zero: Zero,
    /// Parts of the model whose weights or gradients travel together: the embedding, each block, and a head of its own.
    pub units: usize,
    /// Micro-batches of each rank in a step.
    pub micro_batches: usize,
    /// Tokens of each rank in a step.
    pub tokens: u64,
    /// Calls and bytes that each rank sends, by kind of collective.
    pub traffic: Traffic,
}

impl CommunicationPlan {
    /// The plan of `config` for a model of `sizes` on `device`; `None` for one rank. Takes no memory there.
    pub fn new(config: &RunConfig, sizes: &DecoderConfig, device: &Device) -> Result<Option<CommunicationPlan>> {
        let ranks = config.parallel.data;
        if ranks <= 1 {
            return Ok(None);
        }
        let micro_batches = config.training.gradient_accumulation_steps;
        let device = unlimited(device);
        let traffic = |micro_batches| traffic(config, sizes, &device, micro_batches);
        let traffic = match micro_batches {
            // The middle ones of a step communicate alike, and nothing that the last one does not.
            3.. => {
                let (one, two) = (traffic(1)?, traffic(2)?);
                two + (two - one) * (micro_batches as u64 - 2)
            }
            few => traffic(few)?,
        };
        Ok(Some(CommunicationPlan {
            ranks,
            zero: config.parallel.zero,
            units: sizes.layers + if sizes.tied { 1 } else { 2 },
            micro_batches,
            tokens: config.tokens_per_step() / ranks as u64,
            traffic,
        }))
    }
}

/// What a rank sends in the second step of a dry run; the first may leave what later ones reuse.
fn traffic(config: &RunConfig, sizes: &DecoderConfig, device: &Device, micro_batches: usize) -> Result<Traffic> {
    let mut run = dry_run(config, sizes, device, micro_batches)?;
    run.quantize_weights()?;
    run.step(config.training.learning_rate, StepPrecision::Recipe)?;
    let before = run.step.partition().ranks().traffic();
    run.step(config.training.learning_rate, StepPrecision::Recipe)?;
    Ok(run.step.partition().ranks().traffic() - before)
}
