//! `POST /classify`: the probabilities of the labels of texts, by a classifier. Rankings by a classifier with one label are here too.

use crate::answer::new_id;
use crate::body::Body;
use crate::classifier::Classifier;
use crate::completions::prompts;
use crate::embeddings::{Vectors, with_ends};
use crate::error::{ApiError, Result};
use crate::params::WITHOUT_EFFECT;
use crate::preparing::beside;
use crate::served::{Encoded, Served};
use crate::truncation::{self, Truncation};
use serde_json::{Value, json};
use tokio::sync::OwnedSemaphorePermit;

/// The fields that are read.
const READ: &[&str] = &["model", "input", "add_special_tokens"];

/// The paths that a classifier answers, besides paths that read no model.
pub const PATHS: [&str; 5] = ["/v1/classify", "/v1/rerank", "/v1/score", "/tokenize", "/detokenize"];

/// Returns the fields that a request may have.
pub fn fields() -> Vec<&'static str> {
    [READ, truncation::FIELDS, WITHOUT_EFFECT].concat()
}

/// Returns `text` up to its last token that is not padding, which has the scores of the text.
fn scored(mut text: Encoded, padding: Option<u32>) -> Encoded {
    let last = text.ids.iter().rposition(|id| Some(*id) != padding).unwrap_or(0);
    text.ids.truncate(last + 1);
    text
}

/// The probabilities of texts of the field `field`, and the number of tokens.
async fn probabilities(
    served: &Served,
    classifier: &Classifier,
    permit: OwnedSemaphorePermit,
    body: &Body,
    (field, texts): (&str, Vec<Encoded>),
) -> Result<(Vec<Vec<f64>>, usize)> {
    let model = served.model(body)?;
    let tokens = texts.iter().map(|text| text.ids.len()).sum();
    let texts = texts.into_iter().map(|text| scored(text, classifier.padding)).collect();
    let scores = Vectors::start(served, permit, &model, field, texts)?.get().await?;
    Ok((scores.iter().map(|scores| classifier.activation.apply(scores)).collect(), tokens))
}

/// Answers a request with the label and the probabilities of each text.
pub async fn classify(served: &Served, permit: OwnedSemaphorePermit, mut body: Body) -> Result<Value> {
    let Some(classifier) = &served.classifier else {
        return Err(ApiError::invalid(
            "the model is no classifier, so it has no labels; serve a folder of a classifier",
        ));
    };
    let special = body.flag_on("add_special_tokens")?;
    let input = body.take_prompt().ok_or_else(|| ApiError::field("input", "`input` is missing"))?;
    let truncation = Truncation::read(&body, served.max_model_len.saturating_sub(1))?;
    let texts = with_ends(served, prompts(served, "input", input, special, &truncation).await?, special);
    let (all, tokens) = probabilities(served, classifier, permit, &body, ("input", texts)).await?;
    let entry = |(index, probs): (usize, &Vec<f64>)| {
        let best = (0..probs.len()).fold(0, |best, at| if probs[at] > probs[best] { at } else { best });
        json!({"index": index, "label": classifier.names[best], "probs": probs, "num_classes": probs.len()})
    };
    Ok(json!({
        "id": new_id("classify-"), "object": "list", "created": seconds(), "model": served.model(&body)?.name,
        "data": all.iter().enumerate().map(entry).collect::<Vec<_>>(),
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
    }))
}

fn seconds() -> u64 {
    std::time::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs()
}

/// The probabilities that `second` belongs to `first`, one text or as many as `second`, by a classifier with one label. Also returns the number of tokens.
pub async fn pair_scores(
    served: &Served,
    classifier: &Classifier,
    permit: OwnedSemaphorePermit,
    body: &Body,
    (first, second): (Vec<String>, Vec<String>),
) -> Result<(Vec<f64>, usize)> {
    if classifier.names.len() != 1 {
        let labels = classifier.names.len();
        return Err(ApiError::invalid(format!(
            "the model is a classifier of {labels} labels, and a score of a pair is of one label; use /classify, or serve a reranker"
        )));
    }
    let truncation = Truncation::read(body, served.max_model_len.saturating_sub(1))?;
    let (queries, tokenizer) = (first.len(), served.tokenizer.clone());
    let bytes = first.iter().chain(&second).map(String::len).sum();
    let encoded = beside(bytes, move || {
        let pair = |(i, text): (usize, &String)| {
            tokenizer.encode_example(&first[i.min(queries - 1)], Some(text)).map_err(ApiError::of_request)
        };
        second.iter().enumerate().map(pair).collect::<Result<Vec<_>>>()
    });
    let apply = |ids: Vec<u32>| truncation.apply(Encoded { ids, added: 0, text: None });
    let pairs: Vec<Encoded> = encoded.await?.into_iter().map(apply).collect();
    if pairs.iter().any(|pair| pair.ids.is_empty()) {
        return Err(ApiError::field("documents", "`documents` has a text without tokens; give at least one"));
    }
    let (all, tokens) = probabilities(served, classifier, permit, body, ("documents", pairs)).await?;
    Ok((all.into_iter().map(|probs| probs[0]).collect(), tokens))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_after_a_text_has_no_scores() {
        let left = |ids: &[u32]| scored(Encoded { ids: ids.to_vec(), added: 0, text: None }, Some(7)).ids;
        assert_eq!(left(&[1, 7, 2, 7, 7]), [1, 7, 2]);
        assert_eq!(left(&[7, 7]), [7]);
    }
}
