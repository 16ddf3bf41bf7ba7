//! Training on preferences: their batches, the log-probabilities of the reference model, and validation.

use crate::config::RunConfig;
use crate::data::{DataState, LoaderState, PreferenceBatch, PreferenceLoader, Records, RowShare, TrainingData};
use crate::error::{Error, Result};
use crate::evaluate::Evaluation;
use crate::fs::{RealFs, replace_file};
use crate::input;
use crate::interrupt;
use crate::mode::{Pass, StepPrecision};
use crate::models::Decoder;
use crate::run::Run;
use crate::step::{Preference, PreferenceSums, TrainStep};
use ottava_tensor::ops::{PreferenceTargets, preference_loss};
use ottava_tensor::{Device, Tensor};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

/// The log-probabilities of the reference model, in the run's folder.
const REFERENCE: &str = "reference.json";

/// The largest such file: some 40 bytes for each document.
const MAX_REFERENCE_BYTES: u64 = 4 << 30;

/// The log-probabilities of a record: of its documents, and of its prompt with the completion of another record, if labels need that.
type OfRecord = Vec<f64>;

/// The data of a run on preferences.
pub(super) struct Preferences {
    how: Preference,
    loader: PreferenceLoader,
    validation: Records,
    /// Pairs or completions of a micro-batch.
    per_batch: usize,
    /// By document; `None` if the model without its adapters is the reference.
    reference: Option<Reference>,
    /// Records whose log-probabilities by the reference model are not known yet: to train on, and for validation.
    missing: [Vec<usize>; 2],
    path: PathBuf,
}

/// Log-probabilities by the model that the run has started from.
#[derive(Serialize, Deserialize)]
struct Reference {
    /// The key of the data.
    data: String,
    /// By the first document of a record.
    log_probs: std::collections::BTreeMap<usize, OfRecord>,
}

impl Preferences {
    /// The preferences of `data`, from `state` on.
    pub(super) fn new(
        config: &RunConfig,
        how: Preference,
        data: &TrainingData,
        state: &DataState,
        share: RowShare,
    ) -> Result<Preferences> {
        let ([set], DataState::One(state)) = (data.sets.as_slice(), state) else {
            unreachable!("preferences are not mixed")
        };
        let (dataset, layout) = (&set.dataset, data.layout);
        let records = Records::train(dataset.clone(), &set.split, layout)?;
        let validation = Records::validation(dataset.clone(), &set.split, layout)?;
        if records.left_out() + validation.left_out() > 0 && share.rank == 0 {
            tracing::warn!(
                "{} records of preferences are left out, since a prompt leaves no room for its completion within `data.max_length` = {}",
                records.left_out() + validation.left_out(),
                layout.seq_len
            );
        }
        let stored = config.preference.precompute_ref_log_probs == Some(true);
        if share.rank == 0 {
            let reference = match stored {
                true => {
                    "the model that the run starts from, whose log-probabilities are computed before the first step"
                }
                false => "the model without its adapters, which runs in each step",
            };
            tracing::info!(
                "training on preferences by {:?}, beta {}; the reference is {reference}",
                how.loss,
                how.beta
            );
        }
        let reference = stored.then(|| Reference { data: dataset.meta().key.clone(), log_probs: Default::default() });
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
        if self.reference.is_some() {
            self.missing = [self.loader.read_by(max_steps, per_step), (0..self.validation.len()).collect()];
        }
    }

    /// Reads those log-probabilities that the run has stored before.
    pub(super) fn read_reference(&mut self) -> Result<()> {
        let Some(reference) = self.reference.as_mut().filter(|_| self.path.exists()) else { return Ok(()) };
        let found = read(&self.path)?;
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
        let Some(reference) = &mut self.reference else { return Ok(()) };
        let missing = std::mem::take(&mut self.missing);
        if leads {
            let count = missing[0].len() + missing[1].len();
            tracing::info!("computing the log-probabilities of {count} records of preferences by the reference model");
        }
        for (records, missing) in [self.loader.records(), &self.validation].into_iter().zip(&missing) {
            let found = log_probs(run, records, missing, self.per_batch, Pass::Evaluation, StepPrecision::Recipe)?;
            reference.log_probs.extend(missing.iter().map(|&record| records.first(record)).zip(found));
        }
        match leads {
            true => {
                let text = serde_json::to_vec(reference).expect("plain data");
                replace_file(&RealFs, &self.path, &text)
            }
            false => Ok(()),
        }
    }

    /// Loads `micro_batches` micro-batches into the step of `run`, with the reference.
    pub(super) fn load(&mut self, run: &mut Run, micro_batches: usize, precision: StepPrecision) -> Result<()> {
        let batches = (0..micro_batches).map(|_| self.loader.next_batch(self.per_batch));
        let batches = batches.collect::<Result<Vec<_>>>()?;
        for (micro_batch, batch) in batches.iter().enumerate() {
            let reference = self.stored(batch, Side::Own);
            run.step.load_preferences(micro_batch, batch, reference.as_deref())?;
        }
        let Run { model, step, .. } = run;
        if self.reference.is_none() {
            step.compute_reference(model, precision)?;
        }
        self.estimate_kl(model, step, &batches, precision)
    }

