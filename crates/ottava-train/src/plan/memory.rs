//! The memory of a run, from a dry run: the training code runs on a device that holds no data and counts allocations.

use crate::objective::Objective;
use crate::phase::{Check, Passes, Phase};
use crate::run::Run;
use crate::step::{Loss, MicroBatch, TrainStep, token_losses};
use ottava_checkpoint::{Contents, RandomWeights};
use ottava_common::error::Result;
use ottava_common::limits;
use ottava_data::Batch;
use ottava_models::{Decoder, DecoderConfig};
use ottava_parallel::Ranks;
use ottava_recipe::context::Sequences;
use ottava_recipe::layer_ranks::ShardPlace;
use ottava_recipe::mode::StepPrecision;
use ottava_recipe::storage::Masters;
use ottava_sentinel::SentinelPolicy;
use ottava_settings::{Algorithm, ResolvedConfig, RunConfig};
use ottava_tensor::comm::{Axis, GPUS_PER_NODE, Group};
use ottava_tensor::cuda::{CudaDevice, GpuModel, Workload};
use ottava_tensor::ops::real_type;
use ottava_tensor::tracker::MemorySnapshot;
use ottava_tensor::{DType, Device, Error as TensorError, Tensor};
use serde::Serialize;
use std::rc::Rc;

/// The memory that a run needs and the memory available. With several ranks, the memory of one rank.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryPlan {
    /// The number of ranks of the run.
    pub ranks: usize,
    /// The place in the pipeline of the rank that this plan describes. It is the rank that needs the most memory.
    pub stage: usize,
    /// The peak of memory of each rank of a pipeline.
    pub stage_bytes: Vec<u64>,
    /// The bytes of each use at the peak.
    pub lines: Vec<MemoryLine>,
    /// The sum of these bytes.
    pub peak_bytes: u64,
    /// The phase of the run at the peak.
    pub during: String,
    /// The peak of memory while the model is built and loaded.
    pub build_bytes: u64,
    /// The peak of memory while a checkpoint is saved.
    pub save_bytes: u64,
    /// The bytes that the pool takes from the driver of a GPU, including the gaps between tensors. On a CPU, they equal the peak.
    pub reserved_bytes: u64,
    /// The bytes of offloaded tensors in host memory.
    pub host_bytes: u64,
    /// The host memory available for offloaded tensors, the same for each rank of the machine; `None` if the GPU is not in this machine.
    pub host_available_bytes: Option<u64>,
    /// The bytes of host memory for the snapshot of a checkpoint; 0 without `checkpoint.async_save`.
    pub snapshot_bytes: u64,
    /// The bytes of memory files of a host with `recovery.snapshot_steps`: two snapshots of its ranks, and two of the ranks of another host; else 0.
    pub recovery_bytes: u64,
    /// The bytes of the tensors of a checkpoint, written by all ranks.
    pub checkpoint_bytes: u64,
    /// Whether the host has memory for the snapshots of all its ranks.
    pub snapshots_fit: bool,
    /// The memory of the device that is available for tensors.
    pub available_bytes: u64,
    /// Whether the run fits into memory.
    pub fits: bool,
    /// The kernels and attention passes of the run. A GPU prepares them before the first step.
    #[serde(skip)]
    pub workload: Workload,
}

/// The memory of one use.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryLine {
    /// The use.
    pub what: String,
    /// The number of bytes.
    pub bytes: u64,
}

impl MemoryPlan {
    /// Plans `config` for a model of `sizes` on `device`, which may itself be a dry run. If ranks have different layers, returns the plan of the rank
    /// that needs the most memory. Allocates nothing on `device`.
    pub fn new(config: &ResolvedConfig, sizes: &DecoderConfig, device: &Device) -> Result<MemoryPlan> {
        let of_stage = |stage| MemoryPlan::of_stage(config, sizes, device, stage);
        let plans = (0..config.run.parallel.pipeline).map(of_stage).collect::<Result<Vec<_>>>()?;
        let stage_bytes = plans.iter().map(|plan| plan.peak_bytes).collect();
        let mut workload = Workload::default();
        plans.iter().for_each(|plan| workload.merge(&plan.workload));
        // A plan that does not fit comes before all plans that fit; otherwise the largest plan is chosen.
        let most = plans.into_iter().max_by_key(|plan| (!plan.fits, plan.reserved_bytes)).expect("there is a stage");
        Ok(MemoryPlan { stage_bytes, workload, ..most })
    }

