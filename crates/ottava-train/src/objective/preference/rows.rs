//! The rows of a run on preferences, with what they are compared with, and validation.

use super::divergence;
use super::evaluation::{PassOver, margins, record_log_probs, sums};
use super::how::Preference;
use super::loss::MicroBatchPreference;
use super::reference::{REFERENCE, Reference, Side};
use crate::objective::{Evaluation, LoadedRows, Opening, Rows, Validation};
use crate::step::TrainStep;
use ottava_common::error::Result;
use ottava_common::fs::{RealFs, replace_file};
use ottava_data::{Batch, DataState, PreferenceBatch, PreferenceLoader, Records, RowTarget};
use ottava_models::Decoder;
use ottava_recipe::mode::{Pass, StepPrecision};
use ottava_tensor::comm::Axis;
use std::path::PathBuf;

/// The rows of a run on preferences.
pub(in crate::objective) struct PreferenceRows {
    how: Preference,
    loader: PreferenceLoader,
    validation: Records,
    /// Pairs or completions of a micro-batch.
    per_batch: usize,
    /// Pairs or completions of a batch of an evaluation.
    per_evaluated: usize,
    /// Pairs or completions of a step, over all ranks.
    per_step: usize,
    reference: Reference,
    /// Records whose log-probabilities by the reference model are not known yet: to train on, and for validation.
    missing: [Vec<usize>; 2],
    path: PathBuf,
}

impl PreferenceRows {
    /// The preferences of the data, whose rows have this `target`.
    pub(in crate::objective) fn open(
        opening: &Opening,
        how: Preference,
        target: RowTarget,
        reference: Reference,
    ) -> Result<PreferenceRows> {
        let Opening { config, data, state, share, .. } = *opening;
        let ([set], DataState::One(state)) = (data.sets.as_slice(), state) else {
            unreachable!("preferences are not mixed")
        };
        let (dataset, layout) = (&set.dataset, data.layout);
        let mut records = Records::train(dataset.clone(), &set.split, layout, target)?;
        let mut validation = Records::validation(dataset.clone(), &set.split, layout, target)?;
        if !how.needs_divergence() {
            (records, validation) = (records.without_mismatches(), validation.without_mismatches());
        }
        if records.left_out() + validation.left_out() > 0 && share.rank == 0 {
            tracing::warn!(
                "{} records of preferences are left out, since {} `data.max_length` = {}",
                records.left_out() + validation.left_out(),
                target.excess(),
                layout.seq_len
            );
        }
        if share.rank == 0 {
            tracing::info!("training on preferences with {}{}", config.preference.describe(), reference.describe());
        }
        Ok(PreferenceRows {
            how,
            loader: PreferenceLoader::new(records, *state, share)?,
            validation,
            per_batch: config.training.per_device_train_batch_size,
            per_evaluated: config.evaluation_batch(),
            per_step: config.training.sequences(),
            reference,
            missing: Default::default(),
            path: config.output_dir.join(REFERENCE),
        })
    }

    /// What the rows of a batch are compared with; `None` if each step computes it.
    fn known(&self, batch: &PreferenceBatch, side: Side) -> Result<Option<Vec<f64>>> {
        self.reference.known(self.loader.records(), batch, side)
    }
}

impl Rows for PreferenceRows {
    fn examples(&self) -> f64 {
        self.loader.records().len() as f64
    }

    fn state(&self) -> DataState {
        DataState::One(self.loader.state())
    }

    fn reference_digest(&self) -> Option<String> {
        match &self.reference {
            Reference::Stored(stored) => Some(stored.digest()),
            Reference::Base | Reference::Zeros | Reference::Margins => None,
        }
    }

    fn plan_reference(&mut self, max_steps: u64) {
        if self.reference.stored().is_some() {
            self.missing = [self.loader.read_by(max_steps, self.per_step), (0..self.validation.len()).collect()];
        }
    }

