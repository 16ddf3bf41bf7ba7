//! Classifiers: a decoder whose head computes a score for each label. transformers calls this `…ForSequenceClassification`. A reward model is a
//! classifier with one label.

use crate::{ConfigFile, DecoderConfig, HeadSpec};
use ottava_common::error::Result;
use serde_json::{Map, Value, json};

/// The key of the padding token. The scores of a sequence are the scores of its last token that is not padding.
pub(super) const PAD: &str = "pad_token_id";

/// The key of the problem that a classifier solves.
const PROBLEM: &str = "problem_type";

/// The labels of a classifier, as `config.json` has them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Labels {
    /// The names of the labels, in the order of the scores.
    pub names: Vec<String>,
    /// The name of the problem in transformers; `None` if the file does not say it.
    pub problem_type: Option<String>,
}

impl Labels {
    /// Returns `count` labels with the names that transformers gives them.
    pub fn numbered(count: usize) -> Labels {
        Labels { names: (0..count).map(|number| format!("LABEL_{number}")).collect(), problem_type: None }
    }

    /// Reads the labels of the classifier of `file`. Errors if the file has no labels, or numbers them wrongly.
    pub(super) fn read(file: &ConfigFile) -> Result<Labels> {
        let names: Map<String, Value> = file.optional("id2label", Map::new())?;
        let problem_type = file.nullable(PROBLEM)?;
        if names.is_empty() {
            // Without names of labels, transformers builds a classifier with two labels.
            return match file.optional("num_labels", 2)? {
                0 => Err(file.error("`num_labels` is 0; a classifier has at least one label")),
                count => Ok(Labels { problem_type, ..Labels::numbered(count) }),
            };
        }
        let name = |number: usize| {
            let name = names.get(&number.to_string())?;
            Some(name.as_str().map_or_else(|| name.to_string(), str::to_string))
        };
        let all: Option<Vec<String>> = (0..names.len()).map(name).collect();
        let names = all.ok_or_else(|| file.error("the keys of `id2label` are not the numbers from 0 on"))?;
        Ok(Labels { names, problem_type })
    }

    /// Returns `file` with the architecture of a classifier with these labels.
    pub(super) fn write(&self, file: &ConfigFile, architecture: &str) -> ConfigFile {
        let mut values = file.values().clone();
        values.insert("architectures".into(), json!([architecture]));
        let numbered = || self.names.iter().enumerate();
        let names: Map<String, Value> = numbered().map(|(i, name)| (i.to_string(), json!(name))).collect();
        let numbers: Map<String, Value> = numbered().map(|(i, name)| (name.clone(), json!(i))).collect();
        values.insert("id2label".into(), names.into());
        values.insert("label2id".into(), numbers.into());
        values.shift_remove("num_labels");
        if let Some(problem) = &self.problem_type {
            values.insert(PROBLEM.into(), json!(problem));
        }
        file.with_values(values)
    }
}

/// Returns `file` with the padding token `pad`, if `file` names no padding token.
pub(super) fn with_padding(file: &ConfigFile, pad: Option<u32>) -> ConfigFile {
    let mut values = file.values().clone();
    if let Some(pad) = pad.filter(|_| !file.has(PAD)) {
        values.insert(PAD.into(), json!(pad));
    }
    file.with_values(values)
}

/// Returns the sizes of a classifier with the decoder of `sizes`. Factors and soft caps of logits do not apply to scores.
pub(super) fn with_scores(file: &ConfigFile, sizes: DecoderConfig) -> Result<DecoderConfig> {
    let labels = Labels::read(file)?.names.len();
    let head = HeadSpec { labels: Some(labels), tied: false, scale: 1.0, cap: None, ..sizes.head };
    Ok(DecoderConfig { head, ..sizes })
}
