//! Training on preferences: their batches, the log-probabilities of the reference model or the margins of a reward model, and validation.

use crate::config::RunConfig;
use crate::data::{
    DataState, LoaderState, PreferenceBatch, PreferenceLoader, Records, RowShare, RowTarget, TrainingData,
};
use crate::error::{Error, Result};
use crate::evaluate::Evaluation;
use crate::evaluate_preferences::{OfRecord, PassOver, log_probs, margins, sums};
use crate::fs::{RealFs, replace_file};
use crate::hash::sha256;
use crate::input;
use crate::mode::{Pass, StepPrecision};
use crate::models::Decoder;
use crate::run::Run;
use crate::step::{Preference, TrainStep};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// The log-probabilities of the reference model, in the run's folder.
const REFERENCE: &str = "reference.json";

/// The largest such file: some 40 bytes for each document.
const MAX_REFERENCE_BYTES: u64 = 4 << 30;

/// The data of a run on preferences.
pub(super) struct Preferences {
    how: Preference,
    loader: PreferenceLoader,
    validation: Records,
    /// Pairs or completions of a micro-batch.
    per_batch: usize,
    reference: ReferenceValues,
    /// Records whose log-probabilities by the reference model are not known yet: to train on, and for validation.
    missing: [Vec<usize>; 2],
    path: PathBuf,
}

/// What the log-probabilities or rewards of the model are compared with.
enum ReferenceValues {
    /// Log-probabilities that are computed before the first step.
    Stored(Reference),
    /// Those of the model without its adapters, in each step.
    Base,
    /// Zeros, without a reference model.
    Zeros,
    /// The margins of the data, for a reward model.
    Margins,
}

impl ReferenceValues {
    fn stored(&mut self) -> Option<&mut Reference> {
        match self {
            ReferenceValues::Stored(reference) => Some(reference),
            ReferenceValues::Base | ReferenceValues::Zeros | ReferenceValues::Margins => None,
        }
    }
}

/// Log-probabilities by the model that the run has started from.
#[derive(Serialize, Deserialize)]
struct Reference {
    /// The key of the data.
    data: String,
    /// By the first document of a record.
    log_probs: std::collections::BTreeMap<usize, OfRecord>,
}

impl Reference {
    /// The bytes of its file.
    fn to_bytes(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("plain data")
    }
}

impl Preferences {
    /// The preferences of `data`, from `state` on. `padding` is the padding token of a reward model.
    pub(super) fn new(
        config: &RunConfig,
        how: Preference,
        data: &TrainingData,
        state: &DataState,
        share: RowShare,
        padding: Option<i64>,
    ) -> Result<Preferences> {
        let ([set], DataState::One(state)) = (data.sets.as_slice(), state) else {
            unreachable!("preferences are not mixed")
        };
        let (dataset, layout) = (&set.dataset, data.layout);
        let target = match config.preference.trains_reward_model() {
            true => RowTarget::Reward { padding },
            false => RowTarget::Completion,
        };
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
        let stored = config.preference.precompute_ref_log_probs == Some(true);
        let reference = match target {
            RowTarget::Reward { .. } => ReferenceValues::Margins,
            RowTarget::Completion if config.preference.reference_free => ReferenceValues::Zeros,
            RowTarget::Completion if stored => {
                ReferenceValues::Stored(Reference { data: dataset.meta().key.clone(), log_probs: Default::default() })
            }
            RowTarget::Completion => ReferenceValues::Base,
        };
        if share.rank == 0 {
            let about = match reference {
                ReferenceValues::Margins => "",
                ReferenceValues::Stored(_) => {
                    "; the reference is the model that the run starts from, whose log-probabilities are computed before the first step"
                }
                ReferenceValues::Base => "; the reference is the model without its adapters, which runs in each step",
                ReferenceValues::Zeros => "; there is no reference model (`reference_free`)",
            };
            tracing::info!("training on preferences with {}{about}", config.preference.describe());
        }
        let loader = PreferenceLoader::new(records, *state, share)?;
        let (per_batch, path) = (config.training.per_device_train_batch_size, config.output_dir.join(REFERENCE));
        Ok(Preferences { how, loader, validation, per_batch, reference, missing: Default::default(), path })
    }

    /// The start of the next batch.
    pub(super) fn state(&self) -> LoaderState {
        self.loader.state()
    }

