//! `ottava monitor`, and the same page during `ottava train`.

use crate::output::stop_on_signals;
use clap::Args;
use ottava_common::{Error, Result, interrupt};
use ottava_serve::monitor;
use ottava_train::monitor::Monitor;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::thread::JoinHandle;

/// The default port of the page.
pub const PORT: u16 = 8090;

/// Show runs on a web page, while they train and afterwards.
#[derive(Args)]
#[command(
    after_help = "The page shows losses, gradient norm, learning rate, tokens/s, model FLOP utilisation, memory, what FP8 casts lost by layer and
step, alarms, the sentinel and the ranks of all runs side by side. It reads the files of the runs alone and changes none, so it may
run on any machine that sees their folders. It loads nothing from the network.

Examples:
  ottava monitor runs/quickstart
  ottava monitor runs
  ottava monitor runs/fp8 runs/bf16 --port 9000"
)]
pub struct MonitorCommand {
    /// Folders of runs (`output_dir` of their configurations), or folders that contain folders of runs. Runs that begin later are shown too.
    #[arg(required = true)]
    runs: Vec<PathBuf>,
    /// The address to listen on. An address other than the default may let other machines read the runs.
    #[arg(long, default_value = "127.0.0.1")]
    host: IpAddr,
    /// The port to listen on; 0 takes a free port.
    #[arg(long, default_value_t = PORT)]
    port: u16,
}

impl MonitorCommand {
    pub fn run(self) -> Result<()> {
        for folder in self.runs.iter().filter(|folder| !folder.exists()) {
            tracing::warn!(
                "{}: there is no such folder yet; the page shows a run there once it begins. Relative paths start at the folder that the command runs in",
                folder.display()
            );
        }
        let runs = Monitor::new(self.runs)?;
        if !self.host.is_loopback() {
            tracing::warn!("{} can be reached from other machines, which may read the runs", self.host);
        }
        stop_on_signals("stopping")?;
        let stops = || interrupt::flag().load(Ordering::Relaxed);
        monitor(runs, SocketAddr::new(self.host, self.port), stops, announce)
    }
}

/// Prints the address of the page.
fn announce(address: SocketAddr) {
    note!("runs are shown at http://{address}");
    if address.ip().is_loopback() {
        let port = address.port();
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let host = if name.trim().is_empty() { "HOST" } else { name.trim() };
        note!("from another machine: ssh -N -L {port}:{address} {host}, and open http://localhost:{port} there");
    }
}

/// A page that is shown until this value is dropped.
pub struct Page {
    folder: PathBuf,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Page {
    /// Shows the run in `folder` on `port` of this machine, in a thread.
    ///
    /// # Errors
    /// [`Error::Config`] when the port cannot be used.
    pub fn show(folder: &Path, port: u16) -> Result<Page> {
        let runs = Monitor::new(vec![folder.to_path_buf()])?;
        let stop = Arc::new(AtomicBool::new(false));
        let (stopping, (told, ready)) = (stop.clone(), channel());
        let thread = std::thread::spawn(move || {
            let address = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port);
            let is_ready = told.clone();
            let shown = monitor(
                runs,
                address,
                || stopping.load(Ordering::Relaxed),
                |address| {
                    announce(address);
                    let _ = is_ready.send(Ok(()));
                },
            );
            if let Err(error) = shown {
                let _ = told.send(Err(error));
            }
        });
        let started = ready.recv().expect("the thread tells how it started");
        started
            .map_err(|error| Error::Config(format!("--monitor: {error}; name another port, or 0 for a free one")))?;
        Ok(Page { folder: folder.to_path_buf(), stop, thread: Some(thread) })
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
            note!("the page ends with the run; `ottava monitor {}` shows it again", self.folder.display());
        }
    }
}
