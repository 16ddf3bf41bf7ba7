//! The losses of TRL's CPOTrainer, with which Axolotl trains SimPO.

use toml::Value;

/// Our keys that [`settings`] writes.
pub(super) const LOSS: &str = "preference.loss_type";
pub(super) const ALPHA: &str = "preference.cpo_alpha";
pub(super) const WEIGHTS: &str = "preference.loss_weights";
pub(super) const REFERENCE_FREE: &str = "preference.reference_free";

/// A key of ours, its value, and the comment behind it.
pub(super) type Named = (&'static str, Value, &'static str);

/// The settings of a file with this `loss` and `alpha`, if it is of CPOTrainer; `has_gamma` says whether it has `simpo_gamma`. CPOTrainer adds the
/// negative log-likelihood of the chosen completions to each of its losses, times `cpo_alpha`, which is 1 without the key.
pub(super) fn settings(loss: Option<&Value>, alpha: Option<&Value>, has_gamma: bool) -> Option<Vec<Named>> {
    let loss = loss.map_or(Some("sigmoid"), Value::as_str)?;
    if alpha.is_none() && !has_gamma && loss != "simpo" {
        return None;
    }
    let given = alpha.and_then(|value| value.as_float().or(value.as_integer().map(|whole| whole as f64)));
    let factor = given.unwrap_or(1.0);
    let mut found: Vec<Named> = match (loss, factor > 0.0) {
        ("sigmoid", _) => {
            [(LOSS, "cpo".into(), "")].into_iter().chain(alpha.map(|alpha| (ALPHA, alpha.clone(), ""))).collect()
        }
        ("hinge" | "ipo" | "simpo", true) => {
            let comment = if given.is_some() { "" } else { "  # `cpo_alpha` is 1.0 by default" };
            let losses = vec![Value::from(loss), "sft".into()];
            vec![(LOSS, losses.into(), ""), (WEIGHTS, vec![Value::from(1.0), factor.into()].into(), comment)]
        }
        ("hinge" | "ipo" | "simpo", false) => vec![(LOSS, loss.into(), "")],
        _ => return None,
    };
    if ["hinge", "ipo"].contains(&loss) {
        found.push((REFERENCE_FREE, true.into(), ""));
    }
    Some(found)
}
