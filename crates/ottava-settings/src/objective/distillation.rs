//! The table `[distillation]`.

use crate::auto;
use ottava_recipe::RecipeName;
use ottava_tensor::ops::Divergence;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The `[distillation]` table: the model learns the distribution of another model, the teacher, at each token of the training data. Keys have the
/// names of TRL's GKD.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DistillationConfig {
    /// The folder of the teacher: a language model with the tokens of the model that is trained. "" runs no teacher.
    pub teacher: PathBuf,
    /// The folder of the teacher's distributions, which `ottava logits` writes: the teacher does not run beside the model. "" reads no distributions.
    pub logits: PathBuf,
    /// The likeliest tokens of each distribution in `logits`; all other tokens are one event of the divergence.
    pub top_k: usize,
    /// The divergence: 0 is the forward KL divergence of the teacher from the model, 1 the reverse KL divergence of the model from the teacher,
    /// and a number between them the generalized Jensen-Shannon divergence with this share of the teacher in the mixture.
    pub beta: f64,
    /// The temperature by which the logits of both models are divided.
    pub temperature: f64,
    /// The share of the steps whose completions the trained model draws (on-policy): their rows keep the prompts of the data, and the teacher reads
    /// what the model has drawn at `temperature` behind each prompt. 0 learns from the completions of the data alone.
    pub lmbda: f64,
    /// Tokens of a drawn completion at most; a completion also ends where its row ends.
    pub max_completion_length: usize,
    /// The recipe of the teacher's products: "auto" is the recipe of the run, or "fp8-current" if that is "fp8-delayed". The teacher is never
    /// updated.
    #[serde(with = "auto")]
    #[schemars(with = "auto::Auto<RecipeName>")]
    pub teacher_recipe: Option<RecipeName>,
}

impl Default for DistillationConfig {
    fn default() -> DistillationConfig {
        DistillationConfig {
            teacher: PathBuf::new(),
            logits: PathBuf::new(),
            top_k: 64,
            beta: 0.5,
            temperature: 0.9,
            lmbda: 0.0,
            max_completion_length: 128,
            teacher_recipe: None,
        }
    }
}

impl DistillationConfig {
    /// Whether the run has a teacher, or its distributions.
    pub fn is_on(&self) -> bool {
        !self.teacher.as_os_str().is_empty() || self.is_stored()
    }

    /// Whether the run reads the teacher's distributions from a folder.
    pub fn is_stored(&self) -> bool {
        !self.logits.as_os_str().is_empty()
    }

    /// Whether the trained model draws completions.
    pub fn draws(&self) -> bool {
        self.is_on() && self.lmbda > 0.0
    }

    /// The divergence that a run minimizes.
    pub fn divergence(&self) -> Divergence {
        Divergence { beta: self.beta, temperature: self.temperature }
    }
}
