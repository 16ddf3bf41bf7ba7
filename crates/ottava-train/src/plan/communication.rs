//! The communication of a step, from a dry run of one rank.

use super::memory::{dry_run, unlimited};
use crate::run::Run;
use ottava_common::error::Result;
use ottava_models::DecoderConfig;
use ottava_parallel::optim::{StateTensor, optimizer_tensors};
use ottava_parallel::{BufferBytes, Zero};
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::param::Param;
use ottava_settings::ResolvedConfig;
use ottava_tensor::comm::Traffic;
use ottava_tensor::{DType, Device};
use serde::Serialize;

/// The communication of each rank in a step after the first step. In a pipeline, the communication of the first rank.
#[derive(Clone, Debug, Serialize)]
pub struct CommunicationPlan {
    /// The number of all ranks.
    pub ranks: usize,
    /// The number of ranks that divide the tokens of a step.
    pub sharing: usize,
    /// The number of ranks that divide the states of their layers with ZeRO: `sharing`, or a divisor of it with `parallel.zero_shard_size`.
    pub shard: usize,
    /// The stage of ZeRO.
    pub zero: Zero,
    /// The units of the model in the order of forward: the embedding, each block, and an untied head. The weights or gradients of a unit are
    /// communicated together.
    pub units: Vec<UnitPlan>,
    /// The number of micro-batches of each rank in a step.
    pub micro_batches: usize,
    /// The number of tokens of each rank in a step.
    pub tokens: u64,
    /// The calls of each rank and the bytes that it sends, by kind of collective.
    pub traffic: Traffic,
    /// The calls for which layers wait: exchanges of activations among the ranks of the axes tensor, context and expert.
    pub of_layers: Traffic,
    /// The calls between shard groups: reductions of slices.
    pub of_replicas: Traffic,
    /// Whether layers overlap their sums with products. This is true for sums over tensor ranks unless the model has mixtures of experts.
    pub hides_sums: bool,
    /// The number of bytes that an update of the whole model reads and writes, without FP8 codes.
    pub update_bytes: u64,
}

/// A unit of the model: its weights or gradients are communicated together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct UnitPlan {
    /// The bytes of the buffer that ranks gather.
    pub gathered_bytes: u64,
    /// Whether each forward and each backward gathers the unit. If not, only the first forward of a step gathers it.
    pub gathers_in_each_pass: bool,
    /// The bytes of FP8 codes in the gathered buffer. Each rank transposes them.
    pub transposed_bytes: u64,
    /// The bytes of the buffer of gradients that ranks reduce.
    pub reduced_bytes: u64,
    /// Whether gradients are sent as FP8 codes.
    pub codes_reduced: bool,
    /// The bytes of the slice of gradients that each rank then reduces with other shard groups. 0 without other groups.
    pub slice_bytes: u64,
    /// The unit's share of the floating-point operations of a step.
    pub compute: f64,
}

impl CommunicationPlan {
    /// Plans the communication of `config` for a model of `sizes` on `device`. Returns `None` for one rank. Allocates nothing on `device`.
    pub fn new(config: &ResolvedConfig, sizes: &DecoderConfig, device: &Device) -> Result<Option<CommunicationPlan>> {
        let ranks = config.run.parallel.ranks();
        if ranks <= 1 {
            return Ok(None);
        }
        let micro_batches = config.run.training.gradient_accumulation_steps;
        let device = unlimited(device);
        let step = |micro_batches| step(config, sizes, &device, micro_batches);
        let DryStep { traffic, of_layers, of_replicas, update_bytes, units } = match micro_batches {
            // Each further micro-batch has the same communication: the difference between a step of two micro-batches and a step of one.
            3.. if config.run.parallel.pipeline == 1 => {
                let (one, two) = (step(1)?, step(2)?);
                let further = micro_batches as u64 - 2;
                let traffic = two.traffic + (two.traffic - one.traffic) * further;
                let of_layers = two.of_layers + (two.of_layers - one.of_layers) * further;
                // Slices are reduced once per step.
                DryStep { traffic, of_layers, ..two }
            }
            all => step(all)?,
        };
        let sharing = config.run.parallel.planned_data() * config.run.parallel.context;
        Ok(Some(CommunicationPlan {
            ranks,
            sharing,
            shard: config.run.parallel.shard_size(sharing),
            zero: config.run.parallel.zero,
            units,
            micro_batches,
            tokens: config.run.tokens_per_step() / sharing as u64,
            traffic,
            of_layers,
            of_replicas,
            hides_sums: config.run.parallel.tensor > 1 && sizes.experts().is_none(),
            update_bytes,
        }))
    }
}

