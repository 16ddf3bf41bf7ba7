//! The keeper of a host, and the ranks that it starts.

use super::build::identity_of_program;
use super::own::SECRET;
use super::processes::{Output, Process, command};
use ottava_checkpoint::{Verify, latest_complete};
use ottava_common::hash::{hex, sha256};
use ottava_common::launch::{OWN, Place};
use ottava_common::{Error, Result, input, interrupt};
use ottava_elastic::process::{KeeperOptions, Launch, Resume, Times, WorkerLink, Workers, WorkersEnd, run};
use ottava_elastic::{Keeper, Policy, Straggler};
use ottava_settings::{RunConfig, Stragglers};
use ottava_tensor::comm::process::random_bytes;
use ottava_train::report::MAX_METRICS_BYTES;
use ottava_train::trainer::Start;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs::canonicalize;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf, absolute};
use std::process::ExitStatus;
use std::time::{Duration, Instant};

/// The environment variable that makes a process a worker of a keeper: a [`Worker`] as JSON.
const WORKER: &str = "OTTAVA_WORKER";

/// The exit code of a rank whose GPU has failed.
const DEVICE: i32 = 8;

/// The time limit for the other ranks of a host to end after one has failed by itself, for example while they write their last messages.
const GRACE: Duration = Duration::from_secs(10);

/// The time after which ranks that have lost another rank are killed. Until then, the rank that failed by itself, here or on another host, is known.
const NEWS: Duration = Duration::from_secs(1);

/// What a keeper tells a process that it starts as a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Worker {
    /// The number of the rank on its host.
    pub local_rank: usize,
    epoch: u64,
    socket: PathBuf,
    snapshots: PathBuf,
    resume: Resume,
}

impl Worker {
    /// Returns the worker that this process is; `None` if no keeper has started it.
    pub fn of_this_process() -> Result<Option<Worker>> {
        let Ok(text) = std::env::var(WORKER) else { return Ok(None) };
        let wrong = |_| Error::Config(format!("{WORKER} is set, and no keeper has set it; unset it"));
        serde_json::from_str(&text).map(Some).map_err(wrong)
    }

    /// Whether ranks of this job have run before.
    pub fn is_next(&self) -> bool {
        self.resume != Resume::Start
    }

    /// Returns where the run starts, if the command line says `start`.
    pub fn start(&self, start: Start) -> Start {
        match &self.resume {
            Resume::Start => start,
            Resume::Disk => Start::Auto,
            Resume::Memory(path) => Start::Memory(path.clone()),
        }
    }

    /// Connects to the keeper. Returns the connection, and the folder in which the ranks of this host write snapshots.
    pub fn connect(&self) -> Result<(WorkerLink, PathBuf)> {
        let Worker { local_rank, epoch, socket, snapshots, .. } = self;
        let link = WorkerLink::connect(socket, *epoch, *local_rank, interrupt::request).map_err(Error::io(socket))?;
        Ok((link, snapshots.clone()))
    }
}

