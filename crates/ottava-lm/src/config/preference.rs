//! The table `[preference]`.

use super::LoraConfig;
use super::auto;
use crate::data::PreferenceKind;
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
    /// The factor of the squared sum of the rewards of a pair, for `bradley_terry`.
    pub center_rewards_coefficient: f64,
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
#[serde(rename_all = "snake_case")]
pub enum LossType {
    /// DPO.
    Sigmoid,
    /// DPO with flipped preferences.
    Robust,
    /// The hinge loss of the margin.
    Hinge,
    /// IPO.
    Ipo,
    /// That of a reward model.
    BradleyTerry,
    /// KTO, of completions with labels.
    Kto,
}

impl LossType {
    /// The name as in `preference.loss_type`.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            LossType::Sigmoid => "sigmoid",
            LossType::Robust => "robust",
            LossType::Hinge => "hinge",
            LossType::Ipo => "ipo",
            LossType::BradleyTerry => "bradley_terry",
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
            center_rewards_coefficient: 0.0,
            desirable_weight: 1.0,
            undesirable_weight: 1.0,
            precompute_ref_log_probs: None,
        }
    }
}

impl PreferenceConfig {
    /// Whether a reward model is trained.
    pub fn trains_reward_model(&self) -> bool {
        self.loss_type == Some(LossType::BradleyTerry)
    }

    /// The loss; `None` if the data hold no preferences, or are not known yet.
    pub fn how(&self) -> Option<Preference> {
        let PreferenceConfig { beta, label_smoothing, desirable_weight, undesirable_weight, .. } = *self;
        let loss = match self.loss_type? {
            LossType::Sigmoid => PreferenceLoss::Sigmoid { label_smoothing },
            LossType::Robust => PreferenceLoss::Robust { label_smoothing },
            LossType::Hinge => PreferenceLoss::Hinge,
            LossType::Ipo => PreferenceLoss::Ipo,
            // Rewards are scores as they are.
            LossType::BradleyTerry => {
                let loss = PreferenceLoss::BradleyTerry { centering: self.center_rewards_coefficient };
                return Some(Preference { loss, beta: 1.0 });
            }
            LossType::Kto => PreferenceLoss::Kto { desirable_weight, undesirable_weight },
        };
        Some(Preference { loss, beta })
    }

    /// Resolves the loss by the `kind` of the data and by whether the model of the start is a reward model, and the way to the reference model.
    pub(super) fn resolve(&mut self, kind: PreferenceKind, lora: &LoraConfig, is_reward_model: bool) -> Result<()> {
        let (by_kind, shape) = match kind {
            PreferenceKind::Pairs if is_reward_model => (LossType::BradleyTerry, "pairs (`chosen`, `rejected`)"),
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
        if self.trains_reward_model() {
            return Ok(());
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
