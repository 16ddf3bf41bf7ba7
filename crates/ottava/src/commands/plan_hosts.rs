//! The part of `ottava plan` about several hosts: which groups of ranks cross hosts, bytes on each link, checkpoints, failures, spares and days.

mod print;
#[cfg(test)]
mod tests;

use clap::Args;
use ottava_common::{Error, Result};
use ottava_elastic::Straggler;
use ottava_elastic::simulate::{
    Cause, Inputs, LLAMA_3, Published, Snapshots, Spread, Stragglers, Summary, per_1000_gpu_days, published, run_seeds,
};
use ottava_parallel::Zero;
use ottava_tensor::comm::{Axis, MeshShape};
use ottava_train::plan::{CommunicationPlan, Links, PipelineCost, Plan, UnitPlan, predict};
use serde::Serialize;

/// The options for jobs on several hosts.
#[derive(Args)]
#[command(group(clap::ArgGroup::new("simulated").args(["hosts", "failures"]).multiple(true)))]
pub struct HostArgs {
    /// Plan for this many hosts with the same number of GPUs each: groups of ranks that cross hosts, bytes on each link, checkpoints, failures, spares, days.
    #[arg(long, value_name = "N", value_parser = super::count)]
    hosts: Option<usize>,
    /// The mean time between failures of the job in hours; by default, from the failures of Llama 3 405B per GPU.
    #[arg(long, value_name = "HOURS", requires = "simulated", allow_negative_numbers = true)]
    mtbf: Option<f64>,
    /// The minutes from a failure to the first step of the restarted job.
    #[arg(long, value_name = "MINUTES", default_value_t = 10.0, requires = "simulated")]
    restart: f64,
    /// The number of spare hosts; by default, enough in 99 % of the time, if a repair takes two days.
    #[arg(long, value_name = "N", requires = "simulated")]
    spares: Option<u32>,
    /// The share of lost hosts that take the next host with them, for example by a switch, from 0 to 1.
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, requires = "simulated")]
    paired_losses: f64,
    /// The number of hosts that become slow per 1,000 GPUs and day. With a slow host, a step takes 1.3 times as long. A slow host is noticed after 10
    /// minutes, and a spare takes its place after the next checkpoint or snapshot.
    #[arg(long, value_name = "N", default_value_t = 0.0, allow_negative_numbers = true, requires = "simulated")]
    slow_hosts: f64,
    /// The tokens of the run, such as 2e12; by default, from its steps.
    #[arg(long, value_name = "N", requires = "hosts")]
    tokens: Option<f64>,
    /// Print the share of the time that trains new steps, for 64 to 16,384 GPUs with and without spare hosts, from a simulation.
    #[arg(long)]
    failures: bool,
    /// The number of simulations of each job, with seeds from 0.
    #[arg(long, value_name = "N", default_value_t = 4, requires = "simulated")]
    seeds: u64,
}

/// The GPUs of the jobs in the table of `--failures`.
const SIZES: [u32; 5] = [64, 256, 1024, 4096, 16_384];

/// The GPUs of a host in the table of `--failures`.
const GPUS_PER_HOST: u32 = 8;

/// The bytes per second of a copy from a GPU to the memory of its host (`plan/changes.rs` of `ottava-train`).
const BUS: f64 = 50.2e9;

/// The least seconds for which a checkpoint is assumed to pause training.
const LEAST_PAUSE: f64 = 1.0;

/// The bytes per second that a host is assumed to write to a shared disk.
const DISK: f64 = 2e9;

/// The share of the time of training that snapshots in memory may take.
const SNAPSHOT_COST: f64 = 0.01;

/// The seconds from a failure to the next step, if the state is in the memory of hosts.
const MEMORY_RESTART: f64 = 30.0;

/// The time of a step with a slow host, relative to the time without.
const SLOWDOWN: f64 = 1.3;

/// The seconds until a slow host is noticed, and until it is repaired.
const SLOW: [f64; 2] = [600.0, 86_400.0];

/// The number of recoveries times hosts of one simulation. It bounds the time of a simulation.
const SIMULATED: f64 = 120_000.0;