/// Runs the keeper of this host, which starts `ranks` ranks. Returns the exit code of the job.
///
/// Errors if the command line contradicts `config.recovery`, or if this host cannot listen or has no memory folder.
pub fn keep(config: &RunConfig, start: &Start, ranks: usize) -> Result<u8> {
    let place = Place::from_variables(|name| std::env::var(name).ok())?;
    let place = place.filter(|place| place.launcher != OWN);
    let (host, hosts, address) = match place {
        Some(place) => (place.rank, place.size, place.address),
        None => (0, 1, "127.0.0.1:0".to_string()),
    };
    let recovery = &config.recovery;
    let places = hosts.checked_sub(recovery.spares as usize).filter(|places| *places > 0).ok_or_else(|| {
        Error::Config(format!(
            "the launcher has started {hosts} processes, and `recovery.spares` is {}; with `[recovery]`, start one process per host, and more hosts than spares",
            recovery.spares
        ))
    })?;
    if let Start::ResumeFrom(path) = start {
        return Err(Error::Config(format!(
            "--resume={} names a checkpoint, and a job with `recovery.snapshot_steps` continues from its newest snapshot or checkpoint; use --resume=auto, or set \
             `model.path` to the checkpoint in a new run",
            path.display()
        )));
    }
    let secret = match std::env::var(SECRET) {
        Ok(secret) => secret,
        Err(_) if hosts == 1 => hex(&random_bytes().map_err(Error::io("/dev/urandom"))?),
        Err(_) => {
            return Err(Error::Config(format!(
                "{SECRET} is not set; set it to the same random text on all hosts, since hosts send each other snapshots"
            )));
        }
    };
    let policy = Policy {
        sizes: sizes(config, places, ranks)?,
        hosts: hosts as u32,
        quorum: Policy::quorum_of_first_hub(hosts as u32),
        snapshots: true,
        straggler: match recovery.stragglers {
            Stragglers::Warn => Straggler::Warn,
            Stragglers::Swap => Straggler::Swap,
        },
        most_recoveries: recovery.max_recoveries,
    };
    let [silence, host_limit, start_limit] =
        [recovery.silence_timeout, recovery.host_timeout, recovery.start_timeout].map(Duration::from_secs);
    let resumes = *start != Start::New;
    let memory = memory_folder(config, host);
    let options = KeeperOptions {
        host: host as u32,
        policy,
        address,
        secret: secret.clone().into_bytes(),
        identity: identity(config, ranks)?,
        memory: memory.clone(),
        keeps_until: if resumes { last_step(&config.output_dir) } else { None },
        disk: Some(if resumes { newest_checkpoint(config)? } else { 0 }),
        times: Times { silence, host: host_limit, start: start_limit },
        notice: config.output_dir.join(".hub"),
        stop: interrupt::flag(),
    };
    let program = std::env::current_exe().map_err(Error::io("the path of this program"))?;
    let logs = config.output_dir.clone();
    let mut workers =
        HostWorkers { program, ranks, secret, logs, places: 1, first: 0, processes: Vec::new(), failed: None };
    run(&options, &mut workers).map_err(Error::io(memory))
}

/// Returns the numbers of hosts with which the job can run, the largest first, if `places` hosts train at its start.
///
/// Errors if `recovery.min_hosts` is more than `places`, or if none of the smaller numbers of hosts can divide the run.
fn sizes(config: &RunConfig, places: usize, ranks: usize) -> Result<Vec<u32>> {
    let least = match config.recovery.min_hosts {
        0 => places,
        least => least as usize,
    };
    if least > places {
        return Err(Error::Config(format!(
            "`recovery.min_hosts` is {least}, and {places} hosts train; set it to {places} or less, or start more hosts"
        )));
    }
    let refusal = |hosts: usize| config.clone().share(hosts * ranks).err();
    // A number of hosts that cannot divide the run from its start is an error of the ranks.
    let sizes: Vec<u32> = (least..=places)
        .rev()
        .filter(|&hosts| hosts == places || refusal(hosts).is_none())
        .map(|hosts| hosts as u32)
        .collect();
    match (least..places).rev().find_map(refusal) {
        Some(reason) if sizes.len() == 1 => Err(Error::Config(format!(
            "`recovery.min_hosts` is {least}, and no number of hosts from {least} to {} can divide the run: {reason}",
            places - 1
        ))),
        _ => Ok(sizes),
    }
}

/// Returns the folder of this host for the snapshots of the run. Runs into other folders have other folders.
fn memory_folder(config: &RunConfig, host: usize) -> PathBuf {
    let folder = &config.output_dir;
    let folder = canonicalize(folder).or_else(|_| absolute(folder)).unwrap_or_else(|_| folder.clone());
    let run = &sha256(folder.as_os_str().as_encoded_bytes())[..16];
    config.recovery.memory_dir.join(format!("ottava-{run}")).join(format!("host-{host}"))
}

/// Returns the last step in the metrics of the run in `folder`; `None` if there are none, for example because the folder was removed.
fn last_step(folder: &Path) -> Option<u64> {
    let metrics = input::read_text(&folder.join("metrics.jsonl"), MAX_METRICS_BYTES).ok()?;
    // A killed run may have left half a line.
    let step = |line: &str| serde_json::from_str::<Value>(line).ok()?["step"].as_u64();
    metrics.lines().rev().find_map(step)
}

