//! The table `[preference]`.

use super::loss_type::{LossType, LossTypes};
use crate::{LoraConfig, auto};
use ottava_common::error::{Error, Result};
use ottava_data::PreferenceKind;
use ottava_tensor::ops::{PreferenceLoss, PreferenceTerm};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The `[preference]` table: training on preferences, with TRL's names.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PreferenceConfig {
    /// The loss, by TRL's names. Losses of pairs: "sigmoid" (DPO), "robust" (DPO with flipped preferences), "hinge", "ipo", "sigmoid_norm",
    /// "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down", "discopop" or "sft". Losses of pairs
    /// without a reference model: "cpo", "simpo" or "orpo". Losses of completions with labels: "kto" or "apo_zero_unpaired". "bradley_terry" trains a reward model on pairs, from a language model or a
    /// reward model. "auto" is "kto" for completions with labels. For pairs, "auto" is "bradley_terry" if the model is a reward model, else
    /// "sigmoid". A list such as ["sigmoid", "bco_pair", "sft"] adds losses.
    #[serde(with = "auto")]
    #[schemars(with = "auto::Auto<LossTypes>")]
    pub loss_type: Option<LossTypes>,
    /// The factors of the losses of a list, in the order of loss_type; [] means 1 for each loss.
    pub loss_weights: Vec<f64>,
    /// The reward of a completion is beta times its log-probability minus its log-probability under the reference model. With a larger
    /// beta, the model stays nearer to the reference model. "cpo", "simpo" and "orpo" have no reference model; for "orpo", beta is the factor
    /// of the loss of the odds ratio. The paper of SimPO takes 2.0 to 2.5.
    pub beta: f64,
    /// The share of pairs whose preference is assumed to be wrong, from 0 to less than 0.5; for "sigmoid" (conservative DPO), "robust",
    /// "exo_pair" (which requires it, for example 1e-3), "aot", "aot_unpaired", "cpo" and "simpo".
    pub label_smoothing: f64,
    /// The factor of the negative log-likelihood of the chosen completions in "cpo".
    pub cpo_alpha: f64,
    /// The margin of "simpo" by which the reward of the chosen completion should exceed the reward of the rejected one. The paper takes 0.3
    /// to 0.8 times beta.
    pub simpo_gamma: f64,
    /// The temperature of "discopop".
    pub discopop_tau: f64,
    /// true trains without a reference model: the log-probabilities of the reference model are 0 in every loss, and nothing is computed for
    /// them.
    pub reference_free: bool,
    /// The factor of the squared sum of the rewards of a pair, which draws the rewards of "bradley_terry" to a mean of 0.
    pub center_rewards_coefficient: f64,
    /// The factor of the losses of desirable completions, for "kto" and "apo_zero_unpaired".
    pub desirable_weight: f64,
    /// The factor of the losses of undesirable completions, for "kto" and "apo_zero_unpaired".
    pub undesirable_weight: f64,
    /// Where the log-probabilities of the reference model come from: true computes them before the first step and stores them in the run's
    /// folder; false computes them in each step by the model without its adapters. "auto" is false if new adapters are trained, else true.
    #[serde(with = "auto")]
    #[schemars(with = "auto::Auto<bool>")]
    pub precompute_ref_log_probs: Option<bool>,
}

