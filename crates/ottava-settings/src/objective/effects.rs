//! Settings of objectives without effect, because of other settings.

use super::loss_type::LossType;
use crate::RunConfig;

impl RunConfig {
    /// Keys that the losses of preferences do not read, if there are any.
    pub(crate) fn reasons_of_preference(&self, reasons: &mut Vec<(&'static [&'static str], String)>) {
        let Some(losses) = &self.preference.loss_type else { return };
        reasons.push((&["training.label_smoothing_factor"], "with preferences; it is for the loss of texts".into()));
        for keys in OF_LOSSES {
            let key = keys[0].trim_start_matches("preference.");
            let readers =
                |of: &[LossType]| of.iter().filter(|loss| loss.reads(key)).map(|loss| loss.as_str()).collect();
            let [own, all]: [Vec<&str>; 2] = [readers(losses.all()), readers(&LossType::ALL)];
            if own.is_empty() {
                reasons.push((keys, format!("with loss_type {}; it is for {}", losses.names(), all.join(", "))));
            }
        }
        if self.preference.trains_reward_model() {
            reasons.push((OF_REFERENCE, "with loss_type bradley_terry, which has no reference model".into()));
        } else if self.preference.reference_free {
            let text = "with `reference_free`, since there is no reference model";
            reasons.push((&["preference.precompute_ref_log_probs"], text.into()));
        }
    }
}

/// Keys that only some losses read, as [`LossType::reads`] knows.
pub(crate) const OF_LOSSES: [&[&str]; 5] = [
    &["preference.label_smoothing"],
    &["preference.discopop_tau"],
    &["preference.center_rewards_coefficient"],
    &["preference.desirable_weight"],
    &["preference.undesirable_weight"],
];

pub(crate) const OF_REFERENCE: &[&str] =
    &["preference.beta", "preference.reference_free", "preference.precompute_ref_log_probs"];
