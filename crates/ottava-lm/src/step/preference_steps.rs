//! Steps on preferences: what they load, the log-probabilities of a reference model, and the sums of their losses.

use super::host::{values, write};
use super::preference::{MicroBatchPreference, Preference, PreferenceSums};
use super::{MicroBatch, Program, ProgramInputs, TrainStep};
use crate::data::{Batch, PreferenceBatch};
use crate::error::Result;
use crate::mode::{Pass, StepPrecision};
use crate::models::Decoder;
use crate::parallel::{Schedule, Shared};
use ottava_tensor::Tensor;
use ottava_tensor::comm::Axis;
use ottava_tensor::ops::{IGNORE_INDEX, sequence_log_probs};

impl TrainStep {
    /// The same steps, for sequences of which each has a row and whose loss is that of preferences.
    pub fn with_preference(mut self, how: Preference) -> Result<TrainStep> {
        let losses = &self.results.losses;
        let (device, dtype) = (losses.device().clone(), losses.dtype());
        let mut sequences = 0;
        for MicroBatch { sequences: rows, preference, .. } in &mut self.micro_batches {
            sequences = rows.batch;
            *preference = Some(MicroBatchPreference::new(how.clone(), sequences, &device, dtype)?);
        }
        let micro_batches = self.micro_batches.len();
        self.results.losses = Tensor::empty(&device, &[micro_batches, 3 * sequences], dtype)?;
        self.units_per_micro_batch = sequences / how.sequences();
        self.targets = vec![self.units_per_micro_batch; micro_batches];
        self.write_loss_scale()?;
        Ok(self)
    }

    /// Loads a micro-batch of preferences, with the log-probabilities of its sequences by the `reference` model if they are known, or with the
    /// margins of a reward model.
    pub fn load_preferences(
        &mut self,
        micro_batch: usize,
        batch: &PreferenceBatch,
        reference: Option<&[f64]>,
    ) -> Result<()> {
        self.load(micro_batch, &batch.batch)?;
        let units = self.units_per_micro_batch;
        let preference = self.preference_mut(micro_batch);
        let label = |chosen: &bool| f64::from(u8::from(*chosen));
        write(&mut preference.targets.labels, &batch.chosen.iter().map(label).collect::<Vec<_>>())?;
        let rows = batch.batch.targets.chunks_exact(batch.batch.seq_len);
        let lengths = rows.map(|row| row.iter().filter(|&&target| target != IGNORE_INDEX).count().max(1) as f64);
        write(&mut preference.targets.lengths, &lengths.collect::<Vec<_>>())?;
        if let Some(reference) = reference {
            write(&mut preference.targets.reference, reference)?;
        }
        preference.chosen.clone_from(&batch.chosen);
        // Every pair counts, whatever the number of its tokens.
        self.targets[micro_batch] = units;
        Ok(())
    }

    /// Sets the estimate of the divergence from the reference model of a loaded micro-batch.
    pub fn set_kl(&mut self, micro_batch: usize, kl: f64) -> Result<()> {
        write(&mut self.preference_mut(micro_batch).targets.kl, &[kl])
    }

    /// Computes the log-probabilities of all loaded sequences by the model without its adapters, which are its reference. All ranks call it.
    pub fn compute_reference(&mut self, model: &mut Decoder, precision: StepPrecision) -> Result<()> {
        let TrainStep { schedule, micro_batches, partition, .. } = self;
        let inputs = ProgramInputs { micro_batches, loss_scale: None, precision, partition };
        let program = Program::reference_of(schedule, partition.ranks().pipeline().rank());
        // Ranks without the last stage have no losses, and do not need them.
        for (losses, micro_batch) in program.run(model, &inputs, None)?.into_iter().zip(micro_batches) {
            let preference = micro_batch.preference.as_mut().expect(OF_PREFERENCES);
            let log_probs = sequence_log_probs(&losses, preference.sequences())?;
            preference.targets.reference.copy_from(0, &log_probs)?;
        }
        partition.ranks().compare_gpu_calls("a pass of the reference model")
    }

    /// The log-probabilities of the rows of `batches`, by this rank's batches; empty on ranks without the last stage. All ranks call it with
    /// as many batches. `pass` is an evaluation, or that of the reference model.
    pub fn log_probs(
        &self,
        model: &mut Decoder,
        batches: &[&Batch],
        pass: Pass,
        precision: StepPrecision,
    ) -> Result<Vec<Vec<f64>>> {
        let schedule = Schedule { micro_batches: batches.len(), ..self.schedule };
        let program = Program { pass, ..Program::evaluation_of(&schedule, self.partition.ranks().pipeline().rank()) };
        let place = self.partition.ranks().place(Axis::Context);
        let micro_batches = batches.iter().map(|batch| MicroBatch::new(batch, model.device(), place));
        let micro_batches = &micro_batches.collect::<Result<Vec<_>>>()?;
        let inputs = ProgramInputs { micro_batches, loss_scale: None, precision, partition: &self.partition };
        let losses = program.run(model, &inputs, None)?;
        self.partition.ranks().compare_gpu_calls("log-probabilities of sequences")?;
        let sums = losses.iter().zip(batches).map(|(losses, batch)| values(&sequence_log_probs(losses, batch.rows)?));
        sums.collect()
    }

    /// The sums over the sequences of this rank's step, if its loss is that of preferences.
    pub(super) fn preference_sums(&self) -> Result<Option<PreferenceSums>> {
        let of_micro_batches = self.micro_batches.iter().map(|micro_batch| micro_batch.preference.as_ref());
        let Some(preferences) = of_micro_batches.collect::<Option<Vec<_>>>() else { return Ok(None) };
        let all = values(&self.results.losses)?;
        let sums = preferences.iter().zip(all.chunks_exact(all.len() / preferences.len()));
        let sums = sums.map(|(MicroBatchPreference { how, targets, chosen }, of_sequences)| {
            Ok(PreferenceSums::of(how, of_sequences, chosen, values(&targets.kl)?[0]))
        });
        let sums = sums.collect::<Result<Vec<_>>>()?;
        Ok(Some(sums.into_iter().fold(PreferenceSums::default(), PreferenceSums::merge)))
    }

    /// The pairs or sequences with labels that all ranks have in a step.
    pub fn losses_per_step(&self) -> usize {
        self.units()
    }

    /// The ranks that have other sequences, and this rank's place among them.
    pub fn sequence_ranks(&self) -> (usize, usize) {
        let sharing = self.partition.ranks().sharing(Shared::Tokens);
        (sharing.rank(), sharing.size())
    }

    fn preference_mut(&mut self, micro_batch: usize) -> &mut MicroBatchPreference {
        self.micro_batches[micro_batch].preference.as_mut().expect(OF_PREFERENCES)
    }
}

/// Why a micro-batch has what the loss of preferences reads.
const OF_PREFERENCES: &str = "the step was made for preferences";
