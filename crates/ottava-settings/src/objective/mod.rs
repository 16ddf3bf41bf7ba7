//! The objectives: the settings of each objective, and the properties of objectives that the rest of a run reads.

mod classification;
mod classification_runs;
mod distillation;
mod distillation_runs;
mod effects;
mod embedding;
mod embedding_runs;
mod encoder_runs;
mod examples;
mod loss_type;
mod preference;
mod preference_runs;
mod reinforcement;
mod reinforcement_runs;
#[cfg(test)]
mod tests;

pub use classification::{ClassificationConfig, ProblemType};
pub use distillation::DistillationConfig;
pub(super) use effects::OF_REFERENCE;
pub use embedding::{EmbeddingConfig, EmbeddingPooling};
pub use loss_type::{LossType, LossTypes};
pub use preference::PreferenceConfig;
pub use reinforcement::{
    AdvantageConfig, AdvantageEstimator, Aggregation, CorrectionConfig, CorrectionMode, EndpointConfig, KlEstimator,
    PolicyConfig, PolicyLossType, ReinforcementConfig, SamplingConfig, ScaleRewards,
};

use crate::RunConfig;
use ottava_checkpoint::Better;
use ottava_data::{Formatting, PreferenceKind};
use preference::problems;

/// What a run optimises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ObjectiveKind {
    /// The next token of documents.
    NextToken,
    /// Pairs of completions, relative to a reference model: DPO and its relatives.
    Pairs,
    /// Completions with labels, relative to a reference model: KTO and its relatives.
    Labels,
    /// The scores of a reward model, of pairs.
    Reward,
    /// The rewards of completions that the model draws.
    Reinforcement,
    /// The distributions of a teacher at the tokens of documents.
    Distillation,
    /// The labels of texts.
    Classification,
    /// Texts that belong together.
    Embedding,
}

/// The properties of an objective that the rest of a run reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectiveProperties {
    /// Rows of an example; `per_device_train_batch_size` counts examples.
    pub rows: usize,
    /// Whether documents are cut at the end of a row; otherwise long documents are left out.
    pub cuts_documents: bool,
    /// Whether evaluations compute the loss of texts: bits per byte, and metrics of each data set that has a name.
    pub evaluates_texts: bool,
    /// Whether the loss is smoothed by `label_smoothing_factor`.
    pub smooths_labels: bool,
    /// Whether two passes of a micro-batch can be compared, for the sentinel, `repeat_steps` and `debug_steps`.
    pub compares_passes: bool,
    /// Whether the loss falls as the model learns. The loss of policies is about 0 in each step, since advantages are differences from a mean.
    pub loss_falls: bool,
    /// The formatting of records that do not name their formatting.
    pub formatting: Formatting,
    /// The metrics of held-out rows, besides the loss, by which evaluations are compared, without the prefix `eval_`.
    pub metrics: &'static [(&'static str, Better)],
}

impl ObjectiveKind {
    /// The properties of the objective.
    pub fn properties(self) -> ObjectiveProperties {
        let tuning = |rows| ObjectiveProperties {
            rows,
            cuts_documents: true,
            evaluates_texts: false,
            smooths_labels: false,
            compares_passes: false,
            loss_falls: true,
            formatting: Formatting::Auto,
            metrics: &[],
        };
        match self {
            ObjectiveKind::NextToken => {
                ObjectiveProperties { evaluates_texts: true, smooths_labels: true, compares_passes: true, ..tuning(1) }
            }
            ObjectiveKind::Distillation => ObjectiveProperties { evaluates_texts: true, ..tuning(1) },
            ObjectiveKind::Pairs => tuning(PreferenceKind::Pairs.documents()),
            ObjectiveKind::Labels => tuning(PreferenceKind::Labels.documents()),
            ObjectiveKind::Reinforcement => {
                let formatting = Formatting::Prompts;
                ObjectiveProperties { cuts_documents: false, loss_falls: false, formatting, ..tuning(1) }
            }
            ObjectiveKind::Classification => ObjectiveProperties {
                formatting: Formatting::Classification,
                metrics: &[
                    ("accuracy", Better::Higher),
                    ("f1", Better::Higher),
                    ("pearson", Better::Higher),
                    ("mse", Better::Lower),
                ],
                ..tuning(1)
            },
            ObjectiveKind::Embedding => ObjectiveProperties {
                formatting: Formatting::Embedding,
                metrics: &[("accuracy", Better::Higher), ("mrr", Better::Higher)],
                ..tuning(1)
            },
            ObjectiveKind::Reward => {
                ObjectiveProperties { cuts_documents: false, ..tuning(PreferenceKind::Pairs.documents()) }
            }
        }
    }
}

impl ObjectiveKind {
    /// Returns the table of the settings of an objective whose data are examples, or `None` for other objectives.
    pub fn of_examples(self) -> Option<&'static str> {
        match self {
            ObjectiveKind::Classification => Some("[classification]"),
            ObjectiveKind::Embedding => Some("[embedding]"),
            _ => None,
        }
    }
}

impl RunConfig {
    /// Lists the problems of the objective's settings.
    pub(super) fn objective_problems(&self) -> Vec<String> {
        let of_preferences = problems(&self.preference);
        let of_examples = [self.classification_problems(), self.embedding_problems(), self.example_problems()].concat();
        [of_preferences, self.reinforcement_problems(), self.distillation_problems(), of_examples].concat()
    }

    /// What the run optimises. If the settings do not say it, the next token until [`RunConfig::resolve_data`] has read the data.
    pub fn objective(&self) -> ObjectiveKind {
        if self.reinforcement.is_on() {
            return ObjectiveKind::Reinforcement;
        }
        if self.distillation.is_on() {
            return ObjectiveKind::Distillation;
        }
        if self.classification.is_on() {
            return ObjectiveKind::Classification;
        }
        if self.embedding.is_on() {
            return ObjectiveKind::Embedding;
        }
        match self.preference.losses().first().map(|loss| loss.kind()) {
            None => ObjectiveKind::NextToken,
            Some(_) if self.preference.trains_reward_model() => ObjectiveKind::Reward,
            Some(PreferenceKind::Pairs) => ObjectiveKind::Pairs,
            Some(PreferenceKind::Labels) => ObjectiveKind::Labels,
        }
    }

    /// Examples of a batch of an evaluation. The batches of losses that compare the examples of a batch are those of training.
    pub fn evaluation_batch(&self) -> usize {
        let of_training = self.training.per_device_train_batch_size;
        match self.objective() {
            ObjectiveKind::Embedding | ObjectiveKind::Labels | ObjectiveKind::Reinforcement => of_training,
            _ => self.evaluation.per_device_eval_batch_size.unwrap_or(of_training),
        }
    }

    /// Rows of a batch of an evaluation, as [`RunConfig::micro_batch_rows`].
    pub fn evaluation_rows(&self) -> usize {
        self.micro_batch_rows() / self.training.per_device_train_batch_size * self.evaluation_batch()
    }

    /// Rows of a micro-batch; a pair has two rows, and an example of `[embedding]` has a row for each text.
    pub fn micro_batch_rows(&self) -> usize {
        let texts = if self.objective() == ObjectiveKind::Embedding { self.embedding.texts() } else { 1 };
        self.training.per_device_train_batch_size * self.objective().properties().rows * texts
    }
}
