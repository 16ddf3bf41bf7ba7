//! `ottava plan`.

use super::disk::shortage;
use super::plan_data::Data;
use super::plan_hosts::{FailureTables, HostArgs, HostPlan};
use super::plan_verdict::{Checked, Verdict, duration};
use super::remote::{Reads, load_run};
use crate::output::print_json;
use clap::Args;
use ottava_common::{Error, Result};
use ottava_data::Formatting;
use ottava_parallel::Schedule;
use ottava_settings::{DeviceChoice, Loaded, RunConfig};
use ottava_tensor::Device;
use ottava_train::plan::{
    AmaxPlan, AxisPlan, Candidate, CommunicationPlan, GpuPlan, Links, MemoryPlan, MeshPlan, ParallelSearch,
    PipelineCost, PipelinePlan, PipelineRank, Plan, Prediction, ResolvedRun, RolloutPlan, StagePlan, TensorPlan,
    predict,
};
use ottava_train::step::{Program, Reductions};
use serde::Serialize;
use std::path::PathBuf;

/// Say whether a run fits its device, and its steps, time, checkpoints, precision and data. Needs no GPU and reads no weights.
#[derive(Args)]
#[command(after_help = "Examples:
  ottava plan configs/quickstart.toml
  ottava plan run.toml --details
  ottava plan run.toml --recipe fp8-current --json
  ottava plan run.toml --show-data 3
  ottava plan run.toml --device cuda --gpu-memory 80
  ottava plan run.toml --gpu H100
  ottava plan run.toml --set parallel.data=8 --set parallel.zero=3 --step-ms 400
  ottava plan run.toml --ranks 8 --set parallel.auto=true
  ottava plan run.toml --gpu H200 --gpus 1024 --hosts 128 --mtbf 8 --tokens 2e12
  ottava plan run.toml --set gradient_accumulation_steps=4 --program

A run that does not fit its device ends this with exit code 3, and with the cheapest settings that make it fit.")]
pub struct PlanCommand {
    /// The run's TOML file.
    config: PathBuf,
    /// Change a setting: `table.key=VALUE`, or `key=VALUE` if only one table has the key.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<String>,
    /// The recipe; the same as --set precision.recipe=….
    #[arg(long, value_name = "NAME")]
    recipe: Option<String>,
    /// Formats of weights, gradients and optimizer states; the same as --set optimizer.storage=….
    #[arg(long, value_name = "NAME")]
    storage: Option<String>,
    /// The device to plan for: auto, cuda or cpu. Without a GPU, cuda plans for an H200.
    #[arg(long, value_parser = crate::device::parse)]
    device: Option<DeviceChoice>,
    /// Plan for a GPU of this name, such as H100 or "RTX 4090". With --details, show which kernels run on it.
    #[arg(long, value_name = "NAME")]
    gpu: Option<String>,
    /// Plan for a GPU with this much memory, in GiB.
    #[arg(long, value_name = "GIB")]
    gpu_memory: Option<f64>,
    /// The number of ranks to plan for; by default, the product of the sizes in `[parallel]`. With `parallel.auto`, search the fastest division among
    /// these ranks.
    #[arg(long, visible_alias = "gpus", value_name = "N", value_parser = super::count)]
    ranks: Option<usize>,
    /// Predict the step time of several ranks. MS is the time of a step on a single GPU, in milliseconds, with the micro-batches of one rank.
    #[arg(long, value_name = "MS")]
    step_ms: Option<f64>,
    #[command(flatten)]
    hosts: HostArgs,
    /// Tokenize the data as `prepare` does, and show the first ROWS rows of training. Tokens that contribute to the loss are coloured; with NO_COLOR
    /// or without a terminal, they are in brackets.
    #[arg(long, value_name = "ROWS", num_args = 0..=1, default_missing_value = "3", value_parser = super::count)]
    show_data: Option<usize>,
    /// List the actions of a step and of the evaluation of a batch, in the order in which each rank enqueues them.
    #[arg(long)]
    program: bool,
    /// Also print all settings, the casts of each layer with their reasons, the memory of each use, and communication.
    #[arg(long)]
    details: bool,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// How many dropped divisions (parallel layouts) the plan lists per reason.
const LISTED_DIVISIONS: usize = 3;

/// The maximum number of ranks that is predicted.
const MOST_RANKS: usize = 4096;

/// Predictions of the cost model, and its assumptions.
#[derive(Serialize)]
struct Overlap {
    links: Links,
    /// The predictions for the ranks of the plan and, if the compute time is known, for powers of two.
    predictions: Vec<Prediction>,
}

impl Overlap {
    /// Predicts the overlap. `step_ms` is the compute time of a step in milliseconds.
    fn new(plan: &CommunicationPlan, step_ms: Option<f64>) -> Overlap {
        let (links, compute) = (Links::H200, step_ms.map(|ms| ms * 1e-3));
        let powers = (1..).map(|i| 1 << i).take_while(|&ranks| compute.is_some() && ranks <= MOST_RANKS);
        let mut ranks: Vec<_> = powers.chain([plan.ranks]).collect();
        ranks.sort_unstable();
        ranks.dedup();
        let predict = |ranks| predict(plan, PipelineCost::NONE, ranks, &links, compute);
        Overlap { links, predictions: ranks.into_iter().map(predict).collect() }
    }
}

/// The programs of a rank.
#[derive(Serialize)]
struct Programs {
    /// The rank's stage in the pipeline; `None` without a pipeline.
    #[serde(skip_serializing_if = "Option::is_none")]
    stage: Option<usize>,
    step: Program,
    evaluation: Program,
}

impl Programs {
    /// Returns the programs of each rank of the pipeline. `is_tied` says whether the model's head is tied to its embedding.
    fn of_ranks(config: &RunConfig, is_tied: bool) -> Result<Vec<Programs>> {
        let reductions = Reductions::for_step(config.parallel.reducing(), config.parallel.zero);
        let schedule = config.parallel.schedule(config.training.gradient_accumulation_steps)?;
        let evaluation = Schedule { micro_batches: schedule.ranks, ..schedule };
        let of_rank = |rank| Programs {
            stage: (schedule.ranks > 1).then_some(rank),
            step: Program::step_of(&schedule, rank, reductions, is_tied && [0, schedule.ranks - 1].contains(&rank)),
            evaluation: Program::evaluation_of(&evaluation, rank),
        };
        Ok((0..schedule.ranks).map(of_rank).collect())
    }