fn newest_checkpoint(config: &RunConfig) -> Result<u64> {
    let latest = latest_complete(&config.output_dir.join("checkpoints"), Verify::Sizes)?;
    Ok(latest.complete.map_or(0, |(_, manifest)| manifest.step))
}

/// Returns what must be equal on all hosts: the program, its settings and the number of ranks of a host.
fn identity(config: &RunConfig, ranks: usize) -> Result<String> {
    let settings = format!("{:?}", config.settings());
    Ok(format!("{} {} {ranks} {}", env!("CARGO_PKG_VERSION"), identity_of_program()?, sha256(settings.as_bytes())))
}

/// The ranks of this host.
struct HostWorkers {
    program: PathBuf,
    /// The number of ranks of a host.
    ranks: usize,
    secret: String,
    /// The folder of the logs of ranks.
    logs: PathBuf,
    /// The number of places of the epoch.
    places: usize,
    /// The first rank of this host.
    first: usize,
    processes: Vec<Process>,
    /// The time at which the first process had failed.
    failed: Option<Instant>,
}

impl HostWorkers {
    fn start_rank(&self, launch: &Launch, local_rank: usize) -> Result<Process> {
        let rank = self.first + local_rank;
        let Launch { epoch, socket, snapshots, resume, .. } = launch.clone();
        let worker = Worker { local_rank, epoch, socket, snapshots, resume };
        let size = self.places * self.ranks;
        let mut command = command(&self.program, [rank, size], &launch.address, &self.secret);
        command.env(WORKER, serde_json::to_string(&worker).expect("plain data"));
        let output = if rank == 0 { Output::Inherited } else { Output::Log(&self.logs) };
        Process::start(command, rank, output)
    }

    fn statuses(&mut self) -> Vec<Option<ExitStatus>> {
        self.processes.iter_mut().map(|process| process.child.try_wait().ok().flatten()).collect()
    }

    /// Describes the end of the process `index`.
    fn describe(&self, index: usize, status: ExitStatus) -> String {
        format!("rank {} {}", self.first + index, self.processes[index].describe(Some(status)))
    }
}

impl Workers for HostWorkers {
    fn start(&mut self, launch: &Launch) -> Result<(), String> {
        self.stop();
        (self.places, self.first) = (launch.places as usize, launch.place as usize * self.ranks);
        for local_rank in 0..self.ranks {
            let process = self.start_rank(launch, local_rank).map_err(|error| error.to_string())?;
            self.processes.push(process);
        }
        Ok(())
    }

    fn stop(&mut self) {
        for process in &mut self.processes {
            let _ = process.child.kill();
        }
        for mut process in self.processes.drain(..) {
            let _ = process.child.wait();
        }
        self.failed = None;
    }

    fn poll(&mut self) -> Option<WorkersEnd> {
        let statuses = self.statuses();
        let ended: Vec<(usize, ExitStatus)> =
            statuses.iter().enumerate().filter_map(|(index, status)| Some((index, (*status)?))).collect();
        let lost = |status: &ExitStatus| status.signal().is_some() || status.code() == Some(DEVICE);
        if let Some((index, status)) = ended.iter().find(|(_, status)| lost(status)) {
            let words = self.describe(*index, *status);
            self.stop();
            return Some(WorkersEnd::Lost(words));
        }
        let (are_all, failure) =
            (ended.len() == self.processes.len(), ended.iter().find(|(_, status)| !status.success()));
        let Some((index, status)) = failure else {
            // The host has no processes before the start and after the end.
            let is_done = are_all && !self.processes.is_empty();
            return is_done.then(|| self.stop()).map(|()| WorkersEnd::Ended(0));
        };
        let since = self.failed.get_or_insert_with(Instant::now).elapsed();
        let code = |status: &ExitStatus| status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(Keeper::LOST);
        let own = ended.iter().map(|(_, status)| code(status)).find(|code| ![0, Keeper::LOST].contains(code));
        let end = match own {
            Some(code) if are_all || since > GRACE => WorkersEnd::Ended(code),
            None if since > NEWS || are_all && self.places == 1 => WorkersEnd::Lost(self.describe(*index, *status)),
            _ => return None,
        };
        self.stop();
        Some(end)
    }
}

impl Drop for HostWorkers {
    fn drop(&mut self) {
        self.stop();
    }
}
