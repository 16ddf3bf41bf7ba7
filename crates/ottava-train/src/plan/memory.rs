//! The memory of a run, from a dry run: the training code on a device without data that accounts for memory.

use crate::objective::{self, Phase, When};
use crate::run::Run;
use crate::step::{Loss, MicroBatch, NextTokenLoss, token_losses};
use ottava_checkpoint::{Contents, RandomWeights};
use ottava_common::error::Result;
use ottava_common::limits;
use ottava_data::Batch;
use ottava_models::DecoderConfig;
use ottava_parallel::Ranks;
use ottava_recipe::context::Sequences;
use ottava_recipe::layer_ranks::ShardPlace;
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::storage::Masters;
use ottava_sentinel::SentinelPolicy;
use ottava_settings::{Algorithm, ResolvedConfig};
use ottava_tensor::comm::{Axis, GPUS_PER_NODE, Group};
use ottava_tensor::cuda::{GpuModel, Workload};
use ottava_tensor::ops::real_type;
use ottava_tensor::tracker::MemorySnapshot;
use ottava_tensor::{DType, Device, Error as TensorError, Tensor};
use serde::Serialize;
use std::rc::Rc;

/// The memory that a run needs, and the memory available; with several ranks, the memory of one of them.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryPlan {
    /// Ranks of the run.
    pub ranks: usize,
    /// The place in the pipeline of the rank whose memory this is: the one that needs most.
    pub stage: usize,
    /// The peak of each rank of a pipeline.
    pub stage_bytes: Vec<u64>,
    /// Bytes by use at the peak.
    pub lines: Vec<MemoryLine>,
    /// Their sum.
    pub peak_bytes: u64,
    /// The phase of the run at the peak.
    pub during: String,
    /// The peak while the model is built and loaded.
    pub build_bytes: u64,
    /// The peak while a checkpoint is saved.
    pub save_bytes: u64,
    /// Bytes that the pool takes from the driver of a GPU, live or free between tensors. On a CPU equal to the peak.
    pub reserved_bytes: u64,
    /// Bytes of offloaded tensors in host memory.
    pub host_bytes: u64,
    /// Host memory available for them, the same for each rank of the machine, if the GPU is in this machine.
    pub host_available_bytes: Option<u64>,
    /// Bytes of the host's memory for the snapshot of a checkpoint; 0 without `checkpoint.async_save`.
    pub snapshot_bytes: u64,
    /// Whether the host has memory for the snapshots of its ranks.
    pub snapshots_fit: bool,
    /// Memory of the device available for tensors.
    pub available_bytes: u64,
    /// Whether the run fits.
    pub fits: bool,
    /// The kernels and attention passes of the run, which a GPU prepares before the first step.
    #[serde(skip)]
    pub workload: Workload,
}

/// Memory of one use.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryLine {
    /// The use.
    pub what: String,
    /// Its bytes.
    pub bytes: u64,
}

impl MemoryPlan {
    /// The plan of `config` for a model of `sizes` on `device`, which may itself be a dry run: of the rank that needs most memory, if ranks
    /// have different layers. Allocates nothing on `device`.
    pub fn new(config: &ResolvedConfig, sizes: &DecoderConfig, device: &Device) -> Result<MemoryPlan> {
        let of_stage = |stage| MemoryPlan::of_stage(config, sizes, device, stage);
        let plans = (0..config.run.parallel.pipeline).map(of_stage).collect::<Result<Vec<_>>>()?;
        let stage_bytes = plans.iter().map(|plan| plan.peak_bytes).collect();
        let mut workload = Workload::default();
        plans.iter().for_each(|plan| workload.merge(&plan.workload));
        // The first one that does not fit, else the largest.
        let most = plans.into_iter().max_by_key(|plan| (!plan.fits, plan.reserved_bytes)).expect("there is a stage");
        Ok(MemoryPlan { stage_bytes, workload, ..most })
    }

