//! The server: its settings, its start and its end.

use crate::backend::Backend;
use crate::classifier::Classifier;
use crate::connections::{Connections, listen};
use crate::intake::Intake;
use crate::metrics::Metrics;
use crate::models::{Models, OpenAdapters, ServedModel};
use crate::origin::Origin;
use crate::reasoning::ReasoningParser;
use crate::response_store::Store;
use crate::routes::routes;
use crate::served::{LazyGrammars, Served};
use crate::tolerance::Tolerance;
use crate::tool_calls::ToolCallParser;
use crate::worker::Worker;
use axum::Router;
use ottava_common::hash::sha256;
use ottava_common::{Error, interrupt, limits};
use ottava_data::{ChatTemplate, Tokenizer};
use ottava_engine::{AdapterId, Pooling, Sampling};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// The interval between checks for a stop.
const POLL: Duration = Duration::from_millis(50);
/// The number of file descriptors that are reserved for other uses than connections.
const RESERVED_FILES: usize = 16;

/// Settings of a server.
#[derive(Clone, Debug)]
pub struct Options {
    /// The address where the server listens; port 0 chooses a free port.
    pub address: SocketAddr,
    /// The names of the model for clients, at least one. Answers to requests that name no model have the first name.
    pub names: Vec<String>,
    /// The maximum number of running and waiting requests; more requests are refused with status 429.
    pub max_requests: usize,
    /// The maximum number of connections; fewer if the limit of open files is lower. If there are more, the connection that has waited longest for a
    /// request is closed.
    pub max_connections: usize,
    /// The time limit for a client to send its next request, to send its body, or to read any part of an answer.
    pub client_timeout: Duration,
    /// The key that clients of `/v1` must send, if any.
    pub api_key: Option<String>,
    /// The time limit of running requests after a signal to stop.
    pub shutdown_timeout: Duration,
    /// The other sites whose pages may send requests and read the answers.
    pub allowed_origins: Vec<Origin>,
    /// Whether fields of requests that have no effect are refused; otherwise they are ignored, and logged once.
    pub strict: bool,
}

/// An adapter in the engine that requests choose by name, like a model.
#[derive(Clone, Debug)]
pub struct NamedAdapter {
    /// The name of the adapter for clients.
    pub name: String,
    /// The folder of the adapter, which `/v1/models` shows to clients.
    pub root: String,
    /// The number of the adapter in the engine.
    pub id: AdapterId,
}

/// The properties of a model that are not part of its engine.
pub struct Model {
    /// The folder of the model, which `/v1/models` shows to clients.
    pub root: String,
    /// The adapters of the model that requests choose by name.
    pub adapters: Vec<NamedAdapter>,
    /// What opens adapters, if requests can load and unload them. The model must be loaded beside adapters.
    pub open_adapters: Option<OpenAdapters>,
    /// The tokenizer, which converts texts to tokens.
    pub tokenizer: Tokenizer,
    /// The chat template, which converts conversations to texts, if the model has one.
    pub template: Option<ChatTemplate>,
    /// The format in which the model writes tool calls; with `None`, calls stay in the text of answers.
    pub tool_call_parser: Option<ToolCallParser>,
    /// How the model marks its reasoning; with `None`, reasoning stays in the text of answers.
    pub reasoning_parser: Option<ReasoningParser>,
    /// The number of rows of the model's embedding.
    pub vocabulary: usize,
    /// The number of columns of the model's embedding, which is also the number of values of an embedding of a text.
    pub channels: usize,
    /// How the activations of a text become its embedding.
    pub pooling: Pooling,
    /// Whether the model is an encoder, which writes no text.
    pub is_encoder: bool,
    /// The labels of a classifier; `None` for a language model.
    pub classifier: Option<Classifier>,
    /// The maximum number of tokens of prompt and completion together.
    pub max_model_len: usize,
    /// The default sampling of requests; its seed and biases are ignored.
    pub sampling: Sampling,
}