    /// Plans the first rank at place `stage` of the pipeline.
    fn of_stage(config: &ResolvedConfig, sizes: &DecoderConfig, device: &Device, stage: usize) -> Result<MemoryPlan> {
        let available = available(device);
        let dry = unlimited(device);
        let DryRun { build, peak, save, host, saved } = DryRun::new(config, sizes, &dry, stage)?;
        let reserved = match &dry {
            Device::Cuda(gpu) => gpu.memory().reserved,
            Device::Cpu | Device::DryCpu(_) => peak.bytes,
        };
        let fits = match reserved > available {
            // When memory is short, the pool returns idle segments to the driver before it fails, but not while a step is captured. So a second dry
            // run has the device's memory.
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
        // The host cannot swap out pinned memory, so swap space is not counted.
        let host_available = matches!(device, Device::Cuda(gpu) if gpu.tracker().is_none())
            .then(|| of_host(&["MemAvailable:"]) / of_node);
        let [own, others, all] = saved.snapshot;
        let of_checkpoint = if config.run.checkpoint.save_only_model { saved.model[2] } else { all };
        let snapshots = own + (of_node - 1) * others;
        let recovers = config.run.recovery.is_on();
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
            // A snapshot for a checkpoint and one for the memory of the host may be written at the same time.
            snapshot_bytes: if config.async_save { (own + if recovers { own } else { 0 }) as u64 } else { 0 },
            recovery_bytes: if recovers { 4 * snapshots as u64 } else { 0 },
            checkpoint_bytes: of_checkpoint as u64,
            snapshots_fit: room.is_none_or(|room| snapshots * if recovers { 2 } else { 1 } <= room),
            available_bytes: available as u64,
            workload: match &dry {
                Device::Cuda(gpu) => gpu.workload().unwrap_or_default(),
                Device::Cpu | Device::DryCpu(_) => Workload::default(),
            },
            fits: fits && host_available.is_none_or(|there| host <= there),
        })
    }
}

/// Returns `device` in a dry run with unlimited memory, so that a run that does not fit also has a plan. What chooses its size by the memory of the device
/// chooses as on `device`.
pub(super) fn unlimited(device: &Device) -> Device {
    match device {
        Device::Cuda(gpu) => {
            let model = GpuModel { memory: gpu.usable_memory(), ..gpu.model().clone() };
            Device::Cuda(CudaDevice::dry_with(model, UNLIMITED))
        }
        Device::Cpu | Device::DryCpu(_) => device.dry(),
    }
}

/// The memory of such a device, more than any run needs.
const UNLIMITED: usize = 1 << 50;

/// Returns the number of micro-batches to run. The first micro-batch creates gradients, and later ones add to them. In a pipeline, several
/// micro-batches are in flight, so all of them run.
pub(super) fn distinct_micro_batches(config: &ResolvedConfig) -> usize {
    let all = config.run.training.gradient_accumulation_steps;
    if config.run.parallel.pipeline == 1 { all.min(2) } else { all }
}

/// Builds the run of `config` with `micro_batches` micro-batches for the first rank at place `stage` of the pipeline, on a device in a dry run.
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
    // Ranks are numbered with the pipeline axis as the slowest axis.
    let rank = stage * (size / mesh.pipeline);
    let ranks =
        Ranks::new(Group::dry(rank, size), mesh, device)?.sending(config.run.parallel.communication.activation_dtype);
    let ranks = ranks.with_shard_groups(config.run.parallel.zero_shard_size)?;
    let layout = config.run.layout();
    // The data are not read here, so the number of documents is assumed: 64 tokens each. A document takes 4 bytes, and with gated
    // delta nets on a GPU also the scratch of a chunk.
    let documents = layout.document_mask.then(|| layout.seq_len.div_ceil(64) + 2);
    Run::new(&config, sizes, device, weights, Rc::new(ranks))?.with_documents(documents)
}

