//! The table `[preference]`.

use super::auto;
use super::problems::Problems;
use super::{LoraConfig, RunConfig};
use crate::data::{Formatting, Packing, PreferenceKind};
use crate::error::{Error, Result};
use crate::step::Preference;
use ottava_tensor::ops::PreferenceLoss;
use serde::{Deserialize, Serialize};

/// The `[preference]` table: training on preferences, with TRL's names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PreferenceConfig {
    /// The loss; `None`, written `auto`, is chosen by the data, and there is none without preferences.
    #[serde(with = "auto")]
    pub loss_type: Option<LossType>,
    /// The factor of log-probabilities relative to the reference model.
    pub beta: f64,
    /// The share of pairs whose preference is assumed to be wrong, for `sigmoid` and `robust`.
    pub label_smoothing: f64,
    /// The factor of losses of desirable completions, for `kto`.
    pub desirable_weight: f64,
    /// The factor of losses of undesirable completions, for `kto`.
    pub undesirable_weight: f64,
    /// Whether log-probabilities of the reference model are computed before the first step and stored, instead of in each step without
    /// adapters; `None`, written `auto`, computes them ahead unless new adapters are trained.
    #[serde(with = "auto")]
    pub precompute_ref_log_probs: Option<bool>,
}

/// The losses of preferences, as TRL names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LossType {
    /// DPO.
    Sigmoid,
    /// DPO with flipped preferences.
    Robust,
    /// The hinge loss of the margin.
    Hinge,
    /// IPO.
    Ipo,
    /// KTO, of completions with labels.
    Kto,
}

impl LossType {
    /// The name as in `preference.loss_type`.
    fn as_str(self) -> &'static str {
        match self {
            LossType::Sigmoid => "sigmoid",
            LossType::Robust => "robust",
            LossType::Hinge => "hinge",
            LossType::Ipo => "ipo",
            LossType::Kto => "kto",
        }
    }

    /// The preferences that it compares.
    fn kind(self) -> PreferenceKind {
        if self == LossType::Kto { PreferenceKind::Labels } else { PreferenceKind::Pairs }
    }
}

impl Default for PreferenceConfig {
    fn default() -> PreferenceConfig {
        PreferenceConfig {
            loss_type: None,
            beta: 0.1,
            label_smoothing: 0.0,
            desirable_weight: 1.0,
            undesirable_weight: 1.0,
            precompute_ref_log_probs: None,
        }
    }
}

impl PreferenceConfig {
    /// The loss; `None` if the data hold no preferences, or are not known yet.
    pub fn how(&self) -> Option<Preference> {
        let PreferenceConfig { beta, label_smoothing, desirable_weight, undesirable_weight, .. } = *self;
        let loss = match self.loss_type? {
            LossType::Sigmoid => PreferenceLoss::Sigmoid { label_smoothing },
            LossType::Robust => PreferenceLoss::Robust { label_smoothing },
            LossType::Hinge => PreferenceLoss::Hinge,
            LossType::Ipo => PreferenceLoss::Ipo,
            LossType::Kto => PreferenceLoss::Kto { desirable_weight, undesirable_weight },
        };
        Some(Preference { loss, beta })
    }

    /// Resolves the loss by the `kind` of the data, and the way to the reference model.
    fn resolve(&mut self, kind: PreferenceKind, lora: &LoraConfig) -> Result<()> {
        let (by_kind, shape) = match kind {
            PreferenceKind::Pairs => (LossType::Sigmoid, "pairs (`chosen`, `rejected`)"),
            PreferenceKind::Labels => (LossType::Kto, "completions with labels (`completion`, `label`)"),
        };
        let loss = *self.loss_type.get_or_insert(by_kind);
        if loss.kind() != kind {
            return Err(Error::Config(format!(
                "`preference.loss_type` is \"{}\", and the data hold {shape}; set it to \"{}\" or \"auto\"",
                loss.as_str(),
                by_kind.as_str()
            )));
        }
        let is_base = lora.r > 0 && lora.init_from.as_os_str().is_empty();
        if !*self.precompute_ref_log_probs.get_or_insert(!is_base) && lora.r == 0 {
            return Err(Error::Config(
                "`preference.precompute_ref_log_probs` is false, and `lora.r` is 0: without adapters, no reference model is left after the first \
                 step; set it to true or \"auto\""
                    .into(),
            ));
        }
        Ok(())
    }
}

impl RunConfig {
    /// Resolves `[preference]` and the packing of preferences by the formattings of the files.
    ///
    /// Errors with [`Error::Config`] when a setting does not go together with the data.
    pub(super) fn resolve_preference(&mut self, mut files: impl Iterator<Item = Formatting>) -> Result<()> {
        let Some(kind) = files.find_map(Formatting::preference) else {
            return match self.preference.loss_type {
                None => Ok(()),
                Some(loss) => Err(Error::Config(format!(
                    "`preference.loss_type` is \"{}\", and the data hold no preferences (`chosen` and `rejected`, or `completion` and `label`); set it to \"auto\"",
                    loss.as_str()
                ))),
            };
        };
        self.preference.resolve(kind, &self.lora)?;
        if self.data.datasets.len() > 1 {
            return Err(Error::Config(
                "[[data.datasets]] has several sets, and the data are preferences, which are not mixed; name all files in `data.train_files`".into(),
            ));
        }
        for (key, ranks) in [("context", self.parallel.context), ("tensor", self.parallel.tensor)] {
            if ranks > 1 {
                return Err(Error::Config(format!(
                    "`parallel.{key}` is {ranks}, and the data are preferences, which are trained with data and pipeline parallelism only; set it \
                     to 1"
                )));
            }
        }
        match self.data.packing {
            Packing::Auto | Packing::None => self.data.packing = Packing::None,
            Packing::Wrapped | Packing::Bfd => {
                return Err(Error::Config(
                    "`data.packing` packs several documents into a row, and the data are preferences, each completion of which has a row of its own; \
                     set it to \"none\" or \"auto\""
                        .into(),
                ));
            }
        }
        // Padding comes after the only document of a row, where causal attention does not see it.
        self.data.document_mask.get_or_insert(false);
        Ok(())
    }

    /// Rows of a micro-batch: of pairs, two for each.
    pub fn micro_batch_rows(&self) -> usize {
        let each = self.preference.how().map_or(1, |how| how.loss.sequences());
        self.training.per_device_train_batch_size * each
    }

    pub(super) fn check_preference(&self, problems: &mut Problems) {
        let PreferenceConfig { beta, label_smoothing, desirable_weight, undesirable_weight, .. } = self.preference;
        problems.demand(beta.is_finite() && beta > 0.0, "`preference.beta` must be above 0");
        problems.demand(
            (0.0..0.5).contains(&label_smoothing),
            "`preference.label_smoothing` is a share of pairs from 0 to less than 0.5",
        );
        let weights = [("desirable_weight", desirable_weight), ("undesirable_weight", undesirable_weight)];
        for (key, weight) in weights {
            let text = format!("`preference.{key}` must not be negative or infinite");
            problems.demand(weight.is_finite() && weight >= 0.0, text);
        }
    }
}
