//! Runs that were published, with all inputs taken from publications. `docs/many-machines.md` names the source of each number.

use super::formulas::{Disk, spares};
use super::inputs::{Cause, DAY, Inputs, Saves, Scope, Snapshots, Times};
use crate::Straggler;

/// The failures of the training of Llama 3 405B per 1,000 GPUs and day, by kind.
pub const LLAMA_3: &[Cause] = &[
    cause("GPU or NVLink", 0.167, Scope::Host),
    cause("HBM", 0.081, Scope::Host),
    cause("SRAM or processor of a GPU", 0.041, Scope::Host),
    cause("software", 0.061, Scope::Process),
    cause("network", 0.040, Scope::Host),
    cause("maintenance of a host", 0.036, Scope::Host),
    cause("network adapter", 0.008, Scope::Host),
    cause("timeout of NCCL", 0.008, Scope::Process),
    cause("silent corruption", 0.007, Scope::Host),
    cause("other parts of a host", 0.017, Scope::Host),
];

/// The failures of jobs of 16,384 GPUs per 1,000 GPUs and day, from a study of clusters with all causes.
pub const BROAD_PER_1000_GPU_DAYS: f64 = 0.8;

const fn cause(name: &'static str, per_1000_gpu_days: f64, scope: Scope) -> Cause {
    Cause { name, per_1000_gpu_days, scope }
}

/// Returns causes in the proportions of [`LLAMA_3`] whose sum is `per_1000_gpu_days`.
pub fn per_1000_gpu_days(per_1000_gpu_days: f64) -> Vec<Cause> {
    let sum: f64 = LLAMA_3.iter().map(|cause| cause.per_1000_gpu_days).sum();
    let scaled =
        |cause: &Cause| Cause { per_1000_gpu_days: cause.per_1000_gpu_days / sum * per_1000_gpu_days, ..*cause };
    LLAMA_3.iter().map(scaled).collect()
}

impl Inputs {
    /// The quantile of the number of hosts in repair for which there are spares.
    pub const SPARES_QUANTILE: f64 = 0.99;

    /// The largest number of spares of a simulation. It bounds memory and time.
    pub const MOST_SPARES: u32 = 10_000;

    /// Returns a job of `hosts` hosts that goes back to a checkpoint after each failure, with `restart` seconds from a failure to the next step, the best
    /// interval between checkpoints, and enough spares. A checkpoint pauses training for 10 s and takes 60 s to write. A host is repaired in 2 days.
    pub fn disk(hosts: u32, gpus_per_host: u32, causes: Vec<Cause>, restart: f64, days: f64) -> Inputs {
        let repair = 2.0 * DAY;
        let times = Times {
            detect: 0.0,
            latency: 1e-3,
            fetch: 0.0,
            load: 0.0,
            start: restart,
            wait: 60.0,
            relaunch: restart,
            repair,
        };
        let mut inputs = Inputs {
            hosts,
            spares: 0,
            gpus_per_host,
            smallest: hosts,
            causes,
            apart: None,
            in_pairs: 0.0,
            stragglers: None,
            policy: Straggler::Warn,
            step: 5.0,
            saves: Saves { interval: 0.0, pause: 10.0, write: 60.0 },
            snapshots: None,
            times,
            days,
        };
        inputs.spares = inputs.enough_spares();
        inputs.saves.interval = inputs.as_disk().best_interval();
        inputs
    }

    /// Returns this job with snapshots in memory after each step, and `restart` seconds from a failure to the next step. `cost` is the share of the time
    /// that snapshots take. Checkpoints on disk are an hour apart.
    pub fn with_memory(self, cost: f64, restart: f64) -> Inputs {
        let times = Times { start: restart, relaunch: restart, ..self.times };
        let saves = Saves { interval: 3600.0, pause: 0.0, ..self.saves };
        Inputs { snapshots: Some(Snapshots { every: 1, seal: 0.0, cost }), times, saves, ..self }
    }

