//! The server: its routes, its start and its end.

use crate::answer::{Answer, Form};
use crate::backend::Backend;
use crate::body::Body;
use crate::chat::{self, chat_completions};
use crate::completions::{self, completions};
use crate::connections::{Connection, Connections, listen};
use crate::embeddings::{self, Embeddings};
use crate::error::{ApiError, Result, json_body};
use crate::generate::{self, generate};
use crate::intake::{Intake, MAX_BODY_BYTES, Received, SMALL_BYTES};
use crate::metrics::{Metrics, Timer};
use crate::origin::{Origin, allowed, preflight, share};
use crate::preparing::{SHORT_BYTES, beside};
use crate::served::{LazyGrammars, Served, ServedModel};
use crate::tokens;
use crate::tool_calls::ToolCallParser;
use crate::worker::Worker;
use axum::Router;
use axum::extract::{Path, Request, State};
use axum::http::{Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use ottava_common::hash::sha256;
use ottava_common::{Error, interrupt, limits};
use ottava_data::{ChatTemplate, Tokenizer};
use ottava_engine::{AdapterId, Pooling, Sampling};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::OwnedSemaphorePermit;

/// The interval between checks for a stop.
const POLL: Duration = Duration::from_millis(50);
/// The paths by which requests are counted.
const PATHS: [&str; 12] = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/embeddings",
    "/inference/v1/generate",
    "/v1/models",
    "/v1/rollouts",
    "/v1/training",
    "/tokenize",
    "/detokenize",
    "/version",
    "/health",
    "/metrics",
];
/// The paths that need no key and answer all sites. `other` counts paths that do not exist.
const OPEN: [&str; 4] = ["/version", "/health", "/metrics", "other"];
/// The number of file descriptors that are reserved for other uses than connections.
const RESERVED_FILES: usize = 16;