/// The peaks of memory in a dry run.
struct DryRun {
    /// The peak until the first step.
    build: MemorySnapshot,
    peak: MemorySnapshot,
    save: MemorySnapshot,
    /// The bytes of host memory.
    host: usize,
    /// The bytes that are saved.
    saved: SavedBytes,
}

impl DryRun {
    /// Builds the model and carries out the phases of a run, on a device in a dry run.
    ///
    /// The run has two steps of each precision, since later steps reuse the buffers of the first step, and steps in high precision hold other
    /// operands. Checks are due in the first step, an evaluation after the second step of each precision, and a save at the end.
    fn new(config: &ResolvedConfig, sizes: &DecoderConfig, device: &Device, stage: usize) -> Result<DryRun> {
        let tracker = device.tracker().expect("a device in a dry run").clone();
        let seq_len = config.run.data.max_length;
        let (rows, micro_batches) = (config.run.micro_batch_rows(), config.run.training.gradient_accumulation_steps);
        let distinct = distinct_micro_batches(config);
        let mut run = dry_run(config, sizes, device, distinct, stage)?;
        let build = device.scope("build");
        run.quantize_weights()?;
        let (place, sums) = (run.step.partition().ranks().place(Axis::Context), real_type(run.model.recipe().compute));
        let other = |_| held(device, [rows, seq_len], place, run.objective.loss(rows, device, sums)?);
        let _others = (distinct..micro_batches).map(other).collect::<Result<Vec<_>>>()?;
        let mut passes = run.objective.passes(&config.run);
        let evaluates = passes.iter().any(|passes| passes.phase == Phase::Evaluation);
        if !evaluates && !config.run.evaluation.tasks.is_empty() {
            passes.push(Passes::of_evaluation(&config.run));
        }
        drop(build);
        let build = tracker.take_peak();
        let mut rehearsal = Rehearsal { config, run, passes, peak: build.clone(), saved: SavedBytes::default() };
        for phase in Phase::BEFORE_STEPS {
            rehearsal.carry_out(phase, StepPrecision::Recipe)?;
        }
        let steps: Vec<_> = precisions(&config.run).into_iter().flat_map(|precision| [precision; 2]).collect();
        for (number, &precision) in steps.iter().enumerate() {
            let is_due = |phase: &Phase| match phase {
                Phase::Checks => number == 0,
                Phase::Evaluation => number % 2 == 1,
                Phase::Save => number + 1 == steps.len(),
                _ => true,
            };
            for phase in Phase::OF_STEP.into_iter().filter(is_due) {
                rehearsal.carry_out(phase, precision)?;
            }
        }
        let host = match device {
            Device::Cuda(gpu) => gpu.host_bytes(),
            Device::Cpu | Device::DryCpu(_) => 0,
        };
        let Rehearsal { peak, saved, .. } = rehearsal;
        Ok(DryRun { build, peak, save: tracker.take_peak(), host, saved })
    }
}

/// Returns the precisions in which a run may compute steps.
fn precisions(config: &RunConfig) -> Vec<StepPrecision> {
    let s = &config.sentinel;
    let policy_is_high = matches!(s.sentinel_policy, SentinelPolicy::Demote | SentinelPolicy::Bf16);
    let some_are_high = !config.precision.exceptions.high_precision_steps.is_empty()
        || (s.sentinel_steps > 0 && policy_is_high)
        || s.compares_metric();
    [Some(StepPrecision::Recipe), some_are_high.then_some(StepPrecision::High)].into_iter().flatten().collect()
}

/// A run whose phases are carried out without data.
struct Rehearsal<'a> {
    config: &'a ResolvedConfig,
    run: Run,
    /// The passes of the objective.
    passes: Vec<Passes>,
    /// The peak before a checkpoint is saved.
    peak: MemorySnapshot,
    /// The bytes that are saved, after a checkpoint is saved.
    saved: SavedBytes,
}