    fn print(&self) {
        let of = self.stage.map_or(String::new(), |stage| format!(", rank {stage} of the pipeline"));
        for (what, program) in [("a step", &self.step), ("the evaluation of a batch", &self.evaluation)] {
            out!("\nProgram of {what}{of}\n");
            for action in program.to_string().lines() {
                out!("  {action}");
            }
        }
    }
}

/// The JSON object that `--json` prints.
#[derive(Serialize)]
struct Printed<'a> {
    verdict: &'a Verdict,
    #[serde(flatten)]
    plan: &'a Plan,
    /// The kernels that run on the GPU; null for a CPU.
    gpu: &'a Option<GpuPlan>,
    predicted_overlap: &'a Option<Overlap>,
    /// The search for a division, with `parallel.auto`.
    search: &'a Option<ParallelSearch>,
    /// The job on several hosts, with `--hosts`.
    hosts: &'a Option<HostPlan>,
    /// The simulated jobs, with `--failures`.
    failures: &'a Option<FailureTables>,
    /// The formatting of each file.
    formattings: &'a [Formatting],
    /// A description of the tokens that begin and end a document.
    edges: &'a str,
    /// The data, with `--show-data`.
    data: &'a Option<Data>,
    /// The programs, with `--program`.
    program: &'a Option<Vec<Programs>>,
}

impl PlanCommand {
    /// Returns the settings of `--set`, and the settings with options of their own.
    fn all_settings(&self) -> Vec<String> {
        let named = [("precision.recipe", &self.recipe), ("optimizer.storage", &self.storage)];
        let named = named.into_iter().filter_map(|(key, value)| Some(format!("{key}={}", value.as_ref()?)));
        self.settings.iter().cloned().chain(named).collect()
    }

