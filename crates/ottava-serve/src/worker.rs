//! The thread of the engine: takes requests, runs steps, and hands out what they give.

use crate::error::{ApiError, Result};
use ottava_lm::engine::{Engine, EngineStats, Event, Request, RequestId};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

/// What computes completions: the engine, or a stand-in for tests.
pub trait Backend {
    /// As [`Engine::add`].
    fn add(&mut self, request: Request) -> ottava_lm::Result<RequestId>;
    /// As [`Engine::cancel`].
    fn cancel(&mut self, id: RequestId);
    /// As [`Engine::step`].
    fn step(&mut self) -> ottava_lm::Result<Vec<Event>>;
    /// As [`Engine::is_idle`].
    fn is_idle(&self) -> bool;
    /// As [`Engine::stats`].
    fn stats(&self) -> EngineStats;
}

impl Backend for Engine {
    fn add(&mut self, request: Request) -> ottava_lm::Result<RequestId> {
        Engine::add(self, request)
    }
    fn cancel(&mut self, id: RequestId) {
        Engine::cancel(self, id)
    }
    fn step(&mut self) -> ottava_lm::Result<Vec<Event>> {
        Engine::step(self)
    }
    fn is_idle(&self) -> bool {
        Engine::is_idle(self)
    }
    fn stats(&self) -> EngineStats {
        Engine::stats(self)
    }
}

/// Events of the completions of one HTTP request, by their index in it.
type Events = mpsc::UnboundedSender<(usize, Event)>;

enum Command {
    Add { request: Box<Request>, index: usize, events: Events, reply: oneshot::Sender<ottava_lm::Result<RequestId>> },
    Cancel(RequestId),
}

/// A handle to the thread of the engine. The thread ends once all handles and completions are gone.
#[derive(Clone)]
pub struct Worker {
    commands: Sender<Command>,
    /// A permit for each completion that is in work or waits.
    permits: Arc<Semaphore>,
    limit: usize,
    shared: Arc<Shared>,
}

/// What the thread of the engine says about itself.
#[derive(Default)]
struct Shared {
    stats: Mutex<EngineStats>,
    /// Why the engine has ended, if it failed.
    failure: OnceLock<String>,
    stopping: AtomicBool,
}

/// The completions of one HTTP request. Dropping it cancels those that go on.
pub struct Running {
    events: mpsc::UnboundedReceiver<(usize, Event)>,
    ids: Vec<RequestId>,
    worker: Worker,
    _permits: OwnedSemaphorePermit,
}

