//! The paths of a server, and what is common to requests: their keys, bodies, ids and counts.

use crate::answer::{Answer, Form, new_id};
use crate::anthropic;
use crate::body::Body;
use crate::chat::chat_completions;
use crate::chat_request;
use crate::classify;
use crate::completions::{self, completions};
use crate::connections::Connection;
use crate::embeddings::{self, Embeddings};
use crate::error::{ApiError, Result, json_body};
use crate::generate::{self, generate};
use crate::intake::{MAX_BODY_BYTES, Received, SMALL_BYTES};
use crate::invocations::{Invoked, invoked};
use crate::lora_updates;
use crate::metrics::Timer;
use crate::origin::{allowed, preflight, share};
use crate::page::page;
use crate::preparing::{SHORT_BYTES, beside};
use crate::ranking;
use crate::responses;
use crate::served::Served;
use crate::tokens;
use axum::Router;
use axum::extract::{FromRequestParts, Path, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;

/// The paths by which requests are counted.
const PATHS: [&str; 24] = [
    "/",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/classify",
    "/v1/rerank",
    "/v1/score",
    "/inference/v1/generate",
    "/invocations",
    "/v1/models",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/rollouts",
    "/v1/training",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/version",
    "/health",
    "/load",
    "/metrics",
];
/// The paths that need no key and answer all sites. `other` counts paths that do not exist.
const OPEN: [&str; 6] = ["/", "/version", "/health", "/load", "/metrics", "other"];
/// The paths whose answers are texts that the model writes.
const WRITTEN: [&str; 5] =
    ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate"];
/// The header with the id of a request, and the maximum length of an id that a client gives.
const REQUEST_ID: &str = "x-request-id";
const MOST_ID: usize = 128;

/// The routes of a server, and `more` routes. Paths of `/v1` are also there without `/v1`.
pub fn routes(served: Arc<Served>, more: Router) -> Router {
    let api = Router::new()
        .route("/completions", post(post_completions))
        .route("/chat/completions", post(post_chat))
        .route("/responses", post(post_responses))
        .route("/responses/{id}", get(get_response).delete(delete_response))
        .route("/messages", post(post_messages))
        .route("/messages/count_tokens", post(post_count_tokens))
        .route("/embeddings", post(post_embeddings))
        .route("/classify", post(post_classify))
        .route("/rerank", post(post_rerank))
        .route("/score", post(post_score))
        .route("/load_lora_adapter", post(post_load_adapter))
        .route("/unload_lora_adapter", post(post_unload_adapter))
        .route("/models", get(models))
        .route("/models/{*id}", get(model));
    Router::new()
        .nest("/v1", api.clone())
        .merge(api)
        // The path of Cohere's clients.
        .route("/v2/rerank", post(post_rerank))
        .route("/inference/v1/generate", post(post_generate))
        .route("/invocations", post(post_invocations))
        .route("/tokenize", post(post_tokenize))
        .route("/detokenize", post(post_detokenize))
        .route("/tokenizer_info", get(tokenizer_info))
        .route("/", get(page))
        .route("/version", get(version))
        .route("/health", get(health))
        .route("/ping", get(health).post(health))
        .route("/load", get(load))
        .route("/metrics", get(metrics))
        .with_state(served.clone())
        .merge(more)
        .fallback(async || ApiError::refused(StatusCode::NOT_FOUND, "there is nothing at this path"))
        .method_not_allowed_fallback(async || {
            ApiError::refused(StatusCode::METHOD_NOT_ALLOWED, "this path does not support this method")
        })
        .layer(from_fn_with_state(served, guard))
}

/// The path by which a request is counted.
fn counted(path: &str) -> &'static str {
    let known = |path: &str| PATHS.into_iter().find(|&known| known == path);
    let versioned = if path.starts_with("/v1/") { path.to_string() } else { format!("/v1{path}") };
    match (known(path), known(&versioned)) {
        (Some(path), _) | (_, Some(path)) => path,
        _ if path == "/ping" => "/health",
        _ if path == "/v2/rerank" => "/v1/rerank",
        _ if versioned.starts_with("/v1/models/") => "/v1/models/{id}",
        _ if versioned.starts_with("/v1/responses/") => "/v1/responses/{id}",
        _ => "other",
    }
}

