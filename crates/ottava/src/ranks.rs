//! The ranks of a job: processes that a launcher started, or that this one starts.

use ottava_lm::checkpoint::fs::{RealFs, create_dirs, refuse_link};
use ottava_lm::config::RunConfig;
use ottava_lm::hash::{hex, sha256};
use ottava_lm::launch::{OWN, OWN_ADDRESS, OWN_RANK, OWN_SIZE, Place};
use ottava_lm::{Error, Result};
use ottava_tensor::comm::Comm;
use ottava_tensor::comm::process::{self, Limits, Rendezvous};
use std::fs::File;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A text that all ranks of a job share, so that no stranger joins it.
const SECRET: &str = "OTTAVA_SECRET";

/// Values of settings from this length on are compared by their hash.
const LONG: usize = 256;

/// How long processes may take to end after this one is done.
const GRACE: Duration = Duration::from_secs(10);

/// The other ranks, where this process has started them. Dropping it ends them.
#[derive(Default)]
pub struct Processes(Vec<(usize, Child)>);

/// The communicator of this process: of its launcher's job, of `ranks` processes that it starts, or of itself alone.
pub fn join(ranks: usize, config: &RunConfig) -> Result<(Comm, Processes)> {
    let place = Place::of(|name| std::env::var(name).ok())?;
    match place {
        Some(place) => {
            if ranks > 1 && place.launcher != OWN {
                return Err(Error::Config(format!(
                    "{} started this process as rank {} of {}; leave --ranks out",
                    place.launcher, place.rank, place.size
                )));
            }
            tracing::info!("rank {} of {}, started by {}", place.rank, place.size, place.launcher);
            let secret = std::env::var(SECRET).unwrap_or_default();
            let comm = process::join(&rendezvous(place.rank, place.size, place.address, secret, config))?;
            Ok((comm, Processes::default()))
        }
        None if ranks > 1 => {
            let listener = TcpListener::bind("127.0.0.1:0").map_err(Error::io("127.0.0.1"))?;
            let address = listener.local_addr().map_err(Error::io("127.0.0.1"))?.to_string();
            let secret = hex(&process::random_bytes().map_err(Error::io("/dev/urandom"))?);
            let processes = Processes::start(ranks, &address, &secret, config)?;
            let comm = process::lead(&listener, &rendezvous(0, ranks, address, secret, config))?;
            Ok((comm, processes))
        }
        None => Ok((Comm::solo(), Processes::default())),
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
    /// Starts ranks 1 to `ranks - 1` with this process's command line; their output goes to `rank-N.log` in the run's folder.
    fn start(ranks: usize, address: &str, secret: &str, config: &RunConfig) -> Result<Processes> {
        let program = std::env::current_exe().map_err(Error::io("the path of this program"))?;
        create_dirs(&RealFs, &config.output_dir)?;
        let mut processes = Processes::default();
        for rank in 1..ranks {
            let path = config.output_dir.join(format!("rank-{rank}.log"));
            refuse_link(&path).map_err(Error::io(&path))?;
            let log = File::options().create(true).append(true).open(&path).map_err(Error::io(&path))?;
            let errors = log.try_clone().map_err(Error::io(&path))?;
            let child = Command::new(&program)
                .args(std::env::args_os().skip(1))
                .env(OWN_RANK, rank.to_string())
                .env(OWN_SIZE, ranks.to_string())
                .env(OWN_ADDRESS, address)
                .env(SECRET, secret)
                .stdin(Stdio::null())
                .stdout(log)
                .stderr(errors)
                .spawn()
                .map_err(Error::io(&program))?;
            processes.0.push((rank, child));
        }
        Ok(processes)
    }

    /// Waits until all have ended. Errors when one failed.
    pub fn wait(mut self) -> Result<()> {
        for (rank, child) in &mut self.0 {
            let status = child.wait().map_err(Error::io(format!("rank {rank}")))?;
            if !status.success() {
                return Err(Error::Config(format!("rank {rank} ended with {status}; its log is rank-{rank}.log")));
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