/// Serves until a signal requests a stop or the engine fails. `load` creates the engine in the thread that runs it. Calls `ready` with the address
/// once the engine is loaded and requests are answered.
///
/// # Errors
/// The errors of `load`; [`Error::Io`] if the address cannot be used; the error of the engine if another rank has failed; and [`Error::Model`] if the
/// engine failed for another reason.
pub fn serve<B: Backend>(
    options: &Options,
    load: impl FnOnce() -> ottava_common::Result<(B, Model)> + Send + 'static,
    ready: impl FnOnce(SocketAddr),
) -> ottava_common::Result<()> {
    let io = |error| Error::io(options.address.to_string())(error);
    let runtime = runtime().map_err(io)?;
    // Listens before the model is loaded, so a port in use is an error at once.
    let listener = runtime.block_on(async { listen(options.address) }).map_err(io)?;
    let address = listener.local_addr().map_err(io)?;
    let (worker, thread, model) = Worker::start(options.max_requests, load)?;
    let served = served(options, address, &worker, model);
    let app = routes(served.clone(), Router::new());
    let connections = connections(options);
    ready(address);
    runtime.block_on(async {
        let timeout = options.shutdown_timeout;
        tokio::select! {
            () = connections.accept(listener, app) => {}
            drained = async { stop(&worker).await; connections.drain(timeout).await } => {
                if !drained {
                    tracing::warn!("requests are cut off, {} seconds after the stop", timeout.as_secs());
                }
            }
        }
    });
    drop((served, worker));
    runtime.shutdown_timeout(Duration::from_secs(1));
    // The thread ends once the last completion is cancelled.
    match thread.join() {
        Ok(Err(error)) if error.exit_code() == Error::RANKS => Err(error),
        Ok(Err(error)) => Err(Error::Model(format!("the server has ended: {error}"))),
        Ok(Ok(())) | Err(_) => Ok(()),
    }
}

/// The state of the requests of a server at `address` that serves `model` with the engine of `worker`.
pub fn served(options: &Options, address: SocketAddr, worker: &Worker, model: Model) -> Arc<Served> {
    let tokenizer = Arc::new(model.tokenizer);
    Arc::new(Served {
        models: models_of(&options.names, model.root, model.adapters),
        open_adapters: model.open_adapters,
        max_model_len: model.max_model_len,
        tokenizer: tokenizer.clone(),
        tokenizer_info: OnceLock::new(),
        template: model.template.map(Arc::new),
        tool_call_parser: model.tool_call_parser,
        reasoning_parser: model.reasoning_parser,
        tolerance: Arc::new(Tolerance::new(options.strict)),
        vocabulary: model.vocabulary,
        channels: model.channels,
        pooling: model.pooling,
        is_encoder: model.is_encoder,
        classifier: model.classifier,
        sampling: model.sampling,
        grammars: Arc::new(LazyGrammars::new(tokenizer, model.vocabulary)),
        responses: Store::default(),
        metrics: Arc::new(Metrics::new(worker.clone())),
        worker: worker.clone(),
        intake: Intake::new(options.client_timeout),
        is_local: address.ip().is_loopback(),
        origins: options.allowed_origins.clone(),
        api_key: options.api_key.as_ref().map(|key| sha256(key.as_bytes())),
        created: std::time::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs(),
    })
}

/// The connections of a server, as many as its options and open files allow.
pub fn connections(options: &Options) -> Arc<Connections> {
    let files = limits::free_files().map_or(usize::MAX, |free| free.saturating_sub(RESERVED_FILES).max(1));
    Connections::new(options.max_connections.min(files), options.client_timeout)
}

/// Lists the model under each of its names, and each of its adapters as a model.
fn models_of(names: &[String], root: String, adapters: Vec<NamedAdapter>) -> Models {
    let base =
        names.iter().map(|name| ServedModel { name: name.clone(), root: root.clone(), parent: None, adapter: None });
    let adapted = adapters.into_iter().map(|NamedAdapter { name, root, id }| ServedModel {
        name,
        root,
        parent: names.first().cloned(),
        adapter: Some(id),
    });
    Models::new(base.chain(adapted).collect())
}

/// Creates the threads for connections. Threads that parse requests end soon after a burst, and free their memory.
pub fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.worker_threads(2).thread_keep_alive(Duration::from_secs(1)).enable_all().build()
}

/// Returns once a signal requests a stop or the engine has failed. Later requests are refused.
async fn stop(worker: &Worker) {
    while !interrupt::flag().load(Ordering::Relaxed) && worker.failure().is_none() {
        tokio::time::sleep(POLL).await;
    }
    worker.stop();
}