/// A group of ranks.
#[derive(Serialize)]
struct GroupPlan {
    axis: Axis,
    /// The number of ranks of a group.
    ranks: usize,
    /// The number of hosts of the group on most hosts.
    hosts: usize,
}

/// The shard groups of `parallel.zero_shard_size`.
#[derive(Serialize)]
struct ShardPlan {
    /// The number of ranks of a group.
    ranks: usize,
    /// The number of groups that store the same slices.
    groups: usize,
    /// The largest number of hosts of a group.
    hosts: usize,
}

/// A job on several hosts. Bytes are per GPU and step.
#[derive(Serialize)]
pub struct HostPlan {
    hosts: usize,
    gpus_per_host: usize,
    groups: Vec<GroupPlan>,
    /// The shard groups, if several groups store the same slices.
    shards: Option<ShardPlan>,
    /// The bytes that a GPU sends within its host.
    host_link_bytes: f64,
    /// The bytes that a GPU sends to other hosts.
    network_bytes: f64,
    step_seconds: f64,
    exposed_seconds: f64,
    /// The tokens of a GPU in its last micro-batch that hide the gradients on the network.
    hiding_tokens: f64,
    mtbf_hours: f64,
    save_pause_seconds: f64,
    save_write_seconds: f64,
    /// The number of steps between checkpoints that loses the least time.
    save_steps: u64,
    spares: u32,
    restart_minutes: f64,
    /// The goodput by the formula for checkpoints on disk; `None` if failures are too frequent for the formula.
    formula_goodput: Option<f64>,
    /// The simulation with checkpoints on disk.
    disk: Summary,
    /// The number of steps between snapshots in memory.
    snapshot_steps: u64,
    /// The memory of each host for its snapshots and the copies of another host, two of each.
    snapshot_bytes: f64,
    /// The simulation with snapshots in the memory of hosts.
    memory: Summary,
    tokens: Option<f64>,
    /// The days of the run without failures.
    days: Option<f64>,
}

/// A number of GPUs in the table of `--failures`.
#[derive(Serialize)]
struct FailureRow {
    gpus: u32,
    mtbf_hours: f64,
    spares: u32,
    /// Checkpoints on disk, and no spares: the job waits for repairs.
    disk_waits: Spread,
    /// Checkpoints on disk, and no spares: the job goes on with three quarters of its hosts or more.
    disk_shrinks: Spread,
    /// Checkpoints on disk, and spares.
    disk: Spread,
    /// Snapshots in memory, and spares.
    memory: Spread,
}

/// A published run, and its simulation.
#[derive(Serialize)]
struct PublishedRow {
    run: &'static str,
    published: &'static str,
    published_goodput: f64,
    simulated: Spread,
}

/// The tables of `--failures`.
#[derive(Serialize)]
pub struct FailureTables {
    /// The mean time between failures of `--mtbf` in hours, and the GPUs of its job; `None` for the failures of Llama 3 405B.
    mtbf: Option<(f64, usize)>,
    step_seconds: f64,
    save_pause_seconds: f64,
    save_write_seconds: f64,
    restart_minutes: f64,
    repair_days: f64,
    sizes: Vec<FailureRow>,
    published: Vec<PublishedRow>,
}

/// The hours between failures of a simulated job. More failures leave no time to train, and the times of fewer failures are not exact.
const MTBF: [f64; 2] = [0.1, 100_000.0];

/// Errors with the name and the meaning of the `option` if its `number` is not from `least` to `most`.
fn expect_within(option: &str, meaning: &str, number: Option<f64>, [least, most]: [f64; 2]) -> Result<()> {
    match number.filter(|number| !(least..=most).contains(number)) {
        Some(number) => {
            Err(Error::Config(format!("{option} is {number}; set {meaning}, a number from {least} to {most}")))
        }
        None => Ok(()),
    }
}

impl HostArgs {
    /// Returns the number of hosts.
    pub fn count(&self) -> usize {
        self.hosts.unwrap_or(1)
    }