    fn read_reference(&mut self, digest: Option<&str>) -> Result<()> {
        let Some(stored) = self.reference.stored() else { return Ok(()) };
        stored.read(&self.path, digest)?;
        for (records, missing) in [self.loader.records(), &self.validation].into_iter().zip(&mut self.missing) {
            missing.retain(|&record| !stored.log_probs.contains_key(&records.first(record)));
        }
        Ok(())
    }

    fn needs_reference(&self) -> bool {
        self.missing.iter().any(|missing| !missing.is_empty())
    }

    fn compute_reference(&mut self, model: &mut Decoder, step: &TrainStep) -> Result<()> {
        let Some(stored) = self.reference.stored() else { return Ok(()) };
        let missing = std::mem::take(&mut self.missing);
        let leads = step.partition().ranks().leads();
        if leads {
            let count = missing[0].len() + missing[1].len();
            tracing::info!("computing the log-probabilities of {count} records of preferences by the reference model");
        }
        for (records, missing) in [self.loader.records(), &self.validation].into_iter().zip(&missing) {
            let (per_batch, precision) = (self.per_batch, StepPrecision::Recipe);
            let pass = PassOver { per_batch, pass: Pass::Evaluation, precision };
            let found = record_log_probs(model, step.partition(), records, missing, pass)?;
            stored.log_probs.extend(missing.iter().map(|&record| records.first(record)).zip(found));
        }
        if leads { replace_file(&RealFs, &self.path, &stored.to_bytes()) } else { Ok(()) }
    }

    fn load(&mut self, model: &mut Decoder, step: &mut TrainStep, precision: StepPrecision) -> Result<LoadedRows> {
        let batches = (0..step.schedule().micro_batches).map(|_| self.loader.next_batch(self.per_batch));
        let batches = batches.collect::<Result<Vec<_>>>()?;
        for (micro_batch, batch) in batches.iter().enumerate() {
            let reference = self.known(batch, Side::Own)?;
            let place = step.partition().ranks().place(Axis::Context);
            step.loss_mut::<MicroBatchPreference>(micro_batch).load(batch, reference.as_deref(), place)?;
            // The loss tells the step how many losses the micro-batch counts.
            step.load(micro_batch, &batch.batch)?;
        }
        if matches!(self.reference, Reference::Base) {
            // Ranks without the last stage have no losses, and do not need them.
            for (number, losses) in step.loaded_token_losses(model, Pass::Reference, precision)?.iter().enumerate() {
                step.loss_mut::<MicroBatchPreference>(number).set_reference(model, losses)?;
            }
        }
        let mismatched: Option<Vec<&Batch>> = batches.iter().map(|batch| batch.mismatched.as_ref()).collect();
        if let Some(rows) = mismatched {
            let reference = batches.iter().map(|batch| self.known(batch, Side::Mismatched)).collect::<Result<_>>()?;
            divergence::estimate(model, step, &rows, reference, precision)?;
        }
        Ok(LoadedRows::default())
    }

    fn evaluate(&self, model: &mut Decoder, step: &TrainStep, precision: StepPrecision) -> Result<Option<Validation>> {
        let all: Vec<usize> = (0..self.validation.len()).collect();
        if all.is_empty() {
            return Ok(None);
        }
        let mut of = |pass| {
            let pass = PassOver { per_batch: self.per_evaluated, pass, precision };
            record_log_probs(model, step.partition(), &self.validation, &all, pass)
        };
        let policy = of(Pass::Evaluation)?;
        let reference = match &self.reference {
            Reference::Stored(stored) => {
                all.iter().map(|&record| stored.log_probs[&self.validation.first(record)].clone()).collect()
            }
            Reference::Base => of(Pass::Reference)?,
            Reference::Zeros => policy.iter().map(|of_record| vec![0.0; of_record.len()]).collect(),
            Reference::Margins => margins(&self.validation, &all)?,
        };
        let sums = sums(&self.how, &self.validation, &all, &policy, &reference, self.per_batch)?;
        Ok(Some(Validation::of_one(Evaluation { loss: sums.loss(), metrics: sums.metrics() })))
    }
}