/// Refuses requests that are not allowed, counts all requests, and gives each an id.
async fn guard(State(served): State<Arc<Served>>, request: Request, next: Next) -> Response {
    let path = counted(request.uri().path());
    let origin = allowed(&served.origins, request.headers()).cloned();
    let connection = request.extensions().get::<Arc<Connection>>().cloned();
    let id = request.headers().get(REQUEST_ID).filter(|id| id.len() <= MOST_ID).cloned();
    // A POST request is work only after its body is received.
    if let Some(connection) = connection.as_ref().filter(|_| request.method() != Method::POST) {
        connection.work();
    }
    let mut response = match (preflight(&served.origins, &request), expect_allowed(&served, path, &request)) {
        (Some(answer), _) => answer,
        (None, Ok(())) => next.run(request).await,
        (None, Err(error)) => error.into_response(),
    };
    if path.starts_with("/v1/messages")
        && let Some(error) = response.extensions().get::<ApiError>()
    {
        let (parts, _) = error.clone().into_response().into_parts();
        let body = json_body(&anthropic::error(error)).into_response().into_body();
        response = Response::from_parts(parts, body);
    }
    let id = id.or_else(|| HeaderValue::try_from(new_id("req_")).ok());
    response.headers_mut().extend(id.map(|id| (header::HeaderName::from_static(REQUEST_ID), id)));
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
        if served.classifier.is_some() && path.starts_with("/v1/") && !classify::PATHS.contains(&path) {
            return Err(ApiError::invalid(
                "the model is a classifier, which writes no text and has no embeddings; use /classify, or /rerank and /score of a reranker",
            ));
        }
        if served.is_encoder && WRITTEN.contains(&path) {
            return Err(ApiError::invalid(
                "the model is an encoder, which writes no text; use /v1/embeddings, /rerank and /score, or /classify of a classifier",
            ));
        }
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
    answer(served, request, (completions::fields(), Some("prompt")), completions).await
}

async fn post_chat(State(served): State<Arc<Served>>, request: Request) -> Result<Response> {
    answer(served, request, (chat_request::fields(), None), chat_completions).await
}

async fn post_invocations(State(served): State<Arc<Served>>, request: Request) -> Result<Response> {
    let (head, body) = request.into_parts();
    let body = served.intake.receive(body).await?.bytes;
    let (state, path) = (State(served), invoked(&body));
    let request = Request::from_parts(head, body.into());
    match path {
        Invoked::Chat => post_chat(state, request).await,
        Invoked::Completions => post_completions(state, request).await,
        Invoked::Embeddings => post_embeddings(state, request).await,
        Invoked::Rerank => post_rerank(state, request).await,
        Invoked::Score => post_score(state, request).await,
    }
}

async fn post_responses(State(served): State<Arc<Served>>, request: Request) -> Result<Response> {
    answer(served, request, (responses::fields(), None), responses::respond).await
}

async fn get_response(State(served): State<Arc<Served>>, Named(id): Named) -> Result<Response> {
    Ok(json_body(&responses::stored(&served, &id)?).into_response())
}

async fn delete_response(State(served): State<Arc<Served>>, Named(id): Named) -> Result<Response> {
    Ok(json_body(&responses::delete(&served, &id)?).into_response())
}

async fn post_messages(State(served): State<Arc<Served>>, request: Request) -> Result<Response> {
    answer(served, request, (anthropic::fields(), None), anthropic::message).await
}

async fn post_count_tokens(State(served): State<Arc<Served>>, request: Request) -> Result<Response> {
    let accepted = Accepted::receive(&served, request, (anthropic::COUNT.to_vec(), None)).await?;
    Ok(json_body(&anthropic::count_tokens(&served, accepted.body).await?).into_response())
}

async fn post_generate(State(served): State<Arc<Served>>, request: Request) -> Result<Response> {
    answer(served, request, (generate::fields(), Some("token_ids")), generate).await
}

async fn post_embeddings(State(served): State<Arc<Served>>, request: Request) -> Result<Response> {
    let timer = served.metrics.timer();
    let Accepted { body, permit, turn, _received } =
        Accepted::receive(&served, request, (embeddings::fields(), Some("input"))).await?;
    let running = Embeddings::start(&served, permit, body).await?;
    drop(turn);
    let response = running.respond().await?;
    timer.end(&[]);
    Ok(response)
}

async fn post_classify(State(served): State<Arc<Served>>, request: Request) -> Result<Response> {
    let accepted = Accepted::receive(&served, request, (classify::fields(), Some("input"))).await?;
    Ok(json_body(&classify::classify(&served, accepted.permit, accepted.body).await?).into_response())
}