    /// The number of records of an epoch.
    pub(super) fn len(&self) -> usize {
        self.loader.records().len()
    }

    /// Lists the records of which the run reads log-probabilities of the reference model in `max_steps` steps of `per_step` records, and for
    /// validation.
    pub(super) fn plan_reference(&mut self, max_steps: u64, per_step: usize) {
        if self.reference.stored().is_some() {
            self.missing = [self.loader.read_by(max_steps, per_step), (0..self.validation.len()).collect()];
        }
    }

    /// Reads the log-probabilities that the run has stored before. Those of another file than the one with the `digest` that the checkpoint has
    /// are computed again.
    pub(super) fn read_reference(&mut self, digest: Option<&str>) -> Result<()> {
        let path = &self.path;
        let Some(reference) = self.reference.stored().filter(|_| path.exists()) else { return Ok(()) };
        let bytes = input::read(path, MAX_REFERENCE_BYTES).map_err(Error::io(path))?;
        if digest != Some(&*sha256(&bytes)) {
            tracing::warn!(
                "{} is not the file that the run has written: the log-probabilities of the reference model are computed again",
                path.display()
            );
            return Ok(());
        }
        let found: Reference = serde_json::from_slice(&bytes).map_err(|error| {
            Error::Checkpoint(format!("{}: {error}; remove the file to compute it again", path.display()))
        })?;
        if found.data != reference.data {
            return Ok(());
        }
        *reference = found;
        for (records, missing) in [self.loader.records(), &self.validation].into_iter().zip(&mut self.missing) {
            missing.retain(|&record| !reference.log_probs.contains_key(&records.first(record)));
        }
        Ok(())
    }

    /// Whether log-probabilities of the reference model are still to be computed.
    pub(super) fn needs_reference(&self) -> bool {
        self.missing.iter().any(|missing| !missing.is_empty())
    }

    /// Computes the missing log-probabilities by the model of `run`, which no step has changed. The rank that `leads` stores them.
    pub(super) fn compute_reference(&mut self, run: &mut Run, leads: bool) -> Result<()> {
        let Some(reference) = self.reference.stored() else { return Ok(()) };
        let missing = std::mem::take(&mut self.missing);
        if leads {
            let count = missing[0].len() + missing[1].len();
            tracing::info!("computing the log-probabilities of {count} records of preferences by the reference model");
        }
        for (records, missing) in [self.loader.records(), &self.validation].into_iter().zip(&missing) {
            let (per_batch, precision) = (self.per_batch, StepPrecision::Recipe);
            let pass = PassOver { per_batch, pass: Pass::Evaluation, precision };
            let found = log_probs(&mut run.model, &run.step, records, missing, pass)?;
            reference.log_probs.extend(missing.iter().map(|&record| records.first(record)).zip(found));
        }
        if leads { replace_file(&RealFs, &self.path, &reference.to_bytes()) } else { Ok(()) }
    }

    /// SHA-256 of the file of log-probabilities of the reference model, if the run has one.
    pub(super) fn reference_digest(&self) -> Option<String> {
        match &self.reference {
            ReferenceValues::Stored(reference) => Some(sha256(&reference.to_bytes())),
            ReferenceValues::Base | ReferenceValues::Zeros | ReferenceValues::Margins => None,
        }
    }

    /// Loads `micro_batches` micro-batches into the step of `run`, with the reference.
    pub(super) fn load(&mut self, run: &mut Run, micro_batches: usize, precision: StepPrecision) -> Result<()> {
        let batches = (0..micro_batches).map(|_| self.loader.next_batch(self.per_batch));
        let batches = batches.collect::<Result<Vec<_>>>()?;
        for (micro_batch, batch) in batches.iter().enumerate() {
            let reference = self.known(batch, Side::Own)?;
            run.step.load_preferences(micro_batch, batch, reference.as_deref())?;
        }
        let Run { model, step, .. } = run;
        if matches!(self.reference, ReferenceValues::Base) {
            step.compute_reference(model, precision)?;
        }
        self.estimate_kl(model, step, &batches, precision)
    }

