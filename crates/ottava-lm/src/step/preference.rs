//! The loss of preferences in a step: pairs of sequences, or sequences with labels, relative to a reference model.

use super::host::from_host;
use crate::error::Result;
use crate::models::Decoder;
use crate::param::Units;
use ottava_tensor::ops::{
    PreferenceLoss, PreferenceTargets, PreferenceTerm, preference_loss, real_type, sequence_log_probs,
};
use ottava_tensor::{DType, Device, Tensor};

/// A weighted sum of losses of preferences, and their constant.
#[derive(Clone, Debug, PartialEq)]
pub struct Preference {
    /// The losses, all of pairs or all of sequences with labels; of a reward model, its loss alone.
    pub terms: Vec<PreferenceTerm>,
    /// The factor of log-probabilities relative to the reference model, the reward; 1 for a reward model.
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

    /// Whether the divergence from the reference model is estimated.
    pub fn needs_divergence(&self) -> bool {
        self.terms.iter().any(|term| term.loss.needs_divergence())
    }
}

/// What the loss of preferences reads of a micro-batch whose sequences each have one row.
pub struct MicroBatchPreference {
    /// The loss.
    pub how: Preference,
    /// What is known of the sequences before forward.
    pub targets: PreferenceTargets,
    /// Whether each sequence is chosen, or desirable.
    pub chosen: Vec<bool>,
}

impl MicroBatchPreference {
    /// Room for `sequences` on `device`, in the type of sums of `compute`. Sequences are chosen and rejected in turns.
    pub fn new(how: Preference, sequences: usize, device: &Device, compute: DType) -> Result<MicroBatchPreference> {
        let tensor = |len, value: f64| from_host(&vec![value; len], device, real_type(compute));
        let targets = PreferenceTargets {
            reference: tensor(sequences, 0.0)?,
            lengths: tensor(sequences, 1.0)?,
            labels: tensor(sequences, 0.0)?,
            kl: tensor(1, 0.0)?,
        };
        Ok(MicroBatchPreference { how, targets, chosen: (0..sequences).map(|s| s % 2 == 0).collect() })
    }

    /// Sequences.
    pub fn sequences(&self) -> usize {
        self.chosen.len()
    }

    /// The losses of all sequences, their log-probabilities or rewards and the reference of the targets, `[3 · S]`, from the `targets` of tokens and the
    /// result `normed` of forward; and the gradient by that of `scale · Σ losses`, with `scale` `[1]` on the device.
    ///
    /// Computes all logits, or scores, twice: the factor of a token's gradient is known only after the losses of all tokens of its sequence, and logits
    /// of whole sequences take too much memory to be kept.
    pub fn losses_and_gradient(
        &self,
        model: &mut Decoder,
        normed: &Tensor,
        targets: &Tensor,
        scale: &Tensor,
        units: &mut dyn Units,
    ) -> Result<(Tensor, Tensor)> {
        let sequences = self.sequences();
        let policy = sequence_log_probs(&model.losses(normed, targets, units)?, sequences)?;
        let Preference { terms, beta } = &self.how;
        let (losses, factors) = preference_loss(terms, *beta, &policy, &self.targets, scale, targets.len())?;
        let (_, dnormed) = model.losses_and_gradient(normed, targets, &factors, units)?;
        let mut all = Tensor::empty(losses.device(), &[3 * sequences], losses.dtype())?;
        for (i, part) in [&losses, &policy, &self.targets.reference].into_iter().enumerate() {
            all.copy_from(i * sequences, part)?;
        }
        Ok((all, dnormed))
    }
}

/// Sums over sequences, from which the metrics are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PreferenceSums {
    /// Losses, and their number: pairs, or sequences with labels.
    pub losses: [f64; 2],
    /// Chosen and rejected sequences.
    pub sequences: [f64; 2],
    /// Rewards of chosen and of rejected sequences.
    pub rewards: [f64; 2],
    /// Log-probabilities of chosen and of rejected sequences; not of a reward model.
    pub log_probs: [f64; 2],
    /// Pairs whose chosen sequence has the higher reward, and all pairs.
    pub pairs: [f64; 2],
    /// Estimates of the divergence from the reference model, and their number, of sequences with labels.
    pub kl: [f64; 2],
    /// The lowest and the highest reward of a reward model.
    pub range: Option<[f64; 2]>,
}

