//! The ranks of a job: processes that a launcher or this process has started.

mod build;
mod keeper;
mod own;
mod processes;

use crate::device::{self, Local};
use crate::output::log_to;
use build::identity_of_program;
use clap::Args;
pub use keeper::{Worker, keep};
use ottava_common::hash::{hex, sha256};
use ottava_common::launch::{OWN, OWN_PARENT, Place, tasks_of_batch_script};
use ottava_common::{Error, Result, interrupt};
use ottava_settings::{DeviceChoice, RunConfig};
use ottava_tensor::comm::Group;
use ottava_tensor::comm::process::{self, Rendezvous, Supervisor};
use own::{SECRET, open_log};
pub use processes::Processes;
use std::net::TcpListener;
use std::os::unix::process::parent_id;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The length in bytes from which values of settings are compared by their hash.
const LONG: usize = 256;

/// The number of processes to start.
#[derive(Args)]
pub struct RankArgs {
    /// Run on N GPUs of this machine, one process per GPU. Training divides the batch, or the model as `[parallel]` says; inference divides the model.
    #[arg(long, value_name = "N", conflicts_with = "ranks", value_parser = clap::value_parser!(u16).range(1..=4096))]
    gpus: Option<u16>,
    /// Run N CPU processes (ranks) on this machine. Only for tests, since one process is faster.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    ranks: Option<u16>,
}

impl RankArgs {
    /// Returns the number of ranks, and the device of each rank. Errors if `--gpus` or `--ranks` contradicts `choice`, or if this machine has too few
    /// GPUs.
    pub fn choose(&self, choice: DeviceChoice) -> Result<(usize, DeviceChoice)> {
        match (self.gpus, self.ranks) {
            (Some(gpus), _) => {
                if choice == DeviceChoice::Cpu {
                    return Err(Error::Config(format!(
                        "--gpus {gpus} uses GPUs, and the device is the CPU; leave one of them out, or use --ranks {gpus}"
                    )));
                }
                let visible = device::count_gpus()?;
                if usize::from(gpus) > visible {
                    return Err(Error::Config(format!(
                        "--gpus {gpus}: {visible} GPUs are visible on this machine; start fewer, or, for the CPU, use --device cpu and no --gpus"
                    )));
                }
                Ok((usize::from(gpus), DeviceChoice::Cuda))
            }
            (None, Some(ranks)) if ranks > 1 && device::is_gpu(choice) => Err(Error::Config(format!(
                "--ranks {ranks} starts ranks on the CPU, and the device is a GPU; use --gpus {ranks}, or add --device cpu"
            ))),
            (None, ranks) => Ok((ranks.map_or(1, usize::from), choice)),
        }
    }
}

/// The role of this process among the ranks of its job.
pub enum Role {
    /// The only rank.
    Alone,
    /// A rank that a launcher or rank 0 has started.
    Launched(Place),
    /// Rank 0, which starts the other ranks. The value is the number of all ranks.
    Launcher(usize),
}

/// This process among the ranks of its job.
pub struct Job {
    /// The communicator of all ranks.
    pub comm: Group,
    /// The processes of the other ranks, if this process has started them.
    pub processes: Processes,
    /// The rank of this process on its machine.
    pub local: Local,
}

impl Role {
    /// Returns the role from the variables of a launcher, or from the number of `ranks` that the command line asks for.
    pub fn find(ranks: usize) -> Result<Role> {
        let variable = |name: &str| std::env::var(name).ok();
        match Place::from_variables(variable)? {
            Some(place) if ranks > 1 && place.launcher != OWN => Err(Error::Config(format!(
                "{} started this process as rank {} of {}; leave --ranks and --gpus out",
                place.launcher, place.rank, place.size
            ))),
            Some(place) => Ok(Role::Launched(place)),
            None if ranks > 1 => Ok(Role::Launcher(ranks)),
            None => {
                if let Some(tasks) = tasks_of_batch_script(variable) {
                    tracing::warn!(
                        "Slurm has allocated {tasks} tasks, and this process is none of them: it runs alone; start it with srun to run {tasks} ranks"
                    );
                }
                Ok(Role::Alone)
            }
        }
    }

    /// Whether this process is rank 0.
    pub fn leads(&self) -> bool {
        !matches!(self, Role::Launched(place) if place.rank > 0)
    }