    pub fn run(self) -> Result<()> {
        if let Some(ms) = self.step_ms.filter(|ms| !(ms.is_finite() && *ms > 0.0)) {
            return Err(Error::Config(format!("--step-ms is {ms}; a step takes more than 0 milliseconds")));
        }
        self.hosts.check()?;
        let Loaded { mut config, old_keys } = load_run(&self.config, &self.all_settings(), Reads::Shapes)?;
        super::warn_of_settings(&config, old_keys);
        let ranks = self.ranks.unwrap_or(config.parallel.ranks());
        if !config.parallel.auto {
            config.share(ranks)?;
        }
        let (files, formattings): (Vec<_>, Vec<_>) = config.resolve_data()?.into_iter().unzip();
        let sizes = config.decoder_config()?;
        config.expect_positions(&sizes)?;
        let has_tokens = config.cache_dir().exists();
        let checked = Checked::new(&config, &files, &formattings, self.show_data.is_some())?;
        if !has_tokens && config.cache_dir().exists() {
            tracing::info!(
                "the tokens of the data are in {}, where `ottava train` reads them",
                config.cache_dir().display()
            );
        }
        if let Some(text) = &checked.few_steps {
            tracing::warn!("{text}");
        }
        let data = self.show_data.map(|rows| Data::read(&config, rows)).transpose()?;
        let choice = self.device.unwrap_or(config.device);
        let device = crate::device::plan_for(choice, self.gpu.as_deref(), self.gpu_memory)?;
        let gpu = match &device {
            Device::Cuda(gpu) => Some(GpuPlan::new(gpu.model())?),
            _ => None,
        };
        // Printed before the dry runs, because a dry run fails if a kernel does not run on this GPU.
        if let (Some(gpu), true, false) = (&gpu, self.gpu.is_some() && self.details, self.json) {
            print_gpu(gpu);
        }
        let search = match config.parallel.auto {
            true => Some(ParallelSearch::new(&config, &sizes, &device, ranks)?),
            false => None,
        };
        if let Some(search) = &search {
            config = search.fastest()?.division.applied(&config);
            config.share(ranks)?;
        }
        let resolved = ResolvedRun::new(&config, &sizes, &device)?;
        let plan = Plan::new(&resolved, &sizes, &device)?;
        for text in &plan.exceptions {
            tracing::warn!("{text}");
        }
        let predicted = plan.communication.as_ref().filter(|_| plan.pipeline.is_none());
        let overlap = predicted.map(|communication| Overlap::new(communication, self.step_ms));
        let is_tied = sizes.head.tied && sizes.lora.is_none() && plan.pipeline.is_some();
        let program = self.program.then(|| Programs::of_ranks(&resolved.config.run, is_tied)).transpose()?;
        let sharing = match &device {
            Device::Cuda(_) => 1,
            Device::Cpu | Device::DryCpu(_) => plan.memory.ranks.div_ceil(self.hosts.count()),
        };
        let verdict = Verdict::new(&resolved, &plan, &checked, &device.to_string(), sharing);
        // The disk of this machine says nothing about a run on another machine.
        let is_here = !matches!(&device, Device::Cuda(gpu) if gpu.tracker().is_some());
        let shortage = shortage(&resolved.config.run, verdict.checkpoint_bytes, verdict.steps);
        if let Some(text) = shortage.filter(|_| is_here) {
            tracing::warn!("{text}");
        }
        let hosts = self.hosts.plan(&plan, self.step_ms, verdict.tokens)?;
        let failures = self.hosts.tables(plan.memory.ranks)?;
        match self.json {
            true => print_json(&Printed {
                verdict: &verdict,
                plan: &plan,
                gpu: &gpu,
                predicted_overlap: &overlap,
                search: &search,
                hosts: &hosts,
                failures: &failures,
                formattings: &formattings,
                edges: &checked.edges,
                data: &data,
                program: &program,
            }),
            false => {
                verdict.print();
                if self.details {
                    out!("");
                    print(&resolved.config.to_run_config(), &plan, &files, &formattings, &checked.edges);
                }
                data.iter().for_each(Data::print);
                if let Some(communication) = plan.communication.as_ref().filter(|_| self.details) {
                    print_communication(communication, plan.pipeline.is_some());
                }
                overlap.iter().filter(|_| self.details || self.step_ms.is_some()).for_each(print_overlap);
                search.iter().for_each(print_search);
                hosts.iter().for_each(HostPlan::print);
                failures.iter().for_each(FailureTables::print);
                program.iter().flatten().for_each(Programs::print);
            }
        }
        resolved.expect_fit()?;
        verdict.expect_fit()
    }
}