    /// What the rows of a batch are compared with; `None` if each step computes it.
    fn known(&self, batch: &PreferenceBatch, side: Side) -> Result<Option<Vec<f64>>> {
        let of_row = |(row, document): (usize, &usize)| match &self.reference {
            ReferenceValues::Base => Ok(None),
            ReferenceValues::Zeros => Ok(Some(0.0)),
            ReferenceValues::Margins => self.loader.records().margin(*document).map(f64::from).map(Some),
            ReferenceValues::Stored(reference) => {
                // The place of the document in its record.
                let place = row % self.how.sequences();
                let of_record = &reference.log_probs[&(document - place)];
                Ok(Some(match side {
                    Side::Own => of_record[place],
                    Side::Mismatched => of_record[of_record.len() - 1],
                }))
            }
        };
        batch.documents.iter().enumerate().map(of_row).collect()
    }

    /// Sets the divergence from the reference model that KTO compares with: the mean over the rows of a micro-batch of all ranks of how much
    /// more likely completions of other prompts have become, at least 0.
    fn estimate_kl(
        &self,
        model: &mut Decoder,
        step: &mut TrainStep,
        batches: &[PreferenceBatch],
        precision: StepPrecision,
    ) -> Result<()> {
        let rows: Option<Vec<_>> = batches.iter().map(|batch| batch.mismatched.as_ref()).collect();
        let Some(rows) = rows else { return Ok(()) };
        let policy = step.log_probs(model, &rows, Pass::Evaluation, precision)?;
        let reference = batches.iter().map(|batch| self.known(batch, Side::Mismatched));
        let reference: Option<Vec<_>> = reference.collect::<Result<_>>()?;
        let reference = match reference {
            Some(reference) => reference,
            None => step.log_probs(model, &rows, Pass::Reference, precision)?,
        };
        let apart = |(policy, reference): (&Vec<f64>, &Vec<f64>)| -> f64 {
            policy.iter().zip(reference).map(|(policy, reference)| policy - reference).sum()
        };
        let mut sums: Vec<f64> = policy.iter().zip(&reference).map(apart).collect();
        // Ranks without the last stage have no losses.
        sums.resize(batches.len(), 0.0);
        let ranks = step.partition().ranks();
        let all = ranks.gather_lists("the divergence from the reference model", &sums)?;
        let (_, others) = step.sequence_ranks();
        let of_losses: Vec<&Vec<f64>> = ranks.of_losses(&all).collect();
        let kl = |micro_batch: usize| {
            let sum: f64 = of_losses.iter().map(|sums| sums[micro_batch]).sum();
            (sum / (self.per_batch * others) as f64).max(0.0)
        };
        let kl: Vec<f64> = (0..batches.len()).map(kl).collect();
        kl.into_iter().enumerate().try_for_each(|(micro_batch, kl)| step.set_kl(micro_batch, kl))
    }

    /// The loss and the metrics of the records for validation; `None` without such records.
    pub(super) fn evaluate(&self, run: &mut Run, precision: StepPrecision) -> Result<Option<Evaluation>> {
        let all: Vec<usize> = (0..self.validation.len()).collect();
        if all.is_empty() {
            return Ok(None);
        }
        let Run { model, step, .. } = run;
        let mut of = |pass| {
            let pass = PassOver { per_batch: self.per_batch, pass, precision };
            log_probs(model, step, &self.validation, &all, pass)
        };
        let policy = of(Pass::Evaluation)?;
        let reference = match &self.reference {
            ReferenceValues::Stored(reference) => {
                all.iter().map(|&record| reference.log_probs[&self.validation.first(record)].clone()).collect()
            }
            ReferenceValues::Base => of(Pass::Reference)?,
            ReferenceValues::Zeros => policy.iter().map(|of_record| vec![0.0; of_record.len()]).collect(),
            ReferenceValues::Margins => margins(&self.validation, &all)?,
        };
        let sums = sums(&self.how, &self.validation, &all, &policy, &reference, self.per_batch)?;
        let loss = sums.loss();
        let tokens = all.iter().map(|&record| self.validation.tokens(record)).sum::<Result<usize>>()? as u64;
        Ok(Some(Evaluation { loss, perplexity: f64::NAN, bits_per_byte: f64::NAN, tokens, preference: Some(sums) }))
    }
}

/// The rows whose log-probabilities are asked for.
#[derive(Clone, Copy)]
enum Side {
    /// Prompts with their completions.
    Own,
    /// Prompts with completions of other records.
    Mismatched,
}