async fn post_rerank(State(served): State<Arc<Served>>, request: Request) -> Result<Response> {
    let accepted = Accepted::receive(&served, request, (ranking::fields_of_rerank(), None)).await?;
    Ok(json_body(&ranking::rerank(&served, accepted.permit, &accepted.body).await?).into_response())
}

async fn post_score(State(served): State<Arc<Served>>, request: Request) -> Result<Response> {
    let accepted = Accepted::receive(&served, request, (ranking::fields_of_score(), None)).await?;
    Ok(json_body(&ranking::score(&served, accepted.permit, &accepted.body).await?).into_response())
}

async fn post_tokenize(State(served): State<Arc<Served>>, request: Request) -> Result<Response> {
    let mut accepted = Accepted::receive(&served, request, (tokens::TOKENIZE.to_vec(), Some("prompt"))).await?;
    Ok(json_body(&tokens::tokenize(&served, &mut accepted.body).await?).into_response())
}

async fn post_detokenize(State(served): State<Arc<Served>>, request: Request) -> Result<Response> {
    let accepted = Accepted::receive(&served, request, (tokens::DETOKENIZE.to_vec(), None)).await?;
    Ok(json_body(&tokens::detokenize(&served, &accepted.body)?).into_response())
}

async fn tokenizer_info(State(served): State<Arc<Served>>) -> Result<Response> {
    Ok(json_body(tokens::tokenizer_info(&served)?).into_response())
}

async fn post_load_adapter(State(served): State<Arc<Served>>, request: Request) -> Result<Response> {
    let accepted = Accepted::receive(&served, request, (lora_updates::LOAD.to_vec(), None)).await?;
    Ok(lora_updates::load(&served, &accepted.body).await?.into_response())
}

async fn post_unload_adapter(State(served): State<Arc<Served>>, request: Request) -> Result<Response> {
    let accepted = Accepted::receive(&served, request, (lora_updates::UNLOAD.to_vec(), None)).await?;
    Ok(lora_updates::unload(&served, &accepted.body)?.into_response())
}

/// The last part of a path, which names a model or a response.
struct Named(String);

impl<S: Send + Sync> FromRequestParts<S> for Named {
    type Rejection = ApiError;

    async fn from_request_parts(head: &mut Parts, state: &S) -> Result<Named> {
        let Path(name) = Path::from_request_parts(head, state)
            .await
            .map_err(|error| ApiError::invalid(format!("the path cannot be read: {}", error.body_text())))?;
        Ok(Named(name))
    }
}

/// The fields that a request may have, and the field that is its prompt.
type Fields = (Vec<&'static str>, Option<&'static str>);

/// Receives a request that may have these fields, and answers it through `prepare`.
async fn answer<F: Form, P: Future<Output = Result<Answer<F>>>>(
    served: Arc<Served>,
    request: Request,
    fields: Fields,
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
    async fn receive(served: &Served, request: Request, (fields, prompt): Fields) -> Result<Accepted> {
        let connection = request.extensions().get::<Arc<Connection>>().cloned();
        let mut received = served.intake.receive(request.into_body()).await?;
        if let Some(connection) = connection {
            connection.work();
        }
        let permit = served.worker.permit()?;
        let turn = served.intake.turn(&received).await;
        let bytes = std::mem::take(&mut received.bytes);
        let body = match bytes.len() {
            0..=SHORT_BYTES => Body::parse(&bytes, &fields, prompt)?,
            long => beside(long, move || Body::parse(&bytes, &fields, prompt)).await?,
        };
        body.ignore_unknown(&served.tolerance)?;
        Ok(Accepted { body, permit, turn, _received: received })
    }
}

async fn models(State(served): State<Arc<Served>>) -> Response {
    let models: Vec<Value> = served.models.all().iter().map(|model| served.describe(model)).collect();
    json_body(&json!({"object": "list", "data": models})).into_response()
}

async fn model(State(served): State<Arc<Served>>, Named(id): Named) -> Result<Response> {
    Ok(json_body(&served.describe(served.models.named(&id)?.as_ref())).into_response())
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

async fn load(State(served): State<Arc<Served>>) -> Response {
    json_body(&json!({"server_load": served.worker.in_flight()})).into_response()
}

async fn metrics(State(served): State<Arc<Served>>) -> Response {
    let format = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, format)], served.metrics.text()).into_response()
}