    /// Stored log-probabilities of the rows of a batch.
    fn stored(&self, batch: &PreferenceBatch, side: Side) -> Option<Vec<f64>> {
        let reference = self.reference.as_ref()?;
        let rows = batch.documents.iter().enumerate().map(|(row, document)| {
            // The place of the document in its record.
            let place = row % self.how.loss.sequences();
            let of_record = &reference.log_probs[&(document - place)];
            match side {
                Side::Own => of_record[place],
                Side::Mismatched => of_record[of_record.len() - 1],
            }
        });
        Some(rows.collect())
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
        let reference: Option<Vec<_>> = batches.iter().map(|batch| self.stored(batch, Side::Mismatched)).collect();
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
        let of = |run: &mut Run, pass| log_probs(run, &self.validation, &all, self.per_batch, pass, precision);
        let policy = of(run, Pass::Evaluation)?;
        let reference = match &self.reference {
            Some(reference) => {
                all.iter().map(|&record| reference.log_probs[&self.validation.first(record)].clone()).collect()
            }
            None => of(run, Pass::Reference)?,
        };
        let sums = self.sums(&all, &policy, &reference)?;
        let loss = sums.loss();
        if !loss.is_finite() {
            return Err(Error::NonFinite(format!(
                "the loss of the preferences for validation is {loss}: the model's weights or activations are not finite"
            )));
        }
        let tokens = all.iter().map(|&record| self.validation.tokens(record)).sum::<Result<usize>>()? as u64;
        Ok(Some(Evaluation { loss, perplexity: f64::NAN, bits_per_byte: f64::NAN, tokens, preference: Some(sums) }))
    }

    /// The sums over records for validation, computed by the op of the loss.
    fn sums(&self, records: &[usize], policy: &[OfRecord], reference: &[OfRecord]) -> Result<PreferenceSums> {
        let each = self.how.loss.sequences();
        let tensor = |values: Vec<f64>| Tensor::from_slice(&Device::Cpu, &[values.len()], &values);
        let own = |all: &[OfRecord]| all.iter().flat_map(|of_record| of_record[..each].to_vec()).collect::<Vec<_>>();
        let (policy_of, reference_of) = (own(policy), own(reference));
        let documents = || records.iter().flat_map(|&record| self.validation.documents(record));
        let chosen = documents().map(|document| self.validation.is_chosen(document));
        let chosen = chosen.collect::<Result<Vec<_>>>()?;
        let lengths = documents().map(|document| self.validation.targets(document));
        let lengths = lengths.collect::<Result<Vec<_>>>()?.into_iter().map(|count| count as f64).collect();
        let apart = policy.iter().zip(reference).filter(|(policy, _)| policy.len() > each);
        let apart: f64 = apart.map(|(policy, reference)| policy[each] - reference[each]).sum();
        let targets = PreferenceTargets {
            reference: tensor(reference_of.clone())?,
            lengths: tensor(lengths)?,
            labels: tensor(chosen.iter().map(|chosen| f64::from(u8::from(*chosen))).collect())?,
            kl: tensor(vec![(apart / records.len() as f64).max(0.0)])?,
        };
        let (policy, one) = (tensor(policy_of.clone())?, tensor(vec![1.0])?);
        let Preference { loss, beta } = self.how;
        let (losses, _) = preference_loss(loss, beta, &policy, &targets, &one, policy.len())?;
        Ok(PreferenceSums::of(self.how, &[losses.to_vec()?, policy_of, reference_of].concat(), &chosen))
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

fn read(path: &Path) -> Result<Reference> {
    let bytes = input::read(path, MAX_REFERENCE_BYTES).map_err(Error::io(path))?;
    serde_json::from_slice(&bytes)
        .map_err(|error| Error::Checkpoint(format!("{}: {error}; remove the file to compute it again", path.display())))
}

/// The log-probabilities of `which` of `records`, in their order, on all ranks. Each rank computes every one of its turns of `per_batch`
/// records.
fn log_probs(
    run: &mut Run,
    records: &Records,
    which: &[usize],
    per_batch: usize,
    pass: Pass,
    precision: StepPrecision,
) -> Result<Vec<OfRecord>> {
    let Run { model, step, .. } = run;
    let (rank, world) = step.sequence_ranks();
    let mut found = Vec::with_capacity(which.len());
    for round in which.chunks(per_batch * world) {
        let turns: Vec<&[usize]> = round.chunks(per_batch).collect();
        // Ranks compute together, so one without a turn repeats the first one, and counts nothing.
        let mine = turns.get(rank).unwrap_or(&turns[0]);
        let batch = records.batch(mine)?;
        let rows: Vec<_> = std::iter::once(&batch.batch).chain(&batch.mismatched).collect();
        let of_rows = step.log_probs(model, &rows, pass, precision)?;
        let stop = f64::from(u8::from(interrupt::flag().load(Ordering::Relaxed)));
        let told = [vec![stop], of_rows.concat()].concat();
        let ranks = step.partition().ranks();
        let all = ranks.gather_lists("log-probabilities of preferences", &told)?;
        if all.iter().any(|told| told[0] != 0.0) {
            return Err(interrupt::cancelled("computing log-probabilities of preferences"));
        }
        let of_losses: Vec<&Vec<f64>> = ranks.of_losses(&all).collect();
        for (turn, told) in turns.iter().zip(of_losses) {
            let own = batch.documents.len() / mine.len() * turn.len();
            let (documents, mismatched) = told[1..].split_at(own);
            for (i, documents) in documents.chunks_exact(own / turn.len()).enumerate() {
                found.push(documents.iter().chain(mismatched.get(i)).copied().collect());
            }
        }
    }
    Ok(found)
}
