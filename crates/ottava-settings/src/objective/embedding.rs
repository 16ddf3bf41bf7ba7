//! The table `[embedding]`.

use crate::auto;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How the activations of a text become its embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum EmbeddingPooling {
    /// The mean over the tokens of the text.
    Mean,
    /// The activations of the last token.
    Last,
    /// The activations of the first token, for encoders.
    Cls,
}

impl EmbeddingPooling {
    /// Returns the key of sentence-transformers that names the pooling.
    pub fn mode(self) -> &'static str {
        match self {
            EmbeddingPooling::Mean => "pooling_mode_mean_tokens",
            EmbeddingPooling::Last => "pooling_mode_lasttoken",
            EmbeddingPooling::Cls => "pooling_mode_cls_token",
        }
    }
}

/// The `[embedding]` table: an embedding model of texts, trained on texts that belong together (InfoNCE, in sentence-transformers
/// MultipleNegativesRankingLoss). Setting pooling trains an embedding model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct EmbeddingConfig {
    /// How the activations after the last norm become the embedding of a text: "mean", "last", or "cls" (the first token, for encoders). "auto"
    /// trains no embedding model.
    #[serde(with = "auto")]
    #[schemars(with = "auto::Auto<EmbeddingPooling>")]
    pub pooling: Option<EmbeddingPooling>,
    /// The temperature by which cosines are divided; sentence-transformers has its reciprocal, scale.
    pub temperature: f64,
    /// Number of negative texts of each record that are read; further negative texts of a record are left out.
    pub negatives: usize,
    /// Whether the texts of all data ranks are negatives for each anchor, as with gather_across_devices of sentence-transformers; otherwise the texts of
    /// a micro-batch on one rank.
    pub gather_across_ranks: bool,
}

impl Default for EmbeddingConfig {
    fn default() -> EmbeddingConfig {
        EmbeddingConfig { pooling: None, temperature: 0.05, negatives: 0, gather_across_ranks: true }
    }
}

impl EmbeddingConfig {
    /// Whether the run trains an embedding model.
    pub fn is_on(&self) -> bool {
        self.pooling.is_some()
    }

    /// Returns the number of texts of an example that are read: the anchor, the positive text, and the negative texts.
    pub fn texts(&self) -> usize {
        2 + self.negatives
    }
}