impl Rehearsal<'_> {
    /// Carries out the part of `phase` that holds memory of the device.
    fn carry_out(&mut self, phase: Phase, precision: StepPrecision) -> Result<()> {
        match phase {
            Phase::Rows => {
                let config = &self.config.run;
                self.run.objective.rehearse_draws(&mut self.run.model, self.run.step.partition(), config)?;
                self.run.objective.run_other_models(&mut self.run.step)?;
                self.run_passes(phase, precision)
            }
            Phase::Reference => self.run_passes(phase, precision),
            Phase::Evaluation => {
                self.run_passes(phase, precision)?;
                self.evaluate_average(precision)
            }
            Phase::FirstEvaluation => self.run_passes(Phase::Evaluation, precision),
            Phase::Checks => self.run_checks(),
            Phase::Update => self.run.step(self.config.run.optimizer.learning_rate, precision).map(drop),
            Phase::Statistics => Ok(()),
            Phase::Save => {
                let tracker = self.run.model.device().tracker().expect("a device in a dry run");
                let peak = tracker.take_peak();
                if peak.bytes >= self.peak.bytes {
                    self.peak = peak;
                }
                self.saved = save(&mut self.run)?;
                Ok(())
            }
        }
    }

    /// Runs the passes of the objective in `phase`.
    fn run_passes(&mut self, phase: Phase, precision: StepPrecision) -> Result<()> {
        let seq_len = self.config.run.data.max_length;
        let mut due = self.passes.iter().filter(|passes| passes.phase == phase);
        let Run { model, step, objective, .. } = &mut self.run;
        due.try_for_each(|passes| rehearse(model, step, &**objective, passes, seq_len, precision))
    }

    /// Runs the passes of an evaluation by the average of the weights, if the run has one.
    fn evaluate_average(&mut self, precision: StepPrecision) -> Result<()> {
        let config = &self.config.run;
        if config.ema.config().is_none() || !config.ema.evaluate || !config.validates() {
            return Ok(());
        }
        let (passes, seq_len) = (&self.passes, config.data.max_length);
        let Run { model, optimizer, step, objective, .. } = &mut self.run;
        step.with_averages(model, &mut **optimizer, |model, _, step| {
            let mut due = passes.iter().filter(|passes| passes.phase == Phase::Evaluation);
            due.try_for_each(|passes| rehearse(model, step, &**objective, passes, seq_len, precision))
        })
    }

    /// Runs the checks of the loaded rows.
    fn run_checks(&mut self) -> Result<()> {
        let (config, run) = (&self.config.run, &mut self.run);
        let device = run.model.device().clone();
        let _scope = device.scope("comparison");
        let rows = config.micro_batch_rows();
        let tokens = vec![0; rows * config.data.max_length];
        let batch = Batch::whole(tokens.clone(), tokens, rows);
        for check in Check::of(config) {
            match check {
                Check::Comparison | Check::Tensors => {
                    run.compare(&batch.first_rows(config.sentinel.sentinel_sequences)).map(drop)?;
                }
                Check::Repetition => run.repeat(&batch, StepPrecision::Recipe, true).map(drop)?,
            }
        }
        Ok(())
    }
}

/// Runs passes on rows of `seq_len` tokens. All micro-batches after the second would differ from it only in their tokens, so they are held in memory
/// and do not run.
fn rehearse(
    model: &mut Decoder,
    step: &TrainStep,
    objective: &dyn Objective,
    passes: &Passes,
    seq_len: usize,
    precision: StepPrecision,
) -> Result<()> {
    let device = model.device().clone();
    let _scope = device.scope(match passes.phase {
        Phase::Evaluation => "evaluation",
        _ => "reference model",
    });
    let (partition, rows) = (step.partition(), passes.rows);
    let place = partition.ranks().place(Axis::Context);
    let distinct = match partition.ranks().pipeline().size() {
        1 => passes.micro_batches.min(2),
        _ => passes.micro_batches,
    };
    let sums = real_type(model.recipe().compute);
    let micro_batch = |_| held(&device, [rows, seq_len], place, objective.evaluated(rows, &device, sums)?);
    let _others = (distinct..passes.micro_batches).map(micro_batch).collect::<Result<Vec<_>>>()?;
    let micro_batches = (0..distinct).map(micro_batch).map(|held| Ok(held?.0));
    token_losses(model, &micro_batches.collect::<Result<Vec<_>>>()?, passes.pass, precision, partition).map(drop)
}