/// The measurements of a step in a dry run.
struct DryStep {
    traffic: Traffic,
    of_layers: Traffic,
    of_replicas: Traffic,
    update_bytes: u64,
    units: Vec<UnitPlan>,
}

/// Measures the second step of a dry run, since the first step may create buffers that later steps reuse.
fn step(config: &ResolvedConfig, sizes: &DecoderConfig, device: &Device, micro_batches: usize) -> Result<DryStep> {
    let mut run = dry_run(config, sizes, device, micro_batches, 0)?;
    run.quantize_weights()?;
    run.step(config.run.optimizer.learning_rate, StepPrecision::Recipe)?;
    let sent = |run: &Run| {
        let ranks = run.step.partition().ranks();
        [ranks.traffic(), ranks.traffic_of_layers(), ranks.traffic_of_replicas()]
    };
    let before = sent(&run);
    run.step(config.run.optimizer.learning_rate, StepPrecision::Recipe)?;
    let after = sent(&run);
    let [traffic, of_layers, of_replicas] = std::array::from_fn(|i| after[i] - before[i]);
    let units = units(&run, sizes.layers.len(), config.run.data.max_length);
    Ok(DryStep { traffic, of_layers, of_replicas, update_bytes: update_bytes(&mut run), units })
}

/// Returns the units of the model. All blocks have equal shares of the operations. An untied head has the operations of its product. A tied head
/// counts in the last block.
fn units(run: &Run, layers: usize, seq_len: usize) -> Vec<UnitPlan> {
    let (partition, model) = (run.step.partition(), run.model.description());
    let head = model.head.iter().map(|head| 6.0 * (head.outputs * head.inputs) as f64).sum::<f64>();
    let head = head / model.flops_per_token(seq_len);
    let buffers = partition.buffer_bytes();
    let of_part = |(part, buffer): (usize, &BufferBytes)| {
        let block = if (1..=layers).contains(&part) { (1.0 - head) / layers as f64 } else { 0.0 };
        UnitPlan {
            gathered_bytes: buffer.gathered,
            gathers_in_each_pass: buffer.gathers_in_each_pass,
            transposed_bytes: buffer.codes,
            reduced_bytes: buffer.reduced,
            codes_reduced: partition.sends_codes(),
            slice_bytes: buffer.slice,
            compute: block + if part + 1 == buffers.len() { head } else { 0.0 },
        }
    };
    buffers.iter().enumerate().map(of_part).collect()
}

/// Returns the bytes of an update: master weights and moments are read and written, gradients are read, and weights are written.
fn update_bytes(run: &mut Run) -> u64 {
    let divides = run.step.partition().divides();
    let shares = if divides { run.step.partition().ranks().shard_group(false).size() } else { 1 };
    let of_param = |(param, states): (&mut Param, Vec<StateTensor>)| {
        let once = param.slice().len() * (param.gradient.dtype().map_or(1, DType::size) + param.weights.dtype().size());
        let twice = optimizer_tensors(&mut param.weights, states).iter().map(|kept| kept.tensor.bytes()).sum::<usize>();
        once + 2 * twice
    };
    let params = run.model.parameters().into_iter().zip(run.optimizer.states());
    (params.map(of_param).sum::<usize>() * shares) as u64
}