    /// Errors if an option has no possible value.
    pub fn check(&self) -> Result<()> {
        let (hosts, spares) = (self.hosts.map(|hosts| hosts as f64), self.spares.map(f64::from));
        expect_within("--hosts", "the number of hosts", hosts, [1.0, 20_000.0])?;
        expect_within("--mtbf", "the hours between failures of the job", self.mtbf, MTBF)?;
        expect_within("--restart", "the minutes of a restart", Some(self.restart), [0.01, 1440.0])?;
        expect_within("--spares", "the number of spare hosts", spares, [0.0, f64::from(Inputs::MOST_SPARES)])?;
        expect_within("--tokens", "the tokens of the run", self.tokens, [1.0, 1e18])?;
        let losses = Some(self.paired_losses);
        expect_within("--paired-losses", "the share of lost hosts that take another host", losses, [0.0, 1.0])?;
        let slow = Some(self.slow_hosts);
        expect_within("--slow-hosts", "the hosts that become slow per 1,000 GPUs and day", slow, [0.0, 1000.0])?;
        expect_within("--seeds", "the number of simulations", Some(self.seeds as f64), [1.0, 1000.0])
    }

    /// Plans `plan` on the hosts; `None` without `--hosts`. `step_ms` is the time of a step on a single GPU in milliseconds, and `tokens` are the tokens of
    /// the run.
    pub fn plan(&self, plan: &Plan, step_ms: Option<f64>, tokens: Option<u64>) -> Result<Option<HostPlan>> {
        let Some(hosts) = self.hosts else { return Ok(None) };
        let gpus = plan.memory.ranks;
        if !gpus.is_multiple_of(hosts) {
            return Err(Error::Config(format!(
                "--hosts is {hosts}, and {gpus} GPUs cannot be divided evenly among {hosts} hosts; --gpus sets the number of GPUs"
            )));
        }
        let shard = plan.communication.as_ref().map_or(1, |plan| plan.shard);
        let placement = Placement::new(&plan.mesh.shape, shard, gpus / hosts);
        let step = placement.step(plan, step_ms)?;
        let causes = self.causes(gpus);
        let mut disk = self.disk(hosts as u32, (gpus / hosts) as u32, causes);
        let slice = placement.slice_bytes(plan);
        disk.step = step.seconds;
        disk.saves.pause = (slice / BUS).max(LEAST_PAUSE);
        disk.saves.write = slice * (gpus / hosts) as f64 / DISK;
        disk.saves.interval = disk.as_disk().best_interval();
        let disk = with_days(disk);
        let snapshot_steps = (slice / BUS / SNAPSHOT_COST / step.seconds).ceil().max(1.0);
        let snapshots = Snapshots {
            every: snapshot_steps as u64,
            seal: slice / Links::H200.between.bandwidth,
            cost: slice / BUS / (snapshot_steps * step.seconds),
        };
        let memory = Inputs { snapshots: Some(snapshots), ..disk.clone().with_memory(0.0, MEMORY_RESTART) };
        let tokens = self.tokens.or(tokens.map(|tokens| tokens as f64));
        let (host_link_bytes, network_bytes) = placement.bytes(plan.communication.as_ref());
        Ok(Some(HostPlan {
            hosts,
            gpus_per_host: gpus / hosts,
            groups: placement.groups,
            shards: placement.shards,
            host_link_bytes,
            network_bytes,
            step_seconds: step.seconds,
            exposed_seconds: step.exposed,
            hiding_tokens: step.hiding_tokens,
            mtbf_hours: disk.mean_time_between_failures() / 3600.0,
            save_pause_seconds: disk.saves.pause,
            save_write_seconds: disk.saves.write,
            save_steps: (disk.saves.interval / step.seconds).round().max(1.0) as u64,
            spares: disk.spares,
            restart_minutes: self.restart,
            formula_goodput: disk.as_disk().is_rare().then(|| disk.as_disk().goodput(disk.saves.interval)),
            disk: run_seeds(&disk, self.seeds),
            snapshot_steps: snapshot_steps as u64,
            snapshot_bytes: 4.0 * slice * (gpus / hosts) as f64,
            memory: run_seeds(&memory, self.seeds),
            tokens,
            days: tokens.map(|tokens| tokens / plan.tokens_per_step as f64 * step.seconds / 86_400.0),
        }))
    }