fn print(config: &RunConfig, plan: &Plan, files: &[PathBuf], formattings: &[Formatting], edges: &str) {
    out!("Configuration\n");
    for line in config.to_toml().lines() {
        out!("  {line}");
    }
    out!("\nData\n");
    for (path, formatting) in files.iter().zip(formattings) {
        out!("  {}: {}", path.display(), formatting.as_str());
    }
    for (name, share) in config.weighted_shares().into_iter().flatten() {
        out!("  {name}: {:.2} % of the tokens, {:.0} a step", share * 100.0, share * plan.tokens_per_step as f64);
    }
    if !config.data.datasets.is_empty() && config.weighted_shares().is_none() {
        out!("  shares of the data sets follow from their tokens; --show-data counts them");
    }
    out!("  {edges}");
    out!("\nModel\n");
    if plan.frozen > 0 {
        let share = plan.parameters as f64 / (plan.parameters + plan.frozen) as f64 * 100.0;
        out!(
            "  {} parameters in adapters are trained, {share:.2} % of all; {} are frozen",
            plan.parameters,
            plan.frozen
        );
    }
    out!(
        "  {} parameters, {:.2} MFLOP per token, {} tokens a step",
        plan.parameters + plan.frozen,
        plan.flops_per_token / 1e6,
        plan.tokens_per_step
    );
    if let Some(seconds) = plan.least_step_seconds {
        let all = match config.training.max_steps {
            None => String::new(),
            Some(steps) => format!(", {} for {steps} steps", duration(seconds * steps as f64)),
        };
        out!("  at least {:.1} ms a step{all}, if each GPU is as busy as one H200 with Llama-2-7B", seconds * 1e3);
    }
    for attention in &plan.attention {
        out!("  attention: {} for {} x {}", attention.backend, attention.count, attention.what);
        attention.because.iter().for_each(|reason| out!("    because: {reason}"));
    }
    if let Some(experts) = &plan.experts {
        let shared = experts.shared.map_or(String::new(), |hidden| format!(", and a shared one of width {hidden}"));
        out!(
            "  experts: {} layers with {} of width {}{shared}; {} for each token, by {}",
            experts.layers,
            experts.experts,
            experts.hidden,
            experts.chosen,
            experts.router
        );
        match experts.ranks {
            1 => out!(
                "    a micro-batch has {} rows for them in buffers of {}, so nothing is dropped",
                experts.rows,
                experts.capacity
            ),
            ranks => out!(
                "    each of {ranks} ranks has {} and gathers the tokens of all: a micro-batch of these ranks has {} rows for all experts, and a rank buffers of {}, so nothing is dropped",
                experts.experts / ranks,
                experts.rows,
                experts.capacity
            ),
        }
    }
    out!("  embedding, norms, routers, softmax and loss: high precision in every recipe");
    print_linears(plan);
    plan.rollouts.iter().for_each(print_rollouts);
    print_tensors(&plan.tensors);
    print_mesh(&plan.mesh);
    plan.pipeline.iter().for_each(print_pipeline);
    print_memory(&plan.memory);
    if let Some(choice) = &plan.choice {
        out!("\n  {choice}");
    }
}

fn print_gpu(gpu: &GpuPlan) {
    let tested = if gpu.is_tested { "tested" } else { "not tested; from NVIDIA's documents" };
    let list = |items: &[String]| if items.is_empty() { "none".to_string() } else { items.join("; ") };
    out!(
        "GPU\n\n  {}, {}, compute capability {}.{}, {tested}",
        gpu.name,
        gpu.architecture,
        gpu.capability.0,
        gpu.capability.1
    );
    out!("  features: {}", list(&gpu.features.iter().map(ToString::to_string).collect::<Vec<_>>()));
    out!("  {} KiB of shared memory for a block", gpu.shared_bytes >> 10);
    out!("  FP8 products of cuBLASLt, by scales: {}", list(&gpu.fp8_products));
    out!("  kernels that run: {}", gpu.kernels.join(", "));
    for missing in &gpu.missing {
        out!("  kernels that do not run: {missing}");
    }
    out!("");
}