/// Settings of a server.
#[derive(Clone, Debug)]
pub struct Options {
    /// The address where the server listens; port 0 chooses a free port.
    pub address: SocketAddr,
    /// The name of the model for clients.
    pub name: String,
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
    /// The tokenizer, which converts texts to tokens.
    pub tokenizer: Tokenizer,
    /// The chat template, which converts conversations to texts, if the model has one.
    pub template: Option<ChatTemplate>,
    /// The format in which the model writes tool calls; with `None`, calls stay in the text of answers.
    pub tool_call_parser: Option<ToolCallParser>,
    /// The number of rows of the model's embedding.
    pub vocabulary: usize,
    /// The number of columns of the model's embedding, which is also the number of values of an embedding of a text.
    pub channels: usize,
    /// How the activations of a text become its embedding.
    pub pooling: Pooling,
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
        models: models_of(&options.name, model.root, model.adapters),
        max_model_len: model.max_model_len,
        tokenizer: tokenizer.clone(),
        template: model.template.map(Arc::new),
        tool_call_parser: model.tool_call_parser,
        vocabulary: model.vocabulary,
        channels: model.channels,
        pooling: model.pooling,
        sampling: model.sampling,
        grammars: Arc::new(LazyGrammars::new(tokenizer, model.vocabulary)),
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

/// Lists the model, and each of its adapters as a model.
fn models_of(base: &str, root: String, adapters: Vec<NamedAdapter>) -> Vec<Arc<ServedModel>> {
    let adapted = adapters.into_iter().map(|NamedAdapter { name, root, id }| ServedModel {
        name,
        root,
        parent: Some(base.into()),
        adapter: Some(id),
    });
    let base = ServedModel { name: base.into(), root, parent: None, adapter: None };
    std::iter::once(base).chain(adapted).map(Arc::new).collect()
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

/// The routes of a server, and `more` routes.
pub fn routes(served: Arc<Served>, more: Router) -> Router {
    Router::new()
        .route("/v1/completions", post(post_completions))
        .route("/v1/chat/completions", post(post_chat))
        .route("/v1/embeddings", post(post_embeddings))
        .route("/inference/v1/generate", post(post_generate))
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/tokenize", post(post_tokenize))
        .route("/detokenize", post(post_detokenize))
        .route("/version", get(version))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .with_state(served.clone())
        .merge(more)
        .fallback(async || ApiError::refused(StatusCode::NOT_FOUND, "there is nothing at this path"))
        .method_not_allowed_fallback(async || {
            ApiError::refused(StatusCode::METHOD_NOT_ALLOWED, "this path does not support this method")
        })
        .layer(from_fn_with_state(served, guard))
}

/// Refuses requests that are not allowed, and counts all requests.
async fn guard(State(served): State<Arc<Served>>, request: Request, next: Next) -> Response {
    let path = match request.uri().path() {
        path if path.starts_with("/v1/models/") => "/v1/models/{id}",
        path => PATHS.into_iter().find(|&known| known == path).unwrap_or("other"),
    };
    let origin = allowed(&served.origins, request.headers()).cloned();
    let connection = request.extensions().get::<Arc<Connection>>().cloned();
    // A POST request is work only after its body is received.
    if let Some(connection) = connection.as_ref().filter(|_| request.method() != Method::POST) {
        connection.work();
    }
    let mut response = match (preflight(&served.origins, &request), expect_allowed(&served, path, &request)) {
        (Some(answer), _) => answer,
        (None, Ok(())) => next.run(request).await,
        (None, Err(error)) => error.into_response(),
    };
    share(origin, &mut response);
    served.metrics.count(path, response.status());
    match connection {
        Some(connection) => response.map(|body| connection.track(body)),
        None => response,
    }
}

/// Errors for a request that must be refused because of its head.
fn expect_allowed(served: &Served, path: &str, request: &Request) -> Result<()> {
    let headers = request.headers();
    if OPEN.contains(&path) {
        return Ok(());
    }
    served.authorize(headers)?;
    if request.method() == Method::POST {
        let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or("missing");
        if !kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("application/json")) {
            let message = format!("the Content-Type is {kind}; send `Content-Type: application/json`");
            return Err(ApiError::refused(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
        }
        let length = headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<usize>().ok());
        // A large body is refused before any of it is received. A small body is received first, because some clients read an answer only after they
        // have sent everything.
        match length {
            Some(length) if length > MAX_BODY_BYTES => {
                return Err(ApiError::too_large(&length.to_string(), MAX_BODY_BYTES));
            }
            Some(length) if length <= SMALL_BYTES => {}
            _ => served.worker.expect_room()?,
        }
    }
    Ok(())
}

async fn post_completions(State(served): State<Arc<Served>>, request: Request) -> Result<Response> {
    answer(served, request, completions::fields(), completions).await
}

async fn post_chat(State(served): State<Arc<Served>>, request: Request) -> Result<Response> {
    answer(served, request, chat::fields(), chat_completions).await
}

async fn post_generate(State(served): State<Arc<Served>>, request: Request) -> Result<Response> {
    answer(served, request, generate::fields(), generate).await
}

async fn post_embeddings(State(served): State<Arc<Served>>, request: Request) -> Result<Response> {
    let timer = served.metrics.timer();
    let Accepted { body, permit, turn, _received } = Accepted::receive(&served, request, embeddings::fields()).await?;
    let running = Embeddings::start(&served, permit, body).await?;
    drop(turn);
    let response = running.respond().await?;
    timer.end(0);
    Ok(response)
}

async fn post_tokenize(State(served): State<Arc<Served>>, request: Request) -> Result<Response> {
    let mut accepted = Accepted::receive(&served, request, tokens::TOKENIZE.to_vec()).await?;
    Ok(json_body(&tokens::tokenize(&served, &mut accepted.body).await?).into_response())
}

async fn post_detokenize(State(served): State<Arc<Served>>, request: Request) -> Result<Response> {
    let accepted = Accepted::receive(&served, request, tokens::DETOKENIZE.to_vec()).await?;
    Ok(json_body(&tokens::detokenize(&served, &accepted.body)?).into_response())
}

/// Receives a request that may have these fields, and answers it through `prepare`.
async fn answer<F: Form, P: Future<Output = Result<Answer<F>>>>(
    served: Arc<Served>,
    request: Request,
    fields: Vec<&'static str>,
    prepare: impl FnOnce(Arc<Served>, OwnedSemaphorePermit, Body, Timer) -> P,
) -> Result<Response> {
    let timer = served.metrics.timer();
    let Accepted { body, permit, turn, _received } = Accepted::receive(&served, request, fields).await?;
    let answer = prepare(served, permit, body, timer).await?;
    drop(turn);
    answer.respond().await
}

/// A parsed request, and the permits that it holds until it is answered.
struct Accepted {
    body: Body,
    permit: OwnedSemaphorePermit,
    /// The permit to process a large body.
    turn: Option<OwnedSemaphorePermit>,
    /// The received body, which holds the permit for its memory.
    _received: Received,
}

impl Accepted {
    /// Receives and parses a request that may have these fields.
    async fn receive(served: &Served, request: Request, fields: Vec<&'static str>) -> Result<Accepted> {
        let connection = request.extensions().get::<Arc<Connection>>().cloned();
        let mut received = served.intake.receive(request.into_body()).await?;
        if let Some(connection) = connection {
            connection.work();
        }
        let permit = served.worker.permit()?;
        let turn = served.intake.turn(&received).await;
        let bytes = std::mem::take(&mut received.bytes);
        let body = match bytes.len() {
            0..=SHORT_BYTES => Body::parse(&bytes, &fields)?,
            long => beside(long, move || Body::parse(&bytes, &fields)).await?,
        };
        Ok(Accepted { body, permit, turn, _received: received })
    }
}

async fn models(State(served): State<Arc<Served>>) -> Response {
    let models: Vec<Value> = served.models.iter().map(|model| served.describe(model)).collect();
    json_body(&json!({"object": "list", "data": models})).into_response()
}

async fn model(State(served): State<Arc<Served>>, Path(id): Path<String>) -> Result<Response> {
    Ok(json_body(&served.describe(served.model_named(&id)?)).into_response())
}

async fn version() -> Response {
    json_body(&json!({"version": env!("CARGO_PKG_VERSION")})).into_response()
}

async fn health(State(served): State<Arc<Served>>) -> Response {
    match served.worker.is_stopping() {
        true => ApiError::stopping().into_response(),
        false => json_body(&json!({"status": "ok", "in_flight": served.worker.in_flight()})).into_response(),
    }
}

async fn metrics(State(served): State<Arc<Served>>) -> Response {
    let format = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, format)], served.metrics.text()).into_response()
}
