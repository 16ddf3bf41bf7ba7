//! The ranks of a job: processes that a launcher started, or that this one starts.

use crate::device::{self, Local};
use clap::Args;
use ottava_lm::checkpoint::fs::{RealFs, create_dirs, refuse_link};
use ottava_lm::config::{DeviceChoice, RunConfig};
use ottava_lm::hash::{hex, sha256};
use ottava_lm::launch::{OWN, OWN_ADDRESS, OWN_RANK, OWN_SIZE, Place};
use ottava_lm::{Error, Result};
use ottava_tensor::comm::Comm;
use ottava_tensor::comm::process::{self, Limits, Rendezvous};
use ottava_tensor::cuda::CudaDevice;
use std::fs::File;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A text that all ranks of a job share, so that no stranger joins it.
const SECRET: &str = "OTTAVA_SECRET";

/// Values of settings from this length on are compared by their hash.
const LONG: usize = 256;

/// How long processes may take to end after this one is done.
const GRACE: Duration = Duration::from_secs(10);

/// How many processes to start.
#[derive(Args)]
pub struct RankArgs {
    /// Train on N GPUs of this machine, each with a process of its own.
    #[arg(long, value_name = "N", conflicts_with = "ranks", value_parser = clap::value_parser!(u16).range(1..=4096))]
    gpus: Option<u16>,
    /// Train on N ranks of this machine on the CPU, each a process.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=4096))]
    ranks: Option<u16>,
}

impl RankArgs {
    /// The number of ranks, and the device of each. Errors where they do not fit `choice` or this machine.
    pub fn choose(&self, choice: DeviceChoice) -> Result<(usize, DeviceChoice)> {
        match (self.gpus, self.ranks) {
            (Some(gpus), _) => {
                if choice == DeviceChoice::Cpu {
                    return Err(Error::Config(format!(
                        "--gpus {gpus} trains on GPUs, and the device is the CPU; leave one of them out, or use --ranks {gpus}"
                    )));
                }
                let visible = CudaDevice::count()?;
                if usize::from(gpus) > visible {
                    return Err(Error::Config(format!("--gpus {gpus}: {visible} GPUs are visible on this machine")));
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

/// This process among the ranks of its job.
pub struct Job {
    /// Its communicator.
    pub comm: Comm,
    /// The other ranks, where it has started them.
    pub processes: Processes,
    /// Its place on its machine.
    pub local: Local,
}

/// The other ranks, where this process has started them. Dropping it ends them.
#[derive(Default)]
pub struct Processes(Vec<(String, Child)>);

/// Joins the job of this process: that of its launcher, of `ranks` processes that it starts, or of itself alone. The output of processes
/// that it starts goes to `rank-N.log` in the folder `logs`; without one, only their messages are shown.
pub fn join(ranks: usize, config: &RunConfig, logs: Option<&Path>) -> Result<Job> {
    let place = Place::of(|name| std::env::var(name).ok())?;
    match place {
        Some(place) => {
            if ranks > 1 && place.launcher != OWN {
                return Err(Error::Config(format!(
                    "{} started this process as rank {} of {}; leave --ranks and --gpus out",
                    place.launcher, place.rank, place.size
                )));
            }
            tracing::info!("rank {} of {}, started by {}", place.rank, place.size, place.launcher);
            if place.launcher == OWN {
                process::wake_with_parent();
            }
            let secret = std::env::var(SECRET).unwrap_or_default();
            let comm = process::join(&rendezvous(place.rank, place.size, place.address, secret, config))?;
            let local = Local { rank: place.local_rank, may_see_one: place.launcher != OWN };
            Ok(Job { comm, processes: Processes::default(), local })
        }
        None if ranks > 1 => {
            let listener = TcpListener::bind("127.0.0.1:0").map_err(Error::io("127.0.0.1"))?;
            let address = listener.local_addr().map_err(Error::io("127.0.0.1"))?.to_string();
            let secret = hex(&process::random_bytes().map_err(Error::io("/dev/urandom"))?);
            let processes = Processes::start(ranks, &address, &secret, logs)?;
            let comm = process::lead(&listener, &rendezvous(0, ranks, address, secret, config))?;
            Ok(Job { comm, processes, local: Local::ALONE })
        }
        None => Ok(Job { comm: Comm::solo(), processes: Processes::default(), local: Local::ALONE }),
    }
}

fn rendezvous(rank: usize, size: usize, address: String, secret: String, config: &RunConfig) -> Rendezvous {
    // A job's ranks run one program with one configuration.
    let mut identity = vec![("version".to_string(), env!("CARGO_PKG_VERSION").to_string())];
    identity.extend(config.settings().into_iter().map(|(key, value)| match value.len() {
        0..LONG => (key, value),
        _ => (key, sha256(value.as_bytes())),
    }));
    Rendezvous { rank, size, address, secret: secret.into_bytes(), identity, limits: Limits::default() }
}

impl Processes {
    /// Starts ranks 1 to `ranks - 1` with this process's command line.
    fn start(ranks: usize, address: &str, secret: &str, logs: Option<&Path>) -> Result<Processes> {
        let program = std::env::current_exe().map_err(Error::io("the path of this program"))?;
        if let Some(logs) = logs {
            create_dirs(&RealFs, logs)?;
        }
        let mut processes = Processes::default();
        for rank in 1..ranks {
            let mut name = format!("rank {rank}");
            let (output, errors) = match logs {
                Some(logs) => {
                    let path = logs.join(format!("rank-{rank}.log"));
                    refuse_link(&path).map_err(Error::io(&path))?;
                    let log = File::options().create(true).append(true).open(&path).map_err(Error::io(&path))?;
                    name += &format!(", whose log is {},", path.display());
                    (log.try_clone().map_err(Error::io(&path))?.into(), log.into())
                }
                None => (Stdio::null(), Stdio::inherit()),
            };
            let child = Command::new(&program)
                .args(std::env::args_os().skip(1))
                .env(OWN_RANK, rank.to_string())
                .env(OWN_SIZE, ranks.to_string())
                .env(OWN_ADDRESS, address)
                .env(SECRET, secret)
                .stdin(Stdio::null())
                .stdout(output)
                .stderr(errors)
                .spawn()
                .map_err(Error::io(&program))?;
            processes.0.push((name, child));
        }
        Ok(processes)
    }

    /// Waits until all have ended. Errors when one failed.
    pub fn wait(mut self) -> Result<()> {
        for (name, child) in &mut self.0 {
            let status = child.wait().map_err(Error::io(&name))?;
            if !status.success() {
                return Err(Error::Config(format!("{name} ended with {status}")));
            }
        }
        Ok(())
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        let limit = Instant::now() + GRACE;
        for (_, child) in &mut self.0 {
            while matches!(child.try_wait(), Ok(None)) {
                if Instant::now() > limit {
                    let _ = child.kill();
                    let _ = child.wait();
                    break;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}
