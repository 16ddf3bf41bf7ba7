//! The communication of a step, from a dry run of one rank.

use super::memory::{dry_run, unlimited};
use crate::config::RunConfig;
use crate::error::Result;
use crate::mode::StepPrecision;
use crate::models::DecoderConfig;
use crate::optim::optimizer_tensors;
use crate::parallel::Zero;
use crate::param::Param;
use crate::run::Run;
use ottava_tensor::comm::Traffic;
use ottava_tensor::ops::Moments;
use ottava_tensor::{DType, Device};
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
    /// Bytes that an update of the whole model reads and writes.
    pub update_bytes: u64,
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
        let step = |micro_batches| step(config, sizes, &device, micro_batches);
        let (traffic, update_bytes) = match micro_batches {
            // The middle ones of a step communicate alike, and nothing that the last one does not.
            3.. => {
                let ((one, update_bytes), (two, _)) = (step(1)?, step(2)?);
                (two + (two - one) * (micro_batches as u64 - 2), update_bytes)
            }
            few => step(few)?,
        };
        Ok(Some(CommunicationPlan {
            ranks,
            zero: config.parallel.zero,
            units: sizes.layers + if sizes.tied { 1 } else { 2 },
            micro_batches,
            tokens: config.tokens_per_step() / ranks as u64,
            traffic,
            update_bytes,
        }))
    }
}

/// What a rank sends in the second step of a dry run, since the first may leave what later ones reuse; and
/// [`CommunicationPlan::update_bytes`].
fn step(config: &RunConfig, sizes: &DecoderConfig, device: &Device, micro_batches: usize) -> Result<(Traffic, u64)> {
    let mut run = dry_run(config, sizes, device, micro_batches)?;
    run.quantize_weights()?;
    run.step(config.training.learning_rate, StepPrecision::Recipe)?;
    let before = run.step.partition().ranks().traffic();
    run.step(config.training.learning_rate, StepPrecision::Recipe)?;
    let traffic = run.step.partition().ranks().traffic() - before;
    Ok((traffic, update_bytes(&mut run)))
}

/// Masters and moments are read and written, gradients read, and weights written.
fn update_bytes(run: &mut Run) -> u64 {
    let divides = run.step.partition().divides();
    let shares = if divides { run.step.partition().ranks().size() } else { 1 };
    let of_param = |(param, moments): (&mut Param, &mut Moments)| {
        let once = param.slice().len() * (param.grad_dtype().map_or(1, DType::size) + param.dtype().size());
        let twice =
            optimizer_tensors(&mut param.weights, moments).iter().map(|kept| kept.tensor.bytes()).sum::<usize>();
        once + 2 * twice
    };
    let params = run.model.parameters().into_iter().zip(run.optimizer.moments_mut());
    (params.map(of_param).sum::<usize>() * shares) as u64
}
