//! The loss of a policy, as the settings of a run say.

use ottava_settings::{Aggregation, RunConfig};
use ottava_tensor::ops::{Correction, PolicyLoss, ValueLoss};

/// How the losses of tokens become the loss of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Policy {
    /// The loss of a token. It has the correction if the step itself computes the log-probabilities of the draw's policy.
    pub loss: PolicyLoss,
    /// The factor of the entropy of a token's distribution, which is subtracted from the loss of the token.
    pub entropy_coef: f64,
    /// The loss of the values of tokens, if the model has a value head.
    pub value: Option<ValueLoss>,
    /// The correction of draws by a pass over the completions before their steps.
    pub correction_by_pass: Option<Correction>,
    /// The mean over the tokens of a step.
    pub aggregation: Aggregation,
}

impl Policy {
    /// Returns the loss of `run`.
    pub fn of(run: &RunConfig) -> Policy {
        let (r, steps_once) = (&run.reinforcement, run.steps_once());
        Policy {
            loss: PolicyLoss { correction: run.correction().filter(|_| steps_once), ..r.policy_loss() },
            entropy_coef: r.loss.entropy_coef,
            value: r.value_loss(),
            correction_by_pass: run.correction().filter(|_| !steps_once),
            aggregation: r.aggregation(),
        }
    }

    /// Returns the correction of draws, by a pass or by the step.
    pub fn correction(&self) -> Option<Correction> {
        self.correction_by_pass.or(self.loss.correction)
    }
}

/// Returns the factors of the tokens of a completion, from their log-probabilities `old` as steps compute them and `drawn` as they were drawn.
pub(super) fn factors(how: &Correction, old: &[f64], drawn: &[f64]) -> Vec<f64> {
    let logs = || old.iter().zip(drawn).map(|(old, drawn)| old - drawn);
    match how.of_sequence {
        true => vec![how.factor(logs().sum()); old.len()],
        false => logs().map(|log| how.factor(log)).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn corrections_bound_or_mask_ratios() {
        let (old, drawn) = ([-1.0, -2.0, -0.5], [-1.0, -2.0 - 4f64.ln(), -0.5 - 0.25f64.ln()]);
        // Ratios 1, 4 and 1/4; of the completion 1.
        let factors = |of_sequence, is_mask, max| {
            super::factors(&Correction { of_sequence, is_mask, min: 0.5, max }, &old, &drawn)
        };
        let near = |found: Vec<f64>, expected: [f64; 3]| {
            // Exponentials of logarithms of numbers near 1: some units of 2⁻⁵³.
            assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-14), "{found:?}, {expected:?}");
        };
        near(factors(false, false, 3.0), [1.0, 3.0, 0.25]);
        near(factors(false, true, 3.0), [1.0, 0.0, 0.0]);
        near(factors(false, true, 5.0), [1.0, 4.0, 0.0]);
        near(factors(true, false, 3.0), [1.0; 3]);
        let mask = Correction { of_sequence: true, is_mask: true, min: 0.5, max: 3.0 };
        assert_eq!(super::factors(&mask, &old, &[-3.0; 3]), [0.0; 3], "the ratio of the completion is e^5.5");
    }
}
