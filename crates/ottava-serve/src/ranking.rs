//! `POST /v1/rerank` and `POST /v1/score`: how similar texts are, as the cosine of their embeddings, or the probability of a pair by a reranker.

use crate::answer::new_id;
use crate::body::{Body, MOST_PROMPTS, Prompt};
use crate::classify::pair_scores;
use crate::completions::prompts;
use crate::embeddings::{Vectors, with_ends};
use crate::error::{ApiError, Result};
use crate::params::WITHOUT_EFFECT;
use crate::served::Served;
use crate::truncation::{self, Truncation};
use serde_json::{Value, json};
use tokio::sync::OwnedSemaphorePermit;

/// The fields of a request to rank documents.
const RERANK: &[&str] = &["model", "query", "documents", "top_n", "return_documents"];
/// The fields of a request for scores. The names of each pair mean the same.
const SCORE: &[&str] = &["model", "text_1", "text_2", "queries", "documents"];

/// The fields that a request to rank documents may have.
pub fn fields_of_rerank() -> Vec<&'static str> {
    [RERANK, truncation::FIELDS, WITHOUT_EFFECT].concat()
}

/// The fields that a request for scores may have.
pub fn fields_of_score() -> Vec<&'static str> {
    [SCORE, truncation::FIELDS, WITHOUT_EFFECT].concat()
}

/// Ranks the documents of a request.
pub async fn rerank(served: &Served, permit: OwnedSemaphorePermit, body: &Body) -> Result<Value> {
    let query = body.text("query")?.ok_or_else(|| ApiError::field("query", "`query` is missing"))?;
    let documents = texts(body, &["documents"])?;
    let top = body.count("top_n")?.filter(|&top| top > 0).unwrap_or(documents.len());
    let with_documents = body.flag_on("return_documents")?;
    let (scores, tokens) = scores(served, permit, body, vec![query.to_string()], documents.clone()).await?;
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
    let result = |&index: &usize| {
        let mut result = json!({"index": index, "relevance_score": scores[index]});
        if with_documents {
            result["document"] = json!({"text": documents[index]});
        }
        result
    };
    Ok(json!({
        "id": new_id("rerank-"), "model": served.model(body)?.name, "usage": {"total_tokens": tokens},
        "results": order.iter().take(top).map(result).collect::<Vec<_>>(),
    }))
}

/// Scores the pairs of texts of a request: one text with each of others, or pairs.
pub async fn score(served: &Served, permit: OwnedSemaphorePermit, body: &Body) -> Result<Value> {
    let (first, second) = (texts(body, &["text_1", "queries"])?, texts(body, &["text_2", "documents"])?);
    if first.len() != 1 && first.len() != second.len() {
        let message =
            format!("`text_1` has {} texts and `text_2` has {}; give one text or as many", first.len(), second.len());
        return Err(ApiError::field("text_1", message));
    }
    let (scores, tokens) = scores(served, permit, body, first, second).await?;
    let entry = |(index, score): (usize, &f64)| json!({"index": index, "object": "score", "score": score});
    Ok(json!({
        "id": new_id("score-"), "object": "list", "model": served.model(body)?.name,
        "data": scores.iter().enumerate().map(entry).collect::<Vec<_>>(),
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }))
}

/// Reads the texts of the first of `names` that the request has.
fn texts(body: &Body, names: &[&str]) -> Result<Vec<String>> {
    let name = names.iter().find(|name| body.get(name).is_some()).unwrap_or(&names[0]);
    let missing = || ApiError::field(name, format!("`{name}` is missing or empty; it is a text or a list of texts"));
    let text = |value: &Value| value.as_str().or_else(|| value.get("text")?.as_str()).map(str::to_string);
    let texts = match body.get(name) {
        Some(Value::Array(_)) => body.list(name, MOST_PROMPTS)?.into_iter().flatten().map(text).collect(),
        value => value.and_then(text).map(|text| vec![text]),
    };
    texts.filter(|texts: &Vec<String>| !texts.is_empty()).ok_or_else(missing)
}

/// The cosines of the embeddings of `first`, one text or as many as `second`, and of `second`; of a classifier, the probabilities of pairs. Also returns the number of tokens.
async fn scores(
    served: &Served,
    permit: OwnedSemaphorePermit,
    body: &Body,
    first: Vec<String>,
    second: Vec<String>,
) -> Result<(Vec<f64>, usize)> {
    if let Some(classifier) = &served.classifier {
        return pair_scores(served, classifier, permit, body, (first, second)).await;
    }
    let (model, queries) = (served.model(body)?, first.len());
    let all = Prompt::Texts(first.into_iter().chain(second).collect());
    let truncation = Truncation::read(body, served.max_model_len.saturating_sub(1))?;
    let encoded = with_ends(served, prompts(served, "documents", all, true, &truncation).await?, true);
    let vectors = Vectors::start(served, permit, &model, "documents", encoded)?;
    let tokens = vectors.tokens();
    let vectors = vectors.get().await?;
    let (first, second) = vectors.split_at(queries);
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let cosine = |a: &[f32], b: &[f32]| dot(a, b) / (dot(a, a) * dot(b, b)).sqrt().max(f64::MIN_POSITIVE);
    let scores = second.iter().enumerate().map(|(i, of_second)| cosine(&first[i.min(queries - 1)], of_second));
    Ok((scores.collect(), tokens))
}
