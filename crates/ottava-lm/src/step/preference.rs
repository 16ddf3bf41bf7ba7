//! The loss of preferences in a step: pairs of sequences, or sequences with labels, relative to a reference model.

use crate::error::Result;
use crate::models::Decoder;
use crate::param::Units;
use ottava_tensor::ops::{PreferenceLoss, PreferenceTargets, cast, preference_loss, real_type, sequence_log_probs};
use ottava_tensor::{DType, Device, Tensor};

/// A loss of preferences and its constant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Preference {
    /// The loss.
    pub loss: PreferenceLoss,
    /// The factor of log-probabilities relative to the reference model, the reward.
    pub beta: f64,
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

    /// The losses of all sequences, their log-probabilities and those of the reference, `[3 · S]`, from the `targets` of tokens and the
    /// result `normed` of forward; and the gradient by that of `scale · Σ losses`, with `scale` `[1]` on the device.
    ///
    /// Computes all logits twice: the factor of a token's gradient is known only after the losses of all tokens of its sequence, and logits
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
        let Preference { loss, beta } = self.how;
        let (losses, factors) = preference_loss(loss, beta, &policy, &self.targets, scale, targets.len())?;
        let (_, dnormed) = model.losses_and_gradient(normed, targets, &factors, units)?;
        let mut all = Tensor::empty(losses.device(), &[3 * sequences], losses.dtype())?;
        for (i, part) in [&losses, &policy, &self.targets.reference].into_iter().enumerate() {
            all.copy_from(i * sequences, part)?;
        }
        Ok((all, dnormed))
    }
}

fn from_host(values: &[f64], device: &Device, dtype: DType) -> Result<Tensor> {
    Ok(cast(&Tensor::from_slice(&Device::Cpu, &[values.len()], values)?, dtype)?.to_device(device)?)
}

pub(super) fn values(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(cast(&tensor.to_device(&Device::Cpu)?, DType::F64)?.to_vec()?)
}

/// Overwrites `tensor` with `values`.
pub(super) fn write(tensor: &mut Tensor, values: &[f64]) -> Result<()> {
    Ok(tensor.write_bytes(&from_host(values, &Device::Cpu, tensor.dtype())?.read_bytes()?)?)
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
    /// Log-probabilities of chosen and of rejected sequences.
    pub log_probs: [f64; 2],
    /// Pairs whose chosen sequence has the higher reward, and all pairs.
    pub pairs: [f64; 2],
}

impl PreferenceSums {
    /// The sums over sequences of which those that are `chosen` are known, from `values` as [`MicroBatchPreference`] returns them.
    pub fn of(how: Preference, values: &[f64], chosen: &[bool]) -> PreferenceSums {
        let (losses, rest) = values.split_at(chosen.len());
        let (policy, reference) = rest.split_at(chosen.len());
        let each = how.loss.sequences();
        let reward = |s: usize| how.beta * (policy[s] - reference[s]);
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
        sums
    }

    /// All numbers, for [`PreferenceSums::from_numbers`].
    pub fn numbers(&self) -> Vec<f64> {
        [self.losses, self.sequences, self.rewards, self.log_probs, self.pairs].concat()
    }

    /// The sums with these numbers; zeros where they are missing.
    pub fn from_numbers(numbers: &[f64]) -> PreferenceSums {
        let pair = |i: usize| [2 * i, 2 * i + 1].map(|i| numbers.get(i).copied().unwrap_or_default());
        let [losses, sequences, rewards, log_probs, pairs] = [0, 1, 2, 3, 4].map(pair);
        PreferenceSums { losses, sequences, rewards, log_probs, pairs }
    }

    /// The sums over the sequences of both.
    pub fn merge(self, other: PreferenceSums) -> PreferenceSums {
        let sums: Vec<f64> = self.numbers().into_iter().zip(other.numbers()).map(|(a, b)| a + b).collect();
        PreferenceSums::from_numbers(&sums)
    }

    /// The mean loss.
    pub fn loss(&self) -> f64 {
        self.losses[0] / self.losses[1]
    }

    /// The metrics by TRL's names, without those of sequences that there are none of.
    pub fn metrics(&self) -> Vec<(&'static str, f64)> {
        let mean = |sums: [f64; 2], side: usize| sums[side] / self.sequences[side];
        let of_rewards = [0, 1].map(|side| mean(self.rewards, side));
        let all = [
            ("rewards/chosen", of_rewards[0]),
            ("rewards/rejected", of_rewards[1]),
            ("rewards/accuracies", self.pairs[0] / self.pairs[1]),
            ("rewards/margins", of_rewards[0] - of_rewards[1]),
            ("logps/chosen", mean(self.log_probs, 0)),
            ("logps/rejected", mean(self.log_probs, 1)),
        ];
        all.into_iter().filter(|(_, value)| value.is_finite()).collect()
    }
}