    /// Returns a job that goes back to checkpoints on disk.
    fn disk(&self, hosts: u32, gpus_per_host: u32, causes: Vec<Cause>) -> Inputs {
        let [notice, lasts] = SLOW;
        let slow = Stragglers { per_1000_gpu_days: self.slow_hosts, slowdown: SLOWDOWN, notice, lasts };
        let inputs = Inputs::disk(hosts, gpus_per_host, causes, self.restart * 60.0, 0.0);
        Inputs {
            spares: self.spares.unwrap_or(inputs.spares),
            in_pairs: self.paired_losses,
            stragglers: (self.slow_hosts > 0.0).then_some(slow),
            policy: Straggler::Swap,
            ..inputs
        }
    }

    /// Returns the causes of failures, if `--mtbf` is about a job of `gpus` GPUs.
    fn causes(&self, gpus: usize) -> Vec<Cause> {
        match self.mtbf {
            Some(hours) => per_1000_gpu_days(24.0 / hours / gpus as f64 * 1000.0),
            None => LLAMA_3.to_vec(),
        }
    }

    /// Returns the tables of `--failures`; `None` without it. `gpus` are the GPUs of the job of `--mtbf`.
    ///
    /// Errors with [`Error::Config`] if failures at one of the sizes are too frequent or too rare to simulate.
    pub fn tables(&self, gpus: usize) -> Result<Option<FailureTables>> {
        if !self.failures {
            return Ok(None);
        }
        for (size, hours) in
            SIZES.into_iter().filter_map(|size| Some((size, self.mtbf? * gpus as f64 / f64::from(size))))
        {
            if !(MTBF[0]..=MTBF[1]).contains(&hours) {
                return Err(Error::Config(format!(
                    "--mtbf is {} for a job of {gpus} GPUs; a job of {size} GPUs then fails every {hours:.2e} h, and --failures simulates times from {} to {} h; \
                     set --gpus to the GPUs of the job that fails every {} h",
                    self.mtbf.unwrap_or_default(),
                    MTBF[0],
                    MTBF[1],
                    self.mtbf.unwrap_or_default()
                )));
            }
        }
        let assumed = self.disk(1, GPUS_PER_HOST, self.causes(gpus));
        let goodput = |inputs: &Inputs| run_seeds(inputs, self.seeds).goodput;
        let row = |size: u32| {
            let hosts = size / GPUS_PER_HOST;
            let disk = with_days(self.disk(hosts, GPUS_PER_HOST, self.causes(gpus)));
            let waits = Inputs { spares: 0, ..disk.clone() };
            let shrinks = Inputs { smallest: hosts - hosts / 4, ..waits.clone() };
            FailureRow {
                gpus: size,
                mtbf_hours: disk.mean_time_between_failures() / 3600.0,
                spares: disk.spares,
                disk_waits: goodput(&waits),
                disk_shrinks: goodput(&shrinks),
                disk: goodput(&disk),
                memory: goodput(&disk.clone().with_memory(SNAPSHOT_COST, MEMORY_RESTART)),
            }
        };
        let of_published = |run: Published| PublishedRow {
            run: run.name,
            published: run.published,
            published_goodput: run.goodput,
            simulated: goodput(&run.inputs),
        };
        Ok(Some(FailureTables {
            mtbf: self.mtbf.map(|hours| (hours, gpus)),
            step_seconds: assumed.step,
            save_pause_seconds: assumed.saves.pause,
            save_write_seconds: assumed.saves.write,
            restart_minutes: self.restart,
            repair_days: assumed.times.repair / 86_400.0,
            sizes: SIZES.into_iter().map(row).collect(),
            published: published().into_iter().map(of_published).collect(),
        }))
    }
}

/// Returns `inputs` with as many days as the time of a simulation allows.
fn with_days(inputs: Inputs) -> Inputs {
    let failures = (SIMULATED / f64::from(inputs.hosts + inputs.spares)).clamp(60.0, 400.0);
    let days = failures * inputs.mean_time_between_failures() / 86_400.0;
    Inputs { days, ..inputs }
}