    /// Returns the job of the formula for checkpoints on disk.
    pub fn as_disk(&self) -> Disk {
        Disk {
            between_failures: self.mean_time_between_failures(),
            pause: self.saves.pause,
            write: self.saves.write,
            restart: self.times.detect + self.times.load + self.times.start,
        }
    }

    /// Returns the number of spares that is enough with a probability of [`Inputs::SPARES_QUANTILE`], at most [`Inputs::MOST_SPARES`]. Spares fail as
    /// often as other hosts.
    pub fn enough_spares(&self) -> u32 {
        let of_hosts = self.causes.iter().filter(|cause| cause.scope == Scope::Host);
        let per_1000_gpu_days: f64 = of_hosts.map(|cause| cause.per_1000_gpu_days).sum();
        let per_repair = per_1000_gpu_days / 1000.0 * f64::from(self.gpus_per_host) * self.times.repair / DAY;
        // A host that is being repaired cannot fail.
        let in_repair = per_repair / (1.0 + per_repair);
        let mut count = 0;
        loop {
            let needed = spares(in_repair * f64::from(self.hosts + count), Inputs::SPARES_QUANTILE);
            if needed <= count || count >= Inputs::MOST_SPARES {
                return count.min(Inputs::MOST_SPARES);
            }
            count = needed;
        }
    }
}

/// A published run.
#[derive(Clone, Debug)]
pub struct Published {
    /// The run, in words.
    pub name: &'static str,
    /// The inputs.
    pub inputs: Inputs,
    /// What was published.
    pub published: &'static str,
    /// The published goodput.
    pub goodput: f64,
}

/// The step of the run on 64 H200 in seconds. It was not published: 3,000 steps took 405 minutes with a failure every 60 minutes on average, and each
/// failure is assumed to take 2 minutes with a spare GPU.
const STEP_OF_64: f64 = (405.0 - 405.0 / 60.0 * 2.0) * 60.0 / 3000.0;

/// Returns the published runs. No input was fitted to a published result, except the step of the run on 64 GPUs.
pub fn published() -> Vec<Published> {
    // The published times of a restart contain the replacement of a host, so hosts stay. Fewer hosts with more GPUs have the same failures.
    let all = |rate: f64| vec![cause("all causes", rate, Scope::Process)];
    let of_100k = || Inputs::disk(125, 800, all(BROAD_PER_1000_GPU_DAYS), 600.0, 30.0);
    let of_64 = || {
        // A failure in 45 to 75 minutes on 64 GPUs.
        let inputs = Inputs::disk(8, 8, all(24.0 / 64.0 * 1000.0), 22.5 * 60.0, 40.0);
        let saves = Saves { interval: 100.0 * STEP_OF_64, ..inputs.saves };
        Inputs { step: STEP_OF_64, saves, apart: Some([45.0 * 60.0, 75.0 * 60.0]), ..inputs }
    };
    let of_minutes = |minutes: f64| 3000.0 * STEP_OF_64 / 60.0 / minutes;
    vec![
        Published {
            name: "Llama 3 405B, 16,384 GPUs, checkpoints, restart in 10 minutes",
            inputs: Inputs::disk(2048, 8, LLAMA_3.to_vec(), 600.0, 14.0),
            published: "more than 90 %",
            goodput: 0.9,
        },
        Published {
            name: "100,000 GPUs, synchronous, restart in 10 minutes",
            inputs: of_100k(),
            published: "44 %",
            goodput: 0.44,
        },
        Published {
            name: "100,000 GPUs, FT-HSDP: stall of 3 minutes, no work lost",
            inputs: of_100k().with_memory(0.0, 180.0),
            published: "80 %",
            goodput: 0.8,
        },
        Published {
            name: "64 H200, a failure per hour, checkpoints, restart in 22.5 minutes",
            inputs: of_64(),
            published: "818 min for 3,000 steps",
            goodput: of_minutes(818.0),
        },
        Published {
            name: "64 H200, a failure per hour, a spare GPU in 2 minutes",
            inputs: of_64().with_memory(0.0, 120.0),
            published: "405 min for 3,000 steps",
            goodput: of_minutes(405.0),
        },
    ]
}
