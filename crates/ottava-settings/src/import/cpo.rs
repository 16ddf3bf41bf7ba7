//! The losses of TRL's CPOTrainer, with which Axolotl trains SimPO.

use super::defaults::Trainer;
use super::{OBJECTIVE, Setting};
use toml::Value;

const ALPHA: &str = "preference.cpo_alpha";
const WEIGHTS: &str = "preference.loss_weights";

/// Names the loss of a file of CPOTrainer among the settings `ours`. CPOTrainer adds the negative log-likelihood of the chosen completions to each of
/// its losses, times `cpo_alpha`, which is 1 without the key.
pub(super) fn name_losses(trainer: Trainer, ours: &mut Vec<Setting>) {
    let find = |path: &str| ours.iter().find(|setting| setting.path == path).map(|setting| &setting.value);
    let (alpha, gamma) = (find(ALPHA), find("preference.simpo_gamma"));
    let loss = find(OBJECTIVE).map_or(Some("sigmoid"), Value::as_str).unwrap_or_default().to_string();
    let is_cpo = alpha.is_some() || gamma.is_some() || loss == "simpo";
    if !is_cpo || !matches!(trainer, Trainer::Trl | Trainer::Axolotl) {
        return;
    }
    let is_given = alpha.is_some();
    let alpha =
        alpha.and_then(|value| value.as_float().or(value.as_integer().map(|whole| whole as f64))).unwrap_or(1.0);
    let losses: Value = match (&*loss, alpha > 0.0) {
        ("sigmoid", _) => "cpo".into(),
        ("hinge" | "ipo" | "simpo", true) => vec![Value::from(&*loss), "sft".into()].into(),
        ("hinge" | "ipo" | "simpo", false) => (&*loss).into(),
        _ => return,
    };
    let mut added = vec![(OBJECTIVE, losses, "")];
    if loss != "sigmoid" {
        ours.retain(|setting| setting.path != ALPHA);
        if alpha > 0.0 {
            let comment = if is_given { "" } else { "  # `cpo_alpha` is 1.0 by default" };
            added.push((WEIGHTS, vec![Value::from(1.0), alpha.into()].into(), comment));
        }
    }
    if ["hinge", "ipo"].contains(&&*loss) {
        added.push(("preference.reference_free", true.into(), ""));
    }
    ours.retain(|setting| added.iter().all(|(path, ..)| setting.path != *path));
    let setting =
        |(path, value, comment): (&str, Value, &str)| Setting { path: path.into(), value, comment: comment.into() };
    ours.extend(added.into_iter().map(setting));
}