/// The groups of ranks on hosts.
struct Placement {
    shape: MeshShape,
    groups: Vec<GroupPlan>,
    shards: Option<ShardPlan>,
    /// The number of ranks that divide slices.
    shard: usize,
    /// The ranks of one host that share gradients.
    sharing_in_host: usize,
}

/// The time of a step.
struct Step {
    seconds: f64,
    exposed: f64,
    hiding_tokens: f64,
}

impl Placement {
    /// Places the ranks of `shape`. `shard` ranks of data x context divide slices.
    fn new(shape: &MeshShape, shard: usize, gpus_per_host: usize) -> Placement {
        // Tensor is the fastest axis of rank numbers, followed by context, data and pipeline; experts divide data x context.
        let [tensor, context] = [shape.tensor, shape.tensor * shape.context];
        let all = shape.tensor * shape.context * shape.data * shape.pipeline;
        let stride = |axis| match axis {
            Axis::Tensor => 1,
            Axis::Context | Axis::Expert => tensor,
            Axis::Data => context,
            Axis::Pipeline => context * shape.data,
        };
        let most_hosts = |stride: usize, ranks: usize| {
            let hosts_of = |first: usize| {
                let mut hosts: Vec<usize> = (0..ranks).map(|i| (first + i * stride) / gpus_per_host).collect();
                hosts.dedup();
                hosts.len()
            };
            let is_first = |rank: &usize| (rank / stride).is_multiple_of(ranks);
            (0..all).filter(is_first).map(hosts_of).max().unwrap_or(1)
        };
        let group = |axis: Axis| {
            let ranks = shape.size(axis);
            GroupPlan { axis, ranks, hosts: most_hosts(stride(axis), ranks) }
        };
        let several = Axis::ALL.into_iter().filter(|axis| shape.size(*axis) > 1);
        let sharing = shape.data * shape.context;
        let sharing_in_host = (gpus_per_host / shape.tensor).clamp(1, sharing);
        let groups_of_shards = sharing / shard.max(1);
        let shards = (groups_of_shards > 1).then(|| ShardPlan {
            ranks: shard,
            groups: groups_of_shards,
            hosts: most_hosts(tensor, shard),
        });
        Placement { shape: *shape, groups: several.map(group).collect(), shards, shard, sharing_in_host }
    }

    /// Returns the ranks of one host that divide slices, and the ranks of one host that store the same slices.
    fn shards_in_host(&self) -> (usize, usize) {
        (self.sharing_in_host.min(self.shard), (self.sharing_in_host / self.shard).max(1))
    }

    fn sharing(&self) -> usize {
        self.shape.data * self.shape.context
    }

    /// Returns the bytes that a GPU sends in a step within its host and to other hosts. Buffers are reduced and gathered within a host, and a part of the
    /// buffer for each GPU between hosts.
    fn bytes(&self, communication: Option<&CommunicationPlan>) -> (f64, f64) {
        let Some(plan) = communication else { return (0.0, 0.0) };
        let of_layers = plan.of_layers.total().bytes as f64;
        let messages = (plan.traffic.send - plan.of_layers.send).bytes as f64;
        let shared = plan.traffic - plan.of_layers - plan.of_replicas;
        // Vectors and amaxes are reduced over all ranks that share gradients.
        let vectors = shared.all_reduce.bytes;
        let slices = shared.total().bytes - shared.send.bytes - vectors;
        let (divide_in_host, replicas_in_host) = self.shards_in_host();
        let of_all = sides(vectors, self.sharing(), self.sharing_in_host);
        let of_slices = sides(slices, self.shard, divide_in_host);
        let of_replicas = sides(plan.of_replicas.total().bytes, self.sharing() / self.shard, replicas_in_host);
        let crosses = |axes: &[Axis]| self.groups.iter().any(|group| axes.contains(&group.axis) && group.hosts > 1);
        let mut sides: [f64; 2] = std::array::from_fn(|side| of_all[side] + of_slices[side] + of_replicas[side]);
        sides[usize::from(crosses(&[Axis::Tensor, Axis::Context, Axis::Expert]))] += of_layers;
        sides[usize::from(crosses(&[Axis::Pipeline]))] += messages;
        (sides[0], sides[1])
    }

