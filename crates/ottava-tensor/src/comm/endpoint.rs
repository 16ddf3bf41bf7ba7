//! The state that all groups of a rank share.

use super::history::History;
use super::limits::Limits;
use super::link::{Link, Reporter};
use super::traffic::Traffic;
use super::watch::{self, GRACE, Orders, Watch};
use crate::cuda::CudaDevice;
use crate::error::{Error, Result};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// This rank's connection to its job, which all its groups share. Dropping the last group leaves the job.
pub(super) struct Endpoint {
    /// The watch, which ends the process when the job fails. Dropped before `link` leaves the job.
    watch: Mutex<Option<Watch>>,
    pub link: Box<dyn Link>,
    /// The index of this rank among all ranks of the job. `size` is the number of ranks.
    pub rank: usize,
    pub size: usize,
    /// Whether this is a dry run, in which other ranks do not exist.
    pub dry: bool,
    pub history: Arc<History>,
    traffic: Mutex<Traffic>,
    limits: Limits,
    /// The number of groups that this rank has numbered without other ranks.
    groups: AtomicU64,
}

/// Forwards stop requests to all ranks of a job, from any thread. A no-op after this rank has left the job.
#[derive(Clone)]
pub struct Stopper(Arc<dyn Reporter>);

impl Stopper {
    /// Requests all ranks to stop. Each rank is notified through
    /// [`process::Supervisor::request_stop`](super::process::Supervisor::request_stop).
    pub fn request(&self) {
        self.0.stop();
    }
}

impl Endpoint {
    pub fn new(rank: usize, size: usize, link: Box<dyn Link>, limits: Limits) -> Endpoint {
        Endpoint {
            watch: Mutex::default(),
            link,
            rank,
            size,
            dry: false,
            history: Arc::default(),
            traffic: Mutex::default(),
            limits,
            groups: AtomicU64::default(),
        }
    }

    /// Returns a number for a new group, if no other rank exists.
    pub fn number_group(&self) -> u64 {
        self.groups.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub fn traffic(&self) -> MutexGuard<'_, Traffic> {
        self.traffic.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn watched(&self) -> MutexGuard<'_, Option<Watch>> {
        self.watch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn stopper(&self) -> Stopper {
        Stopper(self.link.reporter())
    }

    /// Starts the watch of [`Group::watch`](super::Group::watch).
    pub fn watch(&self, exit_code: u8, notify: impl Fn(Error) + Send + 'static) -> Result<()> {
        let orders = Orders {
            rank: self.rank,
            limit: self.limits.collective,
            grace: GRACE,
            notify: Box::new(notify),
            end: Box::new(move |error| watch::end_process(&error, exit_code)),
        };
        let watch = Watch::start(&*self.link, self.history.clone(), orders);
        *self.watched() =
            Some(watch.map_err(|source| Error::Io { path: "a thread for faults of ranks".into(), source })?);
        Ok(())
    }

    /// Also watches `device`. Starts the watch if it has not been started.
    pub fn watch_gpu(&self, device: &Arc<CudaDevice>, exit_code: u8) -> Result<()> {
        if self.watched().is_none() {
            self.watch(exit_code, |_| {})?;
        }
        self.watched().iter().for_each(|watch| watch.add_gpu(device.clone()));
        Ok(())
    }

    /// Ends the watch, because no work waits for other ranks any more.
    pub fn disarm(&self) {
        self.watched().iter().for_each(Watch::disarm);
    }
}