    /// [`MemoryPlan::new`] of the first rank with place `stage` in the pipeline.
    fn of_stage(config: &ResolvedConfig, sizes: &DecoderConfig, device: &Device, stage: usize) -> Result<MemoryPlan> {
        let available = available(device);
        let dry = unlimited(device);
        let DryRun { build, peak, save, host, snapshot } = DryRun::new(config, sizes, &dry, stage)?;
        let reserved = match &dry {
            Device::Cuda(gpu) => gpu.memory().reserved,
            Device::Cpu | Device::DryCpu(_) => peak.bytes,
        };
        let fits = match reserved > available {
            // When memory is short, the pool returns idle segments before it fails, but not while a step is captured.
            true if peak.bytes <= available && matches!(device, Device::Cuda(_)) => {
                match DryRun::new(config, sizes, &device.dry(), stage) {
                    Err(ottava_common::Error::Tensor(TensorError::OutOfMemory { .. })) => false,
                    other => other.map(|_| true)?,
                }
            }
            beyond => !beyond,
        };
        let ranks = config.run.parallel.ranks();
        let of_node = ranks.min(GPUS_PER_NODE);
        // Pinned memory is never swapped out.
        let host_available = matches!(device, Device::Cuda(gpu) if gpu.tracker().is_none())
            .then(|| of_host(&["MemAvailable:"]) / of_node);
        let [own, others] = snapshot;
        let snapshots = own + (of_node - 1) * others;
        let room = match device {
            Device::Cuda(_) => host_available.map(|there| of_node * there.saturating_sub(host)),
            Device::Cpu | Device::DryCpu(_) => Some(available.saturating_sub(reserved)),
        };
        let line = |&(scope, bytes): &(&str, usize)| MemoryLine { what: describe(scope, config), bytes: bytes as u64 };
        let mut lines: Vec<_> = peak.by_scope.iter().map(line).collect();
        lines.sort_by_key(|line| std::cmp::Reverse(line.bytes));
        Ok(MemoryPlan {
            ranks,
            stage,
            stage_bytes: Vec::new(),
            lines,
            peak_bytes: peak.bytes as u64,
            during: peak.during.to_string(),
            build_bytes: build.bytes as u64,
            save_bytes: save.bytes as u64,
            reserved_bytes: reserved as u64,
            host_bytes: host as u64,
            host_available_bytes: host_available.map(|bytes| bytes as u64),
            snapshot_bytes: if config.async_save { own as u64 } else { 0 },
            snapshots_fit: room.is_none_or(|room| snapshots <= room),
            available_bytes: available as u64,
            workload: match &dry {
                Device::Cuda(gpu) => gpu.workload().unwrap_or_default(),
                Device::Cpu | Device::DryCpu(_) => Workload::default(),
            },
            fits: fits && host_available.is_none_or(|there| host <= there),
        })
    }
}

/// `device` in a dry run with unlimited memory, so that a run that does not fit also has a plan.
pub(super) fn unlimited(device: &Device) -> Device {
    match device {
        Device::Cuda(gpu) => Device::dry_gpu(GpuModel { memory: UNLIMITED, ..gpu.model().clone() }),
        Device::Cpu | Device::DryCpu(_) => device.dry(),
    }
}

/// More than any run needs.
const UNLIMITED: usize = 1 << 50;

/// The number of micro-batches to run: the first creates gradients, later ones add to them. In a pipeline, several are in flight, so all run.
pub(super) fn distinct_micro_batches(config: &ResolvedConfig) -> usize {
    let all = config.run.training.gradient_accumulation_steps;
    if config.run.parallel.pipeline == 1 { all.min(2) } else { all }
}

/// The first rank with place `stage` in the pipeline of the run of `config` with `micro_batches` micro-batches, on a device in a dry run.
pub(super) fn dry_run(
    config: &ResolvedConfig,
    sizes: &DecoderConfig,
    device: &Device,
    micro_batches: usize,
    stage: usize,
) -> Result<Run> {
    let mut config = config.clone();
    config.run.training.gradient_accumulation_steps = micro_batches;
    let weights = &mut RandomWeights { seed: config.run.seed, device: device.clone() };
    let size = config.run.parallel.ranks();
    let mesh = config.run.parallel.mesh(size)?;
    // The pipeline axis is the slowest.
    let rank = stage * (size / mesh.pipeline);
    let ranks =
        Ranks::new(Group::dry(rank, size), mesh, device)?.sending(config.run.parallel.communication.activation_dtype);
    let layout = config.run.layout();
    // The data are not read here. The capacity assumes documents of 64 tokens; each takes 4 bytes.
    let documents = layout.document_mask.then(|| layout.seq_len.div_ceil(64) + 2);
    Run::new(&config, sizes, device, weights, Rc::new(ranks))?.with_documents(documents)
}