    /// Joins the job. All ranks must have equal settings. Output of ranks other than 0 goes to `rank-N.log` in the folder `logs`. Without `logs`, all
    /// ranks print their messages and only rank 0 prints results.
    pub fn join(self, config: &RunConfig, logs: Option<&Path>) -> Result<Job> {
        match self {
            Role::Alone => Ok(Job { comm: Group::solo(), processes: Processes::default(), local: Local::ALONE }),
            Role::Launched(place) => join_launched(place, config, logs),
            Role::Launcher(ranks) => {
                let listener = TcpListener::bind("127.0.0.1:0").map_err(Error::io("127.0.0.1"))?;
                let address = listener.local_addr().map_err(Error::io("127.0.0.1"))?.to_string();
                let secret = hex(&process::random_bytes().map_err(Error::io("/dev/urandom"))?);
                let processes = Processes::start(ranks, &address, &secret, logs)?;
                let supervisor = processes.started();
                let rendezvous = rendezvous(0, ranks, address, secret, config, supervisor)?;
                let led = process::lead(&listener, &rendezvous);
                // A rank that a signal ended before it joined could not request the stop itself.
                if led.is_err() && processes.were_asked_to_end() {
                    interrupt::request();
                }
                let comm = supervised(led)?;
                processes.joined();
                Ok(Job { comm, processes, local: Local::ALONE })
            }
        }
    }
}

fn join_launched(place: Place, config: &RunConfig, logs: Option<&Path>) -> Result<Job> {
    let Place { launcher, rank, size, local_rank, address } = place;
    let is_own = launcher == OWN;
    // Ranks of a keeper are numbered over several hosts.
    let local_rank = Worker::of_this_process()?.map_or(local_rank, |worker| worker.local_rank);
    if is_own {
        process::wake_with_parent();
    }
    let secret = std::env::var(SECRET).unwrap_or_default();
    let local_only = ["127.", "localhost:", "[::1]"].iter().any(|host| address.starts_with(host));
    if secret.is_empty() && rank == 0 && !local_only {
        tracing::warn!(
            "{SECRET} is not set, so any process that reaches {address} can join this job; set it to the same random text on all ranks"
        );
    }
    let parent = std::env::var(OWN_PARENT).ok().and_then(|pid| pid.parse().ok()).filter(|_| is_own);
    let supervisor = Arc::new(Child { parent });
    let comm = supervised(process::join(&rendezvous(rank, size, address, secret, config, supervisor)?))?;
    // The log is opened after the rank has joined, because a rank of a second job in the same folder does not join.
    if let Some(logs) = logs.filter(|_| rank > 0) {
        log_to(rank, if is_own { None } else { Some(open_log(logs, rank)?) });
    }
    tracing::info!("rank {rank} of {size}, started by {launcher}");
    Ok(Job { comm, processes: Processes::default(), local: Local { rank: local_rank, may_see_one: !is_own } })
}

/// Returns the group of all ranks, or the reason why the ranks have not joined. If the job fails and the main thread does not notice, the group ends
/// this process.
fn supervised(joined: ottava_tensor::Result<Group>) -> Result<Group> {
    match joined {
        Ok(comm) => {
            if comm.size() > 1 {
                // `interrupt::lose` ends work that can be interrupted.
                comm.watch(Error::RANKS, interrupt::lose)?;
            }
            Ok(comm)
        }
        Err(error) if interrupt::flag().load(Ordering::Relaxed) => Err(Error::Cancelled(error.to_string())),
        Err(error) => Err(error.into()),
    }
}

fn rendezvous(
    rank: usize,
    size: usize,
    address: String,
    secret: String,
    config: &RunConfig,
    supervisor: Arc<dyn Supervisor>,
) -> Result<Rendezvous> {
    // All ranks of a job must run the same program with the same configuration.
    let mut identity = vec![
        ("version".to_string(), env!("CARGO_PKG_VERSION").to_string()),
        ("the build ID of the program".to_string(), identity_of_program()?),
    ];
    identity.extend(config.settings().into_iter().map(|(key, value)| match value.len() {
        0..LONG => (key, value),
        _ => (key, sha256(value.as_bytes())),
    }));
    let limits = config.parallel.communication.limits();
    Ok(Rendezvous { rank, size, address, secret: secret.into_bytes(), identity, limits, supervisor })
}

/// A rank that another process has started.
struct Child {
    /// The process ID of rank 0 or of the keeper, if this program has started this process.
    parent: Option<u32>,
}

impl Supervisor for Child {
    fn check(&self) -> Result<(), String> {
        match self.parent {
            Some(parent) if parent != parent_id() => {
                Err(format!("the process {parent}, which started this process, has ended"))
            }
            _ => Ok(()),
        }
    }

    fn stop_flag(&self) -> Option<&AtomicBool> {
        Some(interrupt::flag())
    }
}
