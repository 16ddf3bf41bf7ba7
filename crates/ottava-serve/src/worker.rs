//! The handle of the engine's thread: permits for requests, and the events of requests in progress.

use crate::backend::Backend;
use crate::error::{ApiError, Result};
use crate::models::ServedModel;
use crate::schedule::{Command, Job, Outbox, Schedule, Shared, weight};
use ottava_engine::{AdapterId, EngineStats, Event, LoadAdapters};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

/// A handle of the engine's thread. The thread ends once all handles and all requests in progress are dropped.
#[derive(Clone)]
pub struct Worker {
    commands: Sender<Command>,
    /// The permits: one for each HTTP request that is computed or waits.
    permits: Arc<Semaphore>,
    limit: usize,
    next_id: Arc<AtomicU64>,
    shared: Arc<Shared>,
}

/// The completions of one HTTP request. Dropping this value cancels the completions that are not finished.
pub struct Running {
    events: mpsc::UnboundedReceiver<Result<(usize, Event)>>,
    backlog: Arc<AtomicUsize>,
    id: u64,
    worker: Worker,
}

impl Worker {
    /// Starts the thread with the backend that `load` returns, and waits until it is loaded. At most `limit` HTTP requests are computed or wait. Also
    /// returns the second value of `load`. The thread returns the reason why the engine has failed.
    pub fn start<B: Backend, T: Send + 'static>(
        limit: usize,
        load: impl FnOnce() -> ottava_common::Result<(B, T)> + Send + 'static,
    ) -> ottava_common::Result<(Worker, JoinHandle<ottava_common::Result<()>>, T)> {
        let (worker, receiver) = Worker::new(limit);
        let (loaded, result) = channel();
        let of_thread = worker.shared.clone();
        let run = move || match load() {
            Ok((backend, other)) => {
                let _ = loaded.send(Ok(other));
                let mut schedule = Schedule::new(backend, receiver, of_thread.clone());
                // A panic is handled like other failures: requests in progress end with an error, and the server ends.
                let error = match catch_unwind(AssertUnwindSafe(|| schedule.run())) {
                    Ok(Ok(())) => return Ok(()),
                    Ok(Err(error)) => error,
                    Err(panic) => {
                        let text = text_of(panic.as_ref());
                        ottava_common::Error::Model(format!("its thread has panicked: {text}"))
                    }
                };
                tracing::error!("the engine has failed: {error}");
                // Clients must not see the hosts and processes of other ranks.
                let told = match error.exit_code() {
                    ottava_common::Error::RANKS => "another rank has failed".to_string(),
                    _ => error.to_string(),
                };
                let _ = of_thread.failure.set(told);
                Err(error)
            }
            Err(error) => {
                let _ = loaded.send(Err(error));
                Ok(())
            }
        };
        let builder = std::thread::Builder::new().name("engine".into());
        let thread = builder.spawn(run).map_err(ottava_common::Error::io("the thread of the engine"))?;
        let ended = || ottava_common::Error::Model("the model could not be loaded: its thread has ended".into());
        let other = result.recv().map_err(|_| ended())??;
        Ok((worker, thread, other))
    }

    /// Makes a handle, and the channel of its commands for a thread that runs a [`Schedule`]. At most `limit` HTTP requests are computed or wait.
    pub fn new(limit: usize) -> (Worker, Receiver<Command>) {
        let (commands, receiver) = channel();
        let (permits, next_id, shared) = (Arc::new(Semaphore::new(limit)), Arc::default(), Arc::default());
        (Worker { commands, permits, limit, next_id, shared }, receiver)
    }

    /// Returns the state that the engine's thread publishes.
    pub fn shared(&self) -> Arc<Shared> {
        self.shared.clone()
    }

    /// Returns a permit for a request. Errors if the server is stopping or has too many requests.
    pub fn permit(&self) -> Result<OwnedSemaphorePermit> {
        if self.is_stopping() {
            return Err(ApiError::stopping());
        }
        self.permits.clone().try_acquire_owned().map_err(|_| ApiError::busy(self.limit))
    }

    /// Errors if [`Worker::permit`] would error.
    pub fn expect_room(&self) -> Result<()> {
        match self.permits.available_permits() {
            _ if self.is_stopping() => Err(ApiError::stopping()),
            0 => Err(ApiError::busy(self.limit)),
            _ => Ok(()),
        }
    }

    /// Starts the completions of `job`.
    pub fn run(&self, permit: OwnedSemaphorePermit, job: Job) -> Result<Running> {
        let (sender, events) = mpsc::unbounded_channel();
        let backlog: Arc<AtomicUsize> = Arc::default();
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let outbox = Outbox { sender, backlog: backlog.clone() };
        let start = Command::Start { id, job, outbox, permit };
        self.commands.send(start).map_err(|_| self.gone())?;
        Ok(Running { events, backlog, id, worker: self.clone() })
    }

    /// Loads adapters that are open. The engine computes nothing meanwhile. Errors if the engine has failed; the inner error says why the adapters cannot
    /// be loaded.
    pub async fn load_adapters(&self, load: LoadAdapters) -> Result<ottava_common::Result<AdapterId>> {
        let (reply, loaded) = oneshot::channel();
        self.commands.send(Command::LoadAdapters { load, reply }).map_err(|_| self.gone())?;
        loaded.await.map_err(|_| self.gone())
    }

    /// Frees the adapters of a model as soon as no request uses them.
    pub fn remove_adapters(&self, model: Arc<ServedModel>) {
        // A thread that has ended has freed them.
        let _ = self.commands.send(Command::RemoveAdapters { model });
    }

    /// Returns the state of the engine after its last step.
    pub fn stats(&self) -> EngineStats {
        self.shared.stats()
    }

    /// Returns the number of HTTP requests that are computed or wait.
    pub fn in_flight(&self) -> usize {
        self.limit - self.permits.available_permits()
    }

    /// Refuses new requests from now on.
    pub fn stop(&self) {
        self.shared.stopping.store(true, Ordering::Relaxed);
    }

    /// Whether the server is stopping, or the engine has failed.
    pub fn is_stopping(&self) -> bool {
        self.shared.stopping.load(Ordering::Relaxed) || self.shared.failure.get().is_some()
    }

    /// Returns the reason why the engine has ended, if it failed.
    pub fn failure(&self) -> Option<String> {
        self.shared.failure.get().cloned()
    }

    fn gone(&self) -> ApiError {
        let reason = self.shared.failure.get().map_or("its thread has ended", String::as_str);
        ApiError::internal(format!("the engine has failed: {reason}"))
    }
}

impl Running {
    /// Waits for the next event of any of the completions. Errors if the engine has failed.
    pub async fn next(&mut self) -> Result<(usize, Event)> {
        let (index, event) = self.events.recv().await.ok_or_else(|| self.worker.gone())??;
        let weight = weight(&event);
        let before = self.backlog.fetch_sub(weight, Ordering::Relaxed);
        if Outbox::is_low(before - weight) && !Outbox::is_low(before) {
            let _ = self.worker.commands.send(Command::Resume { id: self.id });
        }
        Ok((index, event))
    }

    /// Ends a completion early. Its further events are ignored.
    pub fn cancel(&self, index: usize) {
        let _ = self.worker.commands.send(Command::Cancel { id: self.id, index });
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // If the request is finished, the thread does not know it and ignores the command.
        let _ = self.worker.commands.send(Command::End { id: self.id });
    }
}

/// Returns the message of a panic.
fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no reason given")
}
