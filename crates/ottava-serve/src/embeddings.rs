//! `POST /v1/embeddings`, and the vectors that scores compare.

use crate::body::Body;
use crate::completions::prompts;
use crate::error::{ApiError, Result, json_text};
use crate::models::ServedModel;
use crate::params::{MOST_IN_ANSWER, WITHOUT_EFFECT, expect_fits};
use crate::preparing::beside;
use crate::schedule::Job;
use crate::served::{Encoded, Served};
use crate::truncation::{self, Truncation};
use crate::worker::Running;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ottava_engine::{Event, Pooling, Request};
use serde::Serialize;
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::sync::OwnedSemaphorePermit;

/// The fields that are read.
const READ: &[&str] = &["model", "input", "encoding_format", "add_special_tokens", "dimensions"];

/// Returns the fields that a request may have.
pub fn fields() -> Vec<&'static str> {
    [READ, truncation::FIELDS, WITHOUT_EFFECT].concat()
}

/// The embeddings of a request in progress.
pub struct Embeddings {
    vectors: Vectors,
    model: Arc<ServedModel>,
    in_base64: bool,
    /// The number of values of each embedding.
    dimensions: usize,
}

/// The vectors of texts in progress.
pub struct Vectors {
    running: Running,
    /// The number of tokens of each text.
    tokens: Vec<usize>,
}

impl Vectors {
    /// Starts the computation of the vectors of texts of the field `field`.
    pub fn start(
        served: &Served,
        permit: OwnedSemaphorePermit,
        model: &ServedModel,
        field: &str,
        texts: Vec<Encoded>,
    ) -> Result<Vectors> {
        let (mut requests, mut tokens) = (Vec::new(), Vec::new());
        for Encoded { ids: prompt, .. } in texts {
            expect_fits(field, &prompt, served.max_model_len)?;
            tokens.push(prompt.len());
            let pooling = if served.classifier.is_some() { Pooling::Scores } else { served.pooling };
            let (adapter, pooling) = (model.adapter, Some(pooling));
            requests.push(Request { adapter, prompt, pooling, ..Request::default() });
        }
        Ok(Vectors { running: served.worker.run(permit, Job { requests, n: 1 })?, tokens })
    }

    /// The number of tokens of all texts.
    pub fn tokens(&self) -> usize {
        self.tokens.iter().sum()
    }

    /// Waits for all vectors.
    pub async fn get(mut self) -> Result<Vec<Vec<f32>>> {
        let mut found = vec![None; self.tokens.len()];
        let mut left = found.len();
        while left > 0 {
            match self.running.next().await? {
                (index, Event::Embedding { values, .. }) => found[index] = Some(values),
                (_, Event::Finished { .. }) => left -= 1,
                (_, Event::Prompt { .. } | Event::Token { .. }) => {}
            }
        }
        let vectors = found.into_iter().collect::<Option<Vec<_>>>();
        vectors.ok_or_else(|| ApiError::internal("the engine has ended a text without its embedding"))
    }
}

/// Adds to texts the tokens that the tokenizer puts after them, if a request has `special` tokens. Prompts of completions do not have these tokens.
pub fn with_ends(served: &Served, mut texts: Vec<Encoded>, special: bool) -> Vec<Encoded> {
    let after = served.tokenizer.after_ids();
    for text in texts.iter_mut().filter(|text| special && text.text.is_some() && !text.ids.ends_with(after)) {
        text.ids.extend(after);
    }
    texts
}

/// The first `dimensions` values of a vector, divided by their norm.
fn shortened(mut values: Vec<f32>, dimensions: usize) -> Vec<f32> {
    if dimensions < values.len() {
        values.truncate(dimensions);
        let norm = values.iter().map(|&value| f64::from(value).powi(2)).sum::<f64>().sqrt().max(f64::MIN_POSITIVE);
        values.iter_mut().for_each(|value| *value = (f64::from(*value) / norm) as f32);
    }
    values
}

/// An embedding in the form that clients read.
#[derive(Serialize)]
struct Entry {
    object: &'static str,
    index: usize,
    embedding: Vector,
}

/// The values of an embedding.
#[derive(Serialize)]
#[serde(untagged)]
enum Vector {
    Floats(Vec<f32>),
    /// The values of the embedding in F32, little-endian, encoded in Base64.
    Base64(String),
}

impl Embeddings {
    /// Reads a request, and starts the computation of its embeddings.
    pub async fn start(served: &Served, permit: OwnedSemaphorePermit, mut body: Body) -> Result<Embeddings> {
        let model = served.model(&body)?;
        let in_base64 = match body.text("encoding_format")? {
            None | Some("float") => false,
            Some("base64") => true,
            Some(other) => {
                let message = format!("`encoding_format` is {other:?}; it is float or base64");
                return Err(ApiError::field("encoding_format", message));
            }
        };
        let dimensions = body.count("dimensions")?.unwrap_or(served.channels);
        if dimensions == 0 || dimensions > served.channels {
            let message =
                format!("`dimensions` is {dimensions}; embeddings of this model have 1 to {} values", served.channels);
            return Err(ApiError::field("dimensions", message));
        }
        let special = body.flag_on("add_special_tokens")?;
        let input = body.take_prompt().ok_or_else(|| ApiError::field("input", "`input` is missing"))?;
        let count = input.len() * served.channels;
        if count > MOST_IN_ANSWER {
            let message =
                format!("the embeddings would have {count} values; at most {MOST_IN_ANSWER}: send fewer texts");
            return Err(ApiError::field("input", message));
        }
        let truncation = Truncation::read(&body, served.max_model_len.saturating_sub(1))?;
        let texts = with_ends(served, prompts(served, "input", input, special, &truncation).await?, special);
        let vectors = Vectors::start(served, permit, &model, "input", texts)?;
        Ok(Embeddings { vectors, model, in_base64, dimensions })
    }

    /// Waits for all embeddings and returns the response.
    pub async fn respond(self) -> Result<Response> {
        let Embeddings { vectors, model, in_base64, dimensions } = self;
        let total = vectors.tokens();
        let vectors = vectors.get().await?;
        let values: usize = vectors.iter().map(Vec::len).sum();
        beside(values * size_of::<f32>(), move || {
            let entry = |(index, values): (usize, Vec<f32>)| {
                let values = shortened(values, dimensions);
                let embedding = if in_base64 { Vector::Base64(base64(&values)) } else { Vector::Floats(values) };
                Entry { object: "embedding", index, embedding }
            };
            let data: Vec<Entry> = vectors.into_iter().enumerate().map(entry).collect();
            let usage = json!({"prompt_tokens": total, "total_tokens": total});
            let answer = Answer { object: "list", data, model: &model.name, usage };
            let text = serde_json::to_string(&answer).map_err(|error| ApiError::internal(error.to_string()))?;
            Ok(json_text(text).into_response())
        })
        .await
    }
}

/// The answer to a request.
#[derive(Serialize)]
struct Answer<'a> {
    object: &'static str,
    data: Vec<Entry>,
    model: &'a str,
    usage: Value,
}

fn base64(values: &[f32]) -> String {
    STANDARD.encode(values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>())
}
