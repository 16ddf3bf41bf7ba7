//! Reward models: a decoder with a head that computes one score. transformers calls this `…ForSequenceClassification` with one label.

use crate::{ConfigFile, DecoderConfig, HeadSpec};
use ottava_common::error::Result;
use serde_json::{Map, Value, json};

/// The key of the padding token. The reward of a sequence is the score of its last token that is not padding.
pub(super) const PAD: &str = "pad_token_id";

/// Returns `file` with the padding token `pad`, if `file` names no padding token.
pub(super) fn with_padding(file: &ConfigFile, pad: Option<u32>) -> ConfigFile {
    let mut values = file.values().clone();
    if let Some(pad) = pad.filter(|_| !file.has(PAD)) {
        values.insert(PAD.into(), json!(pad));
    }
    file.with_values(values)
}

/// Returns `file` with the architecture of a reward model and one label.
pub(super) fn with_architecture(file: &ConfigFile, architecture: &str) -> ConfigFile {
    let mut values = file.values().clone();
    values.insert("architectures".into(), json!([architecture]));
    values.insert("id2label".into(), json!({"0": "LABEL_0"}));
    values.insert("label2id".into(), json!({"LABEL_0": 0}));
    file.with_values(values)
}

/// Returns the sizes of a reward model with the decoder of `sizes`. Factors and soft caps of logits do not apply to a score.
///
/// Errors when the number of labels is not one.
pub(super) fn with_score(file: &ConfigFile, sizes: DecoderConfig) -> Result<DecoderConfig> {
    let labels: Map<String, Value> = file.optional("id2label", Map::new())?;
    // Without names of labels, transformers builds a classifier with two labels.
    let labels = if labels.is_empty() { file.optional("num_labels", 2)? } else { labels.len() };
    if labels != 1 {
        return Err(file.error(&format!("the head has {labels} labels (`id2label`); that of a reward model has one")));
    }
    let head = HeadSpec { score: true, tied: false, scale: 1.0, cap: None, ..sizes.head };
    Ok(DecoderConfig { head, ..sizes })
}