impl PreferenceSums {
    /// The sums over the sequences of a micro-batch of which those that are `chosen` are known, from `values` as [`MicroBatchPreference`]
    /// returns them, and its estimate `kl` of the divergence from the reference model.
    pub fn of(how: &Preference, values: &[f64], chosen: &[bool], kl: f64) -> PreferenceSums {
        let (losses, rest) = values.split_at(chosen.len());
        let (policy, reference) = rest.split_at(chosen.len());
        let (each, is_score) = (how.sequences(), how.trains_reward_model());
        let reward = |s: usize| if is_score { policy[s] } else { how.beta * (policy[s] - reference[s]) };
        let mut sums = PreferenceSums { losses: [0.0, (chosen.len() / each) as f64], ..PreferenceSums::default() };
        for (s, is_chosen) in chosen.iter().enumerate() {
            let side = usize::from(!is_chosen);
            sums.losses[0] += losses[s];
            sums.sequences[side] += 1.0;
            sums.rewards[side] += reward(s);
            sums.log_probs[side] += policy[s];
            if each == 2 && *is_chosen {
                sums.pairs[0] += f64::from(reward(s) > reward(s + 1));
                sums.pairs[1] += 1.0;
            }
        }
        if each == 1 {
            sums.kl = [kl, 1.0];
        }
        if is_score {
            let all = [f64::INFINITY, f64::NEG_INFINITY];
            sums.range = Some(policy.iter().fold(all, |[low, high], &score| [low.min(score), high.max(score)]));
        }
        sums
    }

    /// All numbers, for [`PreferenceSums::from_numbers`].
    pub fn numbers(&self) -> Vec<f64> {
        let range = self.range.unwrap_or([f64::NAN; 2]);
        [self.losses, self.sequences, self.rewards, self.log_probs, self.pairs, self.kl, range].concat()
    }

    /// The sums with these numbers; zeros where they are missing.
    pub fn from_numbers(numbers: &[f64]) -> PreferenceSums {
        let pair = |i: usize| Some([*numbers.get(2 * i)?, *numbers.get(2 * i + 1)?]);
        let [losses, sequences, rewards, log_probs, pairs, kl] =
            [0, 1, 2, 3, 4, 5].map(|i| pair(i).unwrap_or_default());
        let range = pair(6).filter(|[low, _]| !low.is_nan());
        PreferenceSums { losses, sequences, rewards, log_probs, pairs, kl, range }
    }

    /// The sums over the sequences of both.
    pub fn merge(self, other: PreferenceSums) -> PreferenceSums {
        let sums: Vec<f64> = self.numbers().into_iter().zip(other.numbers()).map(|(a, b)| a + b).collect();
        let both = self.range.zip(other.range).map(|([a, b], [c, d])| [a.min(c), b.max(d)]);
        PreferenceSums { range: both.or(self.range).or(other.range), ..PreferenceSums::from_numbers(&sums) }
    }

    /// The names of the metrics of tuning by preferences, as in TRL.
    const TUNING: &[&str] = &[
        "rewards/chosen",
        "rewards/rejected",
        "rewards/accuracies",
        "rewards/margins",
        "logps/chosen",
        "logps/rejected",
        "kl",
    ];

    /// The names of the metrics of a reward model, as in TRL.
    const REWARDS: &[&str] = &["accuracy", "margin", "mean_reward", "min_reward", "max_reward"];

    /// The mean loss.
    pub fn loss(&self) -> f64 {
        self.losses[0] / self.losses[1]
    }

    /// The metrics by TRL's names, without those of sequences that there are none of.
    pub fn metrics(&self) -> Vec<(&'static str, f64)> {
        let mean = |sums: [f64; 2], side: usize| sums[side] / self.sequences[side];
        let [chosen, rejected] = [0, 1].map(|side| mean(self.rewards, side));
        let (accuracy, margin) = (self.pairs[0] / self.pairs[1], chosen - rejected);
        let rewards = (self.rewards[0] + self.rewards[1]) / (self.sequences[0] + self.sequences[1]);
        let log_probs = [0, 1].map(|side| mean(self.log_probs, side));
        let (names, values) = match self.range {
            None => {
                let kl = self.kl[0] / self.kl[1];
                let [of_chosen, of_rejected] = log_probs;
                (PreferenceSums::TUNING, vec![chosen, rejected, accuracy, margin, of_chosen, of_rejected, kl])
            }
            Some([low, high]) => (PreferenceSums::REWARDS, vec![accuracy, margin, rewards, low, high]),
        };
        names.iter().copied().zip(values).filter(|(_, value)| value.is_finite()).collect()
    }
}