impl Worker {
    /// Starts the thread with the backend that `load` gives, and waits for it. At most `limit` completions are in work or wait. Returns what
    /// else `load` gives, too.
    pub fn start<B: Backend, T: Send + 'static>(
        limit: usize,
        load: impl FnOnce() -> ottava_lm::Result<(B, T)> + Send + 'static,
    ) -> ottava_lm::Result<(Worker, JoinHandle<()>, T)> {
        let (commands, receiver) = channel();
        let (loaded, result) = channel();
        let shared = Arc::new(Shared::default());
        let of_thread = shared.clone();
        let run = move || match load() {
            Ok((backend, other)) => {
                let _ = loaded.send(Ok(other));
                run(backend, receiver, &of_thread);
            }
            Err(error) => {
                let _ = loaded.send(Err(error));
            }
        };
        let builder = std::thread::Builder::new().name("engine".into());
        let thread = builder.spawn(run).map_err(ottava_lm::Error::io("the thread of the engine"))?;
        let ended = || ottava_lm::Error::Model("the model could not be loaded: its thread has ended".into());
        let other = result.recv().map_err(|_| ended())??;
        Ok((Worker { commands, permits: Arc::new(Semaphore::new(limit)), limit, shared }, thread, other))
    }

    /// Starts the completions of `requests`, all or none.
    ///
    /// Errors when the server is stopping or has too many completions already, and for requests that the engine refuses.
    pub async fn run(&self, requests: Vec<Request>) -> Result<Running> {
        if self.is_stopping() {
            return Err(ApiError::stopping());
        }
        let count = requests.len();
        let permits =
            self.permits.clone().try_acquire_many_owned(count as u32).map_err(|_| ApiError::busy(self.limit))?;
        let (sender, events) = mpsc::unbounded_channel();
        let mut running = Running { events, ids: Vec::with_capacity(count), worker: self.clone(), _permits: permits };
        for (index, request) in requests.into_iter().enumerate() {
            let (reply, replied) = oneshot::channel();
            let add = Command::Add { request: Box::new(request), index, events: sender.clone(), reply };
            self.commands.send(add).map_err(|_| self.gone())?;
            running.ids.push(replied.await.map_err(|_| self.gone())?.map_err(ApiError::of_request)?);
        }
        Ok(running)
    }

    /// The state of the engine after its last step.
    pub fn stats(&self) -> EngineStats {
        *self.shared.stats.lock().expect("no thread panics with it")
    }

    /// Completions that are in work or wait.
    pub fn in_flight(&self) -> usize {
        self.limit - self.permits.available_permits()
    }

    /// Takes no new requests from here on.
    pub fn stop(&self) {
        self.shared.stopping.store(true, Ordering::Relaxed);
    }

    pub fn is_stopping(&self) -> bool {
        self.shared.stopping.load(Ordering::Relaxed)
    }

    /// Why the engine has ended, if it failed.
    pub fn failure(&self) -> Option<String> {
        self.shared.failure.get().cloned()
    }

    fn gone(&self) -> ApiError {
        let reason = self.shared.failure.get().map_or("its thread has ended", String::as_str);
        ApiError::internal(format!("the engine has failed: {reason}"))
    }
}

impl Running {
    /// The next event of any of the completions. Errors when the engine has failed.
    pub async fn next(&mut self) -> Result<(usize, Event)> {
        self.events.recv().await.ok_or_else(|| self.worker.gone())
    }

    /// Ends a completion early. What it still gives is ignored.
    pub fn cancel(&self, index: usize) {
        let _ = self.worker.commands.send(Command::Cancel(self.ids[index]));
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        for &id in &self.ids {
            // Finished ones are no longer known, and ignored.
            let _ = self.worker.commands.send(Command::Cancel(id));
        }
    }
}

/// The loop of the engine's thread.
fn run(mut backend: impl Backend, commands: Receiver<Command>, shared: &Shared) {
    let mut routes: HashMap<RequestId, (usize, Events)> = HashMap::new();
    loop {
        // An idle engine waits for work.
        let first = match backend.is_idle() {
            true => match commands.recv() {
                Ok(command) => Some(command),
                Err(_) => return,
            },
            false => None,
        };
        for command in first.into_iter().chain(commands.try_iter()) {
            match command {
                Command::Add { request, index, events, reply } => {
                    let added = backend.add(*request);
                    if let Ok(id) = &added {
                        routes.insert(*id, (index, events));
                    }
                    // Whoever no longer waits has no receiver either, and is cancelled when it gets its first event.
                    let _ = reply.send(added);
                }
                Command::Cancel(id) => {
                    if routes.remove(&id).is_some() {
                        backend.cancel(id);
                    }
                }
            }
        }
        let events = match backend.is_idle() {
            true => Vec::new(),
            false => match backend.step() {
                Ok(events) => events,
                Err(error) => {
                    tracing::error!("the engine has failed: {error}");
                    let _ = shared.failure.set(error.to_string());
                    return;
                }
            },
        };
        for event in events {
            let (Event::Prompt { id, .. } | Event::Token { id, .. } | Event::Finished { id, .. }) = event;
            let ends = matches!(event, Event::Finished { .. });
            let Some((index, sender)) = routes.get(&id) else { continue };
            let left = sender.send((*index, event)).is_err();
            if left || ends {
                routes.remove(&id);
            }
            if left && !ends {
                backend.cancel(id);
            }
        }
        *shared.stats.lock().expect("no thread panics with it") = backend.stats();
    }
}
