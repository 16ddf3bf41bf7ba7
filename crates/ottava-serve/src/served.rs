//! What all requests share: the model's name and limits, its tokenizer and template, and the engine.

use crate::body::Body;
use crate::error::{ApiError, Result};
use crate::metrics::Metrics;
use crate::worker::Worker;
use axum::http::{HeaderMap, header};
use ottava_lm::data::{Chat, ChatTemplate, Tokenizer};
use ottava_lm::hash::sha256;
use std::sync::Arc;

/// What all requests share.
pub struct Served {
    /// The name of the model for clients.
    pub name: String,
    /// Tokens of prompt and completion together, at most.
    pub max_model_len: usize,
    /// The tokenizer of the model.
    pub tokenizer: Arc<Tokenizer>,
    /// The engine.
    pub worker: Worker,
    /// The chat template, if the model has one.
    pub template: Option<Arc<ChatTemplate>>,
    /// Rows of the model's embedding.
    pub vocabulary: usize,
    /// What `/metrics` shows.
    pub metrics: Arc<Metrics>,
    /// SHA-256 of the key, so that comparing takes the same time for all wrong ones.
    pub api_key: Option<String>,
    /// When the server started, in seconds since 1970.
    pub created: u64,
}

impl Served {
    /// Errors when a request names another model.
    pub fn expect_model(&self, body: &Body) -> Result<()> {
        match body.text("model")? {
            Some(model) if model != self.name => Err(ApiError::no_model(model, &self.name)),
            _ => Ok(()),
        }
    }

    /// The tokens of a prompt, with those that the tokenizer puts before a text if `special`.
    pub async fn encode(&self, text: String, special: bool) -> Result<Vec<u32>> {
        let tokenizer = self.tokenizer.clone();
        beside(move || if special { tokenizer.encode_prompt(&text) } else { tokenizer.encode(&text) }).await
    }

    /// The tokens of a conversation up to where the model answers.
    pub async fn render(&self, chat: Chat) -> Result<Vec<u32>> {
        let Some(template) = self.template.clone() else {
            return Err(ApiError::invalid("the model has no chat template; use /v1/completions"));
        };
        let tokenizer = self.tokenizer.clone();
        beside(move || template.prompt(&tokenizer, &chat)).await
    }

    /// Errors when a token has no row in the model's embedding.
    pub fn expect_known(&self, prompt: &[u32]) -> Result<()> {
        match prompt.iter().find(|&&id| id as usize >= self.vocabulary) {
            Some(id) => {
                let end = self.vocabulary;
                Err(ApiError::field("prompt", format!("there is no token {id}; the vocabulary ends at {end}")))
            }
            None => Ok(()),
        }
    }

    /// Whether a request to `/v1` has the key, if there is one.
    pub fn authorized(&self, headers: &HeaderMap) -> bool {
        let Some(expected) = &self.api_key else { return true };
        let key = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()?.strip_prefix("Bearer "));
        key.is_some_and(|key| sha256(key.as_bytes()) == *expected)
    }
}

/// Runs work of the CPU beside the requests.
async fn beside<T: Send + 'static>(work: impl FnOnce() -> ottava_lm::Result<T> + Send + 'static) -> Result<T> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done.map_err(ApiError::of_request),
        Err(_) => Err(ApiError::internal("the request could not be read")),
    }
}