impl Default for PreferenceConfig {
    fn default() -> PreferenceConfig {
        PreferenceConfig {
            loss_type: None,
            loss_weights: Vec::new(),
            beta: 0.1,
            label_smoothing: 0.0,
            cpo_alpha: 1.0,
            simpo_gamma: 0.5,
            discopop_tau: 0.05,
            reference_free: false,
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
        self.losses().contains(&LossType::BradleyTerry)
    }

    /// The losses; none if the data hold no preferences, or are not known yet.
    pub(crate) fn losses(&self) -> &[LossType] {
        self.loss_type.as_ref().map_or(&[], |losses| losses.all())
    }

    /// Whether the losses are of a method without a reference model.
    pub(crate) fn is_without_reference(&self) -> bool {
        self.losses().iter().any(|loss| loss.has_no_reference())
    }

    /// Whether log-probabilities are compared with the log-probabilities of a reference model.
    pub fn has_reference(&self) -> bool {
        !self.reference_free && !self.is_without_reference() && !self.trains_reward_model()
    }

    /// Whether there is a weight for each loss, or none.
    fn weights_fit(&self) -> bool {
        self.loss_weights.is_empty() || self.loss_weights.len() == self.losses().len()
    }

    /// The numbers of weights and losses when [`PreferenceConfig::weights_fit`] is false, for a message.
    fn misfit(&self) -> String {
        let [weights, losses] = [self.loss_weights.len(), self.losses().len()];
        format!("loss_weights` has {weights} numbers, and `loss_type` names {losses} losses")
    }

    /// The losses with their weights and constants; none if the data hold no preferences, or are not known yet.
    pub fn terms(&self) -> Vec<PreferenceTerm> {
        let weights = self.loss_weights.iter().copied().chain(std::iter::repeat(1.0));
        let terms = self.losses().iter().zip(weights).flat_map(|(loss, weight)| {
            let likelihood = PreferenceTerm { loss: PreferenceLoss::Sft, weight: weight * self.likelihood(*loss) };
            let with_likelihood = (likelihood.weight > 0.0).then_some(likelihood);
            [PreferenceTerm { loss: self.loss(*loss), weight }].into_iter().chain(with_likelihood)
        });
        terms.collect()
    }

    /// The factor of the negative log-likelihood that a loss adds to [`PreferenceConfig::loss`].
    fn likelihood(&self, loss: LossType) -> f64 {
        match loss {
            LossType::Cpo => self.cpo_alpha,
            LossType::Orpo => 1.0,
            _ => 0.0,
        }
    }

    /// What a loss compares, with its constants.
    fn loss(&self, loss: LossType) -> PreferenceLoss {
        let PreferenceConfig { label_smoothing, desirable_weight, undesirable_weight, .. } = *self;
        match loss {
            LossType::Sigmoid | LossType::Cpo => PreferenceLoss::Sigmoid { label_smoothing },
            LossType::Robust => PreferenceLoss::Robust { label_smoothing },
            LossType::Hinge => PreferenceLoss::Hinge,
            LossType::Ipo => PreferenceLoss::Ipo,
            LossType::SigmoidNorm => PreferenceLoss::SigmoidNorm,
            LossType::ExoPair => PreferenceLoss::ExoPair { label_smoothing },
            LossType::NcaPair => PreferenceLoss::NcaPair,
            LossType::BcoPair => PreferenceLoss::BcoPair,
            LossType::SppoHard => PreferenceLoss::SppoHard,
            LossType::Aot => PreferenceLoss::Aot { label_smoothing },
            LossType::AotUnpaired => PreferenceLoss::AotUnpaired { label_smoothing },
            LossType::ApoZero => PreferenceLoss::ApoZero,
            LossType::ApoDown => PreferenceLoss::ApoDown,
            LossType::Discopop => PreferenceLoss::Discopop { tau: self.discopop_tau },
            LossType::Sft => PreferenceLoss::Sft,
            LossType::Simpo => PreferenceLoss::Simpo { gamma: self.simpo_gamma, label_smoothing },
            LossType::Orpo => PreferenceLoss::OddsRatio,
            LossType::BradleyTerry => PreferenceLoss::BradleyTerry { centering: self.center_rewards_coefficient },
            LossType::Kto => PreferenceLoss::Kto { desirable_weight, undesirable_weight },
            LossType::ApoZeroUnpaired => PreferenceLoss::ApoZeroUnpaired { desirable_weight, undesirable_weight },
        }
    }

    /// The losses and the settings that they read, for a message.
    pub fn describe(&self) -> String {
        let weights =
            self.loss_weights.iter().map(|weight| format!("{weight} × ")).chain(std::iter::repeat(String::new()));
        let losses = self.losses().iter().zip(weights).map(|(loss, weight)| format!("{weight}{}", loss.as_str()));
        let mut text = format!("loss_type {}", losses.collect::<Vec<_>>().join(" + "));
        if !self.trains_reward_model() {
            text += &format!(", beta {}", self.beta);
        }
        let constants = [
            ("label_smoothing", self.label_smoothing),
            ("cpo_alpha", self.cpo_alpha),
            ("simpo_gamma", self.simpo_gamma),
        ];
        for (key, value) in constants {
            if value > 0.0 && self.losses().iter().any(|loss| loss.reads(key)) {
                text += &format!(", {key} {value}");
            }
        }
        text
    }

    /// Resolves the loss by the `kind` of the data, and by whether the initial model is a reward model. Also resolves where the
    /// log-probabilities of the reference model come from.
    pub(crate) fn resolve(&mut self, kind: PreferenceKind, lora: &LoraConfig, is_reward_model: bool) -> Result<()> {
        let (by_kind, shape) = match kind {
            PreferenceKind::Pairs if is_reward_model => (LossType::BradleyTerry, "pairs (`chosen`, `rejected`)"),
            PreferenceKind::Pairs => (LossType::Sigmoid, "pairs (`chosen`, `rejected`)"),
            PreferenceKind::Labels => (LossType::Kto, "completions with labels (`completion`, `label`)"),
        };
        let losses = self.loss_type.get_or_insert(by_kind.into());
        if let Some(loss) = losses.all().iter().find(|loss| loss.kind() != kind) {
            return Err(Error::Config(format!(
                "`preference.loss_type` is \"{}\", and the data hold {shape}; set it to \"{}\" or \"auto\"",
                loss.as_str(),
                by_kind.as_str()
            )));
        }
        if !self.weights_fit() {
            return Err(Error::Config(format!("`preference.{}", self.misfit())));
        }
        if !self.has_reference() {
            return Ok(());
        }
        let trains_base = match lora {
            LoraConfig { r: 0, .. } => "`lora.r` is 0",
            LoraConfig { modules_to_save, .. } if !modules_to_save.is_empty() => "`lora.modules_to_save` is set",
            _ => "",
        };
        match *self.precompute_ref_log_probs.get_or_insert(!lora.keeps_base()) || trains_base.is_empty() {
            true => Ok(()),
            false => Err(Error::Config(format!(
                "`preference.precompute_ref_log_probs` is false, and {trains_base}: weights of the base are trained, so no reference model is left \
                 after the first step; set it to true or \"auto\""
            ))),
        }
    }
}

/// Problems of `[preference]`, without the data.
pub(crate) fn problems(config: &PreferenceConfig) -> Vec<String> {
    let PreferenceConfig { beta, label_smoothing, discopop_tau, center_rewards_coefficient, .. } = *config;
    let PreferenceConfig { desirable_weight, undesirable_weight, cpo_alpha, simpo_gamma, ref loss_weights, .. } =
        *config;
    let (losses, mut problems) = (config.losses(), Vec::new());
    let mut demand = |holds: bool, problem: &str| {
        if !holds {
            problems.push(format!("`preference.{problem}"));
        }
    };
    let above_zero = |number: f64| number.is_finite() && number > 0.0;
    demand(above_zero(beta), "beta` must be above 0");
    demand(above_zero(discopop_tau), "discopop_tau` must be above 0");
    demand((0.0..0.5).contains(&label_smoothing), "label_smoothing` is a share of pairs from 0 to less than 0.5");
    demand(
        label_smoothing > 0.0 || !losses.contains(&LossType::ExoPair),
        "label_smoothing` is 0, and the loss exo_pair is infinite without it; set it to 1e-3, for example",
    );
    let weights = [
        ("center_rewards_coefficient", center_rewards_coefficient),
        ("desirable_weight", desirable_weight),
        ("undesirable_weight", undesirable_weight),
        ("cpo_alpha", cpo_alpha),
        ("simpo_gamma", simpo_gamma),
    ];
    for (key, weight) in weights.into_iter().chain(loss_weights.iter().map(|&weight| ("loss_weights", weight))) {
        demand(weight.is_finite() && weight >= 0.0, &format!("{key}` must not be negative or infinite"));
    }
    demand(losses.is_empty() || config.weights_fit(), &config.misfit());
    let [first, rest @ ..] = losses else { return problems };
    demand(
        rest.iter().all(|loss| loss.kind() == first.kind()),
        "loss_type` names losses of pairs and losses of completions with labels; a run has data of one kind",
    );
    demand(
        rest.is_empty() || !losses.contains(&LossType::BradleyTerry),
        "loss_type` adds bradley_terry to other losses; a reward model has no log-probabilities, so name it alone",
    );
    let has_reference = |loss: &LossType| !loss.has_no_reference() && *loss != LossType::Sft;
    demand(
        !config.is_without_reference() || !losses.iter().any(has_reference),
        "loss_type` adds losses with a reference model to cpo, simpo or orpo, which have none; only sft goes together with them",
    );
    problems
}