/// Peaks of a dry run.
struct DryRun {
    /// Until the first step.
    build: MemorySnapshot,
    peak: MemorySnapshot,
    save: MemorySnapshot,
    /// Bytes of host memory.
    host: usize,
    /// As [`Contents::snapshot_bytes`].
    snapshot: [usize; 2],
}

impl DryRun {
    /// Builds the model, runs the steps that differ and the phases of the objective around them, and saves, on a device in a dry run.
    fn new(config: &ResolvedConfig, sizes: &DecoderConfig, device: &Device, stage: usize) -> Result<DryRun> {
        let tracker = device.tracker().expect("a device in a dry run").clone();
        let (t, seq_len) = (&config.run.training, config.run.data.max_length);
        let rows = config.run.micro_batch_rows();
        let micro_batches = t.gradient_accumulation_steps;
        let distinct = distinct_micro_batches(config);
        let mut run = dry_run(config, sizes, device, distinct, stage)?;
        let build = device.scope("build");
        run.quantize_weights()?;
        let objective = objective::of(&config.run);
        let (place, sums) = (run.step.partition().ranks().place(Axis::Context), real_type(run.model.recipe().compute));
        let other = |_| held(device, [rows, seq_len], place, objective.loss(rows, device, sums)?);
        let _others = (distinct..micro_batches).map(other).collect::<Result<Vec<_>>>()?;
        let phases = objective.phases(&config.run);
        let rehearse = |run: &mut Run, when, precision| {
            let mut due = phases.iter().filter(|phase| phase.when == when);
            due.try_for_each(|phase| rehearse(run, phase, seq_len, precision))
        };
        drop(build);
        let build = tracker.take_peak();
        rehearse(&mut run, When::BeforeTraining, StepPrecision::Recipe)?;
        rehearse(&mut run, When::Evaluation, StepPrecision::Recipe)?;
        // Later steps reuse what the first left; steps in high precision hold other operands.
        let s = &config.run.sentinel;
        let policy_is_high = matches!(s.sentinel_policy, SentinelPolicy::Demote | SentinelPolicy::Bf16);
        let some_are_high = !config.run.precision.exceptions.high_precision_steps.is_empty()
            || (s.sentinel_steps > 0 && policy_is_high);
        let kinds = [Some(StepPrecision::Recipe), some_are_high.then_some(StepPrecision::High)];
        let compares = config.run.compares_precisions();
        if compares || s.repeat_steps > 0 {
            let _scope = device.scope("comparison");
            let tokens = vec![0; rows * seq_len];
            let (inputs, targets) = (tokens.clone(), tokens);
            let batch = Batch::whole(inputs, targets, rows);
            if compares {
                run.compare(&batch.first_rows(s.sentinel_sequences))?;
            }
            if s.repeat_steps > 0 {
                run.repeat(&batch, StepPrecision::Recipe, true)?;
            }
        }
        for precision in kinds.into_iter().flatten() {
            for _ in 0..2 {
                rehearse(&mut run, When::BeforeEachStep, precision)?;
                run.step(config.run.optimizer.learning_rate, precision)?;
            }
            rehearse(&mut run, When::Evaluation, precision)?;
        }
        let peak = tracker.take_peak();
        let snapshot = save(&mut run)?;
        let host = match device {
            Device::Cuda(gpu) => gpu.host_bytes(),
            Device::Cpu | Device::DryCpu(_) => 0,
        };
        let peak = if build.bytes > peak.bytes { build.clone() } else { peak };
        Ok(DryRun { build, peak, save: tracker.take_peak(), host, snapshot })
    }
}

