//! The endpoint of a training run: clients draw completions with the weights of today, and return them with their rewards.

use crate::connections::listen;
use crate::error::ApiError;
use crate::rollouts::{self, Rollouts};
use crate::routes::routes;
use crate::schedule::{Command, Schedule};
use crate::server::{Model, Options, connections, runtime, served};
use crate::worker::Worker;
use axum::http::StatusCode;
use ottava_common::{Error, Result, interrupt};
use ottava_engine::Engine;
use ottava_train::objective::rollout::{Clients, Returned, Wanted};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;
use tokio::runtime::Runtime;

/// The server of a training run. Requests that arrive while the run computes steps wait for the next weights.
pub struct Endpoint {
    address: SocketAddr,
    worker: Worker,
    /// Always there, except within a call of [`Clients::collect`].
    commands: Option<Receiver<Command>>,
    rollouts: Arc<Rollouts>,
    runtime: Option<Runtime>,
}

impl Endpoint {
    /// Starts the server of `model` at the address of `options`. Completions whose weights are more than `max_staleness` steps old are refused.
    ///
    /// Errors with [`Error::Io`] if the address cannot be used.
    pub fn start(options: &Options, model: Model, max_staleness: u64) -> Result<Endpoint> {
        let io = |error| Error::io(options.address.to_string())(error);
        let runtime = runtime().map_err(io)?;
        let listener = runtime.block_on(async { listen(options.address) }).map_err(io)?;
        let address = listener.local_addr().map_err(io)?;
        let (worker, commands) = Worker::new(options.max_requests);
        let rollouts = Arc::new(Rollouts::new(model.vocabulary, model.max_model_len, max_staleness));
        let served = served(options, address, &worker, model);
        let app = routes(served.clone(), rollouts::routes(served, rollouts.clone()));
        let connections = connections(options);
        runtime.spawn(async move { connections.accept(listener, app).await });
        Ok(Endpoint { address, worker, commands: Some(commands), rollouts, runtime: Some(runtime) })
    }

    /// The address of the server.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Clients for Endpoint {
    fn collect(&mut self, engine: &mut Engine, wanted: Wanted) -> Result<Vec<Vec<Returned>>> {
        let commands = self.commands.take().expect("collecting is never nested");
        let mut schedule = Schedule::new(engine, commands, self.worker.shared());
        self.rollouts.open(wanted);
        let ran = schedule.run_while(|| {
            interrupt::check("waiting for completions of clients")?;
            Ok(!self.rollouts.is_full())
        });
        let updates = "the run has all completions of these weights and updates them; send the request again";
        self.commands = Some(schedule.end_all(&ApiError::refused(StatusCode::SERVICE_UNAVAILABLE, updates))?);
        let groups = self.rollouts.close();
        ran.map(|()| groups)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.worker.stop();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_timeout(Duration::from_secs(1));
        }
    }
}
