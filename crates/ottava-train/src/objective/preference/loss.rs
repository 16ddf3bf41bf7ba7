//! The loss of preferences in a step: pairs of sequences, or sequences with labels, relative to a reference model.

use super::how::Preference;
use super::sums::{PreferenceSums, Sequences};
use crate::step::host::{from_host, values, write};
use crate::step::{Loss, Metrics};
use ottava_common::error::Result;
use ottava_data::PreferenceBatch;
use ottava_models::Decoder;
use ottava_recipe::layer_ranks::ShardPlace;
use ottava_recipe::param::Units;
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::{IGNORE_INDEX, PreferenceTargets, preference_loss, real_type, sequence_log_probs};
use ottava_tensor::{DType, Device, Tensor};

impl Preference {
    /// The loss of a micro-batch with `rows` sequences on `device`, in the type of sums `dtype`.
    pub fn of_micro_batch(&self, rows: usize, device: &Device, dtype: DType) -> Result<Box<dyn Loss>> {
        Ok(Box::new(MicroBatchPreference::new(self.clone(), rows, device, dtype)?))
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
    /// Whether this rank counts the sequences. Ranks that divide sequences have the same losses, and the first of them counts the losses.
    counts: bool,
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
        Ok(MicroBatchPreference { how, targets, chosen: (0..sequences).map(|s| s % 2 == 0).collect(), counts: true })
    }

    /// Sequences.
    pub fn sequences(&self) -> usize {
        self.chosen.len()
    }

    /// Loads what is known of the sequences of `batch` before forward, with their log-probabilities by the `reference` model, or with the margins of
    /// a reward model. `None` leaves the reference to [`MicroBatchPreference::set_reference`]. `place` is this rank's place among the ranks that divide
    /// sequences.
    pub fn load(&mut self, batch: &PreferenceBatch, reference: Option<&[f64]>, place: ShardPlace) -> Result<()> {
        let label = |chosen: &bool| f64::from(u8::from(*chosen));
        write(&mut self.targets.labels, &batch.chosen.iter().map(label).collect::<Vec<_>>())?;
        let rows = batch.batch.targets.chunks_exact(batch.batch.seq_len);
        let lengths = rows.map(|row| row.iter().filter(|&&target| target != IGNORE_INDEX).count().max(1) as f64);
        write(&mut self.targets.lengths, &lengths.collect::<Vec<_>>())?;
        if let Some(reference) = reference {
            write(&mut self.targets.reference, reference)?;
        }
        self.chosen.clone_from(&batch.chosen);
        self.counts = place.rank == 0;
        Ok(())
    }

    /// Sets the log-probabilities of the sequences by the reference model, from the losses `[T]` of their tokens by `model`.
    pub fn set_reference(&mut self, model: &Decoder, token_losses: &Tensor) -> Result<()> {
        Ok(self.targets.reference.copy_from(0, &log_probs(model, token_losses, self.sequences())?)?)
    }

    /// Sets the estimate of the divergence from the reference model.
    pub fn set_kl(&mut self, kl: f64) -> Result<()> {
        write(&mut self.targets.kl, &[kl])
    }
}

/// Returns the log-probabilities `[S]` of `sequences` sequences by `model`, from the losses `[T]` of their tokens. Ranks that divide sequences have the
/// losses of their tokens, and get the log-probabilities of whole sequences.
pub(super) fn log_probs(model: &Decoder, token_losses: &Tensor, sequences: usize) -> Result<Tensor> {
    let own = sequence_log_probs(token_losses, sequences)?;
    model.ranks().sum(Axis::Context, "sums of sequences", &own, None)
}

impl Loss for MicroBatchPreference {
    /// Pairs, or sequences with labels.
    fn units(&self, _: usize) -> usize {
        self.sequences() / self.how.sequences()
    }

    /// Every pair counts, whatever the number of its tokens.
    fn counted(&self, targets: &[i32]) -> usize {
        if self.counts { self.units(targets.len()) } else { 0 }
    }

    fn values(&self, _: usize) -> usize {
        3 * self.sequences()
    }

    /// The values are the losses of all sequences, their log-probabilities or rewards and the reference of the targets, `[3 · S]`.
    ///
    /// Computes all logits, or scores, twice: the factor of a token's gradient is known only after the losses of all tokens of its sequence, and logits
    /// of whole sequences take too much memory to be kept.
    fn losses_and_gradient(
        &self,
        model: &mut Decoder,
        normed: &Tensor,
        targets: &Tensor,
        scale: &Tensor,
        units: &mut dyn Units,
    ) -> Result<(Tensor, Tensor)> {
        let sequences = self.sequences();
        let token_losses = model.losses(normed, targets, units)?;
        let policy = log_probs(model, &token_losses, sequences)?;
        let Preference { terms, beta } = &self.how;
        let (losses, factors) = preference_loss(terms, *beta, &policy, &self.targets, scale, targets.len())?;
        let (_, dnormed) = model.losses_and_gradient(normed, targets, &factors, units)?;
        let mut all = Tensor::empty(losses.device(), &[3 * sequences], losses.dtype())?;
        for (i, part) in [&losses, &policy, &self.targets.reference].into_iter().enumerate() {
            all.copy_from(i * sequences, part)?;
        }
        Ok((all, dnormed))
    }

    fn add(&self, sums: Vec<f64>, of_sequences: &[f64]) -> Result<Vec<f64>> {
        if !self.counts {
            return Ok(self.merge(sums, &PreferenceSums::none(&self.how).numbers()));
        }
        let PreferenceTargets { lengths, kl, .. } = &self.targets;
        let known = Sequences { chosen: &self.chosen, lengths: &values(lengths)?, kl: values(kl)?[0] };
        let of_micro_batch = PreferenceSums::of(&self.how, of_sequences, &known);
        Ok(self.merge(sums, &of_micro_batch.numbers()))
    }

    /// The lowest and the highest reward do not add up.
    fn merge(&self, sums: Vec<f64>, others: &[f64]) -> Vec<f64> {
        PreferenceSums::from_numbers(&sums).merge(PreferenceSums::from_numbers(others)).numbers()
    }

    fn metrics(&self, sums: &[f64]) -> Metrics {
        PreferenceSums::from_numbers(sums).metrics()
    }
}