/// Runs a phase on rows of `seq_len` tokens. After the second micro-batch, which differs from later ones in nothing but its tokens, micro-batches are
/// held and do not run.
fn rehearse(run: &mut Run, phase: &Phase, seq_len: usize, precision: StepPrecision) -> Result<()> {
    let Run { model, step, .. } = run;
    let device = model.device().clone();
    let _scope = device.scope(match phase.when {
        When::Evaluation => "evaluation",
        When::BeforeTraining | When::BeforeEachStep => "reference model",
    });
    let (partition, rows) = (step.partition(), phase.rows);
    let place = partition.ranks().place(Axis::Context);
    let distinct = match partition.ranks().pipeline().size() {
        1 => phase.micro_batches.min(2),
        _ => phase.micro_batches,
    };
    let micro_batch = |_| held(&device, [rows, seq_len], place, Box::new(NextTokenLoss));
    let _others = (distinct..phase.micro_batches).map(micro_batch).collect::<Result<Vec<_>>>()?;
    let micro_batches = (0..distinct).map(micro_batch).map(|held| Ok(held?.0));
    token_losses(model, &micro_batches.collect::<Result<Vec<_>>>()?, phase.pass, precision, partition).map(drop)
}

/// A micro-batch of `rows` rows of `seq_len` tokens, and its losses.
fn held(
    device: &Device,
    [rows, seq_len]: [usize; 2],
    place: ShardPlace,
    loss: Box<dyn Loss>,
) -> Result<(MicroBatch, Tensor)> {
    let ids = || Tensor::zeros(device, &[rows * place.share(seq_len)], DType::I32);
    let sequences = Sequences::divided(device, rows, seq_len, place)?;
    Ok((MicroBatch { inputs: ids()?, targets: ids()?, sequences, loss }, ids()?))
}

/// A checkpoint is written tensor by tensor, each from a copy in the host's memory. Returns the bytes of a snapshot of all.
fn save(Run { model, optimizer, step, .. }: &mut Run) -> Result<[usize; 2]> {
    let device = model.device().clone();
    let _scope = device.scope("save");
    let (contents, mut live) = Contents::new(model, &mut **optimizer, step.partition())?;
    for name in contents.names() {
        let tensor = live.get(name)?;
        if matches!(device, Device::DryCpu(_)) {
            tensor.duplicate()?;
        }
    }
    Ok(contents.snapshot_bytes())
}

/// Bytes available for tensors on `device`.
pub(super) fn available(device: &Device) -> usize {
    match device {
        Device::Cuda(gpu) => gpu.usable_memory(),
        Device::Cpu | Device::DryCpu(_) => of_host(&["MemAvailable:", "SwapFree:"]),
    }
}

/// Bytes of host memory available to tensors: the sum of these lines of `/proc/meminfo`, within `ulimit` and cgroup limits.
/// [`UNLIMITED`] where the system does not say.
fn of_host(kinds: &[&str]) -> usize {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kilobytes = |kind: &&str| -> Option<usize> {
        info.lines().find_map(|line| line.strip_prefix(kind)?.trim().trim_end_matches("kB").trim().parse().ok())
    };
    // A twentieth is left to the rest of the process.
    let there: usize = kinds.iter().filter_map(kilobytes).sum();
    let system = if there > 0 { there * 1024 } else { UNLIMITED };
    let limit = limits::process_memory().map_or(UNLIMITED, |bytes| bytes as usize);
    system.min(limit) / 20 * 19
}

/// The description of a scope of the dry run.
fn describe(scope: &str, config: &ResolvedConfig) -> String {
    match scope {
        "weights" if config.run.optimizer.formats().masters == Masters::Remainder => {
            "weights, with their remainders".into()
        }
        "weights" if config.run.lora.r > 0 => format!("adapters, {}", config.run.precision.recipe().compute),
        "weights" => format!("weights, {}", config.run.precision.recipe().compute),
        "frozen weights" => format!("frozen weights, {}", config.run.precision.recipe().compute),
        "FP8 codes of frozen weights" => "FP8 codes of frozen weights, which backward transposes".into(),
        "FP8 codes of weights" => "FP8 codes of weights, with transposes".into(),
        "forward" => {
            format!("saved activations, recompute {}", config.recompute.as_str())
        }
        "head" => "logits of a chunk of tokens, and gradients of the head".into(),
        "backward" => "gradients of activations, and recomputed operands".into(),
        "update" if matches!(config.run.optimizer.algorithm, Algorithm::Adamw(_)) => "norm of the gradients".into(),
        "update" => "directions of the update, and norm of the gradients".into(),
        "build" => "scales and histories, rotary positions, inputs and losses".into(),
        other => other.into(),
    }
}
