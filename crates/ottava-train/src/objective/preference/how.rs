//! Which losses of preferences are minimized.

use ottava_tensor::ops::{PreferenceLoss, PreferenceTerm};

/// Losses of preferences with their weights, and β.
#[derive(Clone, Debug, PartialEq)]
pub struct Preference {
    /// The losses, all of pairs or all of sequences with labels; of a reward model, its loss alone.
    pub terms: Vec<PreferenceTerm>,
    /// β: the reward of a completion is β · (policy - reference log-probability); 1 for a reward model.
    pub beta: f64,
}

impl Preference {
    /// One loss alone.
    pub fn of(loss: PreferenceLoss, beta: f64) -> Preference {
        Preference { terms: vec![PreferenceTerm { loss, weight: 1.0 }], beta }
    }

    /// Sequences that have one loss: 2 for pairs.
    pub fn sequences(&self) -> usize {
        self.terms[0].loss.sequences()
    }

    /// Whether the model gives rewards instead of log-probabilities.
    pub fn trains_reward_model(&self) -> bool {
        self.terms.iter().any(|term| matches!(term.loss, PreferenceLoss::BradleyTerry { .. }))
    }

    /// Whether rewards are of the mean log-probability of a token instead of the sum over the sequence.
    pub fn has_rewards_of_means(&self) -> bool {
        self.terms.iter().any(|term| term.loss.has_rewards_of_means())
    }

    /// Whether a loss is this one.
    pub fn has(&self, loss: PreferenceLoss) -> bool {
        self.terms.iter().any(|term| term.loss == loss)
    }

    /// Whether the divergence from the reference model is estimated.
    pub fn needs_divergence(&self) -> bool {
        self.terms.iter().any(|term| term.loss.needs_divergence())
    }
}