/// Prints the tensors of each optimizer, if there are several optimizers.
fn print_tensors(tensors: &[TensorPlan]) {
    out!("\nOptimizer\n");
    let mut names: Vec<_> = tensors.iter().map(|plan| plan.optimizer).collect();
    names.sort_unstable();
    names.dedup();
    for name in &names {
        let of_name = || tensors.iter().filter(|plan| plan.optimizer == *name);
        out!("  {name}: {} tensors", of_name().map(|plan| plan.count).sum::<usize>());
        for TensorPlan { name, count, shape, .. } in of_name().filter(|_| names.len() > 1) {
            out!("    {count} x {name}  {shape:?}");
        }
    }
}

fn print_mesh(mesh: &MeshPlan) {
    out!("\nMesh\n\n  {}", mesh.shape);
    for AxisPlan { axis, ranks } in &mesh.axes {
        out!("  {}: {ranks}", axis.as_str());
    }
    for AmaxPlan { cast, count, over } in &mesh.amaxes {
        out!("  amaxes of {count} casts of {cast}: the maximum over {over}");
    }
}

fn print_memory(memory: &MemoryPlan) {
    let of = match (memory.ranks, memory.stage_bytes.len()) {
        (1, _) => String::new(),
        (ranks, 1) => format!(" of rank 0 of {ranks}"),
        (_, stages) => format!(" of rank {} of {stages} in the pipeline, which needs most", memory.stage),
    };
    out!("\nMemory{of}, from a dry run of the steps\n");
    let line = |bytes: u64, what: &str| out!("  {:>10.3} GiB  {what}", gib(bytes));
    for used in &memory.lines {
        line(used.bytes, &used.what);
    }
    line(memory.peak_bytes, &format!("at the peak, in {}", memory.during));
    if memory.reserved_bytes > memory.peak_bytes {
        line(memory.reserved_bytes, "taken from the driver, with gaps between tensors");
    }
    line(memory.build_bytes, "while the model is built and loaded");
    line(memory.save_bytes, "while a checkpoint is saved");
    if memory.host_bytes > 0 {
        line(memory.host_bytes, "of host memory, for offloaded tensors");
    }
    if memory.snapshot_bytes > 0 {
        line(memory.snapshot_bytes, "of host memory, for snapshots of checkpoints");
    }
    if memory.recovery_bytes > 0 {
        line(
            memory.recovery_bytes,
            "of memory files on each host, for snapshots of its ranks and copies of another host",
        );
    }
    line(memory.available_bytes, if memory.fits { "available" } else { "available, which is not enough" });
}

fn print_pipeline(pipeline: &PipelinePlan) {
    let Schedule { kind, micro_batches, .. } = pipeline.schedule;
    out!("\nPipeline, schedule {}, {micro_batches} micro-batches in a step\n", kind.as_str());
    for StagePlan { rank, blocks: [start, end], embedding, head, cost } in &pipeline.stages {
        let blocks = (end > start).then(|| format!("blocks {start} to {}", end - 1));
        let layers = [embedding.then(|| "embedding".to_string()), blocks, head.then(|| "head".into())];
        let layers = layers.into_iter().flatten().collect::<Vec<_>>().join(", ");
        out!("  rank {rank}: {layers}; {:.1} % of the estimated time", cost * 100.0);
    }
    for (rank, PipelineRank { in_flight, peak_bytes }) in pipeline.ranks.iter().enumerate() {
        out!("  {:>10.3} GiB  on rank {rank}, with at most {in_flight} micro-batches in flight", gib(*peak_bytes));
    }
    out!(
        "  idle for {:.1} % of the compute time if stages take equal time; the most expensive one takes {:.2} times the mean",
        pipeline.bubble * 100.0,
        pipeline.imbalance
    );
}

fn print_linears(plan: &Plan) {
    out!("\nLinears\n");
    for l in &plan.linears {
        out!("  {} x {}  [{}, {}]", l.count, l.name, l.shape[0], l.shape[1]);
        out!("    fprop {}\n    dgrad {}\n    wgrad {}\n    because: {}", l.fprop, l.dgrad, l.wgrad, l.reason);
    }
    plan.folder_codes.iter().for_each(|text| out!("  {text}"));
}

