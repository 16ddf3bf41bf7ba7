//! The server: its routes, and its life from the first request to the last.

use crate::body::Body;
use crate::chat::chat_completions;
use crate::completions::completions;
use crate::error::{ApiError, Result, json_body};
use crate::metrics::Metrics;
use crate::served::Served;
use crate::worker::{Backend, Worker};
use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use ottava_lm::data::{ChatTemplate, Tokenizer};
use ottava_lm::hash::sha256;
use ottava_lm::{Error, interrupt};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::net::TcpListener;

/// Bytes of a request at most: a prompt of a million tokens as a list of ids.
const MAX_BODY_BYTES: usize = 16 << 20;
/// How often a stop is looked for.
const POLL: Duration = Duration::from_millis(50);

/// Settings of a server.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where it listens; port 0 takes a free one.
    pub address: SocketAddr,
    /// The name of the model for clients.
    pub name: String,
    /// Completions in work or waiting, at most; more are refused with status 429.
    pub max_requests: usize,
    /// The key that clients of `/v1` must send, if any.
    pub api_key: Option<String>,
    /// How long requests in work may go on after a signal to stop.
    pub shutdown_timeout: Duration,
}

/// What is known of a model beside its engine.
pub struct Model {
    /// Turns texts into tokens.
    pub tokenizer: Tokenizer,
    /// Turns conversations into texts, if the model has one.
    pub template: Option<ChatTemplate>,
    /// Rows of the model's embedding.
    pub vocabulary: usize,
    /// Tokens of prompt and completion together, at most.
    pub max_model_len: usize,
}

/// Serves until a signal asks to stop, or the engine fails. `load` makes the engine, on the thread that it then stays on. Calls `ready` with
/// the address once it is loaded and requests are answered.
///
/// # Errors
/// Those of `load`, [`Error::Io`] when the address cannot be used, and [`Error::Model`] when the engine failed.
pub fn serve<B: Backend>(
    options: &Options,
    load: impl FnOnce() -> ottava_lm::Result<(B, Model)> + Send + 'static,
    ready: impl FnOnce(SocketAddr),
) -> ottava_lm::Result<()> {
    let io = |error| Error::io(options.address.to_string())(error);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().map_err(io)?;
    // Before the model is loaded, so that a port in use is found at once.
    let listener = runtime.block_on(TcpListener::bind(options.address)).map_err(io)?;
    let address = listener.local_addr().map_err(io)?;
    let (worker, thread, model) = Worker::start(options.max_requests, load)?;
    let Model { tokenizer, template, vocabulary, max_model_len } = model;
    let served = Arc::new(Served {
        name: options.name.clone(),
        max_model_len,
        tokenizer: Arc::new(tokenizer),
        template: template.map(Arc::new),
        vocabulary,
        metrics: Arc::new(Metrics::new(worker.clone())),
        worker: worker.clone(),
        api_key: options.api_key.as_ref().map(|key| sha256(key.as_bytes())),
        created: std::time::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs(),
    });
    let app = routes(served.clone());
    ready(address);
    let failure = runtime.block_on(async {
        let server = axum::serve(listener, app).with_graceful_shutdown(stop(worker.clone()));
        let timeout = options.shutdown_timeout;
        tokio::select! {
            ended = server.into_future() => ended.err().map(|error| error.to_string()),
            // A stop that takes too long cuts connections.
            _ = async { stop(worker.clone()).await; tokio::time::sleep(timeout).await } => {
                tracing::warn!("requests are cut off, {} seconds after the stop", timeout.as_secs());
                None
            }
        }
    });
    let failure = failure.or(worker.failure());
    drop((served, worker));
    runtime.shutdown_timeout(Duration::from_secs(1));
    match failure {
        Some(reason) => Err(Error::Model(format!("the server has ended: {reason}"))),
        None => {
            // It ends once the last completion is cancelled.
            let _ = thread.join();
            Ok(())
        }
    }
}

/// Returns once a signal asks to stop, or the engine has failed. Requests from then on are refused.
async fn stop(worker: Worker) {
    while !interrupt::flag().load(Ordering::Relaxed) && worker.failure().is_none() {
        tokio::time::sleep(POLL).await;
    }
    worker.stop();
}

fn routes(served: Arc<Served>) -> Router {
    Router::new()
        .route("/v1/completions", post(post_completions))
        .route("/v1/chat/completions", post(post_chat))
        .route("/v1/models", get(models))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .fallback(async || ApiError::unreadable(StatusCode::NOT_FOUND, "there is nothing at this path"))
        .method_not_allowed_fallback(async || {
            ApiError::unreadable(StatusCode::METHOD_NOT_ALLOWED, "this path does not take this method")
        })
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .layer(from_fn_with_state(served.clone(), guard))
        .with_state(served)
}

/// Checks the key of requests to `/v1`, and counts requests.
async fn guard(State(served): State<Arc<Served>>, request: Request, next: Next) -> Response {
    let known = ["/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics"];
    let path = known.into_iter().find(|&path| path == request.uri().path()).unwrap_or("other");
    let length = request.headers().get(header::CONTENT_LENGTH);
    let length: usize = length.and_then(|length| length.to_str().ok()?.parse().ok()).unwrap_or(0);
    let response = if path.starts_with("/v1") && !served.authorized(request.headers()) {
        ApiError::unauthorized().into_response()
    } else if length > MAX_BODY_BYTES {
        // Before any of it is sent.
        let message = format!("the body has {length} bytes; at most {MAX_BODY_BYTES}");
        ApiError::unreadable(StatusCode::PAYLOAD_TOO_LARGE, message).into_response()
    } else {
        next.run(request).await
    };
    served.metrics.count(path, response.status());
    response
}

/// The bytes of a request, or why they could not be read.
type Received = std::result::Result<Bytes, BytesRejection>;

async fn post_completions(State(served): State<Arc<Served>>, body: Received) -> Result<Response> {
    let timer = served.metrics.timer();
    completions(served, parse(body)?, timer).await
}

async fn post_chat(State(served): State<Arc<Served>>, body: Received) -> Result<Response> {
    let timer = served.metrics.timer();
    chat_completions(served, parse(body)?, timer).await
}

fn parse(body: Received) -> Result<Body> {
    Body::parse(&body.map_err(|rejected| ApiError::unreadable(rejected.status(), rejected.body_text()))?)
}

async fn models(State(served): State<Arc<Served>>) -> Response {
    let model: Value = json!({
        "id": served.name, "object": "model", "created": served.created, "owned_by": "ottava",
        "max_model_len": served.max_model_len,
    });
    json_body(&json!({"object": "list", "data": [model]})).into_response()
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