    /// Returns the bytes of a checkpoint that each rank writes. The memory plan counts the states of each replica, but one replica is written. An update
    /// reads and writes each state, so about half of its bytes are saved.
    fn slice_bytes(&self, plan: &Plan) -> f64 {
        let counted = plan.memory.checkpoint_bytes as f64 / plan.memory.ranks as f64;
        let updated = plan.communication.as_ref().map(|plan| plan.update_bytes as f64 / 2.0 / self.sharing() as f64);
        updated.map_or(counted, |updated| updated.min(counted))
    }

    /// Predicts the time of a step, from the time on one GPU or from the rate of Hopper GPUs.
    ///
    /// Errors with [`Error::Config`] if neither is known.
    fn step(&self, plan: &Plan, step_ms: Option<f64>) -> Result<Step> {
        let (ranks, sharing) = (plan.memory.ranks as f64, self.sharing() as f64);
        let of_rate = plan.least_step_seconds.map(|seconds| seconds * ranks / sharing);
        let Some(alone) = step_ms.map(|ms| ms * 1e-3).or(of_rate) else {
            return Err(Error::Config(
                "--hosts needs the time of a step, which is not known for this device; add --gpu H200, or --step-ms with a measured time"
                    .into(),
            ));
        };
        let Some(communication) = &plan.communication else {
            return Ok(Step { seconds: alone, exposed: 0.0, hiding_tokens: 0.0 });
        };
        let links = Links { gpus_per_node: self.sharing_in_host, ..Links::H200 };
        let pipeline = plan.pipeline.as_ref().map_or(PipelineCost::NONE, |pipeline| pipeline.cost());
        let predicted = predict(communication, pipeline, communication.ranks, &links, Some(alone)).step;
        let (seconds, exposed) = predicted.map_or((alone, 0.0), |step| (step.seconds, step.exposed_seconds));
        // Backward takes two thirds of the compute.
        let backward_per_token = alone * sharing / ranks * (2.0 / 3.0) / communication.tokens as f64;
        let hiding_tokens = self.gradients_on_network(communication) / links.between.bandwidth / backward_per_token;
        Ok(Step { seconds, exposed, hiding_tokens })
    }

    /// Returns the bytes of gradients that a GPU sends to other hosts: a reduce-scatter and, without ZeRO, an all-gather of the sums. With shard groups, an
    /// all-reduce of slices follows.
    fn gradients_on_network(&self, communication: &CommunicationPlan) -> f64 {
        let passes = if communication.zero == Zero::Nothing { 2.0 } else { 1.0 };
        let (divide_in_host, replicas_in_host) = self.shards_in_host();
        let of = |bytes: fn(&UnitPlan) -> u64| communication.units.iter().map(bytes).sum::<u64>() as f64;
        let between = |ranks: usize, in_host: usize| {
            let hosts = ranks as f64 / in_host as f64;
            (hosts - 1.0) / hosts / in_host as f64
        };
        passes * of(|unit| unit.reduced_bytes) * between(self.shard, divide_in_host)
            + 2.0 * of(|unit| unit.slice_bytes) * between(self.sharing() / self.shard, replicas_in_host)
    }
}

/// Returns the bytes that a GPU sends within its host and to other hosts in collectives of `ranks` ranks, `in_host` of them on each host. A flat
/// collective would send `bytes`.
fn sides(bytes: u64, ranks: usize, in_host: usize) -> [f64; 2] {
    if ranks <= 1 {
        return [0.0; 2];
    }
    let (ranks, in_host) = (ranks as f64, in_host as f64);
    let (buffers, hosts) = (bytes as f64 * ranks / (ranks - 1.0), ranks / in_host);
    [buffers * (in_host - 1.0) / in_host, buffers / in_host * (hosts - 1.0) / hosts]
}