fn print_rollouts(plan: &RolloutPlan) {
    let RolloutPlan { prompts, group, steps, max_length, shared_bytes, is_exact, because, correction } = plan;
    out!("\nRollouts\n");
    out!(
        "  a generation: {prompts} prompts x {group} completions for {steps} steps, prompt and completion of at most {max_length} tokens"
    );
    out!(
        "  draws read the weights and FP8 codes of the run: a second model for draws would hold {:.2} GiB",
        gib(*shared_bytes)
    );
    let agree = if *is_exact { "are equal bit for bit" } else { "are not equal" };
    out!("  log-probabilities of draws and of steps {agree}\n    because: {because}");
    out!("  {correction}");
}

fn print_communication(plan: &CommunicationPlan, is_pipeline: bool) {
    let by = if is_pipeline { "the first" } else { "each" };
    out!("\nCommunication, sent by {by} of {} ranks in a step, from a dry run\n", plan.ranks);
    for (name, _, sent) in plan.traffic.kinds().filter(|(.., sent)| sent.calls > 0) {
        out!("  {:>10.3} MB  in {} calls of {name}", sent.bytes as f64 / 1e6, sent.calls);
    }
    out!("  {:>10.3} MB  in all", plan.traffic.total().bytes as f64 / 1e6);
}

/// Prints the fastest divisions of a search, and why other divisions cannot be used.
fn print_search(search: &ParallelSearch) {
    let ParallelSearch { ranks, best, slower, .. } = search;
    out!(
        "\nFastest divisions among {ranks} ranks, predicted by a model (docs/parallelism.md); the first one is planned above\n"
    );
    for Candidate { division, recompute, peak_bytes, step, tokens_per_second } in best {
        let settings = division.settings().iter().map(|setting| format!("--set {setting}")).collect::<Vec<_>>();
        out!("  {}", if settings.is_empty() { "one rank".to_string() } else { settings.join(" ") });
        out!(
            "    {tokens_per_second:.0} tokens/s, {:.1} GiB on each rank, recompute {}; of a step of {:.1} ms, {:.1} ms are exposed communication and {:.1} ms idle",
            gib(*peak_bytes),
            recompute.as_str(),
            step.seconds * 1e3,
            step.exposed_seconds * 1e3,
            step.idle_seconds * 1e3
        );
    }
    out!("  {slower} slower divisions fit; {} were dropped:", search.dropped.len());
    for (why, divisions) in search.reasons() {
        let all = divisions.len();
        let listed = divisions.iter().take(LISTED_DIVISIONS).map(String::as_str).collect::<Vec<_>>().join("; ");
        let more =
            if all > LISTED_DIVISIONS { format!("; and {} more", all - LISTED_DIVISIONS) } else { String::new() };
        out!("    {listed}{more}\n      {}", why.replace('\n', "\n      "));
    }
}

fn print_overlap(overlap: &Overlap) {
    let links = &overlap.links;
    out!(
        "\nPredicted overlap, by a model (docs/parallelism.md): {} GPUs per node, {:.0} GB/s within, {:.0} GB/s per GPU between nodes\n",
        links.gpus_per_node,
        links.within.gather.ring.bandwidth / 1e9,
        links.between.bandwidth / 1e9
    );
    let step = overlap.predictions.iter().any(|prediction| prediction.step.is_some());
    if !step {
        for prediction in &overlap.predictions {
            out!("  {:>10.1} ms  of communication in a step", prediction.communication_seconds * 1e3);
        }
        out!("  --step-ms adds exposed communication, and the speed on more ranks");
        return;
    }
    out!(
        "  {:>6} {:>16} {:>11} {:>14} {:>9} {:>15}",
        "ranks",
        "communication ms",
        "exposed ms",
        "contention ms",
        "step ms",
        "tokens/s per GPU"
    );
    for prediction in &overlap.predictions {
        let Some(step) = prediction.step else { continue };
        out!(
            "  {:>6} {:>16.1} {:>11.1} {:>14.1} {:>9.1} {:>15.0}",
            prediction.ranks,
            prediction.communication_seconds * 1e3,
            step.exposed_seconds * 1e3,
            step.slowdown_seconds * 1e3,
            step.seconds * 1e3,
            step.tokens_per_second
        );
    }
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}