/// Allocates a micro-batch of `rows` rows of `seq_len` tokens, and its losses.
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

/// Copies each tensor of a checkpoint to host memory, as a save does. Returns the bytes of snapshots.
fn save(Run { model, optimizer, step, .. }: &mut Run) -> Result<SavedBytes> {
    let device = model.device().clone();
    let _scope = device.scope("save");
    let (mut contents, mut live) = Contents::new(model, &mut **optimizer, step.partition())?;
    for name in contents.names() {
        let tensor = live.get(name)?;
        if matches!(device, Device::DryCpu(_)) {
            tensor.duplicate()?;
        }
    }
    let snapshot = contents.snapshot_bytes();
    contents.keep_model();
    Ok(SavedBytes { snapshot, model: contents.snapshot_bytes() })
}

/// The bytes that a rank saves, the maximum bytes of a rank that does not lead, and the bytes of all ranks.
#[derive(Default)]
struct SavedBytes {
    /// Bytes of all tensors of a snapshot that a save takes; see [`Contents::snapshot_bytes`].
    snapshot: [usize; 3],
    /// Bytes of the model alone.
    model: [usize; 3],
}

/// Returns the bytes available for tensors on `device`.
pub(super) fn available(device: &Device) -> usize {
    match device {
        Device::Cuda(gpu) => gpu.usable_memory(),
        Device::Cpu | Device::DryCpu(_) => of_host(&["MemAvailable:", "SwapFree:"]),
    }
}

/// Returns the bytes of host memory available to tensors: the sum of these lines of `/proc/meminfo`, within the limits of `ulimit` and cgroups.
/// Returns [`UNLIMITED`] if the system does not tell.
fn of_host(kinds: &[&str]) -> usize {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kilobytes = |kind: &&str| -> Option<usize> {
        info.lines().find_map(|line| line.strip_prefix(kind)?.trim().trim_end_matches("kB").trim().parse().ok())
    };
    // A twentieth of the memory is left to other parts of the process.
    let there: usize = kinds.iter().filter_map(kilobytes).sum();
    let system = if there > 0 { there * 1024 } else { UNLIMITED };
    let limit = limits::process_memory().map_or(UNLIMITED, |bytes| bytes as usize);
    system.min(limit) / 20 * 19
}

/// Describes a scope of the dry run.
fn describe(scope: &str, config: &ResolvedConfig) -> String {
    match scope {
        "weights" if config.run.optimizer.formats().masters == Masters::Remainder => {
            "weights, with their remainders".into()
        }
        "weights" if config.run.lora.r > 0 => {
            let modules = if config.run.lora.modules_to_save.is_empty() { "" } else { " and modules trained whole" };
            format!("adapters{modules}, {}", config.run.precision.recipe().compute)
        }
        "weights" => format!("weights, {}", config.run.precision.recipe().compute),
        "frozen weights" => format!("frozen weights, {}", config.run.precision.recipe().compute),
        "FP8 codes of frozen weights" => "FP8 codes of frozen weights, which backward transposes".into(),
        "FP8 codes of weights" => "FP8 codes of weights, with transposes".into(),
        "forward" => {
            format!("saved activations, recompute {}", config.recompute.as_str())
        }
        "head" => "logits of a chunk of tokens, and gradients of the head".into(),
        "backward" => "gradients of activations, and recomputed operands".into(),
        "whole weights" => "whole weights that draws read, gathered from all ranks".into(),
        "draws" => "KV cache of draws, and their activations and logits".into(),
        "teacher" => "weights, activations and logits of the teacher".into(),
        "reward model" => "weights and activations of reward models".into(),
        "reference" => "weights, activations and logits of the reference model".into(),
        "update" if matches!(config.run.optimizer.algorithm, Algorithm::Adamw(_)) => "norm of the gradients".into(),
        "update" => "directions of the update, and norm of the gradients".into(),
        "build" => "scales and histories, rotary positions, inputs and losses".into(),
        other => other.into(),
    }
}
