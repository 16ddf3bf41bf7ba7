//! The table `[classification]`.

use crate::auto;
use ottava_models::Labels;
use ottava_tensor::ops::LabelLoss;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The problem that a classifier solves, with the names of transformers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ProblemType {
    /// Each text has one label.
    SingleLabelClassification,
    /// Each text has any number of labels.
    MultiLabelClassification,
    /// Each text has numbers.
    Regression,
}

impl ProblemType {
    /// All problems.
    pub const ALL: [ProblemType; 3] =
        [ProblemType::SingleLabelClassification, ProblemType::MultiLabelClassification, ProblemType::Regression];

    /// Returns the name in `config.json`.
    pub fn as_str(self) -> &'static str {
        match self {
            ProblemType::SingleLabelClassification => "single_label_classification",
            ProblemType::MultiLabelClassification => "multi_label_classification",
            ProblemType::Regression => "regression",
        }
    }

    /// Returns the problem with this name in `config.json`.
    pub fn named(name: &str) -> Option<ProblemType> {
        ProblemType::ALL.into_iter().find(|problem| problem.as_str() == name)
    }

    /// Returns the problem that transformers assumes for a classifier without a named problem: with one label the regression of a number, else one
    /// label of several.
    pub fn of_labels(labels: usize) -> ProblemType {
        if labels == 1 { ProblemType::Regression } else { ProblemType::SingleLabelClassification }
    }

    /// Returns the loss of the problem.
    pub fn loss(self) -> LabelLoss {
        match self {
            ProblemType::SingleLabelClassification => LabelLoss::SingleLabel,
            ProblemType::MultiLabelClassification => LabelLoss::MultiLabel,
            ProblemType::Regression => LabelLoss::Regression,
        }
    }
}

/// The `[classification]` table: a classifier of texts, with a score for each label. It starts from a language model, which gets a new head, or from a
/// classifier of transformers. Keys have the names of transformers. Setting one of the keys trains a classifier.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ClassificationConfig {
    /// The problem: "single_label_classification" (the cross entropy of one label), "multi_label_classification" (the binary cross entropy of each
    /// label, also for rerankers with one label) or "regression" (the squared error of numbers). "auto" is the problem of the model's folder; for a
    /// language model, or if the folder names none, it is "regression" with one label, else "single_label_classification".
    #[serde(with = "auto")]
    #[schemars(with = "auto::Auto<ProblemType>")]
    pub problem_type: Option<ProblemType>,
    /// Number of labels; 0 takes the number of label_names, or the labels of the model's folder, or 1 for a regression.
    pub num_labels: usize,
    /// The names of the labels in the order of the scores, which `config.json` gets as id2label; [] takes the names of the model's folder, or LABEL_0,
    /// LABEL_1 and so on. A record names its label by name or by number.
    pub label_names: Vec<String>,
}

impl ClassificationConfig {
    /// Whether the run trains a classifier.
    pub fn is_on(&self) -> bool {
        *self != ClassificationConfig::default()
    }

    /// Returns the problem. If the settings do not say it, the problem that follows from the number of labels.
    pub fn problem(&self) -> ProblemType {
        self.problem_type.unwrap_or(ProblemType::of_labels(self.labels().names.len()))
    }

    /// Returns the labels, which [`RunConfig::resolve_data`](crate::RunConfig::resolve_data) completes.
    pub fn labels(&self) -> Labels {
        let problem_type = self.problem_type.map(|problem| problem.as_str().to_string());
        match self.label_names.is_empty() {
            true => Labels { problem_type, ..Labels::numbered(self.num_labels.max(1)) },
            false => Labels { names: self.label_names.clone(), problem_type },
        }
    }
}
